"""The order in which a block's microbatches are given out, so that each costs about as much as its neighbours.

Where blocks differ in cost, a window of microbatches that reaches from one into the next sees a step. So they begin
with what costs as much as the end of the block before, and go from there to the other end of what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Final

ENOUGH: Final = 1.012
"""The largest cost over the mean of a few in a row at which no other order is tried."""
ALIKE: Final = 0.004
"""Of the mean: on a slope, chance decides among those whose costs are no further apart."""
LOW: Final = 0.03
"""Of what all but an eighth of microbatches cost at least: what costs so much less stands apart on a slope."""
STRATA: Final = 8
_FAR_APART: Final = (0, 4, 2, 6, 1, 5, 3, 7)
"""Neighbours in the order are of strata that are not."""


def worst_run(costs: Sequence[float], level: float = 0.0) -> float:
    """The largest cost over the mean of any STRATA microbatches in a row, those of the block before among them."""
    if not costs:
        return 1.0
    before = [level] * (STRATA - 1) if level else []
    row = [*before, *costs]
    most = min(STRATA, len(row))
    return max(max(run) * most / math.fsum(run) for at in range(len(row) - most + 1) for run in (row[at : at + most],))


def in_turns(costs: Sequence[float], ranks: Sequence[int], level: float = 0.0) -> tuple[list[int], float]:
    """The order in which microbatches are given out, so that each costs as much as its neighbours, or as any few in a
    row do: the best of these three.

    * Of any STRATA in a row one is of the cheapest, one of the next, and so on.
    * Rising or falling costs, where the block before cost less or more; those that cost much less than the mean apart.

    Args:
        ranks: a permutation by chance, which decides among those that cost alike.
        level: what microbatches of the block before cost at its end; 0 where that is not known.

    Returns:
        The order, and what the last of rising or falling costs are; 0 for the first.
    """
    by_cost = sorted(range(len(costs)), key=lambda place: (costs[place], place))
    bounds = [round(stratum * len(costs) / STRATA) for stratum in range(STRATA + 1)]
    strata = [sorted(by_cost[low:high], key=lambda place: ranks[place]) for low, high in pairwise(bounds)]
    turns = [strata[stratum] for stratum in _FAR_APART]
    mixed = [place for turn in zip_longest(*turns) for place in turn if place is not None]
    if not level or worst_run([costs[place] for place in mixed], level) <= ENOUGH:
        return mixed, 0.0
    alike, low = ALIKE * math.fsum(costs) / len(costs), (1 - LOW) * costs[by_cost[bounds[1]]]
    main = sorted(
        (place for place in by_cost if costs[place] >= low),
        key=lambda place: (round(costs[place] / alike), ranks[place]),
    )
    few = sorted((place for place in by_cost if costs[place] < low), key=lambda place: ranks[place])
    rising, falling = _spread(main, few), _spread(main[::-1], few)
    best = min((mixed, rising, falling), key=lambda order: worst_run([costs[place] for place in order], level))
    last = [costs[place] for place in best if costs[place] >= low][-STRATA:]
    return best, 0.0 if best is mixed else math.fsum(last) / len(last)


def _spread(main: Sequence[int], few: Sequence[int]) -> list[int]:
    """The few at equal distances among the main ones."""
    bounds = [round(part * len(main) / (len(few) + 1)) for part in range(len(few) + 2)]
    parts = [main[low:high] for low, high in pairwise(bounds)]
    return [place for part, one in zip_longest(parts, few) for place in (*part, *([] if one is None else [one]))]
