"""When everything happens if the routes are as announced: peers as single servers, first come first served, with
bounded slots.

A data node asks this before it changes its plan: what would become of everybody? The simulator asks it with the true
costs, and then it is the world.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.vocabulary.types import PeerId

Unit = tuple[PeerId, int]
"""A microbatch of a plan: its data node, and its place in that node's launch order."""


class Task(NamedTuple):
    """One computation: forwards first (position 0 is the data node), then the head, then backwards to the data node
    again.

    A tuple, because plans are forecast often and making a frozen dataclass takes four times as long.
    """

    peer: PeerId
    arrival: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """All tasks of all microbatches in their order, and when each data node is done; infinite when it never is."""

    tasks: Mapping[Unit, Sequence[Task]]
    finish_s: Mapping[PeerId, float]

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s.values(), default=0.0)

    def waiting_s(self) -> float:
        """Seconds that tasks spent in queues, all together."""
        return sum(task.start - task.arrival for tasks in self.tasks.values() for task in tasks)


def forecast(costs: Costs, plan: Mapping[PeerId, Sequence[PeerRoute]]) -> Forecast:
    """Plays the routes, those of each data node in launch order; a data node launches as soon as it has a slot and
    time."""
    return _Play(costs, plan).run()


class _Play:
    """One pass through virtual time. Jobs are (unit, position), with position 0..L forward, L+1 the head, L+2..2L+2
    backward."""

    def __init__(self, costs: Costs, plan: Mapping[PeerId, Sequence[PeerRoute]]) -> None:
        self._overhead = costs.task_overhead_s
        self._message = costs.message_s
        self._forward, self._backward, self._head = costs.forward_s, costs.backward_factor, costs.head_factor
        self._stops: dict[Unit, tuple[PeerId, ...]] = {}
        self._unlaunched: dict[PeerId, list[Unit]] = {}
        for data_node, routes in plan.items():
            units = [(data_node, k) for k in range(len(routes))]
            self._unlaunched[data_node] = units[::-1]
            for unit, route in zip(units, routes, strict=True):
                self._stops[unit] = (data_node, *route, data_node, *reversed(route), data_node)
        peers = {peer for stops in self._stops.values() for peer in stops} | set(plan)
        self._free = {peer: costs.slots[peer] for peer in peers}
        self._idle = dict.fromkeys(peers, True)
        self._queues: dict[PeerId, list[tuple[float, Unit, int]]] = {peer: [] for peer in peers}
        self._events: list[tuple[float, int, PeerId, Unit | None, int]] = []
        self._ticket = 0
        self._tasks: dict[Unit, list[Task]] = {}
        self._open = {data_node: len(routes) for data_node, routes in plan.items()}
        self._finish = dict.fromkeys(plan, 0.0)

    def run(self) -> Forecast:
        for data_node in sorted(self._unlaunched):
            self._start_next(data_node, 0.0)
        events = self._events
        while events:
            now, _, peer, unit, position = heapq.heappop(events)
            if unit is None:
                self._idle[peer] = True
            elif position >= 0:
                self._queues[peer].append((now, unit, position))
            else:
                self._finished(peer, unit, -position - 1, now)
            self._start_next(peer, now)
        finish = {peer: math.inf if self._open[peer] else end for peer, end in self._finish.items()}
        return Forecast(self._tasks, finish)

    def _push(self, when: float, peer: PeerId, unit: Unit | None, position: int) -> None:
        self._ticket += 1
        heapq.heappush(self._events, (when, self._ticket, peer, unit, position))

    def _finished(self, peer: PeerId, unit: Unit, position: int, now: float) -> None:
        stops = self._stops[unit]
        head = len(stops) // 2
        if position > head:
            self._free[peer] += 1
        if position + 1 < len(stops):
            there = stops[position + 1]
            self._push(now + self._message[peer][there], there, unit, position + 1)
        else:
            self._open[peer] -= 1
            self._finish[peer] = max(self._finish[peer], now)
        self._push(now + self._overhead, peer, None, 0)

    def _start_next(self, peer: PeerId, now: float) -> None:
        """Starts the first job that can: a forward needs a slot, and what came later may pass it."""
        if not self._idle[peer]:
            return
        queue = self._queues[peer]
        free = self._free[peer] > 0
        waiting = self._unlaunched.get(peer)
        if waiting and free and all(position for _, _, position in queue):
            queue.append((now, waiting.pop(), 0))
        for k, (arrival, unit, position) in enumerate(queue):
            head = len(self._stops[unit]) // 2
            cost = self._forward[peer]
            if position < head:
                if not free:
                    continue
                self._free[peer] -= 1
            else:
                cost *= self._head if position == head else self._backward
            del queue[k]
            self._idle[peer] = False
            self._tasks.setdefault(unit, []).append(Task(peer, arrival, now, now + cost))
            self._push(now + cost, peer, unit, -position - 1)
            return
