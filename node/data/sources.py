"""Sources of documents: lists names, sorted and the same on every machine, and reads a document's bytes by name."""

import errno
import logging
import os
import struct
import sysconfig
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from node.data.files import LINE_BYTES, MAX_DOCUMENTS, DocumentNames, Listing, files_below, is_visible, single_file
from node.data.hub import HubStream
from node.data.local_paths import text_column
from node.data.row_files import CUT_BYTES, DOCUMENT_BYTES, Format, Kind, NotTextError, Row, Wanted, format_of, rows_in
from node.data.tokenizers import Tokens
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
    source: LocalSource
    if kind == "tokens":
        source = source_at(place, TokenShards)
    else:
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


# ---- token shards ----------------------------------------------------------------------------------------------------
#
# Megatron-LM's format: NAME.bin has the tokens of all documents, and NAME.idx in little-endian
#
#     "MMIDIDX" 0 0 | version 1 (u64) | token type (u8) | sequences S (u64) | documents D + 1 (u64)
#     | tokens per sequence (i32 each) | first byte per sequence (i64) | first sequence per document, and S (i64)
#
# (github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py). Files are not memory-mapped: if a mapped
# file is truncated, reading it kills the process.

PIECE_TOKENS: Final = 2**19  # Largest document in tokens. Longer ones become several
MAX_SEQUENCES: Final = 2**26
READ_AS: Final = np.dtype("<i4")

_MAGIC: Final = b"MMIDIDX\0\0"
_HEADER: Final = struct.Struct("<9sQBQQ")
_TYPES: Final = {code: np.dtype(name) for code, name in ((4, "<i4"), (8, "<u2"))}  # By code in an index file


class TokenShards:
    """Source whose documents are tokens of type READ_AS, in shards of Megatron-LM's format, named `NAME@TOKEN`."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        names = [name.removesuffix(".idx") for name in listing.names if name.endswith(".idx")]
        self._shards = {name: _Shard(listing, name) for name in names}
        self.names = DocumentNames(names, [shard.starts for shard in self._shards.values()])
        if not self.names:
            raise ConfigError(
                f"{listing.place} has no token shard with documents",
                hint="Choose a folder with NAME.bin and NAME.idx, as `skipstone tokenize` writes them.",
            )

    def read(self, name: str) -> bytes:
        base, _, start = name.rpartition("@")
        return self._shards[base].read(int(start)).astype(READ_AS).tobytes()


class _Shard:
    def __init__(self, listing: Listing, name: str) -> None:
        self._listing, self._file = listing, f"{name}.bin"
        with listing.open(f"{name}.idx") as file:
            self._type, ends = _document_ends(file, listing.size_of(f"{name}.idx") or 0, f"{listing.root}/{name}")
        self._end = int(ends[-1]) if ends.size else 0
        if (listing.size_of(self._file) or 0) != self._end * self._type.itemsize:
            raise ConfigError(f"{listing.root}/{name}.bin does not have the {self._end} tokens of its .idx")
        starts = np.concatenate((np.zeros(1, np.int64), ends))
        pieces = (range(int(at), int(starts[number + 1]), PIECE_TOKENS) for number, at in enumerate(starts[:-1]))
        self.starts = array("Q", chain.from_iterable(pieces))

    def read(self, start: int) -> npt.NDArray[Any]:
        after = bisect_right(self.starts, start)
        count = (self.starts[after] if after < len(self.starts) else self._end) - start
        with self._listing.open(self._file) as file:
            file.seek(start * self._type.itemsize)
            found = file.read(count * self._type.itemsize)
        if len(found) != count * self._type.itemsize:
            raise OSError(errno.EIO, "the shard was truncated", self._file)
        return np.frombuffer(found, dtype=self._type)


def _document_ends(file: BinaryIO, size: int, name: str) -> tuple[np.dtype[Any], Tokens]:
    """Reads a shard's index file. Returns the dtype of its tokens, and the end of each document in tokens."""
    header = file.read(_HEADER.size)
    magic, version, code, sequences, bounds = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"",) * 5
    if magic != _MAGIC or version != 1:
        raise ConfigError(f"{name}.idx is not a token shard index (Megatron-LM, version 1)")
    if code not in _TYPES:
        raise ConfigError(f"{name}.idx has tokens of type {code}; only 4 (int32) and 8 (uint16) are supported")
    # Check sizes before reading arrays into memory.
    due = _HEADER.size + 12 * sequences + 8 * bounds
    if sequences > MAX_SEQUENCES or not 1 <= bounds <= MAX_DOCUMENTS + 1 or size != due:
        raise ConfigError(f"{name}.idx: {sequences} sequences and {bounds - 1} documents do not fill {size} bytes")
    lengths = np.frombuffer(file.read(4 * sequences), "<i4")
    pointers = np.frombuffer(file.read(8 * sequences), "<i8")
    first = np.frombuffer(file.read(8 * bounds), "<i8")
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    in_a_row = lengths.size == sequences and (lengths >= 0).all()
    if not (in_a_row and np.array_equal(pointers, ends[:-1] * _TYPES[code].itemsize)):
        raise ConfigError(f"{name}.idx: its sequences are not contiguous in the .bin")
    if first.size != bounds or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise ConfigError(f"{name}.idx: its documents are not contiguous")
    return _TYPES[code], ends[first[1:]]


LocalSource = FileSource | LineSource | FileStream | TokenShards


class ShardWriter:
    """Writer of tokenized documents to Megatron-LM shards `00000.bin`, `00000.idx` and so on in a folder."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int) -> None:
        self._folder, self._most = folder, shard_tokens
        self._code = 8 if vocabulary <= 2**16 else 4
        self.shards = self.documents = self.tokens = 0

    def write(self, documents: Iterable[Tokens]) -> None:
        left = iter(documents)
        for first in left:
            self._shard(chain([first], left))

    def _shard(self, documents: Iterator[Tokens]) -> None:
        """Writes one shard, under hidden names until it is complete, because hidden files never count as text."""
        kind, name, lengths, tokens = _TYPES[self._code], f"{self.shards:05}", array("i"), 0
        parts = [self._folder / f".{name}.{suffix}" for suffix in ("bin", "idx")]
        with ExitStack() as stack:
            data, index = (stack.enter_context(part.open("xb")) for part in parts)
            while tokens < self._most and len(lengths) < MAX_SEQUENCES and (found := next(documents, None)) is not None:
                data.write(found.astype(kind).tobytes())
                lengths.append(found.size)
                tokens += found.size
            index.write(_index(self._code, np.array(lengths, dtype="<i4")))
        for part in parts:  # renamed last, so that readers only see complete shards
            part.replace(part.with_name(part.name.removeprefix(".")))
        self.shards, self.documents, self.tokens = self.shards + 1, self.documents + len(lengths), self.tokens + tokens


def _index(code: int, lengths: npt.NDArray[np.int32]) -> bytes:
    count = lengths.size
    starts = (np.cumsum(lengths, dtype="<i8") - lengths) * _TYPES[code].itemsize
    header = _HEADER.pack(_MAGIC, 1, code, count, count + 1)
    return header + lengths.tobytes() + starts.astype("<i8").tobytes() + np.arange(count + 1, dtype="<i8").tobytes()
