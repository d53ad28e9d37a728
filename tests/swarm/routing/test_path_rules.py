"""Which orders are legal, and that every stage is visited equally often."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.path_rules import PathRules, order_tree, orders
from swarm.routing.stage_balance import fair_sets, lanes_for, ring_set, visits
from swarm.vocabulary.errors import ManifestError
from swarm.vocabulary.routing_messages import MAX_LANES, MAX_VISITS
from swarm.vocabulary.types import MAX_HOPS

SKIPPIPE = PathRules(stages=6, per_path=3, max_forward_jump=4, max_back_stops=2, max_back_distance=2)
EVERY = frozenset(range(1, 6))


def test_the_published_rules_allow_22_of_the_60_orders() -> None:
    found = list(orders(order_tree(SKIPPIPE, frozenset(), EVERY)))
    assert len(found) == len(set(found)) == 22


def test_the_tree_holds_exactly_the_orders_without_fault() -> None:
    found = set(orders(order_tree(SKIPPIPE, frozenset(), EVERY)))
    assert found == {order for order in itertools.permutations(range(1, 6), 3) if SKIPPIPE.fault(order) is None}


def test_required_stages_are_in_every_order() -> None:
    found = list(orders(order_tree(SKIPPIPE, frozenset({2, 3}), frozenset({4, 5}))))
    assert found
    assert all({2, 3} < set(order) for order in found)


@pytest.mark.parametrize("order", [(5, 1, 2), (2, 4, 1), (1, 1, 2), (1, 2), (3, 2, 1)])
def test_faults_are_named(order: tuple[int, ...]) -> None:
    assert SKIPPIPE.fault(order)


@pytest.mark.parametrize(
    ("stages", "per_path", "fewest"), [(5, 4, 4), (5, 3, 2), (5, 2, 1), (5, 1, 1), (2, 1, 1), (4, 0, 0), (1, 0, 0)]
)
def test_one_stage_may_be_missing_where_stages_are_skipped_at_all(stages: int, per_path: int, fewest: int) -> None:
    assert PathRules(stages, per_path).fewest == fewest


def test_what_is_left_of_a_path_keeps_the_rules() -> None:
    orders = itertools.chain.from_iterable(itertools.permutations(range(1, 6), length) for length in range(6))
    taken = {order for order in orders if SKIPPIPE.fault_as_taken(order) is None}
    assert sum(len(order) == SKIPPIPE.per_path for order in taken) == 22
    assert {len(order) for order in taken} == {2, 3}
    far = PathRules(stages=6, per_path=3, max_back_stops=2, max_back_distance=2)
    for order in itertools.permutations(range(1, 6), 3):
        if far.fault(order) is None:
            assert all(far.fault_as_taken(order[:at] + order[at + 1 :]) is None for at in range(3)), order


@pytest.mark.parametrize(("stages", "per_path", "jump"), [(3, 3, 1), (4, 2, 0)])
def test_rules_that_no_path_can_keep_are_refused(stages: int, per_path: int, jump: int) -> None:
    with pytest.raises(ManifestError):
        PathRules(stages, per_path, jump)


@given(st.integers(2, 12), st.data())
def test_the_ring_visits_every_stage_equally_often(stages: int, data: st.DataObject) -> None:
    rules = PathRules(stages, data.draw(st.integers(1, stages - 1)), stages)
    first = data.draw(st.integers(0, 100))
    counts = visits(ring_set(rules, first + k) for k in range(rules.skippable))
    assert set(counts.values()) == {rules.per_path}


@given(st.integers(1, 9), st.integers(1, 12), st.integers(2, 8), st.data())
def test_lanes_make_an_iteration_equal_when_it_can_be(
    data_nodes: int, microbatches: int, stages: int, data: st.DataObject
) -> None:
    rules = PathRules(stages, data.draw(st.integers(1, stages - 1)), stages)
    lanes = lanes_for(rules, data_nodes, microbatches)
    counts = visits(
        stages for stages in fair_sets(rules, data_nodes * lanes) for _ in range(max(1, microbatches // lanes))
    )
    if data_nodes * microbatches * rules.per_path % rules.skippable == 0:
        assert len({counts[stage] for stage in range(1, stages)}) == 1


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, MAX_HOPS + 1), st.data())
def test_all_lanes_can_be_told_at_once(data_nodes: int, microbatches: int, stages: int, data: st.DataObject) -> None:
    rules = PathRules(stages, data.draw(st.integers(0, stages - 1)), stages)
    lanes = lanes_for(rules, data_nodes, microbatches)
    assert 1 <= lanes <= min(microbatches, MAX_LANES)
    assert lanes * rules.per_path <= MAX_VISITS


def test_a_set_that_no_order_visits_is_traded_for_one_that_some_does() -> None:
    rules = PathRules(stages=6, per_path=2, max_forward_jump=3, max_back_stops=1, max_back_distance=1)
    assert not order_tree(rules, ring_set(rules, 0))
    sets = fair_sets(rules, 5)
    assert all(order_tree(rules, stages) for stages in sets)
    assert set(visits(sets).values()) == {2}
