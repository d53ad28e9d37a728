"""The greedy plan: each microbatch takes the legal route that brings it back first.

It is chosen at its launch by the timetables of all that was launched before, by anybody; nobody makes room for others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarm.routing.cost_model import PeerRoute
from swarm.routing.path_rules import OrderTree, order_tree
from swarm.routing.stage_balance import fair_sets, visits
from swarm.simulation.baselines.one_by_one import Moment, one_by_one
from swarm.simulation.central.booking import Booking, Bookings
from swarm.simulation.central.timetable import Timetable
from swarm.simulation.forecast import Forecast, forecast
from swarm.simulation.instance import Instance, Plan
from swarm.vocabulary.types import PeerId

ALONE = 1e9
"""Urgency beside which the delay caused to others counts nothing."""


def earliest_return(instance: Instance) -> Plan:
    """The greedy plan of an iteration; every stage is visited as often as the ring visits it.

    Where free choice of stages uses up the visits of some stage, or makes microbatches block each other for good, they
    take the ring's stages in the order of launches, and at last no steps back.

    Raises:
        ValueError: the rules allow too few orders for equal visits.
    """
    upwards = replace(instance, rules=replace(instance.rules, max_back_stops=0))
    for rule, world in ((EarliestReturn, instance), (EarliestReturnOnRing, instance)):
        try:
            (plan,) = one_by_one(world, rule)
        except ValueError:
            continue
        if math.isfinite(forecast(instance.costs, plan).makespan_s):
            return plan
    (plan,) = one_by_one(upwards, EarliestReturnOnRing)
    return plan


class EarliestReturnOnRing:
    """Whichever legal order and replicas of the ring's next set of stages bring the microbatch back first, given all
    that others have launched."""

    rehearsals, counted = 0, 1

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._sets = fair_sets(instance.rules, instance.total)

    def choose(self, moment: Moment) -> PeerRoute:
        number = sum(len(routes) for routes in moment.plan.values())
        tree = order_tree(self._instance.rules, self._sets[number])
        return bookings_by_set(self._instance, moment, tree)[self._sets[number]].route

    def look_back(self, plan: Mapping[PeerId, Sequence[PeerRoute]], played: Forecast) -> None:
        """Nothing to learn."""


class EarliestReturn:
    """Whichever legal route brings the microbatch back first, given all that others have launched.

    Equal visits are kept by a common count of visits that are left to each stage, which no real data node would have.
    """

    rehearsals, counted = 0, 1

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._left = Counter(dict.fromkeys(range(1, instance.rules.stages), 0))
        self._left.update(visits(fair_sets(instance.rules, instance.total)))
        self._launches = instance.total
        self._tree = order_tree(instance.rules, frozenset(), frozenset(range(1, instance.rules.stages)))

    def choose(self, moment: Moment) -> PeerRoute:
        """The route.

        Raises:
            ValueError: what is left of the visits cannot be made by legal routes.
        """
        found = bookings_by_set(self._instance, moment, self._tree)
        allowed = [stages for stages in found if self._leaves_a_way(stages)]
        if not allowed:
            raise ValueError("earliest return has used up the visits of some stage")
        chosen = min(allowed, key=lambda stages: (found[stages].finish, sorted(stages)))
        self._left.subtract(chosen)
        self._launches -= 1
        return found[chosen].route

    def look_back(self, plan: Mapping[PeerId, Sequence[PeerRoute]], played: Forecast) -> None:
        """Nothing to learn."""

    def _leaves_a_way(self, stages: frozenset[int]) -> bool:
        """Whether the visits left after this one can still be made, none twice by one microbatch."""
        after = [left - (stage in stages) for stage, left in self._left.items()]
        return min(after) >= 0 and max(after) < self._launches


def bookings_by_set(instance: Instance, moment: Moment, tree: OrderTree) -> dict[frozenset[int], Booking]:
    """For each set of stages in the tree, how soon a microbatch launched now could be back."""
    costs = instance.costs
    tables = {peer: Timetable(costs.slots[peer], costs.task_overhead_s) for peer in costs.stage_of()}
    bookings = Bookings(costs, tables)
    for unit, tasks in moment.so_far.tasks.items():
        bookings.enter(unit, tasks, 1.0)
    return bookings.by_set(moment.unit[0], moment.at, ALONE, tree, costs.stages)
