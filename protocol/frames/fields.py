"""Encoding and checks of single fields: peers, texts, times, and the header of a tensor.

Every `read_...` and `checked_...` raises ProtocolViolation for what may not come, and nothing else.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from protocol.frames.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.averaging_messages import LinkRate, StateChunk
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import Backward, Forward, TensorMessage
from swarm.vocabulary.types import Codec, PeerId

MAX_DIMENSIONS: Final = 4

_LARGEST: Final = 2**32 - 1
_LOSSLESS: Final = frozenset({Codec.NONE, Codec.PLANES})
_PEER_ID: Final = re.compile(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{45}")

EnumT = TypeVar("EnumT", bound=enum.Enum)


def parts_of_a_second(seconds: float, parts: int) -> int:
    """Seconds as a whole number of such parts of a second, clamped to 0..2^32 - 1."""
    return min(max(round(seconds * parts), 0), _LARGEST)


def milliseconds(seconds: float) -> int:
    """Seconds as whole milliseconds, as in what is signed."""
    return parts_of_a_second(seconds, 1000)


def packed(measured: LinkRate) -> int:
    """A measured rate with its mark as 32 bits: 24 of the mark, 8 of the rate."""
    return measured.mark << 8 | measured.rate


@lru_cache(maxsize=4096)
def checked_peer(text: str) -> PeerId:
    """A peer id of the right form: a name proves nothing, the certificate does. The same peers are named all the time,
    so the latest are remembered.

    Raises:
        ProtocolViolation: not the form of an Ed25519 key's libp2p id.
    """
    if not _PEER_ID.fullmatch(text):
        raise ProtocolViolation("a peer id is not of the form 12D3Koo... with 52 characters")
    return PeerId(text)


def read_enum(kind: type[EnumT], number: int, what: str) -> EnumT:
    """The enum member of a number. Raises ProtocolViolation for a number that stands for nothing; 0 does only where the
    enum has it.
    """
    try:
        return kind(number)
    except ValueError:
        raise ProtocolViolation(f"{what} {number} is unknown") from None


def printable(text: str) -> str:
    """The text without characters that could drive the reader's terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


# ---- the header of a tensor -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A message whose tensor follows in `chunk_count` chunks of the same transfer."""

    message: TensorMessage
    tensor: TensorSpec
    transfer: int
    chunk_count: int


def wire_header(frame: TensorFrame) -> dict[str, Any]:
    """The fields of link.proto's TensorHeader: what `read_header` reads back."""
    return {
        "transfer": frame.transfer,
        "dtype": frame.tensor.dtype.value,
        "codec": frame.tensor.codec.value,
        "shape": frame.tensor.shape,
        "outliers": frame.tensor.outliers,
        "compressed_bytes": frame.tensor.compressed_bytes,
        "byte_length": frame.tensor.byte_length,
        "chunk_count": frame.chunk_count,
    }


def read_header(message: TensorMessage, header: wire.TensorHeader) -> TensorFrame:
    """Reads a message with its tensor's header, checked for what can be checked without knowing the run."""
    dtype = read_enum(DType, header.dtype, "element type")
    codec = read_enum(Codec, header.codec, "codec")
    if not 1 <= len(header.shape) <= MAX_DIMENSIONS or 0 in header.shape:
        raise ProtocolViolation(
            f"a tensor has {len(header.shape)} dimensions, or one of size 0; 1 to 4 are allowed, none 0"
        )
    tensor = TensorSpec(tuple(header.shape), dtype, codec, header.outliers, header.compressed_bytes)
    fault = tensor.fault() or _misfit(message, tensor)
    if fault is not None:
        raise ProtocolViolation(fault)
    length = tensor.byte_length
    if header.byte_length != length:
        raise ProtocolViolation(f"a tensor of {length} bytes is announced as {header.byte_length} bytes")
    fewest, most = -(-length // MAX_CHUNK_BYTES), -(-length // MIN_CHUNK_BYTES)
    if not fewest <= header.chunk_count <= most:
        raise ProtocolViolation(f"{header.chunk_count} chunks for {length} bytes; {fewest} to {most} are allowed")
    return TensorFrame(message, tensor, header.transfer, header.chunk_count)


def _misfit(message: TensorMessage, tensor: TensorSpec) -> str | None:
    """Why such a tensor does not go with the message; None when it may."""
    if isinstance(message, Forward | Backward):
        return None
    if len(tensor.shape) != 1 or tensor.dtype is not DType.FLOAT32:
        return f"what belongs to a module is a float32 vector, not {tensor.dtype.name} {tensor.shape}"
    if isinstance(message, StateChunk) and tensor.codec not in _LOSSLESS:
        return f"a chunk of state is sent without loss, not as {tensor.codec.name}"
    return None
