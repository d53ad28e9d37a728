"""Legal orders of stages, and the sets of stages that a ring or a measurement visits."""

import itertools
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.world.arms import ring_stages
from swarm.routing.path_rules import PathRules, chosen_subsets, ring_of_subsets, spread_stages
from swarm.vocabulary.errors import ConfigError, ManifestError

SKIPPIPE = PathRules(stages=6, per_path=3, max_forward_jump=4, max_back_stops=2, max_back_distance=2)


@pytest.mark.parametrize("order", [(5, 1, 2), (2, 4, 1), (1, 1, 2), (1, 2), (3, 2, 1)])
def test_faults_are_named(order: tuple[int, ...]) -> None:
    assert SKIPPIPE.fault(order)


@pytest.mark.parametrize(
    ("stages", "per_path", "fewest"), [(5, 4, 4), (5, 3, 2), (5, 2, 1), (5, 1, 1), (2, 1, 1), (4, 0, 0), (1, 0, 0)]
)
def test_one_stage_may_be_missing_where_stages_are_skipped_at_all(stages: int, per_path: int, fewest: int) -> None:
    assert PathRules(stages, per_path).fewest == fewest


def test_the_published_rules_allow_22_of_the_60_orders_and_what_is_left_of_a_path_keeps_them() -> None:
    orders = itertools.chain.from_iterable(itertools.permutations(range(1, 6), length) for length in range(6))
    taken = {order for order in orders if SKIPPIPE.fault_as_taken(order) is None}
    assert sum(len(order) == SKIPPIPE.per_path for order in taken) == 22
    assert {len(order) for order in taken} == {2, 3}
    far = PathRules(stages=6, per_path=3, max_back_stops=2, max_back_distance=2)
    for order in itertools.permutations(range(1, 6), 3):
        if far.fault(order) is None:
            assert all(far.fault_as_taken(order[:at] + order[at + 1 :]) is None for at in range(3)), order
    assert sum(SKIPPIPE.fault(order) is None for order in itertools.permutations(range(1, 6), 3)) == 22


@pytest.mark.parametrize(("stages", "per_path", "jump"), [(3, 3, 1), (4, 2, 0)])
def test_rules_that_no_path_can_keep_are_refused(stages: int, per_path: int, jump: int) -> None:
    with pytest.raises(ManifestError):
        PathRules(stages, per_path, jump)


RULES = st.integers(2, 40).flatmap(lambda n: st.builds(PathRules, st.just(n), st.integers(1, n - 1)))


@given(RULES, st.integers(0, 100))
def test_spread_stages_have_the_right_number_and_even_gaps(rules: PathRules, shift: int) -> None:
    chosen = spread_stages(rules, shift)
    assert len(chosen) == rules.per_path
    assert all(0 < stage < rules.stages for stage in chosen)
    gaps = {later - earlier for earlier, later in pairwise([*chosen, chosen[0] + rules.stages - 1])}
    assert max(gaps) - min(gaps) <= 1


@given(RULES)
def test_the_ring_has_every_choice_once_and_every_stage_equally_often(rules: PathRules) -> None:
    ring = ring_of_subsets(rules)
    assert len(set(ring)) == len(ring)
    assert set(ring) == {spread_stages(rules, shift) for shift in range(rules.stages - 1)}
    visits = Counter(stage for chosen in ring for stage in chosen)
    assert set(visits) == set(range(1, rules.stages))
    assert len(set(visits.values())) == 1


def test_subsets_that_are_measured() -> None:
    assert chosen_subsets(5, None, every=False) == ((1, 2, 3, 4),)
    assert chosen_subsets(5, 2, every=False) == ((1, 3),)
    assert chosen_subsets(5, 2, every=True) == ((1, 3), (2, 4))
    assert chosen_subsets(8, 4, every=False, available=[1, 2, 4, 5, 6]) == ((1, 2, 4, 6),)
    assert chosen_subsets(5, 2, every=True, available={4, 2, 1}) == ((1, 4), (2, 4), (1, 2))
    with pytest.raises(ConfigError, match="has 4 after stage 0, of which 2 are available: 1, 4") as caught:
        chosen_subsets(5, 3, every=False, available={1, 4})
    assert caught.value.hint == "Choose 1 to 2."


@given(st.sets(st.integers(1, 11), min_size=1), st.data())
def test_no_choice_of_available_stages_has_shorter_jumps(available: set[int], data: st.DataObject) -> None:
    count, stages = data.draw(st.integers(1, len(available))), data.draw(st.integers(max(available) + 2, 14))

    def cost(chosen: tuple[int, ...]) -> int:
        return sum((after - before) ** 2 for before, after in pairwise((*chosen, stages)))

    (found,) = chosen_subsets(stages, count, every=False, available=available)
    choices = [each for each in itertools.combinations(sorted(available), count) if each[0] == min(available)]
    assert found in choices
    assert cost(found) == min(map(cost, choices))


@pytest.mark.parametrize(("stages", "per_path"), [(5, 5), (5, 0), (1, 1)])
def test_a_path_that_the_run_does_not_have_is_refused(stages: int, per_path: int) -> None:
    with pytest.raises(ConfigError, match=f"this run has {stages - 1} after stage 0"):
        chosen_subsets(stages, per_path, every=True)


@pytest.mark.parametrize(
    ("stages", "per_path"), [(2, 1), (5, 4), (5, 3), (5, 2), (5, 1), (8, 5), (9, 6), (13, 7), (4, 0)]
)
def test_the_ring_visits_every_stage_equally_often_over_any_window(stages: int, per_path: int) -> None:
    skippable = stages - 1
    for first in range(3 * skippable):
        window = [ring_stages(PathRules(stages, per_path), first + n) for n in range(skippable)]
        assert all(len(visited) == per_path and list(visited) == sorted(set(visited)) for visited in window)
        visits = Counter(stage for visited in window for stage in visited)
        assert visits == {stage: per_path for stage in range(1, stages) if per_path}
