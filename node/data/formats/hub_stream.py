"""A data set of the Hugging Face hub, read file by file: each is fetched when its rows are due, the next one ahead, and
so many bytes of files are kept.

Files come by `huggingface_hub`, at the manifest's commit, without a token; sizes are known before anything is fetched.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from node.data.formats import row_files
from node.data.formats.file_shelf import FileShelf
from node.data.formats.hub_files import HubPlace, Pause, files_of, hub_place, insisted
from swarm.vocabulary.errors import ConfigError, ResourceExhausted

KEPT_BYTES: Final = 2**35
"""Of a data node's files, those that are being fetched included. A larger file than a quarter of it is refused."""


class HubStream:
    """Rows of a data set's files (`node.data.file_order` says whose turn it is). May be read by several threads.

    Raises:
        ConfigError: the hub does not list it, or its files are not of a kind that is read; also as `FileShelf`.
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
        """`place` is `NAME[:CONFIG[:SPLIT[:COLUMN]]]`, `revision` its commit."""
        api, pause = _api(), pause or threading.Event().wait
        self._place, self._is_chat = hub_place(place, is_chat=is_chat), is_chat
        sizes = files_of(self._place, revision, api, pause)
        self.files = tuple(sizes)
        """Their names, in order."""
        self._hub = _Hub(api, self._place, revision, sizes, pause)
        self.shelf = FileShelf(self._hub.fetch, sizes, kept_bytes)

    def rows(self, file: str, start: int) -> Generator[row_files.Row]:
        """The rows of a file from number `start` on; waits until it is here. Raises as `row_files.rows`, and
        SkipstoneError when it cannot be fetched."""
        with self.shelf.opened(file) as path:
            try:
                yield from row_files.rows(path, self._place.column, start, is_chat=self._is_chat)
            except OSError as error:
                raise ConfigError(f"data.source: {file} cannot be read: {error.strerror or error}") from error

    def expect(self, file: str) -> None:
        """Begins to fetch the file whose rows are due after those that are read now."""
        self.shelf.expect(file)


class _Hub:
    """Files of one data set at one commit, into a folder of this process alone, which goes with it."""

    def __init__(self, api: Any, place: HubPlace, commit: str, sizes: dict[str, int], pause: Pause) -> None:
        self._api, self._place, self._commit, self._sizes, self._pause = api, place, commit, sizes, pause
        try:
            self._folder = _own_folder(self)
        except OSError as error:
            raise ConfigError(
                f"no place for a data set's files: {error.filename}: {error.strerror}",
                hint="Name a folder that can be written with the variable HF_HOME.",
            ) from error

    def fetch(self, name: str) -> Path:
        """Raises ConfigError, ResourceExhausted: it is not to be had, or there is no room."""
        if (free := shutil.disk_usage(self._folder).free) < self._sizes[name]:
            raise ResourceExhausted(f"{self._folder}: {name} has {self._sizes[name]} bytes, and {free} are free")
        return insisted(partial(self._fetched, name), f"{name} of {self._place.name}", self._pause)

    def _fetched(self, name: str) -> Path:
        said = {"repo_type": "dataset", "revision": self._commit, "local_dir": self._folder, "token": False}
        path = Path(self._api.hf_hub_download(self._place.name, name, **said))
        if (size := path.stat().st_size) != self._sizes[name]:
            path.unlink()
            raise OSError(f"it has {size} bytes in place of {self._sizes[name]}")
        return path


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


def _own_folder(owner: object) -> Path:
    """A new folder in the hub's home, removed when the owner goes or the process ends; those of processes that ended
    otherwise are removed now, which the system's locks tell."""
    from filelock import FileLock, Timeout
    from huggingface_hub import constants

    home = Path(constants.HF_HOME) / "skipstone"
    home.mkdir(parents=True, exist_ok=True)
    for other in home.iterdir():  # a lock, or a folder whose process wrote on after its lock had gone
        with suppress(Timeout, OSError), FileLock(other.with_suffix(".lock"), timeout=0) as old:
            _remove(other.with_suffix(""), old)
    folder = home / uuid.uuid4().hex
    lock = FileLock(folder.with_suffix(".lock"), thread_local=False)  # another thread may release it
    lock.acquire()
    folder.mkdir()
    weakref.finalize(owner, _release, folder, lock)
    return folder


def _release(folder: Path, lock: Any) -> None:
    _remove(folder, lock)
    lock.release()


def _remove(folder: Path, lock: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    Path(lock.lock_file).unlink(missing_ok=True)
