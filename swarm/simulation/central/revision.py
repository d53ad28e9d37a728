"""Revision of the announced plans, microbatch by microbatch, before they are launched.

Lanes are agreed for the mean; timetables show what really meets. In turns - every other one to the data node that
expects to finish last, the rest to the others one after another - a data node looks for a better way for one of its
microbatches, and tells what it would cost it to visit another stage instead: an offer. Where an offer fits, two data
nodes change one stage for one (visits stay equal). Before a change is announced, the forecast of all announced plans
must say that it helps: what looks good for one microbatch may push others into the way of a third.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.path_rules import OrderTree, PathRules, order_tree
from swarm.routing.route_search import candidates
from swarm.simulation.central.booking import Booking, Bookings
from swarm.simulation.central.timetable import Timetable
from swarm.simulation.forecast import Forecast, Unit, forecast
from swarm.vocabulary.types import PeerId

URGENCY_POWER = 6
MEAN_SHARE = 0.03
"""How much the mean finish counts beside the last one, so that a tie goes to who helps the others."""
FREE_STAGES = 6
"""With more stages than this after stage 0 a revision keeps each microbatch's stages and only changes peers and
order."""
ATTEMPTS = 2
"""Changes whose forecast is looked at in one turn."""
ASKED = 3
"""Offers for the same exchange that are weighed."""
NOTICEABLE_S = 1e-6
DOUBTS = 2
"""Other worlds, with costs a little off, in which a change must help on the average as well: what only works when time
is known exactly is worth less."""
DOUBT = 0.05
"""How far off costs are in them, at most."""

Exchange = tuple[int, int]
"""(stage given up, stage taken instead)."""


@dataclass(frozen=True, slots=True)
class Change:
    """New routes for one microbatch or two, and the weighted seconds they seem to save."""

    routes: Mapping[Unit, PeerRoute]
    saved: float


@dataclass(frozen=True, slots=True)
class _Offer:
    cost: float
    unit: Unit
    route: PeerRoute


class Revision:
    """The announced plans of all data nodes, and their turns.

    Args:
        plan: each data node's routes in launch order. If by the forecast they block each other (`expected` is
            infinite), no turns can be taken.
    """

    def __init__(self, costs: Costs, rules: PathRules, plan: Mapping[PeerId, Sequence[PeerRoute]]) -> None:
        self._costs, self._rules = costs, rules
        self._stage_of = costs.stage_of()
        self._tables = {peer: Timetable(costs.slots[peer], costs.task_overhead_s) for peer in self._stage_of}
        self._bookings = Bookings(costs, self._tables)
        bare = {peer: (1 + costs.backward_factor) * seconds for peer, seconds in costs.forward_s.items()}
        self._peers = {data_node: candidates(costs, data_node, bare) for data_node in costs.data_nodes}
        self._offers: dict[Exchange, list[_Offer]] = {}
        self._next = dict.fromkeys(costs.data_nodes, 0)
        self._turn = 0
        self.plan = {data_node: list(routes) for data_node, routes in plan.items()}
        self.expected = forecast(costs, self.plan)
        self._worth = _worth(self.expected)
        self._doubts: list[Costs] = []
        self._doubted_worth = math.nan
        if math.isfinite(self._worth):
            self._announce()

    def run(self, turns: int) -> int:
        """Gives `turns` turns; returns how many changes were made."""
        return sum(self.take_turn() for _ in range(turns))

    def take_turn(self) -> bool:
        """The next data node's turn; whether anything changed."""
        finish = self.expected.finish_s
        by_need = sorted(finish, key=lambda data_node: (-finish[data_node], data_node))
        data_node = by_need[self._turn % len(by_need)] if self._turn % 2 else by_need[0]
        self._turn += 1
        if not self.plan[data_node]:
            return False
        unit = (data_node, self._next[data_node] % len(self.plan[data_node]))
        self._next[data_node] += 1
        return any(self._accept(change) for change in self._changes(unit)[:ATTEMPTS])

    # ---- looking -------------------------------------------------------------------------------------------------

    def _changes(self, unit: Unit) -> list[Change]:
        """What could be done for one microbatch, the most promising first; also renews its offers."""
        data_node, number = unit
        tasks, urgency = self.expected.tasks[unit], self._urgency[data_node]
        launch, route = tasks[0].start, self.plan[data_node][number]
        stages = frozenset(self._stage_of[peer] for peer in route)
        self._bookings.leave(unit, tasks)
        now = self._bookings.of_route(data_node, launch, urgency, route)
        found = self._bookings.by_set(data_node, launch, urgency, self._tree(stages), self._peers[data_node])
        self._bookings.enter(unit, tasks, urgency)
        changes = []
        if stages in found and found[stages].cost < now.cost - NOTICEABLE_S:
            changes.append(Change({unit: found[stages].route}, now.cost - found[stages].cost))
        changes += self._exchanges(unit, stages, now, found)
        self._renew_offers(unit, stages, now, found)
        return sorted(changes, key=lambda change: -change.saved)

    def _tree(self, stages: frozenset[int]) -> OrderTree:
        if self._rules.skippable > FREE_STAGES:
            return order_tree(self._rules, stages)
        return order_tree(self._rules, frozenset(), frozenset(range(1, self._rules.stages)))

    def _exchanges(
        self, unit: Unit, stages: frozenset[int], now: Booking, found: Mapping[frozenset[int], Booking]
    ) -> list[Change]:
        """Changes in which an offer of another microbatch makes up for the stage given up."""
        changes = []
        for other, booking in found.items():
            if len(other - stages) != 1:
                continue
            (given,), (taken,) = stages - other, other - stages
            for offer in sorted(self._offers.get((taken, given), ()), key=lambda offer: offer.cost)[:ASKED]:
                saved = now.cost - booking.cost - offer.cost
                if offer.unit != unit and saved > NOTICEABLE_S:
                    changes.append(Change({unit: booking.route, offer.unit: offer.route}, saved))
        return changes

    def _renew_offers(
        self, unit: Unit, stages: frozenset[int], now: Booking, found: Mapping[frozenset[int], Booking]
    ) -> None:
        self._withdraw(unit)
        for other, booking in found.items():
            if len(other - stages) == 1:
                (given,), (taken,) = stages - other, other - stages
                self._offers.setdefault((given, taken), []).append(_Offer(booking.cost - now.cost, unit, booking.route))

    def _withdraw(self, unit: Unit) -> None:
        for exchange, offers in self._offers.items():
            self._offers[exchange] = [offer for offer in offers if offer.unit != unit]

    # ---- deciding ------------------------------------------------------------------------------------------------

    def _accept(self, change: Change) -> bool:
        """Makes the change if the forecast says that it helps."""
        before = {unit: self.plan[unit[0]][unit[1]] for unit in change.routes}
        self._write(change.routes)
        expected = forecast(self._costs, self.plan)
        worth = _worth(expected)
        if worth >= self._worth - NOTICEABLE_S:
            self._write(before)
            return False
        in_doubt = self._worth_in_doubt()
        self._write(before)
        if not in_doubt < self._known_doubt():
            return False
        self._write(change.routes)
        self.expected, self._worth, self._doubted_worth = expected, worth, in_doubt
        for unit in change.routes:
            self._withdraw(unit)
        self._announce()
        return True

    def _known_doubt(self) -> float:
        """The doubted worth of the plan as announced, looked at only once somebody wants to change it."""
        if math.isnan(self._doubted_worth):
            self._doubted_worth = self._worth_in_doubt()
        return self._doubted_worth

    def _worth_in_doubt(self) -> float:
        if not self._doubts:  # the same for all data nodes, and no secret
            self._doubts = [_doubted(self._costs, random.Random(seed)) for seed in range(DOUBTS)]  # noqa: S311
        return sum(_worth(forecast(costs, self.plan)) for costs in self._doubts)

    def _write(self, routes: Mapping[Unit, PeerRoute]) -> None:
        for (data_node, number), route in routes.items():
            self.plan[data_node][number] = route

    def _announce(self) -> None:
        """All timetables as the announced plans make them, and every data node's urgency."""
        finish = self.expected.finish_s
        last = max(finish.values())
        self._urgency = {data_node: (end / last) ** URGENCY_POWER for data_node, end in finish.items()}
        for table in self._tables.values():
            table.clear()
        for unit, tasks in self.expected.tasks.items():
            self._bookings.enter(unit, tasks, self._urgency[unit[0]])


def _worth(expected: Forecast) -> float:
    """What turns make smaller: the last finish, and a little of the mean."""
    return expected.makespan_s + MEAN_SHARE * sum(expected.finish_s.values()) / max(1, len(expected.finish_s))


def _doubted(costs: Costs, rng: random.Random) -> Costs:
    """The same swarm with every cost off by up to DOUBT."""

    def off(seconds: float) -> float:
        return seconds * rng.uniform(1 - DOUBT, 1 + DOUBT)

    forward = {peer: off(seconds) for peer, seconds in costs.forward_s.items()}
    message = {
        here: {there: off(seconds) for there, seconds in links.items()} for here, links in costs.message_s.items()
    }
    return replace(costs, forward_s=forward, message_s=message)
