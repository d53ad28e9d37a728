"""SWARM's rule, which chooses a route when a microbatch is launched and does not talk: what `benchmarks.paths` holds
the planner against, beside the earliest return (`swarm.simulation.baselines`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.stage_balance import ring_set
from swarm.simulation.baselines.one_by_one import Moment
from swarm.simulation.forecast import Forecast, Task, Unit
from swarm.simulation.instance import Instance
from swarm.vocabulary.types import PeerId

NEW_SAMPLE_WEIGHT: Final = 0.1
"""Of SWARM's exponential average (Ryabinin et al. 2023, section 3.2)."""
REHEARSALS: Final = 10
COUNTED: Final = 20
"""Iterations in which SWARM's averages are learned, and those that count after them: which replicas are tried again
differs from one to the next."""


@dataclass(slots=True)
class _Wiring:
    """One data node's own view: interleaved weighted round robin over the replicas of each stage."""

    virtual_s: dict[PeerId, float]
    average_s: dict[PeerId, float] = field(default_factory=dict)
    measured: set[tuple[Unit, int]] = field(default_factory=set)

    def response_s(self, costs: Costs, peer: PeerId) -> float:
        """As measured; a replica not measured yet counts as if it were next door, so that it is tried."""
        return self.average_s.get(peer, (1 + costs.backward_factor) * costs.forward_s[peer])

    def sample(self, peer: PeerId, seconds: float) -> None:
        known = self.average_s.get(peer, seconds)
        self.average_s[peer] = known + NEW_SAMPLE_WEIGHT * (seconds - known)


class SmallestVirtualTime:
    """SWARM's stochastic wiring: at each stage the replica whose virtual time is smallest, which then moves on by its
    average response time.

    Each data node knows only what it has measured itself: from sending to a peer until its output, out and back. Stages
    go up, and the ring says which are skipped, in one count over all data nodes.
    """

    rehearsals, counted = REHEARSALS, COUNTED

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        peers = [peer for stage in instance.costs.stages for peer in stage]
        self._wirings = {peer: _Wiring(dict.fromkeys(peers, 0.0)) for peer in instance.costs.data_nodes}

    def choose(self, moment: Moment) -> PeerRoute:
        data_node, number = moment.unit
        costs, rules, wiring = self._instance.costs, self._instance.rules, self._wirings[data_node]
        self._learn(data_node, moment.plan[data_node], moment.so_far, moment.at)
        stages = ring_set(rules, number * len(costs.data_nodes) + costs.data_nodes.index(data_node))
        route = []
        for stage in sorted(stages):
            chosen = min(costs.stages[stage], key=lambda peer: (wiring.virtual_s[peer], peer))
            wiring.virtual_s[chosen] += wiring.response_s(costs, chosen)
            route.append(chosen)
        return tuple(route)

    def look_back(self, plan: Mapping[PeerId, Sequence[PeerRoute]], played: Forecast) -> None:
        for data_node, routes in plan.items():
            self._learn(data_node, routes, played, math.inf)
            self._wirings[data_node].measured.clear()

    def _learn(self, data_node: PeerId, routes: Sequence[PeerRoute], so_far: Forecast, now: float) -> None:
        """From one's own visits that have ended by now."""
        wiring = self._wirings[data_node]
        for number, route in enumerate(routes):
            unit = (data_node, number)
            tasks = so_far.tasks.get(unit, ())
            for place, peer in enumerate(route, start=1):
                back = 2 * len(route) + 2 - place
                if (unit, place) in wiring.measured or back >= len(tasks) or tasks[back].end > now:
                    continue
                wiring.measured.add((unit, place))
                wiring.sample(peer, _taken_s(tasks, place) + _taken_s(tasks, back))


def _taken_s(tasks: Sequence[Task], place: int) -> float:
    """From the end of the task before, when the tensor was sent."""
    return tasks[place].end - tasks[place - 1].end
