"""Packing of a block's documents into microbatches of equal cost.

What a microbatch costs is its tokens and the squares of its documents' (`quadratic_share`). Where one costs more than
the others the whole pipeline waits for it, so a block of many microbatches is packed at once (`filling` says how).

Documents that fit are never cut. Those that have to be cut anyway are cut into pieces as long as may be, and further
where that makes microbatches of equal cost: within a block, and with the block before. Blocks differ in how much of
them is long documents, and a window of microbatches that reaches from one into the next would see the step: where
cutting does not make them alike, a block begins with what the one before ended with, and goes on by and by (`turns`
says in which order).

The paper's outlier queues even out the microbatches of one step; between steps the cost varies more than without. Here
stages are queues and not barriers, so every microbatch has to be like the next.

Source: WLB-LLM (arXiv:2503.17924) section 4, packing by workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.workload.filling import Filling, Piece, Room
from swarm.workload.turns import STRATA, in_turns, worst_run

EVEN_ENOUGH: Final = 1.012
"""The largest cost over the mean, of this block and the one before, at which nothing else is tried."""
ABOVE: Final = 1.006
"""Times the level: what costs more is made cheaper."""
LOWERED: Final = 3
"""How often the mean is looked at anew, which becomes lower with the dearest."""
MOST_LOWERED: Final = 0.9
"""Times the mean: a block is made no cheaper than this, for pieces become short."""
BACK: Final = 0.1
"""How much of the way the level goes back with each block to what microbatches of this one would cost."""
EMPTY: Final = 0.018
"""The part of the room that may be left empty before it counts against a packing..."""
EMPTY_COUNTS: Final = 3.0
"""... so many times as much as a difference of costs."""
FEW_ENDS: Final = 0.02
"""Of the block's tokens: fewer of what remains of documents that are cut even nothing out."""
UNEVEN: Final = 1.1
"""The largest cost over the mean from which on more microbatches are tried, so that those with long documents need not
be filled up with short ones: what they leave empty costs nothing."""
MORE: Final = (1.06, 1.12, 1.18, 1.25)
"""Times as many as are needed."""
FLAT: Final = 0.01
"""Of the mean: a step between two blocks that is no larger stays one."""
STEEPEST: Final = 0.2
"""Of the mean: a block begins no further from its mean than this."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Microbatches of one block."""

    microbatches: tuple[tuple[Piece, ...], ...]
    """The pieces of each, in rising order; the microbatches in the order in which they are to be given out."""
    costs: tuple[float, ...]
    level: float
    """What microbatches of the next block should cost at its beginning."""


def longest_piece(sequence: int) -> int:
    """The tokens of a piece of a document that has to be cut, at most. A little less than may be: as many as fit into a
    microbatch would leave no room beside them, and be dearer than anything else."""
    return sequence - sequence // 64


def pack(
    lengths: Sequence[int],
    cut: Collection[int],
    room: Room,
    level: float = 0.0,
    chance: Callable[[int], Sequence[int]] = range,
) -> Packing:
    """Packs documents into as few microbatches as they fit into, of costs as equal as can be.

    Args:
        lengths: tokens of each document, at least 1.
        cut: the indices of those that are cut: all that are longer than the sequence, and the rests of such.
        level: what microbatches of the block before cost at its end; 0 where that is not known.
        chance: gives a permutation of so many, which decides about the order of microbatches that cost alike.

    Returns:
        The same on every machine.
    """
    if not lengths:
        return Packing((), (), level)
    block = _Block(lengths, frozenset(cut), room, level)
    found, natural = block.fewest_filled()
    if found.unevenness > UNEVEN:
        found = block.more_filled() or found
    packing = _given_out(found, level, natural, chance)
    sloping = block.sloping(found) if level else None
    if sloping is not None:
        other = _given_out(sloping, level, natural, chance)
        packing = min((packing, other), key=lambda one: worst_run(one.costs, level))
    return packing


def _given_out(found: Filling, level: float, natural: float, chance: Callable[[int], Sequence[int]]) -> Packing:
    bins = [one for one in found.bins if one.pieces]
    costs = [one.cost for one in bins]
    turns, ends_at = in_turns(costs, chance(len(bins)), level)
    packed = [tuple(sorted(found.pieces[index] for index in bins[turn].pieces)) for turn in turns]
    if not ends_at:
        ends_at = min(found.mean, level + BACK * (natural - level)) if level else found.mean
    return Packing(tuple(packed), tuple(costs[turn] for turn in turns), ends_at)


class _Block:
    """A block's documents, those that are cut in the longest pieces that may be."""

    def __init__(self, lengths: Sequence[int], cut: frozenset[int], room: Room, level: float) -> None:
        self._cut, self._room, self._level = cut, room, level
        self._tokens = sum(lengths)
        self._fewest = -(-self._tokens // room.tokens)
        longest = longest_piece(room.sequence)
        self._pieces = [
            Piece(index, start, min(start + step, length))
            for index, length in enumerate(lengths)
            for step in (longest if index in cut else length,)
            for start in range(0, length, step)
        ]
        self._ends = frozenset(
            index
            for index, piece in enumerate(self._pieces)
            if piece.document in cut and piece.stop - piece.start < longest
        )

    def fewest_filled(self) -> tuple[Filling, float]:
        """The more even of two fillings, and what one microbatch cost before any was made cheaper."""
        tried = list[tuple[float, Filling, float]]()
        ends = sum(self._pieces[index].stop - self._pieces[index].start for index in self._ends)
        for poured in (frozenset[int](), self._ends)[: 1 + (ends >= FEW_ENDS * self._tokens)]:
            found = self._filled(poured, self._fewest)
            natural = found.mean
            found.lower(self._bound(found))
            tried.append((self._badness(found), found, natural))
            if tried[-1][0] <= EVEN_ENOUGH:
                break
        _, found, natural = min(tried, key=lambda one: one[0])
        return found, natural

    def more_filled(self) -> Filling | None:
        """As few more microbatches as make costs even; None if nothing does."""
        for share in MORE:
            found = self._filled(frozenset(), math.ceil(share * self._fewest))
            if found.unevenness <= (1 + UNEVEN) / 2:
                return found
        return None

    def sloping(self, flat: Filling) -> Filling | None:
        """Microbatches of which the first cost what those before the block did, and the later ones by and by what the
        block's text makes them cost; None where that step is small, or its text does not give such a slope."""
        step = self._level - flat.mean
        step = math.copysign(min(abs(step), STEEPEST * flat.mean), step)
        if abs(step) <= FLAT * flat.mean:
            return None
        found = Filling(self._pieces, self._cut, flat.poured, self._room, slope(step, len(flat.bins)))
        if self._cut:
            found.lower(self._bound(found))
        return found if len(found.bins) == len(flat.bins) else None

    def _filled(self, poured: frozenset[int], count: int) -> Filling:
        return Filling(self._pieces, self._cut, poured, self._room, [0.0] * count)

    def _bound(self, found: Filling) -> float:
        """What a microbatch may cost: hardly more than the mean, when all that cost more are made cheaper, and than the
        block before."""
        costs = [one.beside for one in found.bins]
        natural = mean = found.mean
        bound = math.inf
        for _ in range(LOWERED):
            bound = ABOVE * max(min(mean, self._level or mean), MOST_LOWERED * natural)
            mean = math.fsum(min(cost, bound) for cost in costs) / len(costs)
        return bound

    def _badness(self, found: Filling) -> float:
        """The largest cost over the mean, both of this block and the one before; more where room is left empty."""
        level, mean, count = self._level or found.mean, found.mean, len(found.bins)
        empty = 1 - self._tokens / (count * self._room.tokens)
        uneven = max(level, *(one.cost for one in found.bins)) / min(level, mean)
        return uneven + (EMPTY_COUNTS * max(0.0, empty - EMPTY) if count > self._fewest else 0.0)


def slope(step: float, count: int) -> list[float]:
    """How much more than their mean so many microbatches are to cost: the first ones `step`, those of the second half
    all the same, in steps of STRATA microbatches between."""
    down = max(1, count // 2 // STRATA)
    aims = [step * max(-1 / 3, 1 - 4 / 3 * (place // STRATA + 0.5) / down) for place in range(count)]
    mean = math.fsum(aims) / count
    return [aim - mean for aim in aims]
