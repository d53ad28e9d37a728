"""A data set of the Hugging Face hub, read file by file at a pinned commit, with a bounded number of bytes on disk.

The head of the README says which files a config and a split are (huggingface.co/docs/hub/
datasets-manual-configuration); else words in file names do, as in the `datasets` library. No code of it is run.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar, cast

import zstandard

from node.data.files import LINE_BYTES, open_regular
from protocol.manifest.manifest import HUB_PLACE
from swarm.vocabulary.errors import ConfigError, ResourceExhausted, SkipstoneError

KEPT_BYTES: Final = 2**35
SHARE_OF_ONE: Final = 4
"""A file may have a quarter of KEPT_BYTES: training text, held-out text, one prefetched and one more always fit."""
MAX_HUB_FILES: Final = 2**17
MOST_STARS: Final = 6
WAITS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses between retries, in seconds."""
_FINAL: Final = (401, 403, 404, 410)
"""HTTP statuses that are not retried."""
_OF_SPLITS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}

T = TypeVar("T")
Pause = Callable[[float], object]

logger = logging.getLogger(__name__)


class HubPlace(NamedTuple):
    name: str
    config: str | None
    split: str
    column: str


def hub_place(place: str, *, is_chat: bool) -> HubPlace:
    """Parses a place; empty parts mean no config, `train`, and `text`, or `messages` for conversations."""
    name, config, split, column = (place.split(":") + [""] * 3)[:4]
    return HubPlace(name, config or None, split or "train", column or ("messages" if is_chat else "text"))


def newest_commit(place: str) -> str:
    """Returns the data set's newest commit. Raises ConfigError if it is unknown."""
    name = place.partition(":")[0]
    try:
        return str(_api().dataset_info(name, files_metadata=False, token=False).sha)
    except Exception as error:  # of the library, and of those that it fetches with
        raise ConfigError(
            f"data.source: which commit of the data set {name!r} is to be read is not known: {error}",
            hint="Name it with --revision COMMIT, or install what asks the hub: pip install 'skipstone[datasets]'.",
        ) from error


def source_keys(source: str, revision: str | None = None) -> dict[str, Any]:
    """The manifest's `[data]` keys for a source, with a data set's newest commit by default. Raises ConfigError."""
    kind, _, place = source.partition(":")
    if revision is None and kind == "huggingface" and HUB_PLACE.fullmatch(place):
        revision = newest_commit(place)
    by = "files" if kind == "huggingface" else "documents"
    return {"source": source, "files": None, "revision": revision, "dealt_by": by}


class HubStream:
    """Rows of a data set's files at a commit, with the least recently used files removed. Thread-safe.

    Raises ConfigError if the hub does not list it, or a file is too large.
    """

    def __init__(
        self,
        place: str,
        revision: str,
        *,
        is_chat: bool = False,
        kept_bytes: int = KEPT_BYTES,
        pause: Pause | None = None,
    ) -> None:
        self._place, self._revision, self._is_chat = hub_place(place, is_chat=is_chat), revision, is_chat
        self._api, self._pause = _api(), pause or threading.Event().wait
        self._sizes = self._listed()
        for name, size in self._sizes.items():
            if size * SHARE_OF_ONE > kept_bytes:
                raise ConfigError(
                    f"data.source: {name} has {size} bytes, more than a quarter of the {kept_bytes} that are kept",
                    hint="Use a data set of smaller files, or a folder of your own with path:FOLDER.",
                )
        self._most = kept_bytes
        self._files: OrderedDict[str, Future[Path]] = OrderedDict()
        """Here or being fetched, the least recently used first."""
        self._readers: Counter[str] = Counter()
        self._ahead: threading.Thread | None = None
        self._lock = threading.Lock()
        self.files = tuple(self._sizes)
        try:
            self._folder = _own_folder(self)
        except OSError as error:
            raise ConfigError(
                f"no place for a data set's files: {error.filename}: {error.strerror}",
                hint="Name a folder that can be written with the variable HF_HOME.",
            ) from error

    def rows(self, file: str, start: int) -> Generator[Row]:
        """Reads a file's rows from number `start` on; waits for the file. Raises SkipstoneError."""
        with self.opened(file) as path:
            try:
                yield from rows_of(path, self._place.column, start, is_chat=self._is_chat)
            except OSError as error:
                raise ConfigError(f"data.source: {file} cannot be read: {error.strerror or error}") from error

    def fetch(self, name: str) -> Path:
        """Fetches a file into this stream's folder. Raises ConfigError or ResourceExhausted."""
        size = self._sizes[name]
        if (free := shutil.disk_usage(self._folder).free) < size:
            raise ResourceExhausted(f"{self._folder}: {name} has {size} bytes, and {free} are free")
        options = {"repo_type": "dataset", "revision": self._revision, "local_dir": self._folder, "token": False}

        def ask() -> Path:
            path = Path(self._api.hf_hub_download(self._place.name, name, **options))
            if (found := path.stat().st_size) != size:
                path.unlink()
                raise OSError(f"it has {found} bytes in place of {size}")
            return path

        return _insisted(ask, f"{name} of {self._place.name}", self._pause)

    @property
    def bytes(self) -> int:
        return sum(self._sizes[name] for name in list(self._files))

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """Keeps the file within the block. Raises SkipstoneError, or ResourceExhausted if all files are being read."""
        with self._lock:
            self._readers[name] += 1
        try:
            yield self._path(name)
        finally:
            with self._lock:
                self._readers[name] -= 1

    def expect(self, name: str) -> None:
        """Starts to fetch a file that is due soon, if there is space and no other is being fetched ahead."""
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
                    raise ResourceExhausted(f"no room for {name} among the {self._most} bytes of files that are kept")
                self._files.move_to_end(name)
            if is_ours:
                self._bring(name, file)
            try:
                return file.result()
            except SkipstoneError as error:
                if is_ours:
                    raise
                logger.debug("%s was not fetched ahead: %s", name, error)  # so we try ourselves

    def _added(self, name: str) -> Future[Path] | None:
        """Makes space for a file, as far as needed; None if there is none. Called under the lock."""
        for old, file in list(self._files.items()):
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
            with self._lock:
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
                f"data.source: the data set {name!r} is {info.sha} on the hub, the manifest asks for {revision}",
                hint="Ask the run's author; that commit is not there any more, or the name is another data set's.",
            )
        if len(found) > MAX_HUB_FILES:
            raise ConfigError(f"data.source: the data set {name!r} has more than {MAX_HUB_FILES} files")
        sizes = {file.path: file.size for file in found if getattr(file, "size", 0)}
        names = chosen(self._place, _configs(info), sizes)
        unread = [file for file in names if not file.endswith(SUFFIXES)]
        if unread:
            raise ConfigError(
                f"data.source: {unread[0]} of the data set {name!r} is none of {', '.join(SUFFIXES)}",
                hint="Use the files that the hub converts to Parquet, or path:FOLDER with files of your own.",
            )
        return {file: sizes[file] for file in names}


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ConfigError(
            "data.source names a Hugging Face data set, and the `huggingface_hub` library is not installed",
            hint="Install it with `pip install 'skipstone[datasets]'`, or use another data.source.",
        ) from None
    os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")  # hf_xet's own cache would not be in the bound
    disable_progress_bars()
    return HfApi(token=False)


def _insisted(ask: Callable[[], T], what: str, pause: Pause) -> T:
    """Asks the hub again as long as another answer may come. Raises ConfigError."""
    for wait in (*WAITS, None):
        try:
            return ask()
        except Exception as error:  # of the hub's library, and of those that it fetches with
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            status = getattr(getattr(error, "response", None), "status_code", None)
            if wait is None or status in _FINAL:
                raise ConfigError(
                    f"data.source: {what} cannot be had from the hub: {reason}",
                    hint="Start the node again when it can; it goes on from its checkpoint.",
                ) from error
            logger.warning("%s cannot be had from the hub, the next try is in %g s: %s", what, wait, reason)
            pause(wait)
    raise AssertionError("the last try returns or raises")


def _own_folder(owner: object) -> Path:
    """Makes a folder in the hub's home that goes with its owner; removes those of processes that died."""
    from filelock import FileLock, Timeout
    from huggingface_hub import constants

    def remove(folder: Path, lock: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()

    home = Path(constants.HF_HOME) / "skipstone"
    home.mkdir(parents=True, exist_ok=True)
    for other in home.iterdir():  # a lock, or a folder whose process wrote on after its lock had gone
        with suppress(Timeout, OSError), FileLock(other.with_suffix(".lock"), timeout=0) as old:
            remove(other.with_suffix(""), old)
    folder = home / uuid.uuid4().hex
    lock = FileLock(folder.with_suffix(".lock"), thread_local=False)  # another thread may release it
    lock.acquire()
    folder.mkdir()
    weakref.finalize(owner, remove, folder, lock)
    return folder


# ---- the files of a config and a split -------------------------------------------------------------------------------


def chosen(place: HubPlace, configs: Sequence[Mapping[str, Any]], files: Iterable[str]) -> list[str]:
    """Sorted names of the files of a config and split. Raises ConfigError if there is none, or no default."""
    visible = sorted(name for name in files if not any(part[0] in "._" for part in name.split("/")))
    below, patterns = "", None
    if any("data_files" in config or "data_dir" in config for config in configs):
        config = _config(place, configs)
        below = str(config.get("data_dir") or "").strip("/.")
        patterns = _patterns(config["data_files"], place.split) if "data_files" in config else None
    elif place.config not in (None, "default"):
        raise ConfigError(f"data.source: {place.name} names no configs, and so none {place.config!r}")
    names = [name for name in visible if not below or name.startswith(f"{below}/")]
    if patterns is None:
        names = _by_words(place.split, [name for name in names if name.endswith(SUFFIXES)])
    else:
        matching = [_compiled(f"{below}/{pattern}" if below else pattern) for pattern in patterns]
        names = [name for name in names if any(pattern.fullmatch(name) for pattern in matching)]
    if not names:
        of = "" if place.config is None else f" of its config {place.config!r}"
        raise ConfigError(f"data.source: {place.name} has no file of the split {place.split!r}{of} that is read")
    return names


def _configs(info: Any) -> list[Mapping[str, Any]]:
    """Configs of the README's head, in which a stranger may have written anything."""
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
        f"data.source: {place.name} has several configs and none is the default: {', '.join(named)}",
        hint=f"Name one of them: huggingface:{place.name}:CONFIG.",
    )


def _patterns(data_files: Any, split: str) -> list[str]:
    """Patterns of a split: `data_files` is a pattern or several, both of `train`, or a list of splits."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: list[str] = []
    for entry in entries:
        is_named = isinstance(entry, Mapping)
        if (str(entry.get("split", "train")) if is_named else "train") == split:
            paths = entry.get("path") if is_named else entry
            patterns += map(str, paths if isinstance(paths, list) else [paths])
    return patterns


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern as the hub's file system matches it: `*` stays within a folder, `**` does not."""
    from fsspec.utils import glob_translate

    if pattern.count("*") > MOST_STARS:  # matching could take for ever
        raise ConfigError(f"data.source: a pattern of the data set's files has more than {MOST_STARS} `*`: {pattern!r}")
    return re.compile(glob_translate(pattern.removeprefix("./")))


def _by_words(split: str, names: list[str]) -> list[str]:
    """Files with a word of the split in their names; all are `train` if no name has a word of any split."""

    def has_word(name: str, words: Iterable[str]) -> bool:
        return re.search(rf"(?<![a-z])({'|'.join(map(re.escape, words))})(?![a-z])", name.lower()) is not None

    if split == "train" and not any(has_word(name, words) for name in names for words in _OF_SPLITS.values()):
        return names
    return [name for name in names if has_word(name, _OF_SPLITS.get(split, (split,)))]


# ---- the rows of a file ----------------------------------------------------------------------------------------------


PARQUET: Final = ".parquet"
SUFFIXES: Final = (PARQUET, *(f"{kind}{packed}" for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst")))
MAX_GROUP_BYTES: Final = 2**31
"""Uncompressed size of the column in a row group. Pyarrow may hold all of it."""
BATCH_ROWS: Final = 256
MAX_WINDOW_BYTES: Final = 2**27

Row = Callable[[], bytes]
"""Reads a row's document. Raises OSError if the row is malformed or too long."""


def rows_of(path: Path, column: str, start: int, *, is_chat: bool) -> Iterator[Row]:
    """Reads the rows of a file of one of SUFFIXES from number `start` on. Raises ConfigError or OSError."""
    if path.name.endswith(PARQUET):
        found = _column(path, column, start)
        return (partial(_document, value, is_chat) for value in found)
    return (partial(_of_line, line, column, is_chat) for line in _lines(path, start))


def _document(value: object, is_chat: bool) -> bytes:
    """The document of a value; an empty one, which is left out, if there is none."""
    if value is None:
        return b""
    return (json.dumps({"messages": value}, default=str) if is_chat else str(value)).encode(errors="replace")


def _of_line(line: bytes | None, column: str, is_chat: bool) -> bytes:
    if line is None:
        raise OSError(errno.EFBIG, f"the line has more than {LINE_BYTES} bytes")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise OSError(errno.EINVAL, "the line is no JSON") from None
    if not isinstance(row, dict) or column not in row:
        raise OSError(errno.EINVAL, f"the line is no object with {column!r}")
    return _document(row[column], is_chat)


def _lines(path: Path, start: int) -> Iterator[bytes | None]:
    """Lines that are not blank, None for one that is too long."""
    with _unpacked(path) as file:
        number, is_begin = 0, True
        try:
            while piece := file.readline(LINE_BYTES + 1):
                if is_begin and number == 0 and piece.lstrip()[:1] == b"[":
                    raise ConfigError(f"data.source: {path.name} is not one JSON object a line")
                is_end = piece.endswith(b"\n") or len(piece) <= LINE_BYTES
                if is_begin and piece.strip():
                    if number >= start:
                        yield piece if is_end else None
                    number += 1
                is_begin = is_end
        except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise ConfigError(f"data.source: {path.name} cannot be unpacked: {error}") from error


@contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    with open_regular(path) as file:
        if path.name.endswith(".gz"):
            with gzip.open(file, "rb") as packed:
                yield cast("BinaryIO", packed)
        elif path.name.endswith(".zst"):
            unpacking = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            with io.BufferedReader(unpacking.stream_reader(file, read_across_frames=True)) as reader:
                yield cast("BinaryIO", reader)
        else:
            yield file


def _column(path: Path, column: str, start: int) -> Iterator[Any]:
    """Values of the column from row `start` on; earlier row groups are not read."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            "data.source names a data set of Parquet files, and the `pyarrow` library is not installed",
            hint="Install it with `pip install 'skipstone[datasets]'`.",
        ) from None
    try:
        with open_regular(path) as file, ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            if column not in names:
                raise ConfigError(f"data.source: {path.name} has no column {column!r}; it has {', '.join(names)}")
            at = 0
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if at + count > start:
                    _require_bounded(parquet.metadata.row_group(group), column, path)
                    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column]):
                        values = batch.column(0)
                        for number in range(max(0, start - at), len(values)):
                            yield values[number].as_py()
                        at += len(values)
                else:
                    at += count
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data.source: {path.name} cannot be read: {error}") from error


def _require_bounded(group: Any, column: str, path: Path) -> None:
    parts = (group.column(number) for number in range(group.num_columns))
    size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] == column)
    if size > MAX_GROUP_BYTES:
        raise ConfigError(
            f"data.source: a row group of {path.name} has {size} bytes in {column!r}, more than {MAX_GROUP_BYTES}",
            hint="Use a data set of smaller row groups, or a folder of your own with path:FOLDER.",
        )
