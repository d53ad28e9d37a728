"""Shape, type and encoding of a tensor, from its header, so that a receiver knows all sizes before it allocates."""

import enum
import math
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.types import Codec

BLOCK: Final = 128
INT4_BLOCK: Final = 64
# Channels per outlier, at least, because outliers are also sent as zeros in the blocks
FEWEST_CHANNELS_AN_OUTLIER: Final = 16
MAX_TOKEN_BYTES: Final = 3


class DType(enum.Enum):
    """Element types of tensors on the wire, with the values in link.proto."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3

    @property
    def size_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


_BLOCKWISE: Final = frozenset({Codec.INT8, Codec.INT4})
_WHOLE_FLOATS: Final = frozenset({DType.FLOAT32, DType.BFLOAT16})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, element type and encoding of a tensor on the wire. Invalid if `fault` returns a reason."""

    shape: tuple[int, ...]
    dtype: DType
    codec: Codec = Codec.NONE
    outliers: int = 0  # Channels sent separately in bfloat16; blockwise codecs only
    token_bytes: int = 0  # Bytes of each token's number, which follow the encoded elements. Last axis: channels.

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def raw_bytes(self) -> int:
        return self.elements * self.dtype.size_bytes + self.rows * self.token_bytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def byte_length(self) -> int:
        return self.encoded_bytes + self.rows * self.token_bytes

    @property
    def encoded_bytes(self) -> int:
        """Bytes of the encoded elements, without token numbers."""
        elements = self.elements
        match self.codec:
            case Codec.NONE:
                return elements * self.dtype.size_bytes
            case Codec.BF16:
                return 2 * elements
            case Codec.INT8:
                return elements + 4 * blocks_of(elements, BLOCK) + self.apart_bytes
            case Codec.INT4:
                return -(-elements // 2) + 2 * blocks_of(elements, INT4_BLOCK) + self.apart_bytes
            case Codec.INT2:
                return -(-elements // 4) + 2 * blocks_of(elements, INT4_BLOCK)

    @property
    def apart_bytes(self) -> int:
        """Bytes of the outlier channels: two bytes for each channel number, two bytes for each element."""
        return 2 * self.outliers * (1 + self.rows)

    def fault(self) -> str | None:
        if self.dtype not in _WHOLE_FLOATS and self.codec is not Codec.NONE:
            return f"{self.codec.name} encodes float32 and bfloat16, not {self.dtype.name}"
        apart = len(self.shape) > 1 and self.codec in _BLOCKWISE
        if self.outliers > (most_outliers(self.shape) if apart else 0):
            return f"{self.outliers} outlier channels are more than {self.codec.name} of {self.shape} allows"
        if self.token_bytes > MAX_TOKEN_BYTES:
            return f"{self.token_bytes} bytes for a token's number are more than {MAX_TOKEN_BYTES}"
        return None


def blocks_of(elements: int, size: int) -> int:
    return -(-elements // size)


def most_outliers(shape: tuple[int, ...]) -> int:
    """Returns the largest allowed number of outlier channels of a tensor with this shape."""
    return shape[-1] // FEWEST_CHANNELS_AN_OUTLIER
