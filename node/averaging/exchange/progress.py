"""The progress of an exchange, and who keeps it waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from node.averaging.exchange.partition import Piece, Plan
from swarm.vocabulary.averaging_messages import RoundId
from swarm.vocabulary.types import PeerId

TOLD_PERCENT: Final = 10


@dataclass(frozen=True, slots=True)
class HowFar:
    """The progress of one member in one exchange."""

    round: RoundId
    reduced_chunks: int
    """Of its shard."""
    percent: int
    """Of the pieces that it takes in: contributions to its shard, and results, its own among them."""


Watch = Callable[[HowFar], None]
"""Told when an exchange begins, and whenever another tenth of it is done."""


class ExchangeProgress:
    """The counts of an exchange's pieces; knows nothing of their contents."""

    def __init__(self, plan: Plan, watch: Watch = lambda how_far: None) -> None:
        self._plan = plan
        self._watch = watch
        contributors = frozenset(plan.contributors) - {plan.own}
        self._awaited = {piece: set(contributors) for piece in plan.shards[plan.own] if contributors}
        """Whose contributions to each piece of our shard are not in yet, in the order in which they are sent."""
        self._results_due = {peer: len(plan.shards[peer]) for peer in plan.others}
        self._contributed = dict.fromkeys(plan.others, 0)
        self._unapplied = set(plan.pieces)
        self._all = len(self._unapplied) + len(self._awaited) * len(contributors)
        self._taken_in = 0
        self._told: int | None = None
        self._tell()

    def contributed(self, reducer: PeerId) -> None:
        """Notes that we have sent a piece to its reducer."""
        self._contributed[reducer] += 1

    def added(self, sender: PeerId, piece: Piece) -> None:
        """Notes that a contribution to a piece of our shard is in its sum."""
        self._awaited[piece].discard(sender)
        if not self._awaited[piece]:
            del self._awaited[piece]
        self._take_in()

    def applied(self, piece: Piece) -> bool:
        """Notes that a result has been applied; whether it was the last."""
        self._unapplied.discard(piece)
        if piece.reducer != self._plan.own:
            self._results_due[piece.reducer] -= 1
        self._take_in()
        return not self._unapplied

    def owing(self) -> frozenset[PeerId]:
        """The members that could send us something now and have not.

        As long as contributions to our shard are due, nobody is blamed for results: whoever keeps us waiting may keep
        the other reducers waiting, too. And only those are blamed who have not contributed to the first piece that
        lacks something: the others may be held up by that very piece, because a member sends no more than a window
        ahead of the results.
        """
        late = next(iter(self._awaited.values()), ())
        return frozenset(late) or frozenset(peer for peer in self._results_due if self._owes_result(peer))

    def _owes_result(self, reducer: PeerId) -> bool:
        due = self._results_due[reducer]
        if not self._plan.contributes:
            return due > 0
        return due > len(self._plan.shards[reducer]) - self._contributed[reducer]

    def _take_in(self) -> None:
        self._taken_in += 1
        self._tell()

    def _tell(self) -> None:
        percent = 100 * self._taken_in // self._all
        percent -= percent % TOLD_PERCENT
        if percent != self._told:
            self._told = percent
            reducing = self._plan.members[self._plan.own]
            self._watch(HowFar(self._plan.roster.round, reducing.end_chunk - reducing.first_chunk, percent))
