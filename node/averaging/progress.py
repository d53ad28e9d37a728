"""How far an exchange has come, and who keeps it waiting."""

from __future__ import annotations

from node.averaging.pieces import Piece, Plan
from swarm.vocabulary import PeerId


class ExchangeProgress:
    """Counts pieces; knows nothing of their contents."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        contributors = frozenset(plan.contributors) - {plan.own}
        own = plan.shards[plan.own]
        self._contributions_due = {peer: len(own) for peer in contributors}
        self._results_due = {peer: len(plan.shards[peer]) for peer in plan.others}
        self._contributed = dict.fromkeys(plan.others, 0)
        self._unapplied = set(plan.pieces)

    def contributed(self, reducer: PeerId) -> None:
        """We have sent a piece to its reducer."""
        self._contributed[reducer] += 1

    def added(self, sender: PeerId) -> None:
        """A contribution to our shard is in its sum."""
        self._contributions_due[sender] -= 1

    def applied(self, piece: Piece) -> bool:
        """A result has been applied. Whether it was the last."""
        self._unapplied.discard(piece)
        if piece.reducer != self._plan.own:
            self._results_due[piece.reducer] -= 1
        return not self._unapplied

    def owing(self) -> frozenset[PeerId]:
        """Who could send us something now and has not.

        As long as contributions to our shard are due, nobody is blamed for results: whoever keeps us waiting may keep the other reducers
        waiting, too.
        """
        late = frozenset(peer for peer, due in self._contributions_due.items() if due)
        return late or frozenset(peer for peer in self._results_due if self._owes_result(peer))

    def _owes_result(self, reducer: PeerId) -> bool:
        due = self._results_due[reducer]
        if not self._plan.contributes:
            return due > 0
        return due > len(self._plan.shards[reducer]) - self._contributed[reducer]
