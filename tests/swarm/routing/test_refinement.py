"""A data node's refinement of its own routes: what it finds, what it leaves as it was, and when it ends."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.deadlock import closes_a_circle, crowded_by
from swarm.routing.path_rules import PathRules, order_tree, orders
from swarm.routing.refinement import Plan, Refined, Refinement
from swarm.routing.stage_balance import fair_sets
from swarm.simulation.forecast import forecast
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.small_swarms import RULES, names, swarm

ALLOWANCE = 120
FULL = PathRules(2, 1)


def improved(machine: Refinement, plan: Plan, allowance: int = ALLOWANCE) -> Refined:
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
    machines = {peer: Refinement(peer, costs, rules) for peer in plan}
    for _ in range(rounds):
        for peer, machine in machines.items():
            plan = {**plan, peer: improved(machine, plan).routes}
    return plan


@pytest.mark.parametrize("seed", range(12))
def test_all_are_done_sooner_and_the_sum_of_visits_stays(seed: int) -> None:
    costs, before = unequal(seed)
    after = in_turns(costs, before, RULES, rounds=2)
    assert forecast(costs, after).makespan_s < 0.97 * forecast(costs, before).makespan_s
    stage_of = costs.stage_of()
    for peer, routes in after.items():
        assert [len(route) for route in routes] == [RULES.per_path] * len(before[peer])
        assert visits(routes, stage_of) == visits(before[peer], stage_of)
        assert all(RULES.fault([stage_of[hop] for hop in route]) is None for route in routes)


def visits(routes: tuple[PeerRoute, ...], stage_of: dict[PeerId, int]) -> Counter[int]:
    return Counter(stage_of[peer] for route in routes for peer in route)


@pytest.mark.parametrize("seed", range(12))
def test_what_it_expects_is_what_the_world_makes_of_it(seed: int) -> None:
    costs, plan = unequal(seed)
    own = costs.data_nodes[seed % 3]
    found = improved(Refinement(own, costs, RULES), plan)
    played = forecast(costs, {**plan, own: found.routes})
    assert found.expected.finish_s == pytest.approx(dict(played.finish_s))
    assert found.forecasts <= ALLOWANCE + 1


@pytest.mark.parametrize("seed", range(6))
def test_no_step_back_may_close_a_circle(seed: int) -> None:
    costs, before = unequal(seed)
    after = in_turns(costs, before, RULES, rounds=2)
    stage_of, crowded = costs.stage_of(), crowded_by(after, costs)
    routes = {route for routes in after.values() for route in routes}
    for route in routes:
        assert not closes_a_circle(route, routes - {route}, stage_of, crowded)


def test_the_same_swarm_is_refined_in_the_same_way() -> None:
    costs, plan = unequal(3)
    own = costs.data_nodes[0]
    one, two = (improved(Refinement(own, costs, RULES), plan) for _ in range(2))
    assert one == two


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


def test_nothing_to_find_ends_the_turn() -> None:
    costs = swarm([1, 1])
    own = costs.data_nodes[0]
    found = improved(Refinement(own, costs, FULL), {own: (names("1.0"),) * 4})
    assert found.forecasts == 0
    assert found.routes == (names("1.0"),) * 4


def test_who_is_not_the_last_leaves_half_of_its_forecasts() -> None:
    costs, plan = unequal(5)
    finish = forecast(costs, plan).finish_s
    first = min(finish, key=finish.__getitem__)
    last = max(finish, key=finish.__getitem__)
    spent = {peer: improved(Refinement(peer, costs, RULES), plan, 40).forecasts for peer in (first, last)}
    assert spent[first] <= 25
    assert spent[last] > spent[first]


@pytest.mark.parametrize("seed", range(6))
def test_where_all_launch_freely_the_pace_of_all_counts(seed: int) -> None:
    """Not when the last one is done: it may even be later."""
    costs, plan = unequal(seed)
    for own in costs.data_nodes:
        machine = Refinement(own, costs, RULES, 2, is_free=True)
        before = machine.expected(plan)
        found = machine.improve(plan, before, ALLOWANCE)
        pace = [sum(1 / finish for finish in played.finish_s.values()) for played in (before, found.expected)]
        assert pace[1] >= pace[0]
        assert found.expected == machine.expected({**plan, own: found.routes})
        assert machine.worth(before)[0] == pytest.approx(len(plan) / pace[0])
