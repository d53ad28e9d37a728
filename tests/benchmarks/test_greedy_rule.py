"""The rule of three lines takes the path with the least links and service times."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.greedy_rule import least_route
from swarm.routing.cost_model import Costs
from swarm.vocabulary.types import PeerId

OWN = PeerId("own")
NEAR, FAR, NEXT, OTHER = (PeerId(name) for name in ("near", "far", "next", "other"))


def costs_of(forward_s: dict[PeerId, float], way_s: dict[frozenset[PeerId], float]) -> Costs:
    peers = (OWN, NEAR, FAR, NEXT, OTHER)
    message_s = {a: {b: way_s.get(frozenset((a, b)), 0.1) if a != b else 0.0 for b in peers} for a in peers}
    slots = dict.fromkeys(peers, 4)
    return Costs(((OWN,), (NEAR, FAR), (NEXT, OTHER)), {OWN: 0.0, **forward_s}, message_s, slots, backward_factor=2.0)


EQUAL = dict.fromkeys((NEAR, FAR, NEXT, OTHER), 0.1)


def test_of_equal_machines_the_near_ones_are_taken() -> None:
    way_s = {frozenset((OWN, NEAR)): 0.01, frozenset((NEAR, OTHER)): 0.01, frozenset((OTHER, OWN)): 0.01}
    assert least_route(costs_of(EQUAL, way_s), OWN, (1, 2), {}) == (NEAR, OTHER)


def test_a_way_to_the_first_hop_may_pay_for_itself_behind_it() -> None:
    way_s = {frozenset((OWN, NEAR)): 0.05, frozenset((FAR, NEXT)): 0.0, frozenset((NEXT, OWN)): 0.02}
    assert least_route(costs_of(EQUAL, way_s), OWN, (1, 2), {}) == (FAR, NEXT)


def test_own_microbatches_under_way_count_as_visits_that_come_before() -> None:
    costs = costs_of({**EQUAL, NEAR: 0.05}, {})
    assert least_route(costs, OWN, (1,), {NEAR: 0}) == (NEAR,)
    assert least_route(costs, OWN, (1,), {NEAR: 2}) == (FAR,)


def test_it_is_the_least_of_all_paths() -> None:
    rng = random.Random(1)
    for _ in range(50):
        peers = (OWN, NEAR, FAR, NEXT, OTHER)
        way_s = {frozenset(pair): rng.random() for pair in itertools.combinations(peers, 2)}
        costs = costs_of({peer: rng.random() for peer in EQUAL}, way_s)
        under_way = {peer: rng.randrange(4) for peer in EQUAL}

        def seconds(route: tuple[PeerId, ...], costs: Costs = costs, under_way: dict[PeerId, int] = under_way) -> float:
            ways = sum(2 * costs.message_s[a][b] for a, b in itertools.pairwise((OWN, *route, OWN)))
            return ways + sum(costs.service_s(peer) * (1 + under_way[peer]) for peer in route)

        best = min(seconds(route) for route in itertools.product((NEAR, FAR), (NEXT, OTHER)))
        assert seconds(least_route(costs, OWN, (1, 2), under_way)) == pytest.approx(best)


def test_a_stage_without_a_peer_is_an_error() -> None:
    costs = costs_of(EQUAL, {})
    empty = Costs((*costs.stages, ()), costs.forward_s, costs.message_s, costs.slots)
    with pytest.raises(ValueError, match="empty"):
        least_route(empty, OWN, (1, 2, 3), {})
