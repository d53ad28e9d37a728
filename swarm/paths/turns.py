"""In which order a data node takes its lanes: spread out, so that neither a peer nor a stage gets its share in one heap.

Over all lanes every stage has its equal share of the visits; this keeps it so over shorter stretches, as well as whole numbers and the given lanes
allow (a low-discrepancy sequence, by greedy choice).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swarm.vocabulary import Hop


def spread(lanes: Sequence[tuple[Hop, ...]]) -> tuple[tuple[Hop, ...], ...]:
    """The lanes in a good order; the first one stays the first."""
    wanted = Counter(mark for lane in lanes for mark in _marks(lane))
    had: Counter[object] = Counter()
    left = list(range(len(lanes)))
    order: list[tuple[Hop, ...]] = []
    while left:
        share = (len(order) + 1) / len(lanes)

        def ahead(place: int, share: float = share) -> tuple[float, int]:
            """How far this lane's peers and stages would be ahead of their share."""
            return sum(had[mark] + 1 - wanted[mark] * share for mark in _marks(lanes[place])), place

        chosen = min(left, key=ahead) if order else 0
        left.remove(chosen)
        had.update(_marks(lanes[chosen]))
        order.append(lanes[chosen])
    return tuple(order)


def _marks(lane: tuple[Hop, ...]) -> tuple[object, ...]:
    return (*(hop.module for hop in lane), *(hop.peer for hop in lane))
