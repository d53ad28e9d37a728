"""Tokens that were made before, in Megatron-LM's format: pairs of files NAME.bin and NAME.idx.

`.bin` is the tokens of all documents, one after the other; `.idx`, all of it little-endian, is

    "MMIDIDX" 0 0 | version 1 (u64) | type of the tokens (u8) | sequences S (u64) | documents D + 1 (u64)
    | tokens of each sequence (i32 each) | first byte of each (i64) | first sequence of each document, and S (i64)

(github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py), which its `preprocess_data.py`, GPT-NeoX and
NeMo write and read as well. Documents are read where they lie, not through a memory map: a file that is cut off under a
map kills the process that looks at it, and reading goes through the same page cache.
"""

from __future__ import annotations

import errno
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from node.data.files import MAX_DOCUMENTS, Listing, PlacedNames
from swarm.vocabulary.errors import ConfigError

Tokens = npt.NDArray[np.int64]

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
        """Raises ConfigError: a shard is none, or there are none or too many documents."""
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
    """One pair of files: where its documents begin, in tokens, none longer than PIECE_TOKENS."""

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
    """Writes documents into shards of a folder, `00000.bin` and `00000.idx` and so on, each whole before the next.

    Args:
        vocabulary: decides how many bytes a token takes.
        shard_tokens: after which a shard ends, with a whole document.
    """

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
