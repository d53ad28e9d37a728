"""Which orders are legal, and that every stage is visited equally often."""

from __future__ import annotations

import itertools

import pytest

from swarm.routing.path_rules import PathRules
from swarm.vocabulary.errors import ManifestError

SKIPPIPE = PathRules(stages=6, per_path=3, max_forward_jump=4, max_back_stops=2, max_back_distance=2)


def test_the_published_rules_allow_22_of_the_60_orders() -> None:
    assert sum(SKIPPIPE.fault(order) is None for order in itertools.permutations(range(1, 6), 3)) == 22


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
