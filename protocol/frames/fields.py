"""What the frames of microbatches, rounds and lanes have in common: peers, modules, numbers, texts, the header of a
tensor.

Every `read_...` and `checked_...` raises ProtocolViolation for what may not come, and nothing else.

The bounds of an AnchorVersion that somebody names, wherever it stands: in a record, in a round's frames, in a hash
list.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from protocol.frames.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.averaging_messages import MAX_COUNT, MAX_ROUND, Measured
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import TensorMessage
from swarm.vocabulary.types import MAX_FRAGMENTS, AnchorVersion, Codec, ModuleId, PeerId

_LARGEST: Final = 2**32 - 1


def milliseconds(seconds: float) -> int:
    """As times are written, in a message and in what is signed: whole, from 0 to 2^32 - 1."""
    return min(max(round(seconds * 1000), 0), _LARGEST)


def packed(measured: Measured) -> int:
    """32 bits."""
    return measured.mark << 8 | measured.rate


DETAIL_CHARACTERS: Final = 256
MAX_DIMENSIONS: Final = 4
MAX_RECORD_BYTES: Final = 2048

_PEER_ID: Final = re.compile(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{45}")

EnumT = TypeVar("EnumT", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A message whose tensor follows in `chunk_count` chunks of the same transfer."""

    message: TensorMessage
    tensor: TensorSpec
    transfer: int
    chunk_count: int


def checked_peer(text: str) -> PeerId:
    """Only the form is checked: a name proves nothing, the certificate does.

    Raises:
        ProtocolViolation: not the form of an Ed25519 key's libp2p id.
    """
    if not _PEER_ID.fullmatch(text):
        raise ProtocolViolation("a peer id is not of the form 12D3Koo... with 52 characters")
    return PeerId(text)


def checked_measure(value: float, what: str) -> float:
    """Raises ProtocolViolation unless it is finite and not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise ProtocolViolation(f"{what} of {value} makes no sense")
    return value


def read_enum(kind: type[EnumT], number: int, what: str) -> EnumT:
    """Raises ProtocolViolation for a number that stands for nothing; 0 does only where the enum has it."""
    try:
        return kind(number)
    except ValueError:
        raise ProtocolViolation(f"{what} {number} is unknown") from None


def read_detail(text: str) -> str:
    """A text for people, without what could drive their terminal.

    Raises:
        ProtocolViolation: more than 256 characters.
    """
    if len(text) > DETAIL_CHARACTERS:
        raise ProtocolViolation(f"a detail of {len(text)} characters is longer than {DETAIL_CHARACTERS}")
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def read_record(record: bytes) -> bytes:
    """Only its length is checked. Raises ProtocolViolation."""
    if not 0 < len(record) <= MAX_RECORD_BYTES:
        raise ProtocolViolation(f"a record of {len(record)} bytes is not from 1 to {MAX_RECORD_BYTES} bytes long")
    return record


def wire_module(module: ModuleId) -> wire.ModuleId:
    return wire.ModuleId(stage=module.stage, expert=module.expert)


def read_module(module: wire.ModuleId) -> ModuleId:
    return ModuleId(module.stage, module.expert)


def wire_header(frame: TensorFrame) -> wire.TensorHeader:
    """What `read_header` reads back."""
    return wire.TensorHeader(
        transfer=frame.transfer,
        dtype=wire_number(frame.tensor.dtype),
        codec=wire_number(frame.tensor.codec),
        shape=frame.tensor.shape,
        outliers=frame.tensor.outliers,
        compressed_bytes=frame.tensor.compressed_bytes,
        byte_length=frame.tensor.byte_length,
        chunk_count=frame.chunk_count,
    )


def read_header(message: TensorMessage, header: wire.TensorHeader) -> TensorFrame:
    """The message with its tensor's header, checked for what can be checked without knowing the run."""
    dtype = read_enum(DType, header.dtype, "element type")
    codec = read_enum(Codec, header.codec, "codec")
    if not 1 <= len(header.shape) <= MAX_DIMENSIONS or 0 in header.shape:
        raise ProtocolViolation(
            f"a tensor has {len(header.shape)} dimensions, or one of size 0; 1 to 4 are allowed, none 0"
        )
    tensor = TensorSpec(tuple(header.shape), dtype, codec, header.outliers, header.compressed_bytes)
    fault = tensor.fault()
    if fault is not None:
        raise ProtocolViolation(fault)
    length = tensor.byte_length
    if header.byte_length != length:
        raise ProtocolViolation(f"a tensor of {length} bytes is announced as {header.byte_length} bytes")
    fewest, most = -(-length // MAX_CHUNK_BYTES), -(-length // MIN_CHUNK_BYTES)
    if not fewest <= header.chunk_count <= most:
        raise ProtocolViolation(f"{header.chunk_count} chunks for {length} bytes; {fewest} to {most} are allowed")
    return TensorFrame(message, tensor, header.transfer, header.chunk_count)


def wire_number(value: enum.Enum) -> Any:
    """An enum's number, as the generated code takes it: the values are link.proto's."""
    return value.value


DIGEST_BYTES: Final = 32


def checked_version(version: AnchorVersion) -> AnchorVersion:
    """The version as it is.

    Raises:
        ProtocolViolation: a number is out of bounds, or the digest has not 32 bytes.
    """
    if not 0 <= version.round <= MAX_ROUND:
        raise ProtocolViolation(f"anchor: round {version.round} is out of range; 0 to {MAX_ROUND} are allowed")
    checked_count(version.steps, "anchor: steps")
    checked_count(version.tokens, "anchor: tokens")
    if not 0 <= version.fragment < MAX_FRAGMENTS:
        raise ProtocolViolation(f"anchor: fragment {version.fragment} is out of range; there are {MAX_FRAGMENTS}")
    checked_digest(version.digest)
    return version


def checked_count(count: int, what: str) -> int:
    """Raises ProtocolViolation unless it is from 0 to MAX_COUNT."""
    if not 0 <= count <= MAX_COUNT:
        raise ProtocolViolation(f"{what}: {count} is out of range; 0 to {MAX_COUNT} are allowed")
    return count


def checked_digest(digest: bytes) -> bytes:
    """Raises ProtocolViolation unless it has 32 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise ProtocolViolation(f"anchor: a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return digest
