"""The greedy plan: the first choice is the best there is, visits are equal, and it comes home."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import visits
from swarm.simulation.baselines.earliest_return import EarliestReturnOnRing, earliest_return
from swarm.simulation.baselines.one_by_one import one_by_one
from swarm.simulation.forecast import forecast
from swarm.simulation.instance import Instance, Plan
from swarm.simulation.problems import problem
from tests.swarm.routing.small_swarms import names, swarm


def assert_legal_with_equal_visits(instance: Instance, plan: Plan) -> None:
    stage_of = instance.costs.stage_of()
    orders = [[stage_of[peer] for peer in route] for routes in plan.values() for route in routes]
    assert len(orders) == instance.total
    assert {instance.rules.fault(order) for order in orders} == {None}
    counted = visits(orders)
    assert len({counted[stage] for stage in range(1, instance.rules.stages)}) == 1
    assert math.isfinite(forecast(instance.costs, plan).makespan_s)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_legal_and_comes_home(seed: int) -> None:
    instance = problem(seed)
    assert_legal_with_equal_visits(instance, earliest_return(instance))


@pytest.mark.parametrize("seed", range(2))
def test_likewise_with_the_rings_sets_of_stages(seed: int) -> None:
    instance = problem(seed)
    (plan,) = one_by_one(instance, EarliestReturnOnRing)
    assert_legal_with_equal_visits(instance, plan)


def test_the_first_takes_the_nearest_and_the_next_goes_where_nobody_is() -> None:
    costs = swarm([1, 2], {"0.0": 0.1, "1.0": 3.0, "1.1": 3.0}, slots=2)
    instance = Instance("two replicas", costs, PathRules(stages=2, per_path=1), 2)
    assert earliest_return(instance) == {names("0.0")[0]: (names("1.0"), names("1.1"))}


def test_where_routes_that_step_back_would_block_each_other_it_still_comes_home() -> None:
    instance = problem(3)
    tight = replace(instance, costs=replace(instance.costs, slots=dict.fromkeys(instance.costs.slots, 1)))
    assert_legal_with_equal_visits(tight, earliest_return(tight))
