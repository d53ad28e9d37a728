"""Small swarms with round figures for tests of paths, and the rules of the world played a second time, on their own."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.types import PeerId

RULES = PathRules(stages=6, per_path=3, max_forward_jump=4, max_back_stops=2, max_back_distance=2)


def names(*peers: str) -> tuple[PeerId, ...]:
    return tuple(PeerId(peer) for peer in peers)


def swarm(replicas: Sequence[int], forward_s: Mapping[str, float] | None = None, slots: int = 3) -> Costs:
    """Peers `s.k` on a line, one second apart for each step of k, half a second more for every message."""
    stages = tuple(names(*(f"{stage}.{k}" for k in range(count))) for stage, count in enumerate(replicas))
    peers = [peer for stage in stages for peer in stage]
    place = {peer: int(peer.split(".")[1]) for peer in peers}
    return Costs(
        stages,
        {peer: (forward_s or {}).get(peer, 1.0) for peer in peers},
        {here: {there: 0.5 + abs(place[here] - place[there]) for there in peers} for here in peers},
        dict.fromkeys(peers, slots),
        task_overhead_s=0.1,
    )


def makespan_by_clockwork(costs: Costs, plan: Mapping[PeerId, Sequence[Sequence[PeerId]]]) -> float:
    """The rules once more, written from their description and sharing no code with `swarm.simulation.forecast`.

    Each peer is looked at whenever something arrives there or it comes free: the longest waiting task that may start
    does.
    """
    stops, waiting, left = {}, defaultdict(list), {}
    for data_node, routes in plan.items():
        left[data_node] = list(range(len(routes)))
        for k, route in enumerate(routes):
            stops[data_node, k] = [data_node, *route, data_node, *list(route)[::-1], data_node]
    free, busy_until, agenda, ends, order = dict(costs.slots), defaultdict(float), [], [], 0

    def look(peer: PeerId, now: float) -> None:
        nonlocal order
        if busy_until[peer] > now:
            return
        if left.get(peer) and free[peer] > 0 and not any(job[2] == 0 for job in waiting[peer]):
            order += 1
            waiting[peer].append((now, order, 0, (peer, left[peer].pop(0))))
        for job in sorted(waiting[peer]):
            _, _, position, unit = job
            half = len(stops[unit]) // 2
            if position < half and free[peer] == 0:
                continue
            waiting[peer].remove(job)
            factor = 1.0 if position < half else costs.head_factor if position == half else costs.backward_factor
            if position < half:
                free[peer] -= 1
            done = now + factor * costs.forward_s[peer]
            busy_until[peer] = done + costs.task_overhead_s
            order += 1
            heapq.heappush(agenda, (done, order, "done", peer, position, unit))
            return

    for peer in sorted(plan):
        look(peer, 0.0)
    while agenda:
        now, _, what, peer, position, unit = heapq.heappop(agenda)
        if what == "here":
            order += 1
            waiting[peer].append((now, order, position, unit))
        elif what == "done":
            if position > len(stops[unit]) // 2:
                free[peer] += 1
            if position + 1 == len(stops[unit]):
                ends.append(now)
            else:
                there = stops[unit][position + 1]
                order += 1
                heapq.heappush(agenda, (now + costs.message_s[peer][there], order, "here", there, position + 1, unit))
            order += 1
            heapq.heappush(agenda, (busy_until[peer], order, "free", peer, position, unit))
        look(peer, now)
    return max(ends) if len(ends) == len(stops) else float("inf")
