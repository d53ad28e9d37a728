"""Pieces of one exchange: the partition that each member computes from layout and roster, and received pieces."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from node.averaging.anchor.shared_vector import Layout
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Refusal
from swarm.averaging.roster import contributors
from swarm.compression.round_codecs import result_codec
from swarm.vocabulary.averaging_messages import MAX_MEMBERS, Contribution, Member, Reduced, Roster, RoundId, RoundPiece
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import Codec, PeerId, short

LARGEST_PIECE: Final = 2**20  # Largest piece in elements (4 MiB of float32)
SMALLEST_PIECE: Final = 2**19  # In elements (2 MiB). Below, overhead exceeds the gain from overlapping.
PIECES_OF_A_SHARD: Final = 4  # At least, of large shards, so that sending, reducing and applying overlap


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive chunks of one shard (the elements that one member sums), sent, reduced and applied together."""

    reducer: PeerId
    first_chunk: int
    end_chunk: int
    start: int
    stop: int

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def elements(self) -> int:
        return self.stop - self.start


class Plan:
    """Partition of a round's fragment into shards and pieces. Raises ProtocolViolation if the roster is invalid."""

    def __init__(self, own: PeerId, layout: Layout, roster: Roster) -> None:
        self.own = own
        self.layout = layout
        self.roster = roster
        self.first_chunk, self.end_chunk = layout.fragments[roster.base.fragment % len(layout.fragments)]
        self.members = {member.peer: member for member in roster.members}
        self.contributors = contributors(roster)
        self.codec, self.result_codec = roster.codec, result_codec(roster.codec)
        _check(own, roster, self.first_chunk, self.end_chunk)
        self.shards = {member.peer: _cut(layout, member) for member in roster.members}
        self.others = tuple(peer for peer in self.shards if peer != own)
        self._by_chunks = {(p.first_chunk, p.end_chunk): p for pieces in self.shards.values() for p in pieces}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._by_chunks.values())

    @property
    def contributes(self) -> bool:
        return self.members[self.own].coefficient > 0

    def piece_at(self, first_chunk: int, end_chunk: int) -> Piece | None:
        return self._by_chunks.get((first_chunk, end_chunk))

    def piece_of(self, sender: PeerId, message: RoundPiece) -> Piece | None:
        """Returns the piece that a message carries, or None if this sender should not send it to this member."""
        piece = self._by_chunks.get((message.first_chunk, message.end_chunk))
        if piece is None or message.round != self.roster.round or sender == self.own:
            return None
        if isinstance(message, Reduced):
            return piece if piece.reducer == sender else None
        return piece if piece.reducer == self.own and sender in self.contributors else None

    def contribution(self, piece: Piece) -> Contribution:
        return Contribution(self.roster.round, piece.first_chunk, piece.end_chunk)

    def result(self, piece: Piece) -> Reduced:
        return Reduced(self.roster.round, piece.first_chunk, piece.end_chunk)

    def spec(self, message: RoundPiece, piece: Piece) -> TensorSpec:
        return piece_spec(self.result_codec if isinstance(message, Reduced) else self.codec, piece.elements)


def _check(own: PeerId, roster: Roster, first_chunk: int, end_chunk: int) -> None:
    members = roster.members
    if own not in {member.peer for member in members} or len({member.peer for member in members}) != len(members):
        raise ProtocolViolation(f"the roster of {short(roster.round.convener)} lists a peer twice or omits us")
    # Shards must cover the fragment without gaps or overlaps.
    shards = sorted((m.first_chunk, m.end_chunk) for m in members if m.first_chunk != m.end_chunk)
    borders = [first_chunk, *(end for _, end in shards)]
    starts = [*(first for first, _ in shards), end_chunk]
    if borders != starts or any(first > end for first, end in shards):
        raise ProtocolViolation(f"the shards of round {roster.round.number} do not partition the fragment")
    sound = all(0 <= m.coefficient <= 1 and 0 <= m.norm < math.inf for m in members)
    if not sound or not any(m.coefficient > 0 for m in members):
        raise ProtocolViolation(f"the roster of round {roster.round.number} has invalid weights")


def _cut(layout: Layout, member: Member) -> tuple[Piece, ...]:
    first, end = member.first_chunk, member.end_chunk
    wished = (end - first) * layout.chunk_elements // PIECES_OF_A_SHARD
    elements = max(SMALLEST_PIECE, min(LARGEST_PIECE, wished))
    chunks = max(1, elements // layout.chunk_elements)
    borders = [*range(first, end, chunks), end]
    parts = [(a, b, layout.range_of(a, b)) for a, b in itertools.pairwise(borders) if a < b]
    return tuple(Piece(member.peer, a, b, part.start, part.stop) for a, b, part in parts)


PROGRESS_PERCENT: Final = 10


Watch = Callable[[RoundId, int, int], None]  # Attempt, chunks in our shard, percentage of pieces done


class ExchangeProgress:
    """Progress of one exchange: pieces sent, summed and applied, and those still missing from each member."""

    def __init__(self, plan: Plan, watch: Watch = lambda attempt, chunks, percent: None) -> None:
        self._plan = plan
        self._watch = watch
        contributors = frozenset(plan.contributors) - {plan.own}
        self._awaited = {piece: set(contributors) for piece in plan.shards[plan.own] if contributors}
        """Contributors missing for each piece of our shard, in order of pieces."""
        self._results_due = {peer: len(plan.shards[peer]) for peer in plan.others}
        self._contributed = dict.fromkeys(plan.others, 0)
        self._unapplied = set(plan.pieces)
        self._all = len(self._unapplied) + len(self._awaited) * len(contributors)
        self._taken_in = 0
        self._reported: int | None = None
        self._report()

    def contributed(self, reducer: PeerId) -> None:
        self._contributed[reducer] += 1

    def added(self, sender: PeerId, piece: Piece) -> None:
        self._awaited[piece].discard(sender)
        if not self._awaited[piece]:
            del self._awaited[piece]
        self._report(taken_in=1)

    def applied(self, piece: Piece) -> bool:
        self._unapplied.discard(piece)
        if piece.reducer != self._plan.own:
            self._results_due[piece.reducer] -= 1
        self._report(taken_in=1)
        return not self._unapplied

    def owing(self) -> frozenset[PeerId]:
        """Returns the members whose contributions or results are due here and have not arrived."""
        # While contributions to our shard are missing, late results have no culprit: the member may delay all reducers.
        # Only the first incomplete piece counts, because a member sends at most a window ahead of the results.
        late = next(iter(self._awaited.values()), ())
        if late:
            return frozenset(late)
        # A reducer owes results only for pieces to which we have contributed.
        ours = {peer: len(self._plan.shards[peer]) - self._contributed[peer] for peer in self._results_due}
        return frozenset(p for p, due in self._results_due.items() if due > (ours[p] if self._plan.contributes else 0))

    def _report(self, taken_in: int = 0) -> None:
        self._taken_in += taken_in
        percent = 100 * self._taken_in // self._all
        percent -= percent % PROGRESS_PERCENT
        if percent != self._reported:
            self._reported = percent
            reducing = self._plan.members[self._plan.own]
            self._watch(self._plan.roster.round, reducing.end_chunk - reducing.first_chunk, percent)


KEPT: Final = 0.5  # Decay of older measurements, applied whenever a sender pauses


@dataclass(slots=True)
class _Sender:
    size_bytes: float = 0.0
    seconds: float = 0.0
    in_flight: int = 0
    since: float = 0.0
    received: int = 0


class ReceiveRates:
    """Receive rate per sender: bytes over the time in which at least one of the sender's pieces was arriving."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._senders = Latest[PeerId, _Sender](MAX_MEMBERS)

    def began(self, sender: PeerId) -> None:
        known = self._senders[sender] = self._senders.get(sender) or _Sender()
        if not known.in_flight:
            known.since, known.received = self._clock.monotonic(), 0
        known.in_flight += 1

    def ended(self, sender: PeerId, size_bytes: int) -> None:
        known = self._senders.get(sender)
        if known is None or not known.in_flight:
            return
        known.received += size_bytes
        known.in_flight -= 1
        seconds = self._clock.monotonic() - known.since
        if not known.in_flight and known.received and seconds > 0:
            known.size_bytes = KEPT * known.size_bytes + known.received
            known.seconds = KEPT * known.seconds + seconds

    def bytes_per_s(self) -> Mapping[PeerId, float]:
        return {peer: known.size_bytes / known.seconds for peer, known in self._senders.items() if known.seconds}


EARLY_PIECES: Final = 32  # Pieces buffered before the roster arrives, from all members together (at most 128 MiB)
FEWEST_EARLY: Final = 2  # Pieces that each member may send before the roster, however many members there are

Deliver = Callable[[PeerId, RoundPiece, Piece, memoryview], None]  # Returns it by `Arrivals.give_back`


def piece_spec(codec: Codec, elements: int) -> TensorSpec:
    return TensorSpec((elements,), DType.FLOAT32, codec)


def early_pieces(others: int) -> int:
    """Returns how many pieces a member may send to another member without waiting for a result in return."""
    return max(FEWEST_EARLY, EARLY_PIECES // max(1, others))


class Arrivals:
    """Receiver of the pieces of one attempt at a round. Buffers pieces that arrive before the roster."""

    def __init__(self, round_id: RoundId, codecs: Sequence[Codec], rejected: Callable[[PeerId, str], None]) -> None:
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
        """Frees the buffers after the exchange. Pieces that arrive later are dropped."""
        self._free.clear()
        self._deliver = lambda sender, message, piece, buffer: None

    def admit(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec) -> memoryview | Refusal:
        key = (sender, message)
        if message.round != self.round or key in self._come:
            return Refusal(False, "this piece belongs to another round or has already arrived")
        why_not = self._objection(sender, message, tensor)
        if why_not is not None:
            return Refusal(False, why_not)
        self._come[key] = tensor.codec
        free = self._free.get(tensor.byte_length)  # allocating large buffers is slow, so reuse them
        return free.pop() if free else np.empty(tensor.byte_length, np.uint8).data  # unlike bytearray, not zeroed

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
        if self._plan is None:  # without the roster only size and codec can be checked
            if len(self._come) >= EARLY_PIECES:
                return "too many pieces before the roster"
            elements = tensor.shape[0]
            specs = (piece_spec(codec, elements) for codec in self._codecs)
            return None if elements <= LARGEST_PIECE and tensor in specs else "no piece has this size and encoding"
        piece = self._plan.piece_of(sender, message)
        if piece is None:
            return "this peer has no such piece to send"
        if tensor == self._plan.spec(message, piece):
            return None
        why = f"a piece of {piece.elements} elements came as {tensor}"
        self._rejected(sender, why)
        return why

    def _hand_over(self, sender: PeerId, message: RoundPiece, buffer: memoryview) -> None:
        assert self._plan is not None
        assert self._deliver is not None
        piece, codec = self._plan.piece_of(sender, message), self._come.get((sender, message))
        if piece is not None:
            due = self._plan.spec(message, piece)
            if codec is due.codec and buffer.nbytes == due.byte_length:
                self._deliver(sender, message, piece, buffer)
                return
            why = f"a piece of {piece.elements} elements has {buffer.nbytes} bytes, not as {due.codec.name}"
            self._rejected(sender, why)
        self.give_back(buffer)
