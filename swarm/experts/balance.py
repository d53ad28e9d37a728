"""Balanced assignment: each document to the cluster that fits it best and has room.

Without a limit the clusters of hard expectation maximisation starve: a large one attracts more, and the peers that host
its experts have most of the work. Who would lose the most by going elsewhere chooses first.

Sources: balanced assignment of documents to experts, Gururangan et al. 2023 (arXiv:2303.14177) and Filippova et al.
2024 (arXiv:2410.03529); DiPaCo (arXiv:2403.10616) section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final

SLACK: Final = 1.05
"""The largest cluster may have so many times its share."""


def balanced(scores: Sequence[Sequence[float]], clusters: int, slack: float = SLACK) -> list[int]:
    """Assigns each document to one of the clusters, none of which gets more than `slack` times its share.

    Args:
        scores: of each document, how well each cluster fits it.

    Returns:
        The cluster of each document.
    """
    capacity = math.ceil(slack * len(scores) / clusters)
    room = [capacity] * clusters
    waiting = [(*_loss(of, room), index) for index, of in enumerate(scores)]
    """What a document loses if it may not have its best cluster, negative; that cluster; and its index."""
    heapify(waiting)
    chosen = [0] * len(scores)
    while waiting:
        _, best, index = waiting[0]
        current = _loss(scores[index], room)
        if current != waiting[0][:2]:  # a cluster has filled up since
            heapreplace(waiting, (*current, index))
            continue
        heappop(waiting)
        chosen[index] = best
        room[best] -= 1
    return chosen


def _loss(scores: Sequence[float], room: Sequence[int]) -> tuple[float, int]:
    """How much worse the second best cluster with room is than the best, negative, and which that is."""
    best, second, found = -math.inf, -math.inf, -1
    for cluster, score in enumerate(scores):
        if not room[cluster]:
            continue
        if score > best:
            best, second, found = score, best, cluster
        elif score > second:
            second = score
    return second - best, found
