"""The planner's forecast is the world's, task by task, whatever the routes; and it gives up only what is too late."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

import swarm.routing.plans.route_forecast as module_under_test
from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.path_rules import order_tree, orders
from swarm.routing.plans.route_forecast import Forecast, RouteForecast
from swarm.simulation.forecast import forecast
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.small_swarms import RULES, names, swarm

ORDERS = list(orders(order_tree(RULES, frozenset(), frozenset(range(1, 6)))))
Plan = dict[PeerId, Sequence[PeerRoute]]


def some_swarm(rng: random.Random) -> Costs:
    """Unequal peers, few slots, and in half of them figures that coincide."""
    step = rng.choice((0.0, 0.5))
    forward = {f"{stage}.{k}": rng.uniform(0.3, 2) if step == 0 else 0.5 for stage in range(6) for k in range(3)}
    costs = swarm([3] * 6, forward)
    slots = {peer: rng.randint(1, 4) for peer in costs.slots}
    return replace(costs, slots=slots, task_overhead_s=rng.choice((0.0, 0.13)))


def some_plan(costs: Costs, rng: random.Random) -> Plan:
    def route() -> PeerRoute:
        return tuple(rng.choice(costs.stages[stage]) for stage in rng.choice(ORDERS))

    return {peer: [route() for _ in range(rng.randint(0, 6))] for peer in costs.data_nodes}


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_worlds_forecast(seed: int) -> None:
    rng = random.Random(seed)
    costs = some_swarm(rng)
    plan = some_plan(costs, rng)
    world, own = forecast(costs, plan), RouteForecast(costs).of(plan)
    if math.isinf(world.makespan_s):
        assert own.worth[0] == math.inf, "they wait for each other for ever"
        return
    assert own.finish_s == pytest.approx(dict(world.finish_s), abs=1e-9)
    for (data_node, place), tasks in world.tasks.items():
        waited = [task.start - task.arrival for task in tasks]
        assert list(own.waited_s[data_node][place]) == pytest.approx(waited, abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_is_given_up_exactly_when_it_ends_after_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    costs = some_swarm(rng)
    plan, known = some_plan(costs, rng), RouteForecast(costs)
    whole = known.of(plan)
    if math.isinf(whole.worth[0]):
        assert known.within(plan, 1e6) is None
        return
    last = whole.worth[0]
    assert known.within(plan, last + 1e-6) == whole
    assert known.within(plan, last - 1e-6) is None


def test_a_route_alone_takes_its_round_trip() -> None:
    costs = swarm([1, 2, 2])
    own, route = costs.data_nodes[0], names("1.1", "2.0")
    assert RouteForecast(costs).alone_s(own, route) == pytest.approx(costs.round_trip_s(own, route))


def test_of_two_the_last_one_counts_then_the_mean() -> None:
    one, two, three = PeerId("a"), PeerId("b"), PeerId("c")
    assert Forecast({one: 3.0, two: 1.0}).worth < Forecast({one: 4.0, three: 0.0}).worth
    assert Forecast({one: 3.0, two: 1.0}).worth < Forecast({one: 3.0, two: 2.0}).worth
    assert Forecast({}).worth == (0.0, 0.0)


def test_known_routes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MAX_ROWS", 2)
    costs = swarm([1, 3])
    known = RouteForecast(costs)
    for peer in ("1.0", "1.1", "1.2"):
        known.alone_s(costs.data_nodes[0], names(peer))
    assert len(known._rows) <= 2
