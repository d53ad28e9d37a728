"""The search for a better plan of all: what it finds, what it leaves as it was, and when it ends."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from swarm.routing.cost_model import Costs
from swarm.routing.deadlock import closes_a_circle, crowded_by
from swarm.routing.path_rules import PathRules, order_tree, orders
from swarm.routing.plans.plan_search import Found, PlanSearch
from swarm.routing.plans.route_changes import Plan
from swarm.routing.stage_balance import fair_sets
from swarm.simulation.forecast import forecast
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.small_swarms import RULES, names, swarm

ALLOWANCE = 20_000
FULL = PathRules(2, 1)


def improved(machine: PlanSearch, plan: Plan, allowance: int = ALLOWANCE) -> Found:
    """What a turn comes to that begins with the plan."""
    return machine.improve(plan, machine.expected(plan), allowance)


def unequal(seed: int) -> tuple[Costs, Plan]:
    """Peers of unlike speeds with few slots, and routes that the ring deals, each stage at a peer by chance."""
    rng = random.Random(seed)
    forward = {f"{stage}.{k}": 0.4 * 8 ** rng.random() for stage in range(6) for k in range(3)}
    costs = swarm([3] * 6, forward)
    costs = replace(costs, slots={peer: rng.randint(2, 4) for peer in costs.slots})
    sets = fair_sets(RULES, 15)
    plan: Plan = {}
    for rank, peer in enumerate(costs.data_nodes):
        dealt = [next(orders(order_tree(replace(RULES, max_back_stops=0), s))) for s in sets[5 * rank : 5 * rank + 5]]
        plan[peer] = tuple(tuple(rng.choice(costs.stages[stage]) for stage in order) for order in dealt)
    return costs, plan


def in_turns(costs: Costs, plan: Plan, rules: PathRules, rounds: int) -> Plan:
    """All data nodes one after the other, so often."""
    machines = [PlanSearch(peer, costs, rules) for peer in plan]
    for _ in range(rounds):
        for machine in machines:
            plan = improved(machine, plan).plan
    return plan


@pytest.mark.parametrize("seed", range(12))
def test_all_are_done_sooner_and_the_sum_of_visits_stays(seed: int) -> None:
    costs, before = unequal(seed)
    after = in_turns(costs, before, RULES, rounds=2)
    assert forecast(costs, after).makespan_s < 0.8 * forecast(costs, before).makespan_s
    stage_of = costs.stage_of()
    assert visits(after, stage_of) == visits(before, stage_of)
    for peer, routes in after.items():
        assert [len(route) for route in routes] == [RULES.per_path] * len(before[peer])
        assert all(RULES.fault([stage_of[hop] for hop in route]) is None for route in routes)


def visits(plan: Plan, stage_of: dict[PeerId, int]) -> Counter[int]:
    return Counter(stage_of[peer] for routes in plan.values() for route in routes for peer in route)


@pytest.mark.parametrize("seed", range(12))
def test_what_it_expects_is_what_the_world_makes_of_it(seed: int) -> None:
    costs, plan = unequal(seed)
    search = PlanSearch(costs.data_nodes[seed % 3], costs, RULES)
    found = improved(search, plan)
    played = forecast(costs, found.plan)
    assert found.expected.finish_s == pytest.approx(dict(played.finish_s))
    assert search.tasks <= 1.2 * ALLOWANCE


@pytest.mark.parametrize("seed", range(6))
def test_no_step_back_may_close_a_circle(seed: int) -> None:
    costs, before = unequal(seed)
    after = in_turns(costs, before, RULES, rounds=2)
    stage_of, crowded = costs.stage_of(), crowded_by(after, costs)
    routes = {route for routes in after.values() for route in routes}
    for route in routes:
        assert not closes_a_circle(route, routes - {route}, stage_of, crowded)


def test_the_same_swarm_is_searched_in_the_same_way() -> None:
    costs, plan = unequal(3)
    own = costs.data_nodes[0]
    one, two = (improved(PlanSearch(own, costs, RULES), plan) for _ in range(2))
    assert one == two


def test_a_circle_is_straightened() -> None:
    costs = swarm([2, 1, 1], slots=1)
    costs = replace(costs, slots={**costs.slots, **dict.fromkeys(costs.data_nodes, 2)})
    search = PlanSearch(costs.data_nodes[0], costs, PathRules(3, 2, max_back_stops=1, max_back_distance=1))
    there, back = names("1.0", "2.0"), names("2.0", "1.0")
    one, two = costs.data_nodes
    assert search.straightened({one: (there,), two: (back,)}) == {one: (there,), two: (there,)}


def test_two_data_nodes_do_not_both_sit_on_the_one_fast_replica() -> None:
    """It has three slots, and six microbatches would be there at once: most of the time they would wait for slots."""
    costs = swarm([2, 2], {"0.0": 0.05, "0.1": 0.05, "1.0": 0.5, "1.1": 0.6})
    costs = replace(costs, slots={**costs.slots, **dict.fromkeys(names("0.0", "0.1", "1.0", "1.1"), 3)})
    both = {peer: (names("1.0"),) * 6 for peer in costs.data_nodes}
    after = in_turns(costs, both, FULL, rounds=2)
    counted = Counter(hop for routes in after.values() for route in routes for hop in route)
    assert min(counted.values()) >= 4
    assert forecast(costs, after).makespan_s < 0.8 * forecast(costs, both).makespan_s


def test_a_replica_that_is_eight_times_slower_gets_an_eighth_or_nothing() -> None:
    costs = swarm([2, 2], {"0.0": 0.05, "0.1": 0.05, "1.0": 0.5, "1.1": 4.0})
    evenly = {peer: (names("1.0"), names("1.1")) * 4 for peer in costs.data_nodes}
    after = in_turns(costs, evenly, FULL, rounds=2)
    counted = Counter(hop for routes in after.values() for route in routes for hop in route)
    assert counted[PeerId("1.1")] <= 2


def test_nothing_to_find_ends_the_search() -> None:
    costs = swarm([1, 1])
    own = costs.data_nodes[0]
    search = PlanSearch(own, costs, FULL)
    plan: Plan = {own: (names("1.0"),) * 4}
    assert improved(search, plan).plan == plan
    assert search.tasks < ALLOWANCE / 10


@pytest.mark.parametrize("seed", range(6))
def test_where_all_launch_freely_the_pace_of_all_counts(seed: int) -> None:
    """Not when the last one is done: it may even be later."""
    costs, plan = unequal(seed)
    for own in costs.data_nodes:
        search = PlanSearch(own, costs, RULES, 2, is_free=True)
        before = search.expected(plan)
        found = search.improve(plan, before, ALLOWANCE)
        pace = [sum(1 / finish for finish in played.finish_s.values()) for played in (before, found.expected)]
        assert pace[1] > 1.05 * pace[0]
        assert found.expected == search.expected(found.plan)
        assert search.worth(before)[0] == pytest.approx(len(plan) / pace[0])
