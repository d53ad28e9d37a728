"""A search for a better plan of all data nodes' microbatches, as one of them makes it: by forecasts of its own.

Lanes are found for the mean: a formula says what they cost. What first come, first served makes of thirty microbatches
that meet at peers with few slots no formula tells, so here a forecast of all routes says whether a change helps, and
the formula only says in which order changes are tried (`swarm.routing.plans.plan_changes`).

A change is taken when the last data node is done sooner, or no later and the mean one sooner. All changes leave the sum
of visits of each stage as it was. Whoever searches may change the routes of all: nobody need give way to another's
changes, and what is found is offered to all at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.deadlock import closes_a_circle, crowded_by, in_order
from swarm.routing.path_rules import PathRules
from swarm.routing.plans.plan_changes import PlanChange, PlanChanges, changed
from swarm.routing.plans.route_changes import Plan
from swarm.routing.plans.route_forecast import Forecast, RouteForecast
from swarm.vocabulary.types import PeerId

LEAST_GAIN_S = 1e-6
MOST_LATER = 1.5
"""The last data node may be done so many times later for the sake of the pace of all."""
TASKS_A_CHANGE = 4
"""What weighing one change by the formula takes, in tasks of a forecast."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has come to."""

    plan: Plan
    expected: Forecast


class PlanSearch:
    """Of one data node.

    Args:
        own: the data node.
        costs: as it takes them to be.
        rounds: how often each data node goes through its routes in a forecast.
        is_free: whether they launch as fast as they can. Then what counts is the pace of all together, and not when the
            last one is done: nobody waits for it.
    """

    def __init__(self, own: PeerId, costs: Costs, rules: PathRules, rounds: int = 1, *, is_free: bool = False) -> None:
        self._costs, self._rounds, self._is_free = costs, rounds, is_free
        self._forecast = RouteForecast(costs)
        self._stage_of = costs.stage_of()
        self._changes = PlanChanges(own, costs, rules, is_free=is_free)
        self._spent = 0

    @property
    def tasks(self) -> int:
        """That were played so far, those of searching for changes among them."""
        return self._forecast.played + TASKS_A_CHANGE * self._changes.scored + self._spent

    def spend(self, tasks: int) -> None:
        """Counts other work as so many tasks."""
        self._spent += tasks

    def expected(self, plan: Plan) -> Forecast:
        """When everybody is done by the own costs, and who waits where; infinite when never."""
        return self._forecast.of(self._whole(plan))

    def improve(self, plan: Plan, expected: Forecast, allowance: int) -> Found:
        """A better plan, or the same one when none is found in so many tasks of forecasts.

        Args:
            expected: of the plan.
        """
        until, circles = self.tasks + allowance, self._circles(plan)
        now = Found(plan, expected)
        while self.tasks < until and math.isfinite(now.expected.worth[0]):
            better = self._climbed(now, circles, until)
            if better is None:
                break
            now = better
        return now

    def _climbed(self, now: Found, circles: frozenset[PeerRoute], until: int) -> Found | None:
        """A better plan; None when none is found.

        Changes that were found for a plan are tried on the better one too, as long as the same data node is the last
        and they change other routes: finding them costs as much as trying them.
        """
        start, touched = now, set[tuple[PeerId, int]]()
        for kind, change in self._changes.likely(now.plan, now.expected):
            if self.tasks >= until:
                break
            places = {(peer, place) for peer, routes in change for place, _ in routes}
            if not touched.isdisjoint(places):
                continue
            found = self._tried(now, change, circles)
            if found is None:
                self._changes.failed(kind)
                continue
            (first, second), (then, then_second) = self.worth(now.expected), self.worth(found.expected)
            self._changes.helped(kind, ((first - then) + 0.1 * (second - then_second)) / first)
            is_same = not self._is_free and _last(found.expected) == _last(now.expected)
            touched |= places
            now = found
            if not is_same:
                break
        return None if now is start else now

    def _tried(self, now: Found, change: PlanChange, circles: frozenset[PeerRoute]) -> Found | None:
        expected = now.expected
        limit_s = (MOST_LATER if self._is_free else 1) * expected.worth[0] + LEAST_GAIN_S
        plan = changed(now.plan, change)
        forecast = self._forecast.within(self._whole(plan), limit_s)
        if forecast is None or not self._is_better(forecast, expected) or not self._circles(plan) <= circles:
            return None
        return Found(plan, forecast)

    # ---- what a forecast is worth ----------------------------------------------------------------------------------

    def worth(self, found: Forecast) -> tuple[float, float]:
        """The smaller the better: when the last is done, and all in the mean; where they launch freely the mean by pace
        (the harmonic one), and the last."""
        if not self._is_free:
            return found.worth
        rate = math.fsum(1 / max(finish, LEAST_GAIN_S) for finish in found.finish_s.values())
        return len(found.finish_s) / rate if rate > 0 else math.inf, found.worth[0]

    def gains(self, before: Forecast, after: Forecast) -> tuple[float, float]:
        """By which shares the two figures of what a forecast is worth are smaller."""
        now, then = self.worth(before), self.worth(after)
        first, second = (_gain(*pair) for pair in zip(now, then, strict=True))
        return first, second

    def _is_better(self, found: Forecast, expected: Forecast) -> bool:
        first, second = self.worth(found)
        before, second_before = self.worth(expected)
        return first < before - LEAST_GAIN_S or (
            first < before + LEAST_GAIN_S and second < second_before - LEAST_GAIN_S
        )

    # ---- circles ---------------------------------------------------------------------------------------------------

    def straightened(self, plan: Plan) -> Plan:
        """The plan without steps back by which microbatches could wait for each other in a circle."""
        circles = self._circles(plan)
        return {
            peer: tuple(in_order(route, self._stage_of) if route in circles else route for route in routes)
            for peer, routes in plan.items()
        }

    def _circles(self, plan: Plan) -> frozenset[PeerRoute]:
        """The routes with a step back that may be part of a circle of microbatches that wait for each other."""
        routes = {route for singles in plan.values() for route in singles}
        back = [route for route in routes if in_order(route, self._stage_of) != route]
        crowded = crowded_by(plan, self._costs) if back else None
        if crowded is None:
            return frozenset()
        return frozenset(r for r in back if closes_a_circle(r, routes - {r}, self._stage_of, crowded))

    def _whole(self, plan: Plan) -> Plan:
        return plan if self._rounds == 1 else {peer: (*routes,) * self._rounds for peer, routes in plan.items()}


def _last(expected: Forecast) -> PeerId:
    """The data node that is done last."""
    return max(expected.finish_s, key=lambda peer: (expected.finish_s[peer], peer))


def _gain(now: float, then: float) -> float:
    if math.isinf(now):
        return 0.0 if math.isinf(then) else 1.0
    return 1 - then / now if now > 0 else 0.0
