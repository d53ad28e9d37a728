"""Results of an exchange beside our own pseudo-gradient, in figures. Runs on the averaging thread; what follows from them is decided in `swarm.rounds.audits`."""

from __future__ import annotations

import numpy as np

from node.averaging.anchor import Vector
from node.averaging.pieces import Piece, Plan
from node.averaging.source import Source
from node.averaging.vectors import STRETCH, stretches
from swarm.rounds.audits import Beside, oddities
from swarm.vocabulary import PeerId


class Comparison:
    """Of one exchange."""

    def __init__(self, plan: Plan, source: Source) -> None:
        self.pieces: dict[Piece, Beside] = {}
        self._plan = plan
        self._source = source
        fragment = plan.layout.range_of(plan.first_chunk, plan.end_chunk)
        self._elements = fragment.stop - fragment.start
        self._room: Vector = np.empty(STRETCH, np.float32)

    def add(self, piece: Piece, result: Vector) -> Beside:
        """The figures of a result [piece.elements]. Its squares are not finite exactly when an element is not, or is beyond 1e19."""
        left, right = self._source.anchor.parameters[piece.part], self._source.snapshot[piece.part]
        own = squares = product = 0.0
        with np.errstate(all="ignore"):
            for part in stretches(piece.elements):
                there = result[part]
                ours = np.subtract(left[part], right[part], out=self._room[: len(there)])
                own += float(np.dot(ours, ours))
                squares += float(np.dot(there, there))
                product += float(np.dot(ours, there))
        beside = Beside(piece.reducer, piece.elements / self._elements, own, squares, product)
        self.pieces[piece] = beside
        return beside

    def oddities(self) -> dict[PeerId, str]:
        """Which reducers' results cannot be the mean, and why, when all results have been added."""
        own = self._plan.members[self._plan.own]
        return oddities(self._plan.own, tuple(self.pieces.values()), own.coefficient, own.norm, self._plan.largest_norm)
