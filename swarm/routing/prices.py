"""Stage prices: each data node keeps the visits of all stages even without an agreement.

A stage costs more the more visits it has had beyond its share, over all data nodes. Each data node announces how often
its microbatches visited each stage; the others learn that a few seconds later and its own visits count at once. So a
data node may visit near stages more often as long as others make up for it.
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

AHEAD: Final = (8.0, 64.0)
"""The least and the most of these visits."""
BEHIND_S: Final = 60.0
"""A stage costs a whole route more once it is ahead by the visits that it gets in this time, in seconds."""
MOST_ROUTES: Final = 2.0
"""Largest price of a stage, either way, in routes."""
MOST_TRUSTED: Final = 2.0
"""Largest launch rate that a data node's announcements count with, in median rates of all data nodes."""
RATE_OVER_S: Final = 60.0
"""Time over which launch rates are averaged, in seconds."""
MAX_ROUTES: Final = 4096
LEAST_SERVICE_S: Final = 1e-9
_HALVINGS: Final = 40


def visit_shares(rules: PathRules, capacities: Sequence[float]) -> list[float]:
    """Shares of the microbatches that should visit each stage after stage 0; they sum to the stages per path.

    Equal, unless the manifest allows unequal visits. Then the shares that let the most microbatches through per second
    within `visit_ratio`, and of these the most equal ones.

    Args:
        capacities: visits per second that each stage can serve.
    """
    per_path, stages = rules.per_path, rules.skippable
    even = per_path / max(1, stages)
    if rules.visit_ratio <= 1 or not 0 < per_path < stages or min(capacities, default=0.0) <= 0:
        return [even] * stages

    def caps(rate: float) -> list[float]:
        """The largest shares at so many microbatches per second."""
        full = [min(1.0, capacity / rate) for capacity in capacities]
        return [min(cap, rules.visit_ratio * min(*full, even)) for cap in full]

    rate = _largest(lambda rate: sum(caps(rate)) >= per_path, math.fsum(capacities) / per_path)
    most = caps(rate)
    level = _largest(lambda level: math.fsum(min(cap, level) for cap in most) <= per_path, 1.0)
    return [min(cap, level) for cap in most]


def _largest(holds: Callable[[float], bool], high: float) -> float:
    """The largest number up to `high` for which a condition holds that holds for all smaller ones."""
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class _Rate:
    """Launches per second, averaged over RATE_OVER_S; over all the time that is known before that."""

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
    """What another data node has announced."""

    incarnation: int
    visits: tuple[int, ...]
    rate: _Rate


class StagePrices:
    """Visit counts of one data node's view, and the prices that follow from them."""

    def __init__(self, rules: PathRules) -> None:
        self._rules = rules
        self.launched = [0] * rules.skippable
        """Visits by stage of our own launched microbatches, as announced to other data nodes."""
        self.shares = visit_shares(rules, ())
        self.excess = [0.0] * rules.skippable
        """Visits beyond its share that each stage after stage 0 has had."""
        self._by_route: OrderedDict[Route, list[float]] = OrderedDict()
        """In a run with experts each route balances its own visits: other data nodes' routes are not known."""
        self._others: dict[PeerId, _Known] = {}
        self._own = 0
        self._own_rate: _Rate | None = None

    @property
    def visits_a_route(self) -> float:
        """Visits beyond its share that make a stage as expensive as a whole route."""
        own = 0.0 if self._own_rate is None else self._own_rate.value
        rate = own + sum(known.rate.value for known in self._others.values())
        least, most = AHEAD
        return min(most, max(least, BEHIND_S * rate * self._rules.per_path / max(1, self._rules.skippable)))

    def prices(self, route: Route, route_s: float) -> list[float]:
        """Seconds to add to a visit to each stage after stage 0.

        Args:
            route: the experts; empty in a run without.
            route_s: what the cheapest route costs.
        """
        excess = self._by_route.get(route, [0.0] * len(self.shares)) if route else self.excess
        return [route_s * each / self.visits_a_route for each in excess]

    def launch(self, stages: Iterable[int], route: Route, among: Collection[int]) -> None:
        """Counts a microbatch of ours.

        Args:
            among: the stages that it could have visited.
        """
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
        """Counts what other data nodes have launched since the last look.

        What one announces counts at most as MOST_TRUSTED times the median launch rate, so one that announces more than
        it launches moves the others little.
        """
        if self._own_rate is None:
            self._own_rate = _Rate(now)
        self._own_rate.add(self._own, now)
        self._own = 0
        before, self._others = self._others, {}
        news: list[tuple[_Known, list[int]]] = []
        for said in data_nodes:
            if len(said.visits) != self._rules.skippable:
                continue
            known = before.get(said.peer)
            if known is None or known.incarnation != said.incarnation:
                known = _Known(said.incarnation, said.visits, _Rate(now))
            self._others[said.peer] = known
            visits = [max(0, new - old) for new, old in zip(said.visits, known.visits, strict=True)]
            known.visits = said.visits
            known.rate.add(sum(visits) / max(1, self._rules.per_path), now)
            news.append((known, visits))
        most = MOST_TRUSTED * median_low([self._own_rate.value, *(known.rate.value for known, _ in news)])
        for known, visits in news:
            self._add(self.excess, visits, min(1.0, most / (known.rate.value or 1.0)), among)

    def _add(self, excess: list[float], visits: Sequence[int], weight: float, among: Collection[int]) -> None:
        """A stage that nobody serves keeps its figure: it has nothing to make up for."""
        total = weight * sum(visits[stage - 1] for stage in among)
        if not total:
            return
        shares = sum(self.shares[stage - 1] for stage in among)
        most = MOST_ROUTES * self.visits_a_route
        for stage in among:
            more = weight * visits[stage - 1] - total * self.shares[stage - 1] / shares
            excess[stage - 1] = min(most, max(-most, excess[stage - 1] + more))
