"""Stage prices, by which data nodes balance the visits of stages (SkipPipe, arXiv 2502.19913) without an agreement.

A stage costs more if it has had more visits than its share, summed over all data nodes, which announce their visits.
A data node may visit near stages more often if others compensate.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from swarm.routing.path_rules import PathRules
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import PeerId, Route

AHEAD: Final = (8.0, 64.0)  # Smallest and largest value of `visits_a_route`
BEHIND_S: Final = 60.0  # Seconds in which a stage gets the visits that, in excess, raise its price by a whole route
MOST_ROUTES: Final = 2.0  # Largest absolute price of a stage, in routes
MOST_TRUSTED: Final = 1.3  # Largest announced launch rate that counts, in median rates. At 2, a lie cost others 8 %.
RATE_OVER_S: Final = 60.0  # Time over which launch rates are averaged, in seconds
MAX_ROUTES: Final = 4096
LEAST_SERVICE_S: Final = 1e-9
_HALVINGS: Final = 40


def visit_shares(rules: PathRules, capacities: Sequence[float]) -> list[float]:
    """Returns the share of microbatches that should visit each stage after stage 0. The sum is `rules.per_path`.

    If `visit_ratio` allows unequal shares: the most equal ones with the highest throughput, by visits per second.
    """
    per_path, stages = rules.per_path, rules.skippable
    even = per_path / max(1, stages)
    if rules.visit_ratio <= 1 or not 0 < per_path < stages or min(capacities, default=0.0) <= 0:
        return [even] * stages

    def caps(rate: float) -> list[float]:
        """Returns the largest possible share of visits of each stage at `rate` microbatches per second."""
        full = [min(1.0, capacity / rate) for capacity in capacities]
        return [min(cap, rules.visit_ratio * min(*full, even)) for cap in full]

    rate = _largest(lambda rate: sum(caps(rate)) >= per_path, math.fsum(capacities) / per_path)
    most = caps(rate)
    level = _largest(lambda level: math.fsum(min(cap, level) for cap in most) <= per_path, 1.0)
    return [min(cap, level) for cap in most]


def _largest(holds: Callable[[float], bool], high: float) -> float:
    """Returns the largest number up to `high` for which a monotone condition holds, by bisection."""
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class _Rate:
    """Launches per second, averaged over RATE_OVER_S, or over the time since the first sample if shorter."""

    def __init__(self, now: float) -> None:
        self._since = self._last = now
        self.value = 0.0

    def add(self, launched: float, now: float) -> None:
        passed_s, self._last = now - self._last, now
        if passed_s > 0:
            gain = max(1 - math.exp(-passed_s / RATE_OVER_S), passed_s / (now - self._since))
            self.value += gain * (launched / passed_s - self.value)


@dataclass(slots=True)
class _Known:
    """Visits of each stage that another data node announced, and its launch rate."""

    incarnation: int
    visits: tuple[int, ...]
    rate: _Rate


class StagePrices:
    """Prices of stages. They follow from our visits and from the visits that other data nodes announced."""

    def __init__(self, rules: PathRules) -> None:
        self._rules = rules
        self.launched = [0] * rules.skippable  # Visits of our launched microbatches by stage, as announced
        self.shares = visit_shares(rules, ())
        self.excess = [0.0] * rules.skippable  # Visits of each stage after stage 0 beyond its share
        # With experts each route balances its own visits: routes of other data nodes are unknown.
        self._by_route: OrderedDict[Route, list[float]] = OrderedDict()
        self._others: dict[PeerId, _Known] = {}
        self._own = 0
        self._own_rate: _Rate | None = None

    @property
    def visits_a_route(self) -> float:
        """Visits beyond a stage's share at which its price equals the cost of a whole route."""
        own = 0.0 if self._own_rate is None else self._own_rate.value
        rate = own + sum(known.rate.value for known in self._others.values())
        least, most = AHEAD
        return min(most, max(least, BEHIND_S * rate * self._rules.per_path / max(1, self._rules.skippable)))

    def prices(self, route: Route, route_s: float) -> list[float]:
        """Returns the price of a visit to each stage after stage 0, in seconds. `route_s`: cost of a cheapest route."""
        excess = self._by_route.get(route, [0.0] * len(self.shares)) if route else self.excess
        return [route_s * each / self.visits_a_route for each in excess]

    def launch(self, stages: Iterable[int], route: Route, among: Collection[int]) -> None:
        """Counts the stages visited by our launched microbatch. `among`: the stages that it could have visited."""
        visits = [0] * self._rules.skippable
        for stage in stages:
            visits[stage - 1] = 1
            self.launched[stage - 1] += 1
        self._own += 1
        if route:
            excess = self._by_route.setdefault(route, [0.0] * len(self.shares))
            self._by_route.move_to_end(route)
            while len(self._by_route) > MAX_ROUTES:
                self._by_route.popitem(last=False)
        else:
            excess = self.excess
        self._add(excess, visits, 1.0, among)

    def look(self, data_nodes: Iterable[Announcement], among: Collection[int], now: float) -> None:
        """Counts the visits that other data nodes announced since the last call, up to MOST_TRUSTED launch rates."""
        if self._own_rate is None:
            self._own_rate = _Rate(now)
        self._own_rate.add(self._own, now)
        self._own = 0
        before, self._others = self._others, {}
        updates: list[tuple[_Known, list[int]]] = []
        for announced in data_nodes:
            if len(announced.visits) != self._rules.skippable:
                continue
            known = before.get(announced.peer)
            if known is None or known.incarnation != announced.incarnation:
                known = _Known(announced.incarnation, announced.visits, _Rate(now))
            self._others[announced.peer] = known
            visits = [max(0, new - old) for new, old in zip(announced.visits, known.visits, strict=True)]
            known.visits = announced.visits
            known.rate.add(sum(visits) / max(1, self._rules.per_path), now)
            updates.append((known, visits))
        most = MOST_TRUSTED * median_low([self._own_rate.value, *(known.rate.value for known, _ in updates)])
        for known, visits in updates:
            self._add(self.excess, visits, min(1.0, most / (known.rate.value or 1.0)), among)

    def _add(self, excess: list[float], visits: Sequence[int], weight: float, among: Collection[int]) -> None:
        """Adds visits to the excess of the stages in `among`. Other stages could not be visited and keep theirs."""
        total = weight * sum(visits[stage - 1] for stage in among)
        if not total:
            return
        shares = sum(self.shares[stage - 1] for stage in among)
        most = MOST_ROUTES * self.visits_a_route
        for stage in among:
            more = weight * visits[stage - 1] - total * self.shares[stage - 1] / shares
            excess[stage - 1] = min(most, max(-most, excess[stage - 1] + more))
