"""The Chunk frame, read and written by hand.

A tensor is nearly all of the traffic, and a protobuf library copies its bytes once more on either side. So this one
frame is put together from a short prefix and a slice of the tensor, and taken apart without touching its data. The
bytes are those that any protobuf library writes for `Frame{chunk}` of link.proto: fields in ascending order, zeros left
out (https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from swarm.vocabulary.errors import ProtocolViolation

MAX_CHUNK_BYTES: Final = 1024 * 1024
MIN_CHUNK_BYTES: Final = 4096
"""Of every chunk but the last of a transfer: fewer would cost the receiver more than they bring."""
MAX_CHUNK_FRAME_BYTES: Final = MAX_CHUNK_BYTES + 64
CHUNK_TAG: Final = 0x12
"""First byte of a frame that holds a chunk: field 2, length-delimited."""

_TRANSFER_TAG: Final = 0x08
_INDEX_TAG: Final = 0x10
_CHECKSUM_TAG: Final = 0x19
_DATA_TAG: Final = 0x22
_FIXED64: Final = struct.Struct("<Q")
_LONGEST_UINT32: Final = 5


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a transfer. `data` is a view of the received frame, which lives as long as the view."""

    transfer: int
    index: int
    checksum: int
    data: memoryview


def checksum_of(data: memoryview) -> int:
    """The checksum of a chunk's data. XXH3-64: finds bugs and broken memory, not attackers, who are TLS's business."""
    return xxhash.xxh3_64_intdigest(data)


def encode_chunk(transfer: int, index: int, data: memoryview) -> bytes:
    """Encodes a chunk as a whole frame; the one copy of `data` on the sending side."""
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
    """Parses a frame that begins with CHUNK_TAG; the checksum is not compared yet.

    Raises:
        ProtocolViolation: not exactly one chunk with 1 byte to 1 MiB of data and its fields in ascending order.
    """
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
    """A uint32 and the position after it."""
    value = 0
    for place in range(_LONGEST_UINT32):
        byte = frame[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >= 2**32:
                break
            return value, at + place + 1
    raise ProtocolViolation("a chunk has a number of more than 32 bits")
