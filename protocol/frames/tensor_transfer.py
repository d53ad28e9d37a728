"""The transfer of one tensor: cut into chunk frames by the sender, reassembled and checked by the receiver.

Nothing here allocates for a tensor: the sender reads from the caller's buffer, the receiver writes into the one that
the handler gave.
"""

from __future__ import annotations

from typing import Final

from protocol.frames.chunks import Chunk, checksum_of, encode_chunk
from protocol.frames.fields import TensorFrame
from swarm.vocabulary.errors import ProtocolViolation

CHUNK_S: Final = 0.02
"""How long a small frame may have to wait behind one chunk."""
LEAST_CHUNK_BYTES: Final = 64 * 1024
"""However slow the link: each frame has a cost of its own."""


def chunk_bytes_for(goodput_bytes_per_s: float, most: int) -> int:
    """The chunk size of the next transfer: what the link carries in CHUNK_S, as a power of two, within the limits;
    `most` as long as nothing was measured.
    """
    if goodput_bytes_per_s <= 0:
        return most
    carried = int(min(goodput_bytes_per_s * CHUNK_S, most))
    return min(most, max(LEAST_CHUNK_BYTES, 1 << max(0, carried.bit_length() - 1)))


def chunk_count_of(byte_length: int, chunk_bytes: int) -> int:
    return -(-byte_length // chunk_bytes)


class OutgoingTransfer:
    """The frames of one tensor to be sent, made one at a time: besides the one that the stream has, at most one is
    copied ahead.
    """

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
        """Whether the header has been taken, so that the receiver may know of the transfer."""
        return self._next >= 0

    @property
    def finished(self) -> bool:
        return self._next == self._chunk_count

    def next_frame(self) -> bytes:
        """The next frame: first the header, then chunk after chunk."""
        frame = self._frame() if self._ahead is None else self._ahead
        self._ahead = None
        self._next += 1
        return frame

    def prepare(self) -> None:
        """Makes the next frame now, while the stream is busy with another, so that `next_frame` will have it at
        hand."""
        if self._ahead is None and not self.finished:
            self._ahead = self._frame()

    def _frame(self) -> bytes:
        if self._next < 0:
            return self._header
        start = self._next * self._chunk_bytes
        return encode_chunk(self.number, self._next, self._data[start : start + self._chunk_bytes])


class Arrival:
    """The receiver's side of one transfer: counts its chunks and checks their order and sizes; keeps none of their
    data.

    The first chunk says how large chunks are, and the header's count has to agree with it. As it stands it swallows a
    refused transfer; `Assembly` also takes the data.
    """

    __slots__ = ("_chunk_bytes", "_received", "frame")

    def __init__(self, frame: TensorFrame, received: int = 0, chunk_bytes: int = 0) -> None:
        self.frame = frame
        self._received = received
        self._chunk_bytes = chunk_bytes

    @property
    def complete(self) -> bool:
        return self._received == self.frame.chunk_count

    def swallowing_the_rest(self) -> Arrival:
        """The arrival without its buffer, from now on: it goes on counting when the data is not wanted any more."""
        return Arrival(self.frame, self._received, self._chunk_bytes)

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk.

        Raises:
            ProtocolViolation: out of order, or not of the size it must have.
        """
        if chunk.index != self._received:
            raise ProtocolViolation(
                f"transfer {chunk.transfer}: chunk {chunk.index} came where {self._received} was due"
            )
        if chunk.index == 0:
            self._fix_chunk_size(len(chunk.data))
        due = min(self._chunk_bytes, self.frame.tensor.byte_length - chunk.index * self._chunk_bytes)
        if len(chunk.data) != due:
            raise ProtocolViolation(
                f"transfer {chunk.transfer}: chunk {chunk.index} has {len(chunk.data)} bytes where {due} were due"
            )
        self._received += 1

    def _fix_chunk_size(self, size: int) -> None:
        if chunk_count_of(self.frame.tensor.byte_length, size) != self.frame.chunk_count:
            raise ProtocolViolation(
                f"transfer {self.frame.transfer}: {self.frame.chunk_count} chunks were announced,"
                f" but chunks of {size} bytes make another number"
            )
        self._chunk_bytes = size


class Assembly(Arrival):
    """An admitted arrival, reassembled in the buffer it was given."""

    __slots__ = ("_target", "buffer", "deadline", "progressed_at")

    def __init__(self, frame: TensorFrame, buffer: memoryview, now: float, deadline: float) -> None:
        super().__init__(frame)
        self.buffer = buffer
        self._target = buffer.cast("B")
        self.progressed_at = now
        self.deadline = deadline

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk, as `Arrival.add`; also ProtocolViolation when the checksum does not agree."""
        super().add(chunk)
        if checksum_of(chunk.data) != chunk.checksum:
            raise ProtocolViolation(f"transfer {chunk.transfer}: the checksum of chunk {chunk.index} does not agree")
        start = chunk.index * self._chunk_bytes
        self._target[start : start + len(chunk.data)] = chunk.data
