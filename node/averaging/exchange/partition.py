"""The partition of one exchange, as one of its members sees it: which pieces there are, who reduces them, who sends
what to whom.

Everything follows from the module's layout and the roster, so all members see the same pieces, and whatever else comes
is refused before it costs any memory.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

from node.averaging.anchor.layout import Layout
from swarm.averaging.roster import contributors
from swarm.compression.round_codecs import RoundCodecs
from swarm.vocabulary.averaging_messages import Contribution, Member, Reduced, Roster, RoundPiece
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import PeerId, short

LARGEST_PIECE: Final = 2**20
"""Elements; 4 MiB of float32. A chunk is never larger (`layout.LARGEST_CHUNK`)."""
SMALLEST_PIECE: Final = 2**19
"""Elements; 2 MiB of float32. Smaller ones cost more by their number than they gain by overlapping
(benchmarks/averaging.py)."""
PIECES_OF_A_SHARD: Final = 4
"""So many at least, where they are not too small, so that sending, reducing and applying overlap."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of whole chunks of one shard: the unit that is sent, reduced and applied."""

    reducer: PeerId
    first_chunk: int
    end_chunk: int
    start: int
    stop: int
    """Of its elements in the module's vector."""

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def elements(self) -> int:
        return self.stop - self.start


class Plan:
    """A roster as one of its members carries it out.

    Raises:
        ProtocolViolation: the shards do not cut the fragment up, a number is not finite or negative, or we are not in
            it.
    """

    def __init__(self, own: PeerId, layout: Layout, roster: Roster) -> None:
        self.own = own
        self.layout = layout
        self.roster = roster
        self.first_chunk, self.end_chunk = layout.fragments[roster.base.fragment % len(layout.fragments)]
        self.members = {member.peer: member for member in roster.members}
        self.contributors = contributors(roster)
        self.codecs = RoundCodecs(roster.codec)
        _check(own, roster, self.first_chunk, self.end_chunk)
        shards = {member.peer: _cut(layout, member) for member in roster.members}
        self.shards = shards
        self.others = tuple(peer for peer in shards if peer != own)
        self._by_chunks = {(p.first_chunk, p.end_chunk): p for pieces in shards.values() for p in pieces}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._by_chunks.values())

    @property
    def contributes(self) -> bool:
        return self.members[self.own].coefficient > 0

    def piece_at(self, first_chunk: int, end_chunk: int) -> Piece | None:
        """The piece that consists of these chunks."""
        return self._by_chunks.get((first_chunk, end_chunk))

    def piece_of(self, sender: PeerId, message: RoundPiece) -> Piece | None:
        """The piece that the message is about, if the sender has reason to send it to us."""
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
    if not all(_is_sound(member) for member in members) or not any(member.coefficient > 0 for member in members):
        raise ProtocolViolation(f"the roster of round {roster.round.number} has impossible weights")


def _is_sound(member: Member) -> bool:
    return all(math.isfinite(x) and x >= 0 for x in (member.coefficient, member.norm)) and member.coefficient <= 1


def _cut(layout: Layout, member: Member) -> tuple[Piece, ...]:
    first, end = member.first_chunk, member.end_chunk
    wished = (end - first) * layout.chunk_elements // PIECES_OF_A_SHARD
    elements = max(SMALLEST_PIECE, min(LARGEST_PIECE, wished))
    chunks = max(1, elements // layout.chunk_elements)
    borders = [*range(first, end, chunks), end]
    parts = [(a, b, layout.range_of(a, b)) for a, b in itertools.pairwise(borders) if a < b]
    return tuple(Piece(member.peer, a, b, part.start, part.stop) for a, b, part in parts)
