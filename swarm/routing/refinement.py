"""One data node's search for better routes of its own microbatches, once all lanes are agreed.

Lanes are agreed for the mean: a formula says what they cost. What first come, first served makes of thirty microbatches
that meet at peers with few slots no formula tells, so here a forecast of all routes in the book says whether a change
helps, and the formula only says in which order changes are tried: those first that save a microbatch the most, what
they cost others included.

A change is taken when the last data node is done sooner, or no later and the mean one sooner. All changes leave the sum
of visits of each stage as it was. Those of the own routes alone nobody has to agree to; an exchange of stages with
another data node is offered to it, and it judges by a forecast of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.deadlock import closes_a_circle, crowded_by
from swarm.routing.path_rules import PathRules
from swarm.routing.route_changes import Change, RouteChanges
from swarm.routing.route_forecast import Forecast, RouteForecast, Routes
from swarm.vocabulary.types import PeerId

WORTH_TELLING = 0.0005, 0.01
"""Share by which the last data node must be done sooner, or all in the mean, for others to hear of a change."""
WORTH_ASKING = 0.003, 0.02
"""Likewise for an exchange, which takes two more messages and binds another data node for their time."""
PARTNERS = 3
"""Data nodes that are asked for an exchange: those that are done first."""
MOST_ROUTES = 6
"""Of each side that are looked at for an exchange, those that take longest."""
NOISE = 0.05
"""Of the last finish, added to what a change seems to save: so that what the formula does not see is tried in turn."""
LEAST_GAIN_S = 1e-6
MOST_LATER = 1.5
"""The last data node may be done so many times later for the sake of the pace of all."""
URGENCY_POWER = 6
"""How much less a data node counts that is done earlier than the last one."""
PRIORS = {"replica": 3.0, "order": 3.0, "launch": 2.0, "exchange": 2.0}
"""Successes that each kind of change is taken to have had before the first trial."""
GAIN_WEIGHT = 100.0
"""Of the relative gain that a kind has brought, beside one success."""

Plan = dict[PeerId, tuple[PeerRoute, ...]]
"""The routes of each data node's microbatches in launch order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A stage of one of our microbatches for a stage of another data node's: the new routes of both.

    Args:
        place: of our microbatch in launch order.
        other: the other data node.
    """

    place: int
    route: PeerRoute
    other: PeerId
    other_place: int
    other_route: PeerRoute


@dataclass(frozen=True, slots=True)
class Refined:
    """What a turn has come to.

    Args:
        routes: of the own microbatches in launch order.
        forecasts: that were made.
    """

    routes: tuple[PeerRoute, ...]
    expected: Forecast
    forecasts: int


class Refinement:
    """Of one data node.

    Args:
        own: the data node.
        costs: as it takes them to be.
        rounds: how often each data node goes through its routes in a forecast.
        is_free: whether they launch as fast as they can. Then what counts is the pace of all together, and not when the
            last one is done: nobody waits for it.
    """

    def __init__(self, own: PeerId, costs: Costs, rules: PathRules, rounds: int = 1, *, is_free: bool = False) -> None:
        self._own, self._costs, self._rules, self._rounds = own, costs, rules, rounds
        self._is_free = is_free
        self._forecast = RouteForecast(costs)
        self._stage_of = costs.stage_of()
        self._rng = random.Random(f"{own}")  # noqa: S311 - which changes are tried first, not a secret
        self._successes = dict(PRIORS)
        self._trials = dict(PRIORS)

    def expected(self, plan: Routes) -> Forecast:
        """When everybody is done by the own costs, and who waits where; infinite when never."""
        return self._forecast.of(self._whole(plan))

    def improve(self, plan: Routes, expected: Forecast, allowance: int) -> Refined:
        """Better routes for the own microbatches, with so many forecasts at most.

        The turn ends early when nothing is left to try, and after half of them when another data node is the last.

        Args:
            expected: of the plan.
        """
        whole = {data_node: tuple(routes) for data_node, routes in plan.items()}
        used, circles = 0, self._circles(whole)
        while used < allowance and math.isfinite(expected.worth[0]):
            if 2 * used > allowance and not self._is_last(expected):
                break
            better = None
            for kind, change in self._changes(whole, expected):
                changed = _with(whole, self._own, change)
                used += 1
                found = self._forecast.within(self._whole(changed), self._limit_s(expected))
                if found is not None and self._is_better(found, expected) and self._circles(changed) <= circles:
                    self._note(kind, expected, found)
                    better = found
                    whole = changed
                    break
                self._trials[kind] += 1
                if used >= allowance:
                    break
            if better is None:
                break
            expected = better
        return Refined(whole[self._own], expected, used)

    def exchange(
        self, plan: Plan, expected: Forecast, allowance: int, is_refused: Callable[[Exchange], bool]
    ) -> Exchange | None:
        """An exchange of stages with another data node that is worth telling, with so many forecasts at most."""
        likely = sorted(self._exchanges(plan, expected), key=lambda found: found[0])
        for _, exchange in islice((found for found in likely if not is_refused(found[1])), allowance):
            if self.helps(plan, expected, self._own, exchange):
                return exchange
        return None

    def answer(self, plan: Plan, expected: Forecast, asking: PeerId, exchange: Exchange) -> PeerRoute | None:
        """Our route in an exchange that another data node asks for, which gives one stage of ours for another; None
        when it is not worth it.

        Args:
            exchange: as the asking one sees it; only the stages of `other_route` count.
        """
        stages = frozenset(self._stage_of[peer] for peer in exchange.other_route)
        changes = self._changes_of(self._own, plan, expected)
        held = changes.stages(exchange.other_place)
        given, taken = held - stages, stages - held
        if len(given) != 1 or len(taken) != 1:
            return None
        swapped = changes.swapped(exchange.other_place, *given, *taken)
        if swapped is None or not self.helps(plan, expected, asking, replace(exchange, other_route=swapped[1])):
            return None
        return swapped[1]

    def helps(self, plan: Plan, expected: Forecast, asking: PeerId, exchange: Exchange) -> bool:
        """Whether an exchange is worth it by our forecast."""
        changed = _with(plan, asking, ((exchange.place, exchange.route),))
        changed = _with(changed, exchange.other, ((exchange.other_place, exchange.other_route),))
        found = self._forecast.within(self._whole(changed), self._limit_s(expected))
        if found is None or not self.is_worth(expected, found, WORTH_ASKING):
            return False
        return self._circles(changed) <= self._circles(plan)

    # ---- what a forecast is worth ----------------------------------------------------------------------------------

    def worth(self, found: Forecast) -> tuple[float, float]:
        """The smaller the better: when the last is done, and all in the mean; where they launch freely the mean by pace
        (the harmonic one), and the last."""
        if not self._is_free:
            return found.worth
        rate = math.fsum(1 / max(finish, LEAST_GAIN_S) for finish in found.finish_s.values())
        return len(found.finish_s) / rate if rate > 0 else math.inf, found.worth[0]

    def is_worth(self, before: Forecast, after: Forecast, least: tuple[float, float]) -> bool:
        """Whether a forecast is better by such a share in its first figure, or in its second while the first is no
        worse."""
        pairs = zip(self.worth(after), self.worth(before), strict=True)
        gains = [1 - then / now if now > 0 else 0.0 for then, now in pairs]
        return gains[0] >= least[0] or (gains[0] >= -1e-9 and gains[1] >= least[1])

    def _is_better(self, found: Forecast, expected: Forecast) -> bool:
        first, second = self.worth(found)
        before, second_before = self.worth(expected)
        return first < before - LEAST_GAIN_S or (
            first < before + LEAST_GAIN_S and second < second_before - LEAST_GAIN_S
        )

    def _limit_s(self, expected: Forecast) -> float:
        """After which a plan cannot be better, or hardly."""
        return (MOST_LATER if self._is_free else 1) * expected.worth[0] + LEAST_GAIN_S

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _exchanges(self, plan: Plan, expected: Forecast) -> Iterator[tuple[float, Exchange]]:
        """With those that are done first, each with the seconds that it seems to cost."""
        finish = expected.finish_s
        others = sorted((peer for peer in plan if peer != self._own), key=lambda peer: (finish[peer], peer))
        ours = self._changes_of(self._own, plan, expected)
        for other in others[:PARTNERS]:
            theirs = self._changes_of(other, plan, expected)
            for place in ours.longest[:MOST_ROUTES]:
                for other_place in theirs.longest[:MOST_ROUTES]:
                    for given in ours.stages(place) - theirs.stages(other_place):
                        for taken in theirs.stages(other_place) - ours.stages(place):
                            one = ours.swapped(place, given, taken)
                            two = theirs.swapped(other_place, taken, given)
                            if one is not None and two is not None:
                                yield one[0] + two[0], Exchange(place, one[1], other, other_place, two[1])

    def _changes_of(self, data_node: PeerId, plan: Plan, expected: Forecast) -> RouteChanges:
        power = 0 if self._is_free else URGENCY_POWER
        return RouteChanges(data_node, self._costs, self._rules, plan, expected, power)

    def _whole(self, plan: Routes) -> Routes:
        return plan if self._rounds == 1 else {peer: (*routes,) * self._rounds for peer, routes in plan.items()}

    def _is_last(self, expected: Forecast) -> bool:
        return self._is_free or expected.finish_s[self._own] >= expected.worth[0] - LEAST_GAIN_S

    def _note(self, kind: str, before: Forecast, after: Forecast) -> None:
        (first, second), (then, second_then) = self.worth(before), self.worth(after)
        gained = (first - then) + 0.1 * (second - second_then)
        self._trials[kind] += 1
        self._successes[kind] += 1 + GAIN_WEIGHT * max(0.0, gained) / first

    def _circles(self, plan: Plan) -> frozenset[PeerRoute]:
        """The routes with a step back that may be part of a circle of microbatches that wait for each other."""
        routes = {route for singles in plan.values() for route in singles}
        crowded = crowded_by(plan, self._costs)
        return frozenset(r for r in routes if closes_a_circle(r, routes - {r}, self._stage_of, crowded))

    def _changes(self, plan: Plan, expected: Forecast) -> Iterator[tuple[str, Change]]:
        """All changes that there are, the kinds in turn as their record is, each kind's most promising first."""
        scored = self._changes_of(self._own, plan, expected)
        noise = NOISE * expected.worth[0]
        left: dict[str, list[tuple[float, int, Change]]] = {}
        for kind, found in (
            ("replica", scored.replicas()),
            ("order", scored.orders()),
            ("launch", scored.launches()),
            ("exchange", scored.exchanges()),
        ):
            ranked = [(score - noise * self._rng.random(), k, change) for k, (score, change) in enumerate(found)]
            left[kind] = sorted(ranked, reverse=True)
        while any(left.values()):
            chance = {
                kind: self._successes[kind] / self._trials[kind] * self._rng.uniform(0.5, 1.5)
                for kind, changes in left.items()
                if changes
            }
            kind = max(chance, key=chance.__getitem__)
            yield kind, left[kind].pop()[2]


def _with(plan: Plan, data_node: PeerId, change: Change) -> Plan:
    routes = list(plan[data_node])
    for place, route in change:
        routes[place] = route
    return {**plan, data_node: tuple(routes)}
