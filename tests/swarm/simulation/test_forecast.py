"""The forecast plays the world's rules, slots and all; and microbatches that block each other are seen to."""

from __future__ import annotations

import math
import random

import pytest

from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import order_tree, orders
from swarm.simulation.forecast import forecast
from tests.swarm.routing.small_swarms import RULES, makespan_by_clockwork, names, swarm


def test_a_lone_microbatch_takes_its_round_trip() -> None:
    costs = swarm([1, 2, 2])
    route = names("1.1", "2.0")
    played = forecast(costs, {costs.data_nodes[0]: [route]})
    assert played.makespan_s == pytest.approx(costs.round_trip_s(costs.data_nodes[0], route))
    assert played.waiting_s() == pytest.approx(0)


def test_a_second_microbatch_waits_for_the_first() -> None:
    costs = swarm([2, 1])
    played = forecast(costs, {peer: [names("1.0")] for peer in costs.data_nodes})
    assert played.waiting_s() > 0


@pytest.mark.parametrize("seed", range(12))
def test_it_agrees_with_the_same_rules_written_a_second_time(seed: int) -> None:
    rng = random.Random(seed)
    forward = {f"{stage}.{k}": rng.uniform(0.3, 2) for stage in range(6) for k in range(3)}
    costs = swarm([3] * 6, forward)
    trees = list(orders(order_tree(RULES, frozenset(), frozenset(range(1, 6)))))

    def route() -> tuple[str, ...]:
        return tuple(rng.choice(costs.stages[stage]) for stage in rng.choice(trees))

    plan = {peer: [names(*route()) for _ in range(5)] for peer in costs.data_nodes}
    assert forecast(costs, plan).makespan_s == pytest.approx(makespan_by_clockwork(costs, plan))


def crossing(slots: int) -> tuple[Costs, dict[str, list[tuple[str, ...]]]]:
    """Two data nodes whose microbatches visit the same two peers in opposite orders."""
    costs = swarm([2, 1, 1], slots=slots)
    return costs, {"0.0": [names("1.0", "2.0")] * 3, "0.1": [names("2.0", "1.0")] * 3}


def test_opposite_orders_with_too_few_slots_block_for_good_and_the_forecast_says_so() -> None:
    costs, plan = crossing(slots=1)
    assert math.isinf(forecast(costs, plan).makespan_s)


def test_opposite_orders_do_no_harm_where_there_is_a_slot_for_everyone() -> None:
    costs, plan = crossing(slots=1)
    roomy = Costs(costs.stages, costs.forward_s, costs.message_s, {**costs.slots, "1.0": 2, "2.0": 2})
    assert math.isfinite(forecast(roomy, plan).makespan_s)


@pytest.mark.parametrize("seed", range(20))
def test_orders_that_only_go_up_never_block_however_few_the_slots(seed: int) -> None:
    rng = random.Random(seed)
    costs = swarm([4, 1, 1, 1, 1, 1], slots=1)
    upward = {
        peer: [tuple(costs.stages[stage][0] for stage in sorted(rng.sample(range(1, 6), 3))) for _ in range(4)]
        for peer in costs.data_nodes
    }
    assert math.isfinite(forecast(costs, upward).makespan_s)
