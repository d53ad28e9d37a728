"""The incoming tensors of one link: admitted by header, reassembled, handed over, or broken off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from protocol.frames.frames import Cancel, SmallFrame
from protocol.frames.tensors import Arrival, Assembly, Chunk, TensorFrame
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import LinkHandler, Refusal
from swarm.vocabulary.errors import PeerError, ProtocolViolation, SkipstoneError, Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import Backward, Direction, Forward, MicrobatchTensor, Receipt, ReceiptStatus
from swarm.vocabulary.types import PeerId, short

MAX_OPEN_TRANSFERS: Final = 64  # Of one sender, refused ones included


@dataclass(slots=True, eq=False)
class Inbox:
    """Incoming transfers of the link to `peer`. `reply` queues a small frame for it."""

    peer: PeerId
    handler: LinkHandler
    clock: Clock
    reply: Callable[[SmallFrame], None]
    _: KW_ONLY
    odd_numbers: bool
    stall_after_s: float
    slowest_bytes_per_s: float
    _arrivals: dict[int, Arrival] = field(default_factory=dict, init=False)

    def owns(self, transfer: int) -> bool:
        """Whether the peer may use this transfer number: the dialling peer's are odd, the other's even."""
        return (transfer % 2 == 1) == self.odd_numbers

    def open(self, frame: TensorFrame) -> None:
        """Admits or refuses a transfer by its header. Raises ProtocolViolation."""
        number = frame.transfer
        if not self.owns(number) or number in self._arrivals:
            raise ProtocolViolation(f"transfer number {number} is not free for the peer to use")
        if len(self._arrivals) >= MAX_OPEN_TRANSFERS:
            raise ProtocolViolation(f"more than {MAX_OPEN_TRANSFERS} transfers at once")
        admitted = self.handler.admit(self.peer, frame.message, frame.tensor)
        if isinstance(admitted, Refusal):
            self._arrivals[number] = Arrival(frame)
            if isinstance(frame.message, Forward | Backward):
                self.reply(_receipt_of(frame.message, admitted))
            self.reply(Cancel(number))
            return
        if admitted.nbytes != frame.tensor.byte_length or admitted.readonly or not admitted.c_contiguous:
            raise SkipstoneError(f"a buffer of {admitted.nbytes} bytes was given for {frame.tensor.byte_length} bytes")
        now = self.clock.monotonic()
        deadline = now + self.stall_after_s + admitted.nbytes / self.slowest_bytes_per_s
        self._arrivals[number] = Assembly(frame, admitted, now, deadline)

    def add(self, chunk: Chunk) -> TensorFrame | None:
        """Takes a chunk; returns the header once a wanted tensor is complete. Raises ProtocolViolation."""
        arrival = self._arrivals.get(chunk.transfer)
        if arrival is None:
            raise ProtocolViolation(f"a chunk of transfer {chunk.transfer}, which is not open")
        arrival.add(chunk)
        if arrival.complete:
            del self._arrivals[chunk.transfer]
        if not isinstance(arrival, Assembly):
            return None
        arrival.progressed_at = self.clock.monotonic()
        if not arrival.complete:
            return None
        self.handler.received(self.peer, arrival.frame.message, arrival.frame.tensor, arrival.buffer)
        return arrival.frame

    def withdrawn(self, transfer: int) -> None:
        arrival = self._arrivals.pop(transfer, None)
        if isinstance(arrival, Assembly):
            self._break_off(arrival, Unreachable(f"{short(self.peer)} broke transfer {transfer} off"))

    def break_off_slow(self) -> None:
        """Gives the buffers of transfers that stand still, or take too long, back to the handler."""
        now = self.clock.monotonic()
        for number, arrival in list(self._arrivals.items()):
            if not isinstance(arrival, Assembly) or self._arrivals.get(number) is not arrival:
                continue  # a reply may end the link, and with it all transfers
            if now > arrival.deadline or now - arrival.progressed_at > self.stall_after_s:
                self._arrivals[number] = arrival.swallowing_the_rest()
                self.reply(Cancel(number))
                self._break_off(arrival, Stalled(f"transfer {number} from {short(self.peer)} made too little progress"))

    def forgive(self, seconds: float) -> None:
        """Extends all deadlines by a time in which this process did not run: nobody else is to blame for it."""
        for arrival in self._arrivals.values():
            if isinstance(arrival, Assembly):
                arrival.progressed_at += seconds
                arrival.deadline += seconds

    def close(self, error: PeerError) -> None:
        arrivals, self._arrivals = self._arrivals, {}
        for arrival in arrivals.values():
            if isinstance(arrival, Assembly):
                self._break_off(arrival, error)

    def _break_off(self, arrival: Assembly, error: PeerError) -> None:
        self.handler.broken_off(self.peer, arrival.frame.message, arrival.buffer, error)


def _receipt_of(message: MicrobatchTensor, refusal: Refusal) -> Receipt:
    return Receipt(
        message.microbatch,
        Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD,
        message.position,
        ReceiptStatus.BUSY if refusal.busy else ReceiptStatus.REFUSED,
        refusal.retry_after_s,
        refusal.detail,
    )
