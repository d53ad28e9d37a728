"""What balance can be worth at best in a swarm of hops that are equally fast: the microbatches that each way of packing
makes, played through the hops step by step, without links and without anything else that takes time.

A way back takes twice a way out. Replicas take what comes first, and a microbatch goes to the replica with the least
work ahead of it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.packing import Task, concat, log_normal, ours, queues, share_of

HOPS: Final = 2
BACKWARD: Final = 2.0
MICROBATCHES: Final = 512
SETTINGS: Final = ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8))
"""Replicas of a stage, microbatches of a step."""


def step_seconds(costs: Sequence[float], replicas: int, hops: int = HOPS) -> float:
    """The time of a step whose microbatches all set out at once; `costs` are seconds of a way out through a hop."""
    waiting = [[deque[tuple[int, int]]() for _ in range(replicas)] for _ in range(hops)]
    ahead = [[0.0] * replicas for _ in range(hops)]
    busy = [[False] * replicas for _ in range(hops)]
    taken: dict[tuple[int, int], int] = {}
    """The replica of each microbatch at each hop, out and back."""
    now, events = 0.0, [(0.0, number, number, 0, False) for number in range(len(costs))]
    """Time, order among equals, microbatch, visit (out through the hops, and back), whether that visit has ended."""
    order = len(events)

    def place(visit: int) -> tuple[int, float]:
        return (visit, 1.0) if visit < hops else (2 * hops - 1 - visit, BACKWARD)

    while events:
        now, _, number, visit, has_ended = heapq.heappop(events)
        hop, factor = place(visit)
        if has_ended:
            replica = taken[number, hop]
            busy[hop][replica] = False
            ahead[hop][replica] -= factor * costs[number]
            if visit + 1 < 2 * hops:
                order += 1
                heapq.heappush(events, (now, order, number, visit + 1, False))
        else:
            if visit < hops:
                replica = taken[number, hop] = min(range(replicas), key=ahead[hop].__getitem__)
                ahead[hop][replica] += (1 + BACKWARD) * costs[number]
            waiting[hop][taken[number, hop]].append((number, visit))
        replica = taken[number, hop]
        if waiting[hop][replica] and not busy[hop][replica]:
            busy[hop][replica] = True
            following, its_visit = waiting[hop][replica].popleft()
            order += 1
            ends = now + place(its_visit)[1] * costs[following]
            heapq.heappush(events, (ends, order, following, its_visit, True))
    return now


def measure_bound(tell: Callable[[str], None]) -> dict[str, Any]:
    """Tokens per second of ours over the other ways of packing, by replicas and microbatches of a step."""
    task = Task(log_normal(), 8192, 4 * 8192, share_of(64), MICROBATCHES)
    arms = {"ours": ours(task).packed, "concat": concat(task).packed, "queues": queues(task).packed}
    found = []
    for replicas, size in SETTINGS:
        pace = {}
        for arm, packed in arms.items():
            whole = range(0, len(packed) - size + 1, size)
            costs = [[one.cost(task.share) for one in packed[start : start + size]] for start in whole]
            tokens = sum(sum(one.documents) for start in whole for one in packed[start : start + size])
            pace[arm] = tokens / sum(step_seconds(step, replicas) for step in costs)
        ratios = {f"ours_over_{arm}": round(pace["ours"] / pace[arm], 3) for arm in ("concat", "queues")}
        found.append({"replicas": replicas, "microbatches": size, **ratios})
        tell(f"bound, {replicas} replicas a hop, {size} microbatches a step: {ratios}")
    return {"settings": found}
