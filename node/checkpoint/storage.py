"""The file operations of checkpoints, as a seam: tests put one in between that fails or dies at any of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from node.observability.failpoints import crash_point


class Storage(Protocol):
    """The file operations of checkpoints. Every method raises OSError when the disk does not do its part."""

    def make_folder(self, path: Path) -> None:
        """Makes the folder, and those above it, where they are missing."""
        ...

    def write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        """Makes or empties the file and writes the pieces into it, one after the other."""
        ...

    def sync(self, path: Path) -> None:
        """Makes a file's contents, or a folder's names, survive a power failure."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Gives the file its new name, replacing what has it, in one step."""
        ...

    def remove(self, path: Path) -> None:
        """Removes a file; one that is not there is removed already."""
        ...

    def names(self, folder: Path) -> tuple[str, ...]:
        """The names in the folder; nothing when there is no such folder."""
        ...


class DiskStorage:
    """The file operations on the real disk."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                rest = piece
                while len(rest):  # a write may take less than it was given
                    rest = rest[file.write(rest) :]

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def names(self, folder: Path) -> tuple[str, ...]:
        try:
            return tuple(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return ()


def write_durably(storage: Storage, target: Path, beside: Path, pieces: Iterable[memoryview]) -> None:
    """Writes a file atomically, beside the target and renamed, each made durable: whatever happens, the target is the
    old file or the new one.
    """
    crash_point("before write")
    storage.write(beside, pieces)
    crash_point("before sync")
    storage.sync(beside)
    crash_point("before rename")
    storage.rename(beside, target)
    crash_point("after rename")
    storage.sync(target.parent)
