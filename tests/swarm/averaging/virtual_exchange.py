"""The exchange of one attempt at one replica, with hashes for tensors: whoever has the same has the same hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarm.vocabulary.averaging_messages import Entry, Roster
from swarm.vocabulary.types import AnchorVersion, PeerId

Send = Callable[[PeerId, "Piece"], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A contribution to a chunk, or its reduced result."""

    roster: Roster
    chunk: int
    reduced: bool
    value: bytes


def hash_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


class VirtualSeal:
    """`swarm.averaging.round_events.Seal` for names without keys: whoever has not changed anything in an entry has it
    signed by who is named in it."""

    def sign(self, entry: Entry) -> Entry:
        return replace(entry, signature=hash_of("signed", replace(entry, signature=b"")) * 2)

    def verify(self, entry: Entry) -> bool:
        return entry == self.sign(entry)


@dataclass(slots=True)
class VirtualExchange:
    """Contributions go to the reducer of each chunk; when it has all, the result goes to everybody."""

    own: PeerId
    roster: Roster
    gradient: bytes
    fragments: int
    send: Send
    contributions: dict[int, dict[PeerId, bytes]] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def chunks(self) -> dict[int, PeerId]:
        """Every chunk and its reducer."""
        return {
            chunk: member.peer
            for member in self.roster.members
            for chunk in range(member.first_chunk, member.end_chunk)
        }

    @property
    def contributors(self) -> frozenset[PeerId]:
        return frozenset(member.peer for member in self.roster.members if member.coefficient > 0)

    def start(self) -> None:
        if self.own in self.contributors:
            for chunk, reducer in self.chunks.items():
                piece = Piece(self.roster, chunk, False, hash_of(self.gradient, chunk))
                if reducer == self.own:
                    self.take(self.own, piece)
                else:
                    self.send(reducer, piece)

    def take(self, sender: PeerId, piece: Piece) -> bool:
        """Whether it was of use."""
        if piece.reduced:
            if self.chunks.get(piece.chunk) != sender or piece.chunk in self.results:
                return False
            self.results[piece.chunk] = piece.value
            return True
        if sender not in self.contributors or self.chunks.get(piece.chunk) != self.own:
            return False
        self.contributions.setdefault(piece.chunk, {})[sender] = piece.value
        if self.contributions[piece.chunk].keys() == self.contributors and piece.chunk not in self.results:
            self._reduce(piece.chunk)
        return True

    def _reduce(self, chunk: int) -> None:
        value = hash_of(sorted(self.contributions[chunk].items()))
        self.results[chunk] = value
        for member in self.roster.members:
            if member.peer != self.own:
                self.send(member.peer, Piece(self.roster, chunk, True, value))

    def owing(self) -> frozenset[PeerId]:
        missing = {reducer for chunk, reducer in self.chunks.items() if chunk not in self.results}
        late = {
            peer
            for chunk, reducer in self.chunks.items()
            if reducer == self.own
            for peer in self.contributors - self.contributions.get(chunk, {}).keys()
        }
        return frozenset((missing | late) - {self.own})

    def result(self) -> AnchorVersion | None:
        if len(self.results) < len(self.chunks):
            return None
        roster = self.roster
        digest = hash_of(roster.base.digest, roster.round.number, sorted(self.results.items()))
        after = (roster.base.fragment + 1) % self.fragments
        return AnchorVersion(roster.round.number, roster.steps, roster.tokens, after, digest)
