"""How good plans are on problems that nobody tuned planning for, beside a short search and the greedy plan."""

from __future__ import annotations

import math
from functools import cache

import pytest

from swarm.simulation.baselines.earliest_return import earliest_return
from swarm.simulation.baselines.search import search_from_best
from swarm.simulation.forecast import forecast
from swarm.simulation.iteration import Conduct, Iteration, run_iterations
from swarm.simulation.problems import problem

BAR = 1.4
"""Makespan as planned over that of the search, at most."""
FORECASTS = 2000
SEEDS = (2, 5, 6)
"""One of each kind of links."""


def no_clock() -> float:
    return 0.0


@cache
def planned(seed: int) -> Iteration:
    return run_iterations(problem(seed), Conduct(), no_clock)[-1]


@cache
def greedy_s(seed: int) -> float:
    instance = problem(seed)
    return forecast(instance.costs, earliest_return(instance)).makespan_s


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_not_far_from_what_a_search_finds(seed: int) -> None:
    instance = problem(seed)
    starts = [planned(seed).plan, earliest_return(instance)]
    found = search_from_best(instance, starts, math.inf, no_clock, most_forecasts=FORECASTS)
    assert planned(seed).played.makespan_s <= BAR * found.makespan_s


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_never_worse_than_the_greedy_one(seed: int) -> None:
    assert planned(seed).played.makespan_s <= greedy_s(seed)
