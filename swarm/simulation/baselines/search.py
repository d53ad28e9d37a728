"""A long central search for a good plan: simulated annealing over the routes of single microbatches.

What is minimized is the makespan by an exact forecast, plus a small share of the mean finish, so that the search sees a
slope where the last data node does not move. How much worse a change may be is drawn before it is forecast; so most
forecasts are given up early. No node could plan like this: it takes a thousand times what planning may cost, and sees
everything at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.routing.deadlock import in_order
from swarm.routing.plans.route_forecast import RouteForecast
from swarm.simulation.baselines.moves import Change, Moves, Routes
from swarm.simulation.forecast import forecast
from swarm.simulation.instance import Instance, Plan

HOT, COLD = 0.005, 0.0007
"""Temperatures at the beginning and at the end, as shares of the first makespan."""
MEAN_SHARE = 0.03
"""How much the mean finish counts beside the last one."""
MEAN_GAIN = 0.03
"""A change that makes the makespan longer may be taken for its gain in the mean, if that is no larger than this share
of it: so the forecast has a limit beforehand."""
EMPTY_TRIES = 10
"""Tries that count as a forecast at least, in a search that is bounded by forecasts."""

Worth = tuple[float, float]
"""The smaller the better: the largest finish, then the mean one; seconds."""


@dataclass(frozen=True, slots=True)
class Searched:
    """The best plan found, its makespan in seconds, and how many plans were forecast."""

    plan: Plan
    makespan_s: float
    forecasts: int


def search(
    instance: Instance,
    start: Plan,
    seconds: float,
    clock: Callable[[], float],
    seed: int = 0,
    most_forecasts: float = math.inf,
) -> Searched:
    """The best plan found from `start` on, which is never worse than `start`; every stage is visited as often as there.

    Args:
        seconds: how long to search, by `clock`; with `math.inf`, and so many forecasts instead, the outcome is
            determined by the seed.

    Raises:
        ValueError: neither bound is finite, or the start blocks itself even if all its routes go up the stages.
    """
    if math.isinf(seconds) and math.isinf(most_forecasts):
        raise ValueError("a search needs a bound")
    annealing = _Annealing(instance, start, seconds, clock, most_forecasts, random.Random(seed))  # noqa: S311
    annealing.run()
    return Searched(annealing.best, annealing.best_worth[0], annealing.forecasts)


def search_from_best(
    instance: Instance,
    starts: Sequence[Plan],
    seconds: float,
    clock: Callable[[], float],
    seed: int = 0,
    most_forecasts: float = math.inf,
) -> Searched:
    """A search from the shortest of several plans; bounds and errors are those of `search`.

    Not from each of them: the first, hot half of a search forgets where it began, so that one of twice the length finds
    more than two.
    """
    makespans_s = [forecast(instance.costs, start).makespan_s for start in starts]
    start = starts[makespans_s.index(min(makespans_s))]
    return search(instance, start, seconds, clock, seed, most_forecasts)


class _Annealing:
    def __init__(
        self,
        instance: Instance,
        start: Plan,
        seconds: float,
        clock: Callable[[], float],
        most_forecasts: float,
        rng: random.Random,
    ) -> None:
        self._forecast = RouteForecast(instance.costs)
        self._moves, self._rng = Moves(instance.costs, instance.rules, rng), rng
        self._clock, self._began = clock, clock()
        self._seconds, self._most = seconds, most_forecasts
        self.forecasts, self._tries = 1, 0
        self.best, self.best_worth = _that_comes_home(instance, start, self._forecast)

    def run(self) -> None:
        """Cools down from the start on, until a bound is used up."""
        rng, worth = self._rng, self.best_worth
        routes: Routes = {data_node: list(own) for data_node, own in self.best.items()}
        hot, cooling = HOT * worth[0], math.log(HOT / COLD)
        while (used := self._used()) < 1:
            self._tries += 1
            change = self._moves.any(routes)
            if not change:
                continue
            allowed = hot * math.exp(-cooling * used) * -math.log(1.0 - rng.random())
            before = _write(routes, change)
            found = self._after(routes, worth, allowed)
            if found is None:
                _write(routes, before)
                continue
            worth = found
            if worth < self.best_worth:
                self.best_worth = worth
                self.best = {data_node: tuple(own) for data_node, own in routes.items()}

    def _after(self, routes: Routes, worth: Worth, allowed: float) -> Worth | None:
        """What a changed plan is worth; None when it is worse than before by more than is allowed."""
        self.forecasts += 1
        limit_s = worth[0] + allowed + MEAN_SHARE * MEAN_GAIN * worth[1]
        played = self._forecast.within(routes, limit_s)
        if played is None or _energy(played.worth) > _energy(worth) + allowed:
            return None
        return played.worth

    def _used(self) -> float:
        """Share of the bound that is used up, whichever is nearer. Tries that come to nothing count a little, so that
        a plan which cannot be changed at all is given up."""
        counted = max(self.forecasts, self._tries / EMPTY_TRIES) / self._most
        return max(counted, (self._clock() - self._began) / self._seconds)


def _energy(worth: Worth) -> float:
    return worth[0] + MEAN_SHARE * worth[1]


def _write(routes: Routes, change: Change) -> Change:
    """Makes a change; returns the one that undoes it."""
    before = {(data_node, number): routes[data_node][number] for data_node, number in change}
    for (data_node, number), route in change.items():
        routes[data_node][number] = route
    return before


def _that_comes_home(instance: Instance, start: Plan, routes: RouteForecast) -> tuple[Plan, Worth]:
    """The start, or if it blocks itself the same routes without steps back; and what it is worth."""
    worth = routes.of(start)
    if worth is None or math.isinf(worth.worth[0]):
        stage_of = instance.costs.stage_of()
        start = {data_node: tuple(in_order(route, stage_of) for route in own) for data_node, own in start.items()}
        worth = routes.of(start)
    if worth is None or math.isinf(worth.worth[0]):
        raise ValueError(f"the plan of {instance.name} to start from blocks itself")
    return start, worth.worth
