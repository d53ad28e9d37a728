"""When each data node would be done with its microbatches on these routes: peers as single servers, first come first
served, with bounded slots.

It is `swarm.simulation.forecast`, which is the world, without a record of what happened: a data node asks it hundreds
of times while it plans. So there is one event for an arrival and one for a busy peer that somebody waits at, what a
route takes is added up once, and a plan is given up as soon as one microbatch cannot be home within the limit even if
it never waits again.

Ties are broken as the world breaks them: what was sent first comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.vocabulary.types import PeerId

MAX_ROWS = 4096
"""Routes whose figures are kept."""

Routes = Mapping[PeerId, Sequence[PeerRoute]]
"""Of each data node's microbatches in launch order."""


_Task = tuple[int, float, float, float, int]
"""One visit of a route, out or back: peer, seconds from its start to its end, from there to the arrival at the next
one, from its start until the microbatch is home if it never waits again, and the slots of the peer that it frees (-1
when it takes one)."""
_Row = tuple[_Task, ...]
"""Of a route: forwards first, the head in the middle, then backwards to the data node again."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Finish of each data node, infinite when it never comes to its end; and for each microbatch, by its data node and
    its place, how long each of its tasks waited."""

    finish_s: Mapping[PeerId, float]
    waited_s: Mapping[PeerId, Sequence[Sequence[float]]] = field(default_factory=dict)

    @property
    def worth(self) -> tuple[float, float]:
        """The smaller the better: the largest finish, then the mean one."""
        finish = self.finish_s.values()
        return max(finish, default=0.0), math.fsum(finish) / max(1, len(finish))


class RouteForecast:
    """Of one swarm.

    Args:
        costs: of every peer on the routes that will be asked about.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._number = {peer: number for number, peer in enumerate(sorted(costs.stage_of()))}
        self._slots = [costs.slots[peer] for peer in self._number]
        self._rows: dict[tuple[PeerId, PeerRoute], _Row] = {}
        self.played = 0
        """Events of all forecasts so far: what they cost."""

    def alone_s(self, data_node: PeerId, route: PeerRoute) -> float:
        """The round trip of a route if it never waits."""
        return self._row(data_node, route)[0][3]

    def of(self, plan: Routes) -> Forecast:
        """Plays the plan."""
        played = self.within(plan, math.inf)
        assert played is not None
        return played

    def _row(self, data_node: PeerId, route: PeerRoute) -> _Row:
        known = self._rows.get((data_node, route))
        if known is None:
            if len(self._rows) >= MAX_ROWS:
                self._rows.clear()
            known = self._rows[data_node, route] = self._timed(data_node, route)
        return known

    def _timed(self, data_node: PeerId, route: PeerRoute) -> _Row:
        costs = self._costs
        stops = (data_node, *route, data_node, *reversed(route), data_node)
        head, row, left_s, ahead = len(stops) // 2, list[_Task](), 0.0, data_node
        for place in range(len(stops) - 1, -1, -1):
            peer = stops[place]
            frees = (place > head) - (place < head)
            factor = (costs.head_factor, costs.backward_factor, 1.0)[frees]
            cost_s, way_s = factor * costs.forward_s[peer], costs.message_s[peer][ahead] if row else 0.0
            left_s += cost_s + way_s
            row.append((self._number[peer], cost_s, way_s, left_s, frees))
            ahead = peer
        return tuple(reversed(row))

    def within(self, plan: Routes, limit_s: float) -> Forecast | None:
        """Plays the plan; None when a data node would not be done within the limit.

        One pass through virtual time, in one function: it is called hundreds of times, and a call for each task would
        double what it takes.
        """
        overhead_s = self._costs.task_overhead_s
        units = [(data_node, place) for data_node in sorted(plan) for place in range(len(plan[data_node]))]
        rows = [self._row(data_node, plan[data_node][place]) for data_node, place in units]
        free = self._slots.copy()
        unlaunched: list[list[int]] = [[] for _ in free]
        for unit in range(len(units) - 1, -1, -1):
            unlaunched[rows[unit][0][0]].append(unit)
        busy_until, is_called = [-1.0] * len(free), [False] * len(free)
        queues: list[list[tuple[float, int, int]]] = [[] for _ in free]
        finish_s, under_way = dict.fromkeys(plan, 0.0), len(units)
        waited = [[0.0] * len(row) for row in rows]
        # What happens: when, when it was sent, ticket, microbatch, place. A call to look at the queue again has no
        # microbatch, and the peer for its place.
        events = [(0.0, -1.0, ticket, -1, self._number[data_node]) for ticket, data_node in enumerate(plan)]
        ticket = len(events)
        while events:
            now, _, _, unit, place = heappop(events)
            arrived = now
            if unit < 0:
                peer, queue = place, queues[place]
                is_called[peer] = False
            else:
                peer, cost_s, way_s, left_s, frees = rows[unit][place]
                queue, until = queues[peer], busy_until[peer]
                if now < until or is_called[peer]:
                    if until + left_s > limit_s:
                        break
                    queue.append((now, unit, place))
                    if not is_called[peer]:
                        is_called[peer] = True
                        ticket += 1
                        heappush(events, (until, until - overhead_s, ticket, -1, peer))
                    continue
            has_slot, waiting = free[peer] > 0, unlaunched[peer]
            if unit < 0 or queue or waiting or not (has_slot or frees >= 0):
                if unit >= 0:
                    queue.append((now, unit, place))
                if waiting and has_slot and all(job[2] for job in queue):
                    queue.append((now, waiting.pop(), 0))
                for k, job in enumerate(queue):
                    arrived, unit, place = job
                    _, cost_s, way_s, left_s, frees = rows[unit][place]
                    if has_slot or frees >= 0:
                        del queue[k]
                        break
                else:  # all wait for a slot; what came later may pass them
                    continue
            if now + left_s > limit_s:
                break
            free[peer] += frees  # nobody looks before the end of this task
            waited[unit][place] = now - arrived
            end = now + cost_s
            busy_until[peer] = end + overhead_s
            ticket += 1
            if place + 1 < len(rows[unit]):
                heappush(events, (end + way_s, end, ticket, unit, place + 1))
            else:
                finish_s[units[unit][0]] = max(finish_s[units[unit][0]], end)
                under_way -= 1
            if queue or waiting:
                is_called[peer] = True
                heappush(events, (end + overhead_s, end, ticket, -1, peer))
        self.played += ticket
        if under_way:  # they wait for each other for ever
            if limit_s < math.inf:
                return None
            finish_s = dict.fromkeys(plan, math.inf)
        by_data_node: dict[PeerId, list[list[float]]] = {data_node: [] for data_node in plan}
        for (data_node, _), row in zip(units, waited, strict=True):
            by_data_node[data_node].append(row)
        return Forecast(finish_s, by_data_node)
