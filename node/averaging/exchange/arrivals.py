"""Pieces that arrive for one attempt: what is admitted, into which memory, for whom, and how fast it came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from node.averaging.exchange.partition import LARGEST_PIECE, Piece, Plan
from protocol.codecs import encoded_bytes
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Refusal
from swarm.compression.round_codecs import RoundCodecs
from swarm.vocabulary.averaging_messages import MAX_MEMBERS, RoundId, RoundPiece
from swarm.vocabulary.types import Codec, PeerId

KEPT: Final = 0.5
"""Weight of earlier measurements, each time a sender falls silent."""


@dataclass(slots=True)
class _Sender:
    size_bytes: float = 0.0
    seconds: float = 0.0
    under_way: int = 0
    since: float = 0.0
    came: int = 0


class Incoming:
    """The senders' rates. Pieces overlap, so bytes count over the time in which any of them arrives."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._senders: dict[PeerId, _Sender] = {}

    def began(self, sender: PeerId) -> None:
        known = self._senders.pop(sender, None) or _Sender()
        self._senders[sender] = known
        while len(self._senders) > MAX_MEMBERS:
            del self._senders[next(iter(self._senders))]
        if not known.under_way:
            known.since, known.came = self._clock.monotonic(), 0
        known.under_way += 1

    def ended(self, sender: PeerId, size_bytes: int) -> None:
        known = self._senders.get(sender)
        if known is None or not known.under_way:
            return
        known.came += size_bytes
        known.under_way -= 1
        seconds = self._clock.monotonic() - known.since
        if not known.under_way and known.came and seconds > 0:
            known.size_bytes = KEPT * known.size_bytes + known.came
            known.seconds = KEPT * known.seconds + seconds

    def bytes_per_s(self) -> Mapping[PeerId, float]:
        return {peer: known.size_bytes / known.seconds for peer, known in self._senders.items() if known.seconds}


EARLY_PIECES: Final = 32
"""Pieces kept before the roster is here, of all members together: at most 128 MiB."""
FEWEST_EARLY: Final = 2
"""Pieces that each member may send that early, however many members there are."""

Deliver = Callable[[PeerId, RoundPiece, Piece, memoryview], None]
"""Takes a whole piece; returns its buffer with `Arrivals.give_back`."""


def piece_spec(codec: Codec, elements: int) -> TensorSpec:
    return TensorSpec((elements,), DType.FLOAT32, codec)


def early_pieces(others: int) -> int:
    """Pieces that a member may send to another before it has seen a result of it."""
    return max(FEWEST_EARLY, EARLY_PIECES // max(1, others))


class Arrivals:
    """The pieces that arrive for one attempt. A member may begin to send before the roster has reached us."""

    def __init__(
        self, round_id: RoundId, codecs: Sequence[RoundCodecs], rejected: Callable[[PeerId, str], None]
    ) -> None:
        self.round = round_id
        self.received_bytes = 0
        self._codecs = codecs
        self._rejected = rejected
        self._plan: Plan | None = None
        self._deliver: Deliver | None = None
        self._come: dict[tuple[PeerId, RoundPiece], Codec] = {}
        self._early: list[tuple[PeerId, RoundPiece, memoryview]] = []
        self._free: dict[int, list[memoryview]] = {}

    def open(self, plan: Plan, deliver: Deliver) -> None:
        self._plan, self._deliver = plan, deliver
        early, self._early = self._early, []
        for sender, message, buffer in early:
            self._hand_over(sender, message, buffer)

    def let_go(self) -> None:
        """Frees the buffers after the exchange; what arrives now is dropped."""
        self._free.clear()
        self._deliver = lambda sender, message, piece, buffer: None

    def admit(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec) -> memoryview | Refusal:
        key = (sender, message)
        if message.round != self.round or key in self._come:
            return Refusal(False, "this piece is of another round, or has come before")
        why_not = self._objection(sender, message, tensor)
        if why_not is not None:
            return Refusal(False, why_not)
        self._come[key] = tensor.codec
        free = self._free.get(tensor.byte_length)
        return free.pop() if free else np.empty(tensor.byte_length, np.uint8).data  # not filled with zeros first

    def received(self, sender: PeerId, message: RoundPiece, buffer: memoryview) -> None:
        self.received_bytes += buffer.nbytes
        if self._plan is None:
            self._early.append((sender, message, buffer))
        else:
            self._hand_over(sender, message, buffer)

    def broken_off(self, sender: PeerId, message: RoundPiece, buffer: memoryview) -> None:
        self._come.pop((sender, message), None)
        self.give_back(buffer)

    def give_back(self, buffer: memoryview) -> None:
        self._free.setdefault(buffer.nbytes, []).append(buffer)

    def _objection(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec) -> str | None:
        if self._plan is None:
            if len(self._come) >= EARLY_PIECES:
                return "too many pieces before the roster"
            elements = tensor.shape[0]
            specs = (piece_spec(codecs.of(message), elements) for codecs in self._codecs)
            return None if elements <= LARGEST_PIECE and tensor in specs else "no piece has such a form"
        piece = self._plan.piece_of(sender, message)
        if piece is None:
            return "no such piece is due from this peer"
        if tensor == piece_spec(self._plan.codecs.of(message), piece.elements):
            return None
        why = f"a piece of {piece.elements} elements as {tensor}"
        self._rejected(sender, why)
        return why

    def _hand_over(self, sender: PeerId, message: RoundPiece, buffer: memoryview) -> None:
        assert self._plan is not None
        assert self._deliver is not None
        piece, codec = self._plan.piece_of(sender, message), self._come.get((sender, message))
        due = self._plan.codecs.of(message)
        if piece is not None and codec is due and buffer.nbytes == encoded_bytes(due, piece.elements):
            self._deliver(sender, message, piece, buffer)
            return
        if piece is not None:
            self._rejected(sender, f"a piece of {piece.elements} elements in {buffer.nbytes} bytes, not as {due.name}")
        self.give_back(buffer)
