"""Tensors on a link: headers, chunk frames and transfers."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from protocol.frames.codec import read_enum
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.averaging_messages import StateChunk
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import Backward, Forward, TensorMessage
from swarm.vocabulary.types import Codec

MAX_CHUNK_BYTES: Final = 1024 * 1024
MIN_CHUNK_BYTES: Final = 4096  # Except for the last chunk of a transfer
MAX_CHUNK_FRAME_BYTES: Final = MAX_CHUNK_BYTES + 64
CHUNK_TAG: Final = 0x12  # First byte of a chunk's frame: field 2, length-delimited

_TRANSFER_TAG: Final = 0x08
_INDEX_TAG: Final = 0x10
_CHECKSUM_TAG: Final = 0x19
_DATA_TAG: Final = 0x22
_FIXED64: Final = struct.Struct("<Q")
_LONGEST_UINT32: Final = 5


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a tensor in transfer. `data` is a view that keeps the received frame in memory."""

    transfer: int
    index: int
    checksum: int
    data: memoryview


def checksum_of(data: memoryview) -> int:
    """Returns the XXH3-64 of a chunk's data. It detects bugs and faulty memory; TLS stops attackers."""
    return xxhash.xxh3_64_intdigest(data)


# Encoded without the protobuf library, which would copy the data once more on each side. The bytes are the same:
# ascending fields, zeros omitted (https://protobuf.dev/programming-guides/encoding/).
def encode_chunk(transfer: int, index: int, data: memoryview) -> bytes:
    """Builds the frame of one chunk of a transfer. The sending side copies `data` only here."""
    fields = bytearray()
    if transfer:
        fields.append(_TRANSFER_TAG)
        _append_varint(fields, transfer)
    if index:
        fields.append(_INDEX_TAG)
        _append_varint(fields, index)
    if checksum := checksum_of(data):
        fields.append(_CHECKSUM_TAG)
        fields += _FIXED64.pack(checksum)
    fields.append(_DATA_TAG)
    _append_varint(fields, len(data))
    prefix = bytearray((CHUNK_TAG,))
    _append_varint(prefix, len(fields) + len(data))
    return b"".join((prefix, fields, data))


def decode_chunk(frame: bytes) -> Chunk:
    """Parses a chunk frame without verifying its checksum. Raises ProtocolViolation."""
    if len(frame) > MAX_CHUNK_FRAME_BYTES:
        raise ProtocolViolation(f"a chunk frame of {len(frame)} bytes is longer than {MAX_CHUNK_FRAME_BYTES}")
    try:
        return _parse(frame)
    except (IndexError, struct.error):
        raise ProtocolViolation("a chunk frame ends in the middle of a field") from None


def _parse(frame: bytes) -> Chunk:
    transfer = index = checksum = 0
    length, at = _varint(frame, 1)
    if at + length != len(frame):
        raise ProtocolViolation(f"a chunk of {length} bytes does not fill its frame of {len(frame)} bytes")
    if frame[at] == _TRANSFER_TAG:
        transfer, at = _varint(frame, at + 1)
    if frame[at] == _INDEX_TAG:
        index, at = _varint(frame, at + 1)
    if frame[at] == _CHECKSUM_TAG:
        checksum = _FIXED64.unpack_from(frame, at + 1)[0]
        at += 1 + _FIXED64.size
    if frame[at] != _DATA_TAG:
        raise ProtocolViolation(f"a chunk has the unexpected field tag {frame[at]:#04x}")
    length, at = _varint(frame, at + 1)
    if not 0 < length <= MAX_CHUNK_BYTES or at + length != len(frame):
        raise ProtocolViolation(f"a chunk states {length} bytes of data and carries {len(frame) - at}")
    return Chunk(transfer, index, checksum, memoryview(frame)[at:])


def _append_varint(buffer: bytearray, value: int) -> None:
    while value > 0x7F:
        buffer.append(value & 0x7F | 0x80)
        value >>= 7
    buffer.append(value)


def _varint(frame: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_UINT32):
        byte = frame[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >= 2**32:
                break
            return value, at + place + 1
    raise ProtocolViolation("a chunk has a number of more than 32 bits")


MAX_DIMENSIONS: Final = 4
_LOSSLESS: Final = frozenset({Codec.NONE, Codec.PLANES})


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """Frame with a message and its tensor's header. The tensor follows in `chunk_count` chunks of the same transfer."""

    message: TensorMessage
    tensor: TensorSpec
    transfer: int
    chunk_count: int


def wire_header(frame: TensorFrame) -> dict[str, Any]:
    """Returns a tensor's type, shape, codec and sizes as fields of link.proto's TensorHeader."""
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
    """Parses a tensor's header and makes all checks that need no manifest. Raises ProtocolViolation."""
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
    """Returns why `tensor` has a wrong shape, type or codec for the kind of `message`; None if it fits."""
    if isinstance(message, Forward | Backward):
        return None
    if len(tensor.shape) != 1 or tensor.dtype is not DType.FLOAT32:
        return f"a module's data is a float32 vector, not {tensor.dtype.name} {tensor.shape}"
    if isinstance(message, StateChunk) and tensor.codec not in _LOSSLESS:
        return f"a chunk of state must be lossless, not {tensor.codec.name}"
    return None


CHUNK_S: Final = 0.02  # Longest wait of a small frame behind one chunk, in seconds
LEAST_CHUNK_BYTES: Final = 64 * 1024


def chunk_bytes_for(goodput_bytes_per_s: float, most: int) -> int:
    """Returns the chunk size for a transfer: bytes that the link carries in CHUNK_S, as a power of two in bounds."""
    if goodput_bytes_per_s <= 0:
        return most
    carried = int(min(goodput_bytes_per_s * CHUNK_S, most))
    return min(most, max(LEAST_CHUNK_BYTES, 1 << max(0, carried.bit_length() - 1)))


def chunk_count_of(byte_length: int, chunk_bytes: int) -> int:
    return -(-byte_length // chunk_bytes)


class OutgoingTransfer:
    """Outgoing tensor: makes its header and chunk frames one at a time, with at most one prepared in advance."""

    __slots__ = ("_ahead", "_chunk_bytes", "_chunk_count", "_data", "_header", "_next", "number")

    def __init__(self, number: int, header: bytes, data: memoryview, chunk_bytes: int) -> None:
        self.number = number
        self._header = header
        self._data = data
        self._chunk_bytes = chunk_bytes
        self._chunk_count = chunk_count_of(len(data), chunk_bytes)
        self._next = -1
        self._ahead: bytes | None = None

    @property
    def begun(self) -> bool:
        """Whether `next_frame` has returned the header, so that the receiver may already know this transfer."""
        return self._next >= 0

    @property
    def finished(self) -> bool:
        return self._next == self._chunk_count

    def next_frame(self) -> bytes:
        frame = self._frame() if self._ahead is None else self._ahead
        self._ahead = None
        self._next += 1
        return frame

    def prepare(self) -> None:
        if self._ahead is None and not self.finished:
            self._ahead = self._frame()

    def _frame(self) -> bytes:
        if self._next < 0:
            return self._header
        start = self._next * self._chunk_bytes
        return encode_chunk(self.number, self._next, self._data[start : start + self._chunk_bytes])


@dataclass(slots=True, eq=False)
class Arrival:
    """Incoming tensor whose chunks are checked and discarded, because it was refused. `Assembly` stores its chunks."""

    frame: TensorFrame
    _received: int = 0
    _chunk_bytes: int = 0

    @property
    def complete(self) -> bool:
        return self._received == self.frame.chunk_count

    def swallowing_the_rest(self) -> Arrival:
        """Returns an `Arrival` that discards this tensor's remaining chunks, so that the buffer can be released."""
        return Arrival(self.frame, self._received, self._chunk_bytes)

    def add(self, chunk: Chunk) -> None:
        """Checks the index and size of the next chunk and counts it as received. Raises ProtocolViolation."""
        if chunk.index != self._received:
            raise ProtocolViolation(
                f"transfer {chunk.transfer}: chunk {chunk.index} arrived instead of {self._received}"
            )
        if chunk.index == 0:
            self._fix_chunk_size(len(chunk.data))
        due = min(self._chunk_bytes, self.frame.tensor.byte_length - chunk.index * self._chunk_bytes)
        if len(chunk.data) != due:
            raise ProtocolViolation(
                f"transfer {chunk.transfer}: chunk {chunk.index} has {len(chunk.data)} bytes instead of {due}"
            )
        self._received += 1

    def _fix_chunk_size(self, size: int) -> None:
        if chunk_count_of(self.frame.tensor.byte_length, size) != self.frame.chunk_count:
            raise ProtocolViolation(
                f"transfer {self.frame.transfer}: {self.frame.chunk_count} chunks were announced,"
                f" but chunks of {size} bytes give a different number"
            )
        self._chunk_bytes = size


class Assembly(Arrival):
    """Incoming tensor that was admitted and is reassembled from its chunks in `buffer`."""

    __slots__ = ("_target", "buffer", "deadline", "progressed_at")

    def __init__(self, frame: TensorFrame, buffer: memoryview, now: float, deadline: float) -> None:
        super().__init__(frame)
        self.buffer = buffer
        self._target = buffer.cast("B")
        self.progressed_at = now
        self.deadline = deadline

    def add(self, chunk: Chunk) -> None:
        """Stores the next chunk in the buffer. Raises ProtocolViolation if its index, size or checksum is wrong."""
        super().add(chunk)
        if checksum_of(chunk.data) != chunk.checksum:
            raise ProtocolViolation(f"transfer {chunk.transfer}: the checksum of chunk {chunk.index} does not match")
        start = chunk.index * self._chunk_bytes
        self._target[start : start + len(chunk.data)] = chunk.data
