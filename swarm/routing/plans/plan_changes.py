"""In which order changes of a plan are tried: what they seem to save by a formula (`route_changes`), and how often
changes of their kind have helped.

Most are of the data node that is done last: another replica, another order of stages or of launches, an exchange of a
stage between two of its microbatches, or with those data nodes that are done first, for one microbatch or for all on
the same route. Those that use the most of its peers may give way, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import PathRules
from swarm.routing.plans.route_changes import Change, Plan, RouteChanges
from swarm.routing.plans.route_forecast import Forecast
from swarm.vocabulary.types import PeerId

PARTNERS = 3
"""Data nodes with which stages are exchanged: those that are done first."""
GIVING_WAY = 2
"""Data nodes that may take other replicas for the sake of another."""
MOST_ROUTES = 6
"""Of each side that are looked at for an exchange, those that take longest."""
NOISE = 0.05
"""Of the last finish, added to what a change seems to save: so that what the formula does not see is tried in turn."""
URGENCY_POWER = 6
"""How much less a data node counts that is done earlier than the last one."""
PRIORS = {"replica": 3.0, "order": 3.0, "route": 3.0, "launch": 2.0, "own exchange": 2.0, "exchange": 3.0, "way": 2.0}
"""Successes that each kind of change is taken to have had before the first trial."""
WEIGHT = {"route": 10}
"""How many others it takes as long as to find one change of a kind."""
GAIN_WEIGHT = 100.0
"""Of the relative gain that a kind has brought, beside one success."""

PlanChange = tuple[tuple[PeerId, Change], ...]
"""New routes for some of the microbatches of some data nodes."""


class PlanChanges:
    """The changes that one data node tries.

    Args:
        own: the data node; each tries changes that seem alike in another order.
    """

    def __init__(self, own: PeerId, costs: Costs, rules: PathRules, *, is_free: bool = False) -> None:
        self._costs, self._rules, self._is_free = costs, rules, is_free
        self._rng = random.Random(f"{own}")  # noqa: S311 - which changes are tried first, not a secret
        self._successes = dict(PRIORS)
        self._trials = dict(PRIORS)
        self.scored = 0
        """Changes that were weighed by the formula so far."""

    def helped(self, kind: str, gain: float) -> None:
        """A change of this kind was taken, and brought such a share."""
        self._trials[kind] += 1
        self._successes[kind] += 1 + GAIN_WEIGHT * max(0.0, gain)

    def failed(self, kind: str) -> None:
        """A change of this kind did not help."""
        self._trials[kind] += 1

    def likely(self, plan: Plan, expected: Forecast) -> Iterator[tuple[str, PlanChange]]:
        """All changes that are looked at, the kinds in turn as their record is, each kind's most promising first."""
        noise = NOISE * expected.worth[0]
        left: dict[str, list[tuple[float, int, PlanChange]]] = {}
        for kind, found in self._scored(plan, expected):
            ranked = [(score - noise * self._rng.random(), k, change) for k, (score, change) in enumerate(found)]
            left[kind] = sorted(ranked, reverse=True)
            self.scored += WEIGHT.get(kind, 1) * len(ranked)
        while any(left.values()):
            chance = {
                kind: self._successes[kind] / self._trials[kind] * self._rng.uniform(0.5, 1.5)
                for kind, changes in left.items()
                if changes
            }
            kind = max(chance, key=chance.__getitem__)
            yield kind, left[kind].pop()[2]

    def _scored(self, plan: Plan, expected: Forecast) -> Iterator[tuple[str, list[tuple[float, PlanChange]]]]:
        """By kind, each with the seconds that it seems to cost."""
        ranked = self._by_need(plan, expected)
        last, others = ranked[0], ranked[1:]
        ours = self._changes_of(last, plan, expected)
        for kind, found in (
            ("replica", ours.replicas()),
            ("order", ours.orders()),
            ("route", ours.routes(MOST_ROUTES)),
            ("launch", ours.launches()),
            ("own exchange", ours.exchanges()),
        ):
            yield kind, [(score, ((last, change),)) for score, change in found]
        visited = {peer for route in plan[last] for peer in route}
        met = {other: sum(peer in visited for route in plan[other] for peer in route) for other in others}
        changes = {other: self._changes_of(other, plan, expected) for other in others[-PARTNERS:]}
        way: list[tuple[float, PlanChange]] = []
        for other in sorted(others, key=lambda other: (-met[other], other))[:GIVING_WAY]:
            theirs = changes.get(other) or self._changes_of(other, plan, expected)
            way += [(score, ((other, change),)) for score, change in theirs.replicas()]
        yield "way", way
        exchanges: list[tuple[float, PlanChange]] = []
        for other, theirs in changes.items():
            exchanges += _exchanges(plan, (last, ours), (other, theirs))
        yield "exchange", exchanges

    def _by_need(self, plan: Plan, expected: Forecast) -> Sequence[PeerId]:
        """Data nodes, those first whose microbatches should be home sooner; any where each counts for itself."""
        ranked = sorted(plan, key=lambda peer: (-expected.finish_s[peer], peer))
        if self._is_free:
            self._rng.shuffle(ranked)
        return ranked

    def _changes_of(self, data_node: PeerId, plan: Plan, expected: Forecast) -> RouteChanges:
        power = 0 if self._is_free else URGENCY_POWER
        return RouteChanges(data_node, self._costs, self._rules, plan, expected, power)


def _exchanges(
    plan: Plan, one: tuple[PeerId, RouteChanges], two: tuple[PeerId, RouteChanges]
) -> Iterator[tuple[float, PlanChange]]:
    """A stage of one data node's microbatches for a stage of another's: of one of each, or of as many as are on the
    same routes."""
    (own, ours), (other, theirs) = one, two
    for place in ours.longest[:MOST_ROUTES]:
        alike = _alike(plan[own], place)
        for other_place in theirs.longest[:MOST_ROUTES]:
            count = min(len(alike), len(other_alike := _alike(plan[other], other_place)))
            for given in ours.stages(place) - theirs.stages(other_place):
                for taken in theirs.stages(other_place) - ours.stages(place):
                    mine, yours = ours.swapped(place, given, taken), theirs.swapped(other_place, taken, given)
                    if mine is None or yours is None:
                        continue
                    for n in {1, count}:
                        change = tuple((k, mine[1]) for k in alike[:n]), tuple((k, yours[1]) for k in other_alike[:n])
                        yield mine[0] + yours[0], ((own, change[0]), (other, change[1]))


def _alike(routes: Sequence[object], place: int) -> list[int]:
    """The microbatches on the same route as this one, itself first."""
    return [place, *(k for k, route in enumerate(routes) if route == routes[place] and k != place)]


def changed(plan: Plan, change: PlanChange) -> Plan:
    """The plan after a change."""
    after = dict(plan)
    for data_node, places in change:
        routes = list(after[data_node])
        for place, route in places:
            routes[place] = route
        after[data_node] = tuple(routes)
    return after
