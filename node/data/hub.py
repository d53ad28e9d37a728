"""A Hugging Face data set at a pinned commit, read one file at a time with bounded disk use.

The files of a config and split come from the README's metadata (huggingface.co/docs/hub/datasets-manual-configuration),
else from words in file names, as in the `datasets` library. Runs no code from the data set.
"""

import logging
import os
import re
import shutil
import threading
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any, Final, NamedTuple, TypeVar

from node.data.row_files import TEXT_COLUMN, Row, rows_of
from protocol.manifest.manifest import HUB_PLACE
from swarm.vocabulary.errors import ConfigError, ResourceExhausted, SkipstoneError

KEPT_BYTES: Final = 2**35
SHARE_OF_ONE: Final = 4  # Largest file is KEPT_BYTES / 4: files for training, held-out text and prefetch always fit
MAX_HUB_FILES: Final = 2**17
MOST_STARS: Final = 6
WAITS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # Pauses between retries, in seconds
_OF_SPLITS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}

SUFFIXES: Final = (".parquet", *(f"{kind}{packed}" for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst")))

T = TypeVar("T")
Pause = Callable[[float], object]

logger = logging.getLogger(__name__)


class HubPlace(NamedTuple):
    name: str
    config: str | None
    split: str
    column: str | None


def hub_place(place: str, *, is_chat: bool) -> HubPlace:
    """Parses a data set's `NAME:CONFIG:SPLIT:COLUMN`. Defaults: no config, `train`, `text` (None if chat)."""
    name, config, split, column = (place.split(":") + [""] * 3)[:4]
    return HubPlace(name, config or None, split or "train", column or (None if is_chat else TEXT_COLUMN))


def newest_commit(place: str) -> str:
    """Returns the newest commit of a Hugging Face data set. Raises ConfigError if the hub does not answer."""
    name = place.partition(":")[0]
    try:
        return str(_api().dataset_info(name, files_metadata=False, token=False).sha)
    except Exception as error:  # of the library or its HTTP client
        raise ConfigError(
            f"data.source: cannot get the newest commit of the data set {name!r}: {error}",
            hint="Give it with --revision COMMIT, or install the hub client: pip install 'skipstone[datasets]'.",
        ) from error


def source_keys(source: str, revision: str | None = None) -> dict[str, Any]:
    """Returns the manifest's `[data]` keys for a source. `revision`: newest commit if None. Raises ConfigError."""
    kind, _, place = source.partition(":")
    if revision is None and kind == "huggingface" and HUB_PLACE.fullmatch(place):
        revision = newest_commit(place)
    by = "files" if kind == "huggingface" else "documents"
    return {"source": source, "files": None, "revision": revision, "dealt_by": by}


class HubStream:
    """Rows of a data set's files at a commit, with a least-recently-used cache. Thread-safe. Raises ConfigError."""

    def __init__(
        self, place: str, revision: str, *, is_chat: bool = False, kept_bytes: int = KEPT_BYTES, pause: Pause = sleep
    ) -> None:
        self._place, self._revision, self._is_chat = hub_place(place, is_chat=is_chat), revision, is_chat
        self._api, self._pause = _api(), pause
        self._sizes = self._listed()
        for name, size in self._sizes.items():
            if size * SHARE_OF_ONE > kept_bytes:
                raise ConfigError(
                    f"data.source: {name} has {size} bytes, more than a quarter of the cache of {kept_bytes}",
                    hint="Use a data set with smaller files, or a local folder with path:FOLDER.",
                )
        self._most = kept_bytes
        self._files: OrderedDict[str, Future[Path]] = OrderedDict()  # Present or downloading, least recently used first
        self._readers: Counter[str] = Counter()
        self._ahead: threading.Thread | None = None
        self._lock = threading.Lock()
        self.files = tuple(self._sizes)
        try:
            self._folder = _own_folder(self)
        except OSError as error:
            raise ConfigError(
                f"cannot create the cache {error.filename}: {error.strerror}", hint="Set HF_HOME to a writable folder."
            ) from error

    def rows(self, file: str, start: int) -> Generator[Row]:
        """Downloads a file unless cached, and yields a reader for each row from row `start`. Raises SkipstoneError."""
        with self.opened(file) as path:
            try:
                yield from rows_of(path, self._place.column, start, is_chat=self._is_chat)
            except OSError as error:
                raise ConfigError(f"data.source: {file} cannot be read: {error.strerror or error}") from error

    def fetch(self, name: str) -> Path:
        """Downloads a file into this stream's cache folder. Raises ConfigError or ResourceExhausted."""
        size = self._sizes[name]
        if (free := shutil.disk_usage(self._folder).free) < size:
            raise ResourceExhausted(f"{self._folder}: {name} needs {size} bytes, but only {free} are free")
        options = {"repo_type": "dataset", "revision": self._revision, "local_dir": self._folder, "token": False}

        def ask() -> Path:
            path = Path(self._api.hf_hub_download(self._place.name, name, **options))
            if (found := path.stat().st_size) != size:
                path.unlink()
                raise OSError(f"it has {found} bytes instead of {size}")
            return path

        return _insisted(ask, f"{name} of {self._place.name}", self._pause)

    @property
    def bytes(self) -> int:
        return sum(self._sizes[name] for name in list(self._files))

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """Downloads a file unless cached, and keeps it during the block. Raises SkipstoneError, ResourceExhausted."""
        with self._lock:  # counted first, so that the file is not evicted between download and use
            self._readers[name] += 1
        try:
            yield self._path(name)
        finally:
            with self._lock:
                self._readers[name] -= 1

    def expect(self, name: str) -> None:
        """Starts to prefetch a file, if there is space and no other prefetch is running."""
        with self._lock:
            if (self._ahead is not None and self._ahead.is_alive()) or name in self._files:
                return
            if (file := self._added(name)) is not None:
                self._ahead = threading.Thread(target=self._bring, args=(name, file), name="hub", daemon=True)
                self._ahead.start()

    def _path(self, name: str) -> Path:
        while True:
            with self._lock:
                file, is_ours = self._files.get(name), False
                if file is None:
                    file, is_ours = self._added(name), True
                if file is None:
                    raise ResourceExhausted(f"no space for {name}: all cached files ({self._most} bytes) are in use")
                self._files.move_to_end(name)
            if is_ours:
                self._bring(name, file)
            try:
                return file.result()
            except SkipstoneError as error:
                if is_ours:
                    raise
                logger.debug("prefetching %s failed: %s", name, error)  # retry in this thread

    def _added(self, name: str) -> Future[Path] | None:
        """Adds a file to the cache and evicts unused ones; None if it cannot fit. The caller must hold the lock."""
        for old, file in list(self._files.items()):  # least recently used first
            if self.bytes + self._sizes[name] <= self._most:
                break
            if file.done() and not self._readers[old]:
                del self._files[old]
                file.result().unlink(missing_ok=True)
        if self.bytes + self._sizes[name] > self._most:
            return None
        self._files[name] = Future()
        return self._files[name]

    def _bring(self, name: str, file: Future[Path]) -> None:
        try:
            path = self.fetch(name)
        except BaseException as error:
            with self._lock:  # waiting readers get the error, and the next request retries
                del self._files[name]
            file.set_exception(error)
        else:
            file.set_result(path)

    def _listed(self) -> dict[str, int]:
        name, revision = self._place.name, self._revision

        def ask() -> tuple[Any, list[Any]]:
            info = self._api.dataset_info(name, revision=revision, expand=["sha", "cardData"], token=False)
            tree = self._api.list_repo_tree(name, revision=revision, repo_type="dataset", recursive=True, token=False)
            return info, list(islice(tree, MAX_HUB_FILES + 1))

        info, found = _insisted(ask, f"the list of files of {name}", self._pause)
        if info.sha != revision:
            raise ConfigError(
                f"data.source: the data set {name!r} is at {info.sha} on the hub, but the manifest requires {revision}",
                hint="The commit was removed, or the name belongs to another data set now. Ask the run's author.",
            )
        if len(found) > MAX_HUB_FILES:
            raise ConfigError(f"data.source: the data set {name!r} has more than {MAX_HUB_FILES} files")
        sizes = {file.path: file.size for file in found if getattr(file, "size", 0)}
        names = chosen(self._place, _configs(info), sizes)
        unread = [file for file in names if not file.endswith(SUFFIXES)]
        if unread:
            raise ConfigError(
                f"data.source: {unread[0]} of the data set {name!r} has none of the suffixes {', '.join(SUFFIXES)}",
                hint="Use the hub's Parquet conversion, or a local folder with path:FOLDER.",
            )
        return {file: sizes[file] for file in names}


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ConfigError(
            "data.source is a Hugging Face data set, but the `huggingface_hub` library is not installed",
            hint="Install it with `pip install 'skipstone[datasets]'`, or use another data.source.",
        ) from None
    os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")  # hf_xet's cache would exceed our bound
    disable_progress_bars()
    return HfApi(token=False)


def _insisted(ask: Callable[[], T], what: str, pause: Pause) -> T:
    """Calls `ask`, which queries the hub, and retries after errors that may be temporary. Raises ConfigError."""
    for wait in (*WAITS, None):
        try:
            return ask()
        except Exception as error:  # of the hub's library or its HTTP client
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            status = getattr(getattr(error, "response", None), "status_code", None)
            if wait is None or status in (401, 403, 404, 410):  # these errors are permanent
                raise ConfigError(
                    f"data.source: cannot get {what} from the hub: {reason}",
                    hint="Restart the node when the hub is reachable. It continues from its checkpoint.",
                ) from error
            logger.warning("cannot get %s from the hub, retrying in %g s: %s", what, wait, reason)
            pause(wait)
    raise AssertionError("the last try returns or raises")


def _own_folder(owner: object) -> Path:
    """Creates a cache folder that exists as long as `owner`. Also removes cache folders of dead processes."""
    from filelock import FileLock, Timeout
    from huggingface_hub import constants

    def remove(folder: Path, lock: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()

    home = Path(constants.HF_HOME) / "skipstone"
    home.mkdir(parents=True, exist_ok=True)
    for other in home.iterdir():  # locks, and folders that outlived their locks
        with suppress(Timeout, OSError), FileLock(other.with_suffix(".lock"), timeout=0) as old:
            remove(other.with_suffix(""), old)
    folder = home / uuid.uuid4().hex
    lock = FileLock(folder.with_suffix(".lock"), thread_local=False)  # the finalizer may run on another thread
    lock.acquire()
    folder.mkdir()
    weakref.finalize(owner, remove, folder, lock)
    return folder


def chosen(place: HubPlace, configs: Sequence[Mapping[str, Any]], files: Iterable[str]) -> list[str]:
    """Returns the sorted file names of a data set's config and split. Raises ConfigError if no file matches."""
    # Names that start with . or _ are hidden, as in the `datasets` library.
    visible = sorted(name for name in files if not any(part[0] in "._" for part in name.split("/")))
    below, patterns = "", None
    if any("data_files" in config or "data_dir" in config for config in configs):
        config = _config(place, configs)
        below = str(config.get("data_dir") or "").strip("/.")
        patterns = _patterns(config["data_files"], place.split) if "data_files" in config else None
    elif place.config not in (None, "default"):
        raise ConfigError(f"data.source: {place.name} defines no configs, so {place.config!r} does not exist")
    names = [name for name in visible if not below or name.startswith(f"{below}/")]
    if patterns is None:
        names = _by_words(place.split, [name for name in names if name.endswith(SUFFIXES)])
    else:
        matching = [_compiled(f"{below}/{pattern}" if below else pattern) for pattern in patterns]
        names = [name for name in names if any(pattern.fullmatch(name) for pattern in matching)]
    if not names:
        of = "" if place.config is None else f" of its config {place.config!r}"
        raise ConfigError(f"data.source: {place.name} has no readable file for the split {place.split!r}{of}")
    return names


def _configs(info: Any) -> list[Mapping[str, Any]]:
    """Returns the configs in the metadata of a data set's README. Ignores malformed entries."""
    card: Any = getattr(info, "card_data", None)
    found = card.get("configs") if hasattr(card, "get") else None
    return [config for config in found if isinstance(config, Mapping)] if isinstance(found, list) else []


def _config(place: HubPlace, configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    named = {str(config.get("config_name", "default")): config for config in configs}
    if place.config is not None:
        if place.config in named:
            return named[place.config]
        raise ConfigError(f"data.source: {place.name} has no config {place.config!r}; it has {', '.join(named)}")
    defaults = [config for config in configs if config.get("default") is True]
    if defaults or "default" in named or len(named) == 1:
        return defaults[0] if defaults else named.get("default") or configs[0]
    raise ConfigError(
        f"data.source: {place.name} has several configs and no default: {', '.join(named)}",
        hint=f"Choose one: huggingface:{place.name}:CONFIG.",
    )


def _patterns(data_files: Any, split: str) -> list[str]:
    """Returns a split's file patterns. `data_files` holds patterns of `train`, or entries with `split` and `path`."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: list[str] = []
    for entry in entries:
        is_named = isinstance(entry, Mapping)
        if (str(entry.get("split", "train")) if is_named else "train") == split:
            paths = entry.get("path") if is_named else entry
            patterns += map(str, paths if isinstance(paths, list) else [paths])
    return patterns


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a glob pattern like the hub's file system: `*` matches within a folder, `**` across folders."""
    from fsspec.utils import glob_translate

    if pattern.count("*") > MOST_STARS:  # matching could take forever
        raise ConfigError(f"data.source: a pattern of the data set's files has more than {MOST_STARS} `*`: {pattern!r}")
    return re.compile(glob_translate(pattern.removeprefix("./")))


def _by_words(split: str, names: list[str]) -> list[str]:
    """Returns the files whose names contain the split's word. If no name contains any split's word, all are `train`."""

    def has_word(name: str, words: Iterable[str]) -> bool:
        return re.search(rf"(?<![a-z])({'|'.join(map(re.escape, words))})(?![a-z])", name.lower()) is not None

    if split == "train" and not any(has_word(name, words) for name in names for words in _OF_SPLITS.values()):
        return names
    return [name for name in names if has_word(name, _OF_SPLITS.get(split, (split,)))]
