"""Generated problems: all unlike, all possible, each the seed's."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from swarm.routing.path_rules import order_tree, orders
from swarm.routing.plans.route_forecast import RouteForecast
from swarm.routing.stage_balance import fair_sets, lanes_for
from swarm.simulation import problems
from swarm.simulation.instance import Instance
from swarm.simulation.lower_bound import lower_bound_s
from swarm.simulation.problems import problem

SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_problem_is_within_its_ranges_and_visits_can_be_equal(seed: int) -> None:
    made = problem(seed)
    costs, rules = made.costs, made.rules
    assert problems.PEERS[0] <= len(costs.stage_of()) <= problems.PEERS[1]
    assert problems.SKIPPED[0] <= 1 - rules.per_path / rules.skippable <= problems.SKIPPED[1]
    assert min(len(peers) for peers in costs.stages) >= problems.FEWEST_REPLICAS
    assert max(costs.forward_s.values()) <= problems.SPREAD[1] * min(costs.forward_s.values())
    assert {problems.SLOTS[0] <= slots <= problems.SLOTS[1] for slots in costs.slots.values()} == {True}
    lanes = lanes_for(rules, len(costs.data_nodes), made.microbatches)
    sets = fair_sets(rules, lanes * len(costs.data_nodes))
    assert made.microbatches % lanes == 0
    assert len(set(Counter(stage for stages in sets for stage in stages).values())) == 1


def test_problems_are_unlike_and_the_seed_makes_them() -> None:
    made = [problem(seed) for seed in SEEDS]
    assert made[3] == problem(3)
    assert {one.name.rpartition("-")[2] for one in made} == {"clouds", "homes", "lan"}
    assert len({(one.rules, one.microbatches, len(one.costs.data_nodes)) for one in made}) > len(SEEDS) // 2


def homes(seed: int) -> Instance:
    """The problem of the seed, over home links."""
    made, rng = problem(seed), random.Random(seed)
    peers = sorted(made.costs.stage_of())
    return replace(made, costs=replace(made.costs, message_s=problems.homes(peers, rng)))


@pytest.mark.parametrize("seed", range(3))
def test_homes_send_slower_than_they_receive_and_the_bound_counts_both_ways(seed: int) -> None:
    made = homes(seed)
    there = made.costs.message_s
    one, other = made.costs.stages[0][:2]
    assert there[one][other] != there[other][one]
    tree = order_tree(made.rules, frozenset(), frozenset(range(1, made.rules.stages)))
    routes = RouteForecast(made.costs)
    data_node = made.costs.data_nodes[0]
    ways = [
        route
        for order in orders(tree)
        for route in itertools.islice(itertools.product(*(made.costs.stages[stage] for stage in order)), 3000)
    ]
    alone = replace(made, microbatches=1, costs=replace(made.costs, stages=((data_node,), *made.costs.stages[1:])))
    assert lower_bound_s(alone) <= min(routes.alone_s(data_node, route) for route in ways) + 1e-9
