"""Which stages a part of a model has."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import all_stages, chosen_subsets, ring_of_subsets, ring_stages, spread_stages
from swarm.vocabulary.errors import ConfigError

RULES = st.integers(2, 40).flatmap(lambda n: st.builds(PathRules, st.just(n), st.integers(1, n - 1)))


def test_examples() -> None:
    assert spread_stages(PathRules(13, 6)) == (1, 3, 5, 7, 9, 11)
    assert spread_stages(PathRules(13, 6), shift=1) == (2, 4, 6, 8, 10, 12)
    assert spread_stages(PathRules(13, 9)) == (1, 3, 4, 5, 7, 8, 9, 11, 12)
    assert spread_stages(PathRules(5, 4)) == all_stages(5) == (1, 2, 3, 4)
    assert spread_stages(PathRules(1, 0)) == all_stages(1) == ()


@given(RULES, st.integers(0, 100))
def test_as_many_as_asked_for_and_evenly_spread(rules: PathRules, shift: int) -> None:
    chosen = spread_stages(rules, shift)
    assert len(chosen) == rules.per_path
    assert all(0 < stage < rules.stages for stage in chosen)
    around = [*chosen, chosen[0] + rules.stages - 1]
    gaps = {later - earlier for earlier, later in pairwise(around)}
    assert max(gaps) - min(gaps) <= 1


@given(RULES)
def test_the_ring_has_every_choice_once_and_every_stage_equally_often(rules: PathRules) -> None:
    ring = ring_of_subsets(rules)
    assert len(set(ring)) == len(ring)
    assert set(ring) == {spread_stages(rules, shift) for shift in range(rules.stages - 1)}
    visits = Counter(stage for chosen in ring for stage in chosen)
    assert set(visits) == set(all_stages(rules.stages))
    assert len(set(visits.values())) == 1


def test_what_is_measured() -> None:
    assert chosen_subsets(5, None, every=False) == ((1, 2, 3, 4),)
    assert chosen_subsets(5, 2, every=False) == ((1, 3),)
    assert chosen_subsets(5, 2, every=True) == ((1, 3), (2, 4))


@pytest.mark.parametrize(("stages", "per_path"), [(5, 5), (5, 0), (1, 1)])
def test_what_the_run_does_not_have_is_said(stages: int, per_path: int) -> None:
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
