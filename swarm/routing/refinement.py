"""One data node's search for better routes of its own microbatches, once all lanes are agreed.

Lanes are agreed for the mean: a formula says what they cost. What first come, first served makes of thirty microbatches
that meet at peers with few slots no formula tells, so here a forecast of all routes in the book says whether a change
helps, and the formula only says in which order changes are tried: those first that save a microbatch the most, what
they cost others included.

A change is taken when the last data node is done sooner, or no later and the mean one sooner. All changes here leave
the sum of visits of each stage as it was, and touch nobody else's routes, so nobody has to agree to them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from swarm.routing.cost_model import Costs, Route
from swarm.routing.deadlock import closes_a_circle, crowded_by
from swarm.routing.path_rules import PathRules, order_tree, orders
from swarm.routing.route_forecast import Forecast, RouteForecast, Routes
from swarm.routing.route_search import NEAREST, cheapest_by_set
from swarm.vocabulary.types import PeerId

URGENCY_POWER = 6
"""How much less a data node counts that is done earlier than the last one."""
NOISE = 0.05
"""Of the last finish, added to what a change seems to save: so that what the formula does not see is tried in turn."""
MOST_ORDERS = 64
"""Of one set of stages that are looked at."""
LEAST_GAIN_S = 1e-6
PRIORS = {"replica": 3.0, "order": 3.0, "launch": 2.0, "exchange": 2.0}
"""Successes that each kind of change is taken to have had before the first trial."""
GAIN_WEIGHT = 100.0
"""Of the relative gain that a kind has brought, beside one success."""

Plan = dict[PeerId, tuple[Route, ...]]
"""The routes of each data node's microbatches in launch order."""
Change = tuple[tuple[int, Route], ...]
"""New routes for some of the microbatches."""


@dataclass(frozen=True, slots=True)
class Refined:
    """What a turn has come to.

    Args:
        routes: of the own microbatches in launch order.
        forecasts: that were made.
    """

    routes: tuple[Route, ...]
    expected: Forecast
    forecasts: int


class Refinement:
    """Of one data node.

    Args:
        own: the data node.
        costs: as it takes them to be.
        rounds: how often each data node goes through its routes in a forecast; 2 where they launch as fast as they can.
    """

    def __init__(self, own: PeerId, costs: Costs, rules: PathRules, rounds: int = 1) -> None:
        self._own, self._costs, self._rules, self._rounds = own, costs, rules, rounds
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
                changed = self._with(whole, change)
                used += 1
                found = self._forecast.within(self._whole(changed), expected.worth[0] + LEAST_GAIN_S)
                if found is not None and _is_better(found, expected) and self._circles(changed) <= circles:
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

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _whole(self, plan: Routes) -> Routes:
        return plan if self._rounds == 1 else {peer: (*routes,) * self._rounds for peer, routes in plan.items()}

    def _with(self, plan: Plan, change: Change) -> Plan:
        routes = list(plan[self._own])
        for place, route in change:
            routes[place] = route
        return {**plan, self._own: tuple(routes)}

    def _is_last(self, expected: Forecast) -> bool:
        return expected.finish_s[self._own] >= expected.worth[0] - LEAST_GAIN_S

    def _note(self, kind: str, before: Forecast, after: Forecast) -> None:
        gained = (before.worth[0] - after.worth[0]) + 0.1 * (before.worth[1] - after.worth[1])
        self._trials[kind] += 1
        self._successes[kind] += 1 + GAIN_WEIGHT * max(0.0, gained) / before.worth[0]

    def _circles(self, plan: Plan) -> frozenset[Route]:
        """The routes with a step back that may be part of a circle of microbatches that wait for each other."""
        routes = {route for singles in plan.values() for route in singles}
        crowded = crowded_by(plan, self._costs)
        return frozenset(r for r in routes if closes_a_circle(r, routes - {r}, self._stage_of, crowded))

    def _changes(self, plan: Plan, expected: Forecast) -> Iterator[tuple[str, Change]]:
        """All changes that there are, the kinds in turn as their record is, each kind's most promising first."""
        scored = _Scored(self, plan, expected)
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


def _is_better(found: Forecast, expected: Forecast) -> bool:
    last, mean = found.worth
    before, mean_before = expected.worth
    return last < before - LEAST_GAIN_S or (last < before + LEAST_GAIN_S and mean < mean_before - LEAST_GAIN_S)


class _Scored:
    """The changes of one plan, each with the seconds that it seems to cost: negative where it saves some."""

    def __init__(self, of: Refinement, plan: Plan, expected: Forecast) -> None:
        self._of, self._costs, self._rules = of, of._costs, of._rules
        self._routes = plan[of._own]
        self._waited = expected.waited_s[of._own]
        self._length = len(self._routes)
        last = expected.worth[0]
        urgency = {
            peer: (finish / last) ** URGENCY_POWER if last > 0 else 1.0 for peer, finish in expected.finish_s.items()
        }
        self._urgency = urgency[of._own]
        costs = self._costs
        waiting: dict[PeerId, float] = {}
        visits: dict[PeerId, int] = {}
        foreign: dict[PeerId, float] = {}
        own: dict[PeerId, int] = {}
        for data_node, routes in plan.items():
            weight = urgency[data_node]
            for route, waited in zip(routes, expected.waited_s[data_node], strict=False):
                end = len(waited) - 2
                for hop, peer in enumerate(route):
                    waiting[peer] = waiting.get(peer, 0.0) + waited[hop + 1] + waited[end - hop]
                    visits[peer] = visits.get(peer, 0) + 1
                    if data_node == of._own:
                        own[peer] = own.get(peer, 0) + 1
                    else:
                        foreign[peer] = foreign.get(peer, 0.0) + weight
        factor = 1 + costs.backward_factor
        self._compute = {peer: factor * seconds for peer, seconds in costs.forward_s.items()}
        self._time = {
            peer: c + waiting.get(peer, 0.0) / max(1, visits.get(peer, 0)) for peer, c in self._compute.items()
        }
        crowd = {peer: costs.service_s(peer) ** 2 / max(last, 1e-9) for peer in costs.forward_s}
        self._harm = {peer: crowd[peer] * foreign.get(peer, 0.0) for peer in crowd}
        self._own_harm = {peer: crowd[peer] * self._urgency * own.get(peer, 0) for peer in crowd}

    def _waits(self, place: int, hop: int) -> float:
        waited = self._waited[place]
        return waited[hop + 1] + waited[len(waited) - 2 - hop]

    def _links_s(self, route: Route) -> float:
        message, here, total = self._costs.message_s, self._of._own, 0.0
        for there in (*route, self._of._own):
            total += message[here][there]
            here = there
        return 2 * total

    def _blocks(self) -> list[tuple[int, ...]]:
        """Each microbatch, all on the same route, and the two halves of these."""
        alike: dict[Route, list[int]] = {}
        for place, route in enumerate(self._routes):
            alike.setdefault(route, []).append(place)
        blocks: list[tuple[int, ...]] = [(place,) for place in range(self._length)]
        for places in alike.values():
            if len(places) > 1:
                blocks.append(tuple(places))
            if len(places) > 3:
                blocks += [tuple(places[0::2]), tuple(places[1::2])]
        return blocks

    def replicas(self) -> Iterator[tuple[float, Change]]:
        """Another replica for one hop of a block."""
        for block in self._blocks():
            route = self._routes[block[0]]
            links_s = self._links_s(route)
            for hop, peer in enumerate(route):
                waited = math.fsum(self._waits(place, hop) for place in block) / len(block)
                for other in self._near(self._of._stage_of[peer]):
                    if other in route:
                        continue
                    changed = (*route[:hop], other, *route[hop + 1 :])
                    seconds = self._links_s(changed) - links_s + self._time[other] - self._compute[peer] - waited
                    harm = self._harm[other] + self._own_harm[other] - self._harm[peer]
                    yield self._urgency * seconds + harm, tuple((place, changed) for place in block)

    def _near(self, stage: int) -> Sequence[PeerId]:
        peers = self._costs.stages[stage]
        if len(peers) <= NEAREST:
            return peers
        message = self._costs.message_s[self._of._own]
        return sorted(peers, key=lambda peer: 2 * message[peer] + self._time[peer] + self._harm[peer])[:NEAREST]

    def orders(self) -> Iterator[tuple[float, Change]]:
        """The same peers in another order."""
        stage_of = self._of._stage_of
        for block in self._blocks():
            route = self._routes[block[0]]
            by_stage = {stage_of[peer]: peer for peer in route}
            links_s = self._links_s(route)
            waited = math.fsum(math.fsum(self._waited[place]) for place in block) / len(block)
            for order in islice(orders(order_tree(self._rules, frozenset(by_stage))), MOST_ORDERS):
                changed = tuple(by_stage[stage] for stage in order)
                if changed != route:
                    seconds = self._links_s(changed) - links_s - 0.5 * waited
                    yield self._urgency * seconds, tuple((place, changed) for place in block)

    def launches(self) -> Iterator[tuple[float, Change]]:
        """Two microbatches change places."""
        waited = [math.fsum(row) for row in self._waited]
        for one in range(self._length):
            for two in range(one + 1, self._length):
                first, second = self._routes[one], self._routes[two]
                if first != second:
                    yield -self._urgency * (waited[one] + waited[two]), ((one, second), (two, first))

    def exchanges(self) -> Iterator[tuple[float, Change]]:
        """Two microbatches exchange a stage that only one of them visits."""
        stage_of = self._of._stage_of
        stages = [frozenset(stage_of[peer] for peer in route) for route in self._routes]
        bids: dict[tuple[Route, int, int], tuple[float, Route] | None] = {}

        def bid(place: int, given: int, taken: int) -> tuple[float, Route] | None:
            route = self._routes[place]
            key = route, given, taken
            if key not in bids:
                bids[key] = self._bid(place, route, stages[place], given, taken)
            return bids[key]

        for one in range(self._length):
            for two in range(one + 1, self._length):
                for given in stages[one] - stages[two]:
                    for taken in stages[two] - stages[one]:
                        first, second = bid(one, given, taken), bid(two, taken, given)
                        if first is not None and second is not None:
                            yield first[0] + second[0], ((one, first[1]), (two, second[1]))

    def _bid(
        self, place: int, route: Route, stages: frozenset[int], given: int, taken: int
    ) -> tuple[float, Route] | None:
        """What it seems to cost to visit one stage instead of another, the other peers staying."""
        stage_of = self._of._stage_of
        wanted = stages - {given} | {taken}
        peers: list[tuple[PeerId, ...]] = [()] * len(self._costs.stages)
        for peer in route:
            peers[stage_of[peer]] = (peer,)
        peers[taken] = tuple(self._near(taken))
        price = {
            peer: self._time[peer] + self._harm[peer] / max(self._urgency, 1e-3) for group in peers for peer in group
        }
        found = cheapest_by_set(self._costs, self._of._own, price, order_tree(self._rules, wanted), among=peers)
        best = found.get(wanted)
        if best is None:
            return None
        now = self._links_s(route) + math.fsum(
            self._compute[peer] + self._waits(place, hop) + self._harm[peer] / max(self._urgency, 1e-3)
            for hop, peer in enumerate(route)
        )
        return self._urgency * (best.price - now), best.route
