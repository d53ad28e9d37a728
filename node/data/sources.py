"""Where documents come from: a fixed, sorted list of names, and bytes by name.

Names are relative, so that the same text has the same names on every machine: the held-out choice, the order and the
split between data nodes follow from them.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from protocol.manifest import DataSection
from swarm.errors import ConfigError

DOCUMENT_BYTES: Final = 2**20
"""A longer file of a folder becomes several documents, so that no document needs more memory than this allows."""
PIECE_BYTES: Final = 2**14
"""A source that is one file is cut into documents of this size: one document could neither be split nor held out."""
MAX_FILES: Final = 1_000_000

_NOT_THE_LIBRARY: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Folders left out of `python-stdlib`: some systems install Python without its tests, and the rest is not Python's own."""


class Source(Protocol):
    """Documents by name."""

    @property
    def names(self) -> Sequence[str]:
        """Distinct, in an order that is the same on every machine with the same text."""
        ...

    def read(self, name: str) -> bytes:
        """The document's text, usually UTF-8.

        Raises:
            OSError: it cannot be read now.
        """
        ...


def open_source(section: DataSection) -> Source:
    """The source that the manifest names.

    Raises:
        ConfigError: it is not on this machine, holds no text, is of an unknown kind, or needs an extra that is not installed.
    """
    kind, _, rest = section.source.partition(":")
    if section.source == "python-stdlib":
        return python_standard_library()
    if kind == "path" and rest:
        return files_at(Path(rest).expanduser())
    if kind == "huggingface" and rest:
        return HuggingFaceSource(rest)
    raise ConfigError(
        f"data.source {section.source!r} is none of `python-stdlib`, `path:FILE-OR-FOLDER` and"
        " `huggingface:NAME[:CONFIG[:SPLIT[:COLUMN]]]`"
    )


class FileSource:
    """Files below a folder. A file longer than `document_bytes` is several documents, named `NAME@OFFSET`."""

    def __init__(self, root: Path, files: Sequence[Path], document_bytes: int) -> None:
        self._document_bytes = document_bytes
        self._places: dict[str, tuple[Path, int]] = {}
        for file in files:
            name = file.relative_to(root).as_posix()
            for offset in range(0, file.stat().st_size, document_bytes):
                self._places[f"{name}@{offset}" if offset else name] = (file, offset)
        if not self._places:
            raise ConfigError(
                f"{root}: there is no text in it", hint="Name a file or a folder with text in data.source."
            )
        self.names = sorted(self._places)

    def read(self, name: str) -> bytes:
        path, offset = self._places[name]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(self._document_bytes)


def python_standard_library() -> FileSource:
    """The `.py` files of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return FileSource(
        root, [file for file in _files_below(root) if _is_library(file.relative_to(root))], DOCUMENT_BYTES
    )


def files_at(path: Path) -> FileSource:
    """One file, cut into small documents, or all files below a folder whose names do not begin with a dot.

    Raises:
        ConfigError: there is no such file or folder, it cannot be read, or has no text.
    """
    try:
        if path.is_file():
            return FileSource(path.parent, [path], PIECE_BYTES)
        if path.is_dir():
            visible = (file for file in _files_below(path) if not _is_hidden(file.relative_to(path)))
            return FileSource(path, list(visible), DOCUMENT_BYTES)
    except OSError as error:
        raise ConfigError(f"data.source: {path} cannot be read: {error.strerror}") from None
    raise ConfigError(f"data.source: there is no file or folder {path} on this machine")


class HuggingFaceSource:
    """A text column of a data set of the Hugging Face hub; a row is a document. Rows stay on disk until they are read."""

    def __init__(self, place: str) -> None:
        """`place` is `NAME[:CONFIG[:SPLIT[:COLUMN]]]`; empty parts mean no config, `train` and `text`."""
        name, config, split, column = (place.split(":") + [""] * 3)[:4]
        self._column = column or "text"
        self._rows = _load_data_set(name, config or None, split or "train")
        if self._column not in self._rows.column_names:
            columns = ", ".join(self._rows.column_names)
            raise ConfigError(f"data.source: {name} has no column {self._column!r}; it has {columns}")
        self.names = _RowNames(len(self._rows))

    def read(self, name: str) -> bytes:
        return str(self._rows[int(name)][self._column]).encode()


class _RowNames(Sequence[str]):
    """Row numbers as names, without a list of millions of strings."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [str(number) for number in range(self._count)[index]]
        return str(range(self._count)[index])


def _load_data_set(name: str, config: str | None, split: str) -> Any:
    try:
        import datasets  # an extra: heavy, and not needed for local text
    except ImportError:
        raise ConfigError(
            "data.source names a Hugging Face data set, and the `datasets` library is not installed",
            hint="Install it with `pip install 'skipstone[datasets]'`, or use another data.source.",
        ) from None
    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:  # the library's own errors derive from these two
        raise ConfigError(f"data.source: the data set {name!r} cannot be loaded: {error}") from error


def _files_below(root: Path) -> Iterator[Path]:
    """Regular files, no links: a link may lead out of the folder, or round in a circle."""
    found = 0
    for folder, _, names in os.walk(root):
        for name in names:
            file = Path(folder, name)
            if file.is_file() and not file.is_symlink():
                found += 1
                if found > MAX_FILES:
                    raise ConfigError(f"{root}: more than {MAX_FILES} files; name a smaller folder in data.source")
                yield file


def _is_library(relative: Path) -> bool:
    """`_sysconfigdata...` is written when Python is built, and differs between machines."""
    if relative.suffix != ".py" or relative.name.startswith("_sysconfigdata"):
        return False
    return _NOT_THE_LIBRARY.isdisjoint(relative.parts)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)
