"""Figures that compare the results of an exchange with our own pseudo-gradient. Runs on the averaging thread; what
follows from them is decided in `swarm.averaging.audits`.

Only some patches of each result are looked at, and nobody knows which before: the figures are those of whole pieces,
nearly, for an eighth of the memory traffic.
"""

from __future__ import annotations

from random import Random
from typing import Final

import numpy as np

from node.averaging.anchor.shared_vector import Vector
from node.averaging.exchange.partition import Piece, Plan
from node.averaging.exchange.pseudo_gradient import Source
from swarm.averaging.audits import Beside, oddities
from swarm.vocabulary.types import PeerId

PATCH: Final = 4096
"""Elements in a row."""
ONE_IN: Final = 8
"""Of the patches of a piece, this share is looked at."""
AT_LEAST: Final = 8
"""Patches of a piece, or all that it has."""


class Comparison:
    """The comparison of one exchange's results.

    Args:
        random: where it looks must not be known before.
    """

    def __init__(self, plan: Plan, source: Source, random: Random) -> None:
        self._plan = plan
        self._source = source
        self._random = random
        self._pieces: list[Beside] = []
        fragment = plan.layout.range_of(plan.first_chunk, plan.end_chunk)
        self._elements = fragment.stop - fragment.start

    def add(self, piece: Piece, result: Vector) -> None:
        """Takes the figures of a result [piece.elements]."""
        left, right = self._source.anchor.parameters[piece.part], self._source.snapshot[piece.part]
        width = min(PATCH, piece.elements)
        count = piece.elements // width
        chosen = self._random.sample(range(count), min(count, max(AT_LEAST, count // ONE_IN)))
        start = self._random.randint(0, piece.elements - count * width)

        def patches(values: Vector) -> Vector:
            """One after the other."""
            rows = values[start : start + count * width].reshape(count, width)
            return rows[chosen].reshape(-1)

        there = patches(result)
        ours = patches(left)
        np.subtract(ours, patches(right), out=ours)
        own, squares, product = (float(np.dot(a, b)) for a, b in ((ours, ours), (there, there), (ours, there)))
        self._pieces.append(Beside(piece.reducer, len(there) / self._elements, own, squares, product))

    def oddities(self) -> dict[PeerId, str]:
        """The reducers whose results cannot be the mean, with the reasons, when all results have been added."""
        own = self._plan.members[self._plan.own]
        return oddities(self._plan.own, self._pieces, own.coefficient, own.norm, self._plan.roster.largest_norm)
