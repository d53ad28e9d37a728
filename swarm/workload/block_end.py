"""Where a block ends: with the document after which its microbatches are full.

It stands alone because it is about which documents are packed, and `packing` about how. A block of so many tokens may
need a microbatch more than its documents fill: four that fill one leave it half empty where two are left over. Those go
into the next block then, which begins earlier, so that there is nothing to save.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from swarm.workload.filling import Room
from swarm.workload.packing import EMPTY_COUNTS, Packing, pack
from swarm.workload.turns import worst_run

EMPTY: Final = 0.016
"""The part of the room that may be left empty, and..."""
UNEVEN: Final = 1.025
"""... the largest cost over the mean of a few in a row, at which no other end is tried."""
FULLEST: Final = 0.75
"""The part of the microbatches that shows how full one can be."""
FURTHER: Final = 0.3
"""Of a microbatch's tokens: how much earlier the next end is that is tried."""
TRIED: Final = 1600
"""Documents, of all other ends together: each is packed once more."""
MOST_TRIED: Final = 3


def pack_and_end(
    lengths: Sequence[int],
    cut: Sequence[int],
    room: Room,
    level: float = 0.0,
    chance: Callable[[int], Sequence[int]] = range,
) -> tuple[Packing, int]:
    """Packs all documents but for the last few, less than fill a microbatch, if so there is less empty room or less
    difference of costs.

    Args: as of `pack`.

    Returns:
        Of how many documents, too: the first ones.
    """
    best, taken = pack(lengths, cut, room, level, chance), len(lengths)
    count = len(best.microbatches)
    if count < 2 or (wanted := _badness(best, room, level)) <= UNEVEN:
        return best, taken
    full = sorted(_tokens(best), reverse=True)[: max(1, int(FULLEST * count))]
    ends = list(accumulate(lengths))
    tokens = ends[-1]
    step, least = math.ceil(FURTHER * tokens / count), tokens - tokens // count
    most = max((count - 1) * sum(full) // len(full), tokens - step)
    kept = len(lengths) - 1
    for _ in range(min(MOST_TRIED, TRIED // len(lengths))):
        kept = min(kept, bisect_right(ends, most))
        if not kept or ends[kept - 1] < least:
            break
        found = pack(lengths[:kept], [index for index in cut if index < kept], room, level, chance)
        badness = _badness(found, room, level)
        if badness < wanted:
            best, taken, wanted = found, kept, badness
        most = ends[kept - 1] - step
    return best, taken


def _tokens(packing: Packing) -> list[int]:
    return [sum(piece.stop - piece.start for piece in of) for of in packing.microbatches]


def _badness(packing: Packing, room: Room, level: float) -> float:
    empty = 1 - sum(_tokens(packing)) / (len(packing.microbatches) * room.tokens)
    return worst_run(packing.costs, level) + EMPTY_COUNTS * max(0.0, empty - EMPTY)
