"""Sources of documents: a sorted list of relative names, the same on every machine, and bytes by name."""

from __future__ import annotations

import errno
import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from node.data.files import (
    LINE_BYTES,
    MAX_DOCUMENTS,
    DocumentNames,
    Listing,
    PlacedNames,
    files_below,
    single_file,
    visible_below,
)
from node.data.hub import HubStream
from node.data.token_shards import TokenShards
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError

DOCUMENT_BYTES: Final = 2**20
"""A longer file of a folder becomes several documents."""
PIECE_BYTES: Final = 2**14
"""A source that is one file is cut into documents of this size, to split it and hold some out."""

_NOT_THE_LIBRARY: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Folders left out of `python-stdlib`, because some systems do not install them."""


@runtime_checkable
class Source(Protocol):
    """Documents by name."""

    @property
    def names(self) -> Sequence[str]:
        """The documents' names: distinct, in an order that is the same on every machine with the same text."""

    def read(self, name: str) -> bytes: ...


def open_source(section: DataSection, place: Path | None) -> Source | HubStream:
    """Opens the manifest's source with its files at `place`. Raises ConfigError if it is missing or another one."""
    kind, rest = section.kind, section.source.partition(":")[2]
    if section.source == "python-stdlib":
        return python_standard_library()
    if kind == "huggingface":
        assert section.revision is not None, "the manifest's schema asks for it"
        return HubStream(rest, section.revision, is_chat=section.labels == "assistant")
    if place is None:
        raise ConfigError(
            "the manifest names a path, and nobody has said where that text lies here",
            hint="Say it with --text FILE-OR-FOLDER.",
        )
    source = _at(place, section)
    if section.files is not None:
        source.listing.require(section.files)
    return source


class FileSource:
    """Files of a listing; one longer than `document_bytes` is several documents, named `NAME@OFFSET`."""

    def __init__(self, listing: Listing, document_bytes: int) -> None:
        self.listing = listing
        self._document_bytes = document_bytes
        self.names = _PieceNames(listing, document_bytes)
        if not self.names:
            raise ConfigError(f"{listing.root}: there is no text in it", hint="Name a file or a folder with text.")

    def read(self, name: str) -> bytes:
        # A file that is called like a part of another one is read in its place.
        base, _, offset = (name, "", "0") if self.listing.size_of(name) is not None else name.rpartition("@")
        with self.listing.open(base) as file:
            file.seek(int(offset))
            return file.read(self._document_bytes)


class _PieceNames(DocumentNames):
    """Names of files and of pieces of files: a file may be long and sparse, and has millions of them."""

    def __init__(self, listing: Listing, document_bytes: int) -> None:
        super().__init__(-(-size // document_bytes) for size in listing.sizes)
        self._listing = listing
        self._document_bytes = document_bytes
        if len(self) > MAX_DOCUMENTS:
            raise ConfigError(
                (
                    f"{listing.root}: {sum(listing.sizes)} bytes are more than {MAX_DOCUMENTS} documents of "
                    f"{document_bytes} bytes"
                ),
                hint="Name a smaller part of it; a long text is better cut into several files.",
            )

    def name_of(self, file: int, number: int) -> str:
        name, offset = self._listing.names[file], number * self._document_bytes
        return f"{name}@{offset}" if offset else name


class LineSource:
    """Lines of a listing's `.jsonl` files, or of its only file, named `NAME@OFFSET`. Opening it reads all files."""

    def __init__(self, listing: Listing) -> None:
        """Raises ConfigError: a file cannot be read, there is no line, or there are too many."""
        self.listing = listing
        names = (
            listing.names if len(listing.names) == 1 else [name for name in listing.names if name.endswith(".jsonl")]
        )
        try:
            self.names = PlacedNames(names, [_line_starts(listing, name) for name in names])
        except OSError as error:
            raise ConfigError(f"{listing.root}: {error.strerror}: {error.filename}") from None
        if not self.names:
            raise ConfigError(
                f"{listing.root}: there is no line in it that could be a conversation",
                hint="Name a file of JSON Lines, or a folder with .jsonl files.",
            )

    def read(self, name: str) -> bytes:
        base, _, offset = name.rpartition("@")
        with self.listing.open(base) as file:
            file.seek(int(offset))
            line = file.readline(LINE_BYTES + 1)
        if len(line.rstrip(b"\r\n")) > LINE_BYTES:
            raise OSError(errno.EFBIG, f"the line has more than {LINE_BYTES} bytes", name)
        return line


def _line_starts(listing: Listing, name: str) -> array[int]:
    """Where the lines of a file begin that have something in them. Holds a piece of a line, however long that is."""
    starts, at, is_begin = array("Q"), 0, True
    with listing.open(name) as file:
        while (piece := file.readline(LINE_BYTES)) and len(starts) <= MAX_DOCUMENTS:
            if is_begin and piece.strip():
                starts.append(at)
            at, is_begin = at + len(piece), piece.endswith(b"\n")
    return starts


def python_standard_library() -> FileSource:
    """The source of the `.py` files of the running Python's standard library, without its tests."""
    return FileSource(files_below(Path(sysconfig.get_path("stdlib")), _is_of_the_library, _is_source), DOCUMENT_BYTES)


def files_at(path: Path) -> FileSource:
    """One file cut into small documents, or all files below a folder but hidden ones. Raises ConfigError."""
    with _mapped(path):
        if path.is_dir():
            return FileSource(visible_below(path), DOCUMENT_BYTES)
        return FileSource(single_file(path), PIECE_BYTES)


def shards_at(path: Path) -> TokenShards:
    """The source of the shards of tokens below a folder. Raises as `files_at`."""
    with _mapped(path):
        return TokenShards(visible_below(path))


def _at(place: Path, section: DataSection) -> FileSource | LineSource | TokenShards:
    if section.kind == "tokens":
        return shards_at(place)
    return lines_at(place) if section.labels == "assistant" else files_at(place)


def lines_at(path: Path) -> LineSource:
    """The source of the lines of a file, or of the `.jsonl` files below a folder. Raises as `files_at`."""
    with _mapped(path):
        return LineSource(visible_below(path) if path.is_dir() else single_file(path))


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"data.source: there is no file or folder {path} on this machine") from None
    except OSError as error:
        raise ConfigError(f"data.source: {path} cannot be read: {error.strerror}") from None


def _is_of_the_library(folder: str) -> bool:
    return folder not in _NOT_THE_LIBRARY


def _is_source(file: str) -> bool:
    """`_sysconfigdata...` is written when Python is built, and differs between machines."""
    return file.endswith(".py") and not file.startswith("_sysconfigdata")
