"""Routes chosen one by one, when each microbatch is launched, by rules that do not talk: what `benchmarks.paths` holds
the planner against.

A data node launches as soon as it has a slot and time. The simulator is first come, first served, so what happened
before a launch does not depend on what is launched later: each choice is made with the true past of the iteration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from swarm.routing.cost_model import Costs, Route
from swarm.routing.path_rules import order_tree
from swarm.routing.stage_balance import ring_set
from swarm.simulation.central.booking import Bookings
from swarm.simulation.central.timetable import Timetable
from swarm.simulation.forecast import Forecast, Task, Unit, forecast
from swarm.simulation.instance import Instance, Plan
from swarm.vocabulary.types import PeerId

NEW_SAMPLE_WEIGHT: Final = 0.1
"""Of SWARM's exponential average (Ryabinin et al. 2023, section 3.2)."""
REHEARSALS: Final = 10
COUNTED: Final = 20
"""Iterations in which SWARM's averages are learned, and those that count after them: which replicas are tried again
differs from one to the next."""
ALONE: Final = 1e9
"""Urgency beside which the delay caused to others counts nothing."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known when a data node launches: the time, and how everything goes that has been launched so far, by
    all."""

    unit: Unit
    at: float
    so_far: Forecast
    plan: Mapping[PeerId, Sequence[Route]]


class Rule(Protocol):
    """Chooses a route at each launch."""

    rehearsals: int
    counted: int
    """Iterations that it is played before those that count, and these."""

    def choose(self, moment: Moment) -> Route:
        """The route of the microbatch that is about to start."""

    def look_back(self, plan: Mapping[PeerId, Sequence[Route]], played: Forecast) -> None:
        """How the whole iteration went."""


def one_by_one(instance: Instance, rule_of: Callable[[Instance], Rule]) -> list[Plan]:
    """The routes of the iterations that count, chosen in the order of the launches."""
    rule = rule_of(instance)
    plans = [_iteration(instance, rule) for _ in range(rule.rehearsals + rule.counted)]
    return plans[rule.rehearsals :]


def _iteration(instance: Instance, rule: Rule) -> Plan:
    plan: dict[PeerId, list[Route]] = {peer: [] for peer in instance.costs.data_nodes}
    for _ in range(instance.total):
        at, data_node = _next_launch(instance, plan)
        unit = (data_node, len(plan[data_node]))
        plan[data_node].append(rule.choose(Moment(unit, at, forecast(instance.costs, plan), plan)))
    rule.look_back(plan, forecast(instance.costs, plan))
    return {peer: tuple(routes) for peer, routes in plan.items()}


def _next_launch(instance: Instance, plan: Mapping[PeerId, Sequence[Route]]) -> tuple[float, PeerId]:
    """When and where the next microbatch starts, found by launching one that goes nowhere from every data node that has
    any left."""
    left = [peer for peer, routes in plan.items() if len(routes) < instance.microbatches]
    probed = {peer: [*routes, ()] if peer in left else routes for peer, routes in plan.items()}
    tasks = forecast(instance.costs, probed).tasks
    return min((tasks[peer, len(plan[peer])][0].start, peer) for peer in left)


# ---- earliest return -------------------------------------------------------------------------------------------------


class EarliestReturn:
    """Whichever legal route brings the microbatch back first, given all that others have launched; nobody makes room
    for others.

    Equal visits are kept by a common count of visits that are left to each stage, which no real data node would have.
    """

    rehearsals, counted = 0, 1

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        skippable = instance.rules.skippable
        each = instance.total * instance.rules.per_path // max(1, skippable)
        self._left = Counter(dict.fromkeys(range(1, skippable + 1), each))
        self._launches = instance.total
        self._tree = order_tree(instance.rules, frozenset(), frozenset(range(1, skippable + 1)))

    def choose(self, moment: Moment) -> Route:
        costs, data_node = self._instance.costs, moment.unit[0]
        tables = {peer: Timetable(costs.slots[peer], costs.task_overhead_s) for peer in costs.stage_of()}
        bookings = Bookings(costs, tables)
        for unit, tasks in moment.so_far.tasks.items():
            bookings.enter(unit, tasks, 1.0)
        found = bookings.by_set(data_node, moment.at, ALONE, self._tree, costs.stages)
        allowed = [stages for stages in found if self._leaves_a_way(stages)]
        if not allowed:
            raise ValueError("earliest return has used up the visits of some stage")
        chosen = min(allowed, key=lambda stages: (found[stages].finish, sorted(stages)))
        self._left.subtract(chosen)
        self._launches -= 1
        return found[chosen].route

    def look_back(self, plan: Mapping[PeerId, Sequence[Route]], played: Forecast) -> None:
        """Nothing to learn."""

    def _leaves_a_way(self, stages: frozenset[int]) -> bool:
        """Whether the visits left after this one can still be made, none twice by one microbatch."""
        after = [left - (stage in stages) for stage, left in self._left.items()]
        return min(after) >= 0 and max(after) < self._launches


# ---- SWARM's rule ----------------------------------------------------------------------------------------------------


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

    def choose(self, moment: Moment) -> Route:
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

    def look_back(self, plan: Mapping[PeerId, Sequence[Route]], played: Forecast) -> None:
        for data_node, routes in plan.items():
            self._learn(data_node, routes, played, math.inf)
            self._wirings[data_node].measured.clear()

    def _learn(self, data_node: PeerId, routes: Sequence[Route], so_far: Forecast, now: float) -> None:
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
