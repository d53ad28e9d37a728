"""The long search and its moves: plans stay legal, visits stay as they were, and the outcome is the seed's."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import visits
from swarm.simulation.baselines.earliest_return import earliest_return
from swarm.simulation.baselines.moves import Moves, Routes
from swarm.simulation.baselines.search import search, search_from_best
from swarm.simulation.forecast import forecast
from swarm.simulation.instance import Instance, Plan, from_json
from swarm.simulation.iteration import Conduct, run_iterations
from swarm.simulation.problems import problem
from tests.swarm.routing.small_swarms import names, swarm

FILES = Path(__file__).parent.parent


def no_clock() -> float:
    return 0.0


def twenty_peers() -> Instance:
    return from_json(json.loads((FILES / "twenty_peers.json").read_text()))


def planned(instance: Instance) -> Plan:
    return run_iterations(instance, Conduct(), no_clock)[-1].plan


def orders_of(instance: Instance, plan: Plan) -> list[list[int]]:
    stage_of = instance.costs.stage_of()
    return [[stage_of[peer] for peer in route] for routes in plan.values() for route in routes]


def assert_same_work(instance: Instance, plan: Plan, start: Plan) -> None:
    assert {peer: len(routes) for peer, routes in plan.items()} == {peer: len(routes) for peer, routes in start.items()}
    assert visits(orders_of(instance, plan)) == visits(orders_of(instance, start))
    assert {instance.rules.fault(order) for order in orders_of(instance, plan)} == {None}


@pytest.mark.parametrize("instance", [twenty_peers(), problem(1), problem(5)], ids=lambda instance: instance.name)
def test_the_search_finds_a_better_plan_for_the_same_work(instance: Instance) -> None:
    start = earliest_return(instance)
    found = search(instance, start, math.inf, no_clock, seed=3, most_forecasts=300)
    assert found.forecasts == 300
    assert found.makespan_s == pytest.approx(forecast(instance.costs, found.plan).makespan_s)
    assert found.makespan_s < forecast(instance.costs, start).makespan_s
    assert_same_work(instance, found.plan, start)


def test_the_seed_decides_what_is_found() -> None:
    instance = twenty_peers()
    start = planned(instance)
    first, again, other = (search(instance, start, math.inf, no_clock, seed, 300) for seed in (1, 1, 2))
    assert first == again
    assert first.plan != other.plan or first.makespan_s == forecast(instance.costs, start).makespan_s


def test_the_search_ends_when_its_clock_says_so() -> None:
    instance, ticks = twenty_peers(), itertools.count()
    found = search(instance, planned(instance), 100.0, lambda: float(next(ticks)), seed=0)
    assert 1 < found.forecasts <= 101
    with pytest.raises(ValueError, match="bound"):
        search(instance, planned(instance), math.inf, no_clock)


def test_a_search_from_the_best_of_several_starts_is_no_worse_than_any() -> None:
    instance = twenty_peers()
    starts = [planned(instance), earliest_return(instance)]
    found = search_from_best(instance, starts, math.inf, no_clock, most_forecasts=200)
    assert found.forecasts == 200
    assert found.makespan_s <= min(forecast(instance.costs, start).makespan_s for start in starts)


def test_a_start_that_blocks_itself_is_walked_in_the_order_of_stages() -> None:
    costs = swarm([2, 1, 1], slots=1)
    rules = PathRules(stages=3, per_path=2, max_forward_jump=2, max_back_stops=1, max_back_distance=1)
    start = {names("0.0")[0]: (names("1.0", "2.0"),) * 3, names("0.1")[0]: (names("2.0", "1.0"),) * 3}
    assert math.isinf(forecast(costs, start).makespan_s)
    found = search(Instance("crossing", costs, rules, 3), start, math.inf, no_clock, most_forecasts=50)
    assert found.makespan_s == pytest.approx(forecast(costs, found.plan).makespan_s)
    assert math.isfinite(found.makespan_s)


def test_a_plan_that_cannot_be_changed_is_given_back() -> None:
    costs = swarm([1, 1])
    instance = Instance("lone", costs, PathRules(stages=2, per_path=1), 2)
    start = {costs.data_nodes[0]: (names("1.0"),) * 2}
    found = search(instance, start, math.inf, no_clock, most_forecasts=20)
    assert (found.plan, found.forecasts) == (start, 1)


@pytest.mark.parametrize("seed", range(4))
def test_every_move_keeps_the_rules_and_the_visits(seed: int) -> None:
    instance = problem(seed)
    start = earliest_return(instance)
    moves = Moves(instance.costs, instance.rules, random.Random(seed))
    routes: Routes = {peer: list(own) for peer, own in start.items()}
    kinds = (
        moves.replica_of_one,
        moves.replica_of_all_alike,
        moves.order_of_one,
        moves.order_of_all_alike,
        moves.launch_order,
        moves.exchange,
        moves.exchange_of_all_alike,
        moves.swap,
    )
    changed = dict.fromkeys(kinds, 0)
    for kind in kinds * 25:
        change = kind(routes)
        changed[kind] += bool(change)
        for (data_node, number), route in change.items():
            routes[data_node][number] = route
        assert_same_work(instance, {peer: tuple(own) for peer, own in routes.items()}, start)
    steps_back = instance.rules.max_back_stops > 0
    assert all(times for kind, times in changed.items() if steps_back or "order_of" not in kind.__name__)
