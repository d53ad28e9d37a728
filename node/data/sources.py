"""Sources of documents: lists names, sorted and the same on every machine, and reads a document's bytes by name."""

import errno
import logging
import os
import sysconfig
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeVar, runtime_checkable

from node.data.files import LINE_BYTES, MAX_DOCUMENTS, DocumentNames, Listing, files_below, is_visible, single_file
from node.data.hub import HubStream
from node.data.local_paths import text_column
from node.data.row_files import CUT_BYTES, DOCUMENT_BYTES, Format, Kind, NotTextError, Row, Wanted, format_of, rows_in
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError

PIECE_BYTES: Final = 2**14  # Document size of a single file. Small enough to split the file and hold some out

_NOT_THE_LIBRARY: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Folders excluded from `python-stdlib`, because some systems do not install them."""


FromListing = TypeVar("FromListing")

logger = logging.getLogger(__name__)


@runtime_checkable
class Source(Protocol):
    """A run's text as a list of named documents, each read on demand."""

    @property
    def names(self) -> Sequence[str]:
        """The documents' names: distinct, in the same order on every machine with the same text."""

    def read(self, name: str) -> bytes: ...


def open_source(section: DataSection, place: Path | None, *, is_new: bool = False) -> "LocalSource | HubStream":
    """Opens the run's text at `place`. `is_new`: refuse doubtful files, which older runs read. Raises ConfigError."""
    kind, rest = section.kind, section.source.partition(":")[2]
    if section.source == "python-stdlib":
        return python_standard_library()
    if kind == "huggingface":
        assert section.revision is not None, "the manifest's schema asks for it"
        return HubStream(rest, section.revision, is_chat=section.labels == "assistant")
    if place is None:
        raise ConfigError(
            "the manifest's path for its text is unknown on this machine", hint="Give it with --text FILE-OR-FOLDER."
        )
    wanted = Wanted(text_column(section, place), section.labels == "assistant")
    source = source_at(place, lambda listing: _local_files(listing, wanted, is_new=is_new))
    if section.files is not None:
        source.listing.require(section.files)
    return source


def _local_files(listing: Listing, wanted: Wanted, *, is_new: bool) -> "FileSource | LineSource | FileStream":
    """Opens each file by its content. In a folder, files that are not text are left out."""
    formats, left_out = dict[str, Format](), listing.left_out
    if not listing.names:
        raise ConfigError(f"{listing.place} contains no text", hint="Choose a file or a folder with text.")
    for name in listing.names:
        try:
            with listing.open(name) as file:
                found = format_of(file, name, wanted)
            if found.kind is Kind.TEXT and listing.is_folder and wanted.needs_rows:
                raise NotTextError("plain text without rows")
            formats[name] = found
        except NotTextError as error:
            left_out[name] = str(error)
        except OSError as error:
            if is_new:
                why = error.strerror or error
                raise ConfigError(f"data.source: {listing.root / name} cannot be read: {why}") from None
            formats[name] = Format(Kind.TEXT, is_plain=True)  # excluded when it is read
    if len(left_out) > len(formats) and (not formats or (is_new and not wanted.needs_rows)):
        name, why = next(iter(left_out.items()))
        others = f" ({len(left_out)} of {len(listing.names)} files are no such text)" if listing.is_folder else ""
        raise ConfigError(
            f"data.source: {listing.root / name} cannot be used: it is {why}{others}", hint="Choose files of text."
        )
    if is_new and (doubts := [found.doubt for found in formats.values() if found.doubt is not None]):
        others = f". {len(doubts) - 1} more files are doubtful" if len(doubts) > 1 else ""
        raise ConfigError(f"{doubts[0]}{others}", hint=doubts[0].hint)
    if left_out and not is_new:
        name, why = next(iter(left_out.items()))
        logger.warning("%d files of the text are not used; %s is %s", len(left_out), name, why)
    kinds = {(found.kind, found.is_plain) for found in formats.values()}
    if kinds <= {(Kind.TEXT, True)} and not wanted.needs_rows:
        return FileSource(listing, piece_bytes(listing), [*formats])
    if kinds <= {(Kind.LINES, True), (Kind.TEXT, True)} and wanted.column is None:
        return LineSource(listing, [*formats])
    return FileStream(listing, [*formats], wanted)


def piece_bytes(listing: Listing) -> int:
    """Returns the largest document: a single file is cut into small ones, files of a folder only if they are long."""
    return DOCUMENT_BYTES if listing.is_folder else PIECE_BYTES


class FileStream:
    """Rows of local files, each file read from its beginning."""

    def __init__(self, listing: Listing, files: Sequence[str], wanted: Wanted) -> None:
        self.listing, self.files, self._wanted = listing, files, wanted
        self.bytes_read = 0

    def rows(self, file: str, start: int) -> Generator[Row]:
        """Yields a reader for each row of a file from row `start`. Raises ConfigError."""
        try:
            with self.listing.open(file) as opened:
                try:
                    yield from rows_in(opened, file, self._wanted, start, piece_bytes(self.listing))
                    opened.seek(0, os.SEEK_END)
                finally:
                    self.bytes_read += opened.tell()
        except OSError as error:
            raise ConfigError(f"data.source: {file} cannot be read: {error.strerror or error}") from error

    def expect(self, name: str) -> None:
        """Does nothing, because local files need no prefetching."""


class FileSource:
    """Source whose documents are files; a file above `document_bytes` becomes several documents `NAME@OFFSET`."""

    def __init__(self, listing: Listing, document_bytes: int, files: Sequence[str] | None = None) -> None:
        self.listing = listing
        self._document_bytes = document_bytes
        files = listing.names if files is None else files
        pieces = [range(0, listing.size_of(name) or 0, document_bytes) for name in files]
        self.names = DocumentNames(files, pieces, is_plain=True)
        if not self.names:
            raise ConfigError(f"{listing.place} contains no text", hint="Choose a file or a folder with text.")

    def read(self, name: str) -> bytes:
        # A file name may end like a piece of another file. The file takes precedence.
        base, _, offset = (name, "", "0") if self.listing.size_of(name) is not None else name.rpartition("@")
        with self.listing.open(base) as file:
            begin, end = (self._border(file, int(offset) + more) for more in (0, self._document_bytes))
            file.seek(begin)
            return file.read(end - begin).removeprefix(b"" if begin else BOM_UTF8)

    def _border(self, file: BinaryIO, offset: int) -> int:
        """Returns where a cut at `offset` comes to lie: at the next line, else at the next character."""
        file.seek(offset)
        after = file.read(CUT_BYTES) if offset else b""
        character = next((at for at, byte in enumerate(after[:4]) if byte & 0xC0 != 0x80), 0)
        return offset + (after.find(b"\n") + 1 or character)


class LineSource:
    """Source whose documents are lines `NAME@OFFSET` of files, such as conversations. Opening reads all files."""

    def __init__(self, listing: Listing, files: Sequence[str] | None = None) -> None:
        self.listing = listing
        files = listing.names if files is None else files
        self.names = DocumentNames(files, [_line_starts(listing, name) for name in files])
        if not self.names:
            raise ConfigError(
                f"{listing.place} has no lines with conversations", hint="Choose a .jsonl file, or a folder of them."
            )

    def read(self, name: str) -> bytes:
        base, _, offset = name.rpartition("@")
        with self.listing.open(base) as file:
            file.seek(int(offset))
            line = file.readline(LINE_BYTES + 1)
        if len(line.rstrip(b"\r\n")) > LINE_BYTES:
            raise OSError(errno.EFBIG, f"the line has more than {LINE_BYTES} bytes", name)
        return line


def _line_starts(listing: Listing, name: str) -> "array[int]":
    """Returns the byte offsets of a file's non-blank lines. Reads long lines in pieces."""
    starts, at, is_begin = array("Q"), 0, True
    with listing.open(name) as file:
        while (piece := file.readline(LINE_BYTES)) and len(starts) <= MAX_DOCUMENTS:
            if is_begin and piece.strip():
                starts.append(at)
            at, is_begin = at + len(piece), piece.endswith(b"\n")
    return starts


def python_standard_library() -> FileSource:
    """Returns the `.py` files of the running Python's standard library, without its tests."""
    found = files_below(
        Path(sysconfig.get_path("stdlib")),
        lambda folder: folder not in _NOT_THE_LIBRARY,
        lambda file: file.endswith(".py") and not file.startswith("_sysconfigdata"),  # differs between machines
    )
    return FileSource(found, DOCUMENT_BYTES)


def source_at(path: Path, kind: Callable[[Listing], FromListing]) -> FromListing:
    """Opens a source of this kind from one file, or all visible files below a folder. Raises ConfigError."""
    try:
        return kind(files_below(path, is_visible, is_visible) if path.is_dir() else single_file(path))
    except FileNotFoundError:
        hint = "Name a file or folder that is there, as path:FILE; --text names this machine's copy of a run's text."
        raise ConfigError(f"data.source: {path} does not exist on this machine", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"data.source: {error.filename or path} cannot be read: {error.strerror}") from None


LocalSource = FileSource | LineSource | FileStream
