"""The partition of one exchange into pieces, which all members compute from layout and roster, and its progress."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from node.averaging.anchor.layout import Layout
from swarm.averaging.roster import contributors
from swarm.compression.round_codecs import RoundCodecs
from swarm.vocabulary.averaging_messages import Contribution, Member, Reduced, Roster, RoundId, RoundPiece
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import PeerId, short

LARGEST_PIECE: Final = 2**20
"""Elements (4 MiB of float32)."""
SMALLEST_PIECE: Final = 2**19
"""Elements (2 MiB of float32). Smaller ones cost more by number than they gain by overlapping."""
PIECES_OF_A_SHARD: Final = 4
"""Least pieces of a shard, unless they become too small: sending, reducing and applying overlap."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of whole chunks of one shard: the unit that is sent, reduced and applied."""

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
    """A roster as one of its members carries it out. Raises ProtocolViolation for impossible shards or weights."""

    def __init__(self, own: PeerId, layout: Layout, roster: Roster) -> None:
        self.own = own
        self.layout = layout
        self.roster = roster
        self.first_chunk, self.end_chunk = layout.fragments[roster.base.fragment % len(layout.fragments)]
        self.members = {member.peer: member for member in roster.members}
        self.contributors = contributors(roster)
        self.codecs = RoundCodecs(roster.codec)
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
        """The piece of a message, if the sender has reason to send it to us."""
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


def _check(own: PeerId, roster: Roster, first_chunk: int, end_chunk: int) -> None:
    members = roster.members
    if own not in {member.peer for member in members} or len({member.peer for member in members}) != len(members):
        raise ProtocolViolation(f"the roster of {short(roster.round.convener)} lists peers twice, or leaves us out")
    shards = sorted((m.first_chunk, m.end_chunk) for m in members if m.first_chunk != m.end_chunk)
    borders = [first_chunk, *(end for _, end in shards)]
    starts = [*(first for first, _ in shards), end_chunk]
    if borders != starts or any(first > end for first, end in shards):
        raise ProtocolViolation(f"the shards of round {roster.round.number} do not cut the fragment up")
    sound = all(0 <= m.coefficient <= 1 and 0 <= m.norm < math.inf for m in members)
    if not sound or not any(m.coefficient > 0 for m in members):
        raise ProtocolViolation(f"the roster of round {roster.round.number} has impossible weights")


def _cut(layout: Layout, member: Member) -> tuple[Piece, ...]:
    first, end = member.first_chunk, member.end_chunk
    wished = (end - first) * layout.chunk_elements // PIECES_OF_A_SHARD
    elements = max(SMALLEST_PIECE, min(LARGEST_PIECE, wished))
    chunks = max(1, elements // layout.chunk_elements)
    borders = [*range(first, end, chunks), end]
    parts = [(a, b, layout.range_of(a, b)) for a, b in itertools.pairwise(borders) if a < b]
    return tuple(Piece(member.peer, a, b, part.start, part.stop) for a, b, part in parts)


TOLD_PERCENT: Final = 10


Watch = Callable[[RoundId, int, int], None]
"""Gets the attempt, the chunks of our shard, and the percentage of pieces taken in, at each tenth of an exchange."""


class ExchangeProgress:
    """The counts of an exchange's pieces."""

    def __init__(self, plan: Plan, watch: Watch = lambda attempt, chunks, percent: None) -> None:
        self._plan = plan
        self._watch = watch
        contributors = frozenset(plan.contributors) - {plan.own}
        self._awaited = {piece: set(contributors) for piece in plan.shards[plan.own] if contributors}
        """Missing contributors of each piece of our shard, in order."""
        self._results_due = {peer: len(plan.shards[peer]) for peer in plan.others}
        self._contributed = dict.fromkeys(plan.others, 0)
        self._unapplied = set(plan.pieces)
        self._all = len(self._unapplied) + len(self._awaited) * len(contributors)
        self._taken_in = 0
        self._told: int | None = None
        self._tell()

    def contributed(self, reducer: PeerId) -> None:
        self._contributed[reducer] += 1

    def added(self, sender: PeerId, piece: Piece) -> None:
        self._awaited[piece].discard(sender)
        if not self._awaited[piece]:
            del self._awaited[piece]
        self._tell(taken_in=1)

    def applied(self, piece: Piece) -> bool:
        self._unapplied.discard(piece)
        if piece.reducer != self._plan.own:
            self._results_due[piece.reducer] -= 1
        self._tell(taken_in=1)
        return not self._unapplied

    def owing(self) -> frozenset[PeerId]:
        """The members that could send us something now and have not."""
        # Results are nobody's fault while contributions to our shard are due: the same member may delay other reducers.
        # Only the first incomplete piece counts: a member sends no more than a window ahead of the results.
        late = next(iter(self._awaited.values()), ())
        return frozenset(late) or frozenset(peer for peer in self._results_due if self._owes_result(peer))

    def _owes_result(self, reducer: PeerId) -> bool:
        due = self._results_due[reducer]
        if not self._plan.contributes:
            return due > 0
        return due > len(self._plan.shards[reducer]) - self._contributed[reducer]

    def _tell(self, taken_in: int = 0) -> None:
        self._taken_in += taken_in
        percent = 100 * self._taken_in // self._all
        percent -= percent % TOLD_PERCENT
        if percent != self._told:
            self._told = percent
            reducing = self._plan.members[self._plan.own]
            self._watch(self._plan.roster.round, reducing.end_chunk - reducing.first_chunk, percent)
