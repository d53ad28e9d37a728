"""Sources of documents: a sorted list of relative names, the same on every machine, and bytes by name."""

from __future__ import annotations

import errno
import struct
import sysconfig
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

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
from node.data.tokenizers import Tokens
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
    with _mapped(path):
        return TokenShards(visible_below(path))


def _at(place: Path, section: DataSection) -> FileSource | LineSource | TokenShards:
    if section.kind == "tokens":
        return shards_at(place)
    return lines_at(place) if section.labels == "assistant" else files_at(place)


def lines_at(path: Path) -> LineSource:
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


# ---- shards of tokens ------------------------------------------------------------------------------------------------
#
# Megatron-LM's format: pairs of files NAME.bin, the tokens of all documents, and NAME.idx, which is in little-endian
#
#     "MMIDIDX" 0 0 | version 1 (u64) | type of the tokens (u8) | sequences S (u64) | documents D + 1 (u64)
#     | tokens of each sequence (i32 each) | first byte of each (i64) | first sequence of each document, and S (i64)
#
# (github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py). There is no memory map: a file that is cut
# off under a map kills the process that looks at it.

PIECE_TOKENS: Final = 2**19
"""A longer document becomes several."""
MAX_SEQUENCES: Final = 2**26
READ_AS: Final = np.dtype("<i4")

_MAGIC: Final = b"MMIDIDX\0\0"
_HEADER: Final = struct.Struct("<9sQBQQ")
_TYPES: Final = {code: np.dtype(name) for code, name in ((4, "<i4"), (8, "<u2"))}
"""Types of the format that tokens may have."""


class TokenShards:
    """Documents of a listing's shards, named `NAME@TOKEN`; they are read as tokens of type READ_AS."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        names = [name.removesuffix(".idx") for name in listing.names if name.endswith(".idx")]
        try:
            shards = [_Shard(listing, name) for name in names]
        except OSError as error:
            raise ConfigError(f"{listing.root}: {error.strerror}: {error.filename}") from None
        self._shards = dict(zip(names, shards, strict=True))
        self.names = PlacedNames(names, [shard.starts for shard in shards])
        if not self.names:
            raise ConfigError(
                f"{listing.root}: there is no shard of tokens with a document in it",
                hint="Name a folder with NAME.bin and NAME.idx; `skipstone tokenize` writes them.",
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
            raise ConfigError(f"{listing.root}/{name}.bin has not the {self._end} tokens that its .idx says")
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
            raise OSError(errno.EIO, "the shard has become shorter", self._file)
        return np.frombuffer(found, dtype=self._type)


def _document_ends(file: BinaryIO, size: int, name: str) -> tuple[np.dtype[Any], Tokens]:
    """The type of a shard's tokens, and where its documents end, in tokens."""
    header = file.read(_HEADER.size)
    magic, version, code, sequences, bounds = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"",) * 5
    if magic != _MAGIC or version != 1:
        raise ConfigError(f"{name}.idx is no index of a shard of tokens (Megatron-LM's, version 1)")
    if code not in _TYPES:
        raise ConfigError(f"{name}.idx: tokens of type {code}; only 4 (int32) and 8 (uint16) are read")
    if (
        sequences > MAX_SEQUENCES
        or not 1 <= bounds <= MAX_DOCUMENTS + 1
        or size != _HEADER.size + 12 * sequences + 8 * bounds
    ):
        raise ConfigError(f"{name}.idx: {sequences} sequences and {bounds - 1} documents do not make {size} bytes")
    lengths = np.frombuffer(file.read(4 * sequences), "<i4")
    pointers = np.frombuffer(file.read(8 * sequences), "<i8")
    first = np.frombuffer(file.read(8 * bounds), "<i8")
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    in_a_row = lengths.size == sequences and (lengths >= 0).all()
    if not (in_a_row and np.array_equal(pointers, ends[:-1] * _TYPES[code].itemsize)):
        raise ConfigError(f"{name}.idx: its sequences do not follow each other in the .bin")
    if first.size != bounds or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise ConfigError(f"{name}.idx: its documents do not follow each other")
    return _TYPES[code], ends[first[1:]]


class ShardWriter:
    """Writes documents into shards of a folder, `00000.bin` and `00000.idx` and so on, each whole before the next."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int) -> None:
        self._folder, self._most = folder, shard_tokens
        self._code = 8 if vocabulary <= 2**16 else 4
        self.shards = self.documents = self.tokens = 0

    def write(self, documents: Iterable[Tokens]) -> None:
        left = iter(documents)
        for first in left:
            self._shard(chain([first], left))

    def _shard(self, documents: Iterator[Tokens]) -> None:
        """Under names that begin with a dot until it is whole: those belong to no text."""
        kind, name, lengths, tokens = _TYPES[self._code], f"{self.shards:05}", array("i"), 0
        parts = [self._folder / f".{name}.{suffix}" for suffix in ("bin", "idx")]
        with ExitStack() as stack:
            data, index = (stack.enter_context(part.open("xb")) for part in parts)
            while tokens < self._most and len(lengths) < MAX_SEQUENCES and (found := next(documents, None)) is not None:
                data.write(found.astype(kind).tobytes())
                lengths.append(found.size)
                tokens += found.size
            index.write(_index(self._code, np.array(lengths, dtype="<i4")))
        for part in parts:
            part.replace(part.with_name(part.name.removeprefix(".")))
        self.shards, self.documents, self.tokens = self.shards + 1, self.documents + len(lengths), self.tokens + tokens


def _index(code: int, lengths: npt.NDArray[np.int32]) -> bytes:
    count = lengths.size
    starts = (np.cumsum(lengths, dtype="<i8") - lengths) * _TYPES[code].itemsize
    header = _HEADER.pack(_MAGIC, 1, code, count, count + 1)
    return b"".join(
        (header, lengths.tobytes(), starts.astype("<i8").tobytes(), np.arange(count + 1, dtype="<i8").tobytes())
    )
