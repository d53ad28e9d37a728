"""A tensor's specification from its header; it bounds what a receiver spends, before memory is taken."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.types import Codec

BLOCK: Final = 128
INT4_BLOCK: Final = 64
SPARSE_CHUNK: Final = 4096
PLACE_LOW_BITS: Final = 4  # Bits of a position in its chunk that are sent as they are (`protocol.codecs.top_k`)
FEWEST_CHANNELS_AN_OUTLIER: Final = 16  # So that little is sent twice


class DType(enum.Enum):
    """Element types that may travel. The value is the one in link.proto."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3

    @property
    def size_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


# Elements per chunk. A shorter last chunk sends an equal share, rounded up.
KEPT: Final = {Codec.TOP_K_4: 192, Codec.TOP_K_2: 256}

_BLOCKWISE: Final = frozenset({Codec.INT8, Codec.INT4})
_WHOLE_FLOATS: Final = frozenset({DType.FLOAT32, DType.BFLOAT16})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, element type and encoding of a tensor on the wire. What `fault` objects to is no tensor of ours."""

    shape: tuple[int, ...]
    dtype: DType
    codec: Codec = Codec.NONE
    outliers: int = 0  # Channels sent apart in bfloat16. Blockwise codecs only.
    compressed_bytes: int = 0  # PLANES only: depends on the elements

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def raw_bytes(self) -> int:
        return self.elements * self.dtype.size_bytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def byte_length(self) -> int:
        elements = self.elements
        match self.codec:
            case Codec.NONE:
                return self.raw_bytes
            case Codec.BF16:
                return 2 * elements
            case Codec.INT8:
                return elements + 4 * blocks_of(elements, BLOCK) + self.apart_bytes
            case Codec.INT4:
                return -(-elements // 2) + 2 * blocks_of(elements, INT4_BLOCK) + self.apart_bytes
            case Codec.TOP_K_4 | Codec.TOP_K_2:
                return _sparse_bytes(elements, self.codec)
            case Codec.PLANES:
                return self.compressed_bytes

    @property
    def apart_bytes(self) -> int:
        """Bytes of the outliers: two for a channel's number, two for each of its elements."""
        return 2 * self.outliers * (1 + self.rows)

    def fault(self) -> str | None:
        if self.dtype not in _WHOLE_FLOATS and self.codec is not Codec.NONE:
            return f"{self.codec.name} encodes float32 and bfloat16, not {self.dtype.name}"
        apart = len(self.shape) > 1 and self.codec in _BLOCKWISE
        if self.outliers > (most_outliers(self.shape) if apart else 0):
            return f"{self.outliers} channels sent apart are more than {self.codec.name} of {self.shape} allows"
        planes = self.codec is Codec.PLANES
        if planes != (self.compressed_bytes > 0) or self.compressed_bytes > self.raw_bytes:
            return f"{self.compressed_bytes} compressed bytes make no sense with {self.codec.name} of {self.shape}"
        return None


def blocks_of(elements: int, size: int) -> int:
    return -(-elements // size)


def most_outliers(shape: tuple[int, ...]) -> int:
    """The largest number of channels of such a tensor that may be sent apart."""
    return shape[-1] // FEWEST_CHANNELS_AN_OUTLIER


@dataclass(frozen=True, slots=True)
class SparseChunk:
    """The layout of a chunk of the sparse codecs: levels, lower bits of places, upper ones, codes, in whole bytes."""

    elements: int  # 1 to SPARSE_CHUNK
    codec: Codec

    @property
    def kept(self) -> int:
        return -(-self.elements * KEPT[self.codec] // SPARSE_CHUNK)

    @property
    def code_bits(self) -> int:
        return 4 if self.codec is Codec.TOP_K_4 else 2

    @property
    def low_bytes(self) -> int:
        return -(-self.kept * PLACE_LOW_BITS // 8)

    @property
    def high_bytes(self) -> int:
        """The length of the upper bits: one for each place, and one for each run of 2^PLACE_LOW_BITS elements."""
        return -(-(self.kept + blocks_of(self.elements, 2**PLACE_LOW_BITS)) // 8)

    @property
    def code_bytes(self) -> int:
        return -(-self.kept * self.code_bits // 8)

    @property
    def byte_length(self) -> int:
        return 4 + self.low_bytes + self.high_bytes + self.code_bytes


def _sparse_bytes(elements: int, codec: Codec) -> int:
    whole, rest = divmod(elements, SPARSE_CHUNK)
    last = SparseChunk(rest, codec).byte_length if rest else 0
    return whole * SparseChunk(SPARSE_CHUNK, codec).byte_length + last
