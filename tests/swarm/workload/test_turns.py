"""Each microbatch has its turn once, among others that cost as much."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarm.workload.packing import STRATA, in_turns, worst_run


@given(st.lists(st.floats(1, 100), max_size=70), st.floats(1, 100) | st.just(0.0), st.randoms())
def test_each_has_its_turn_once(costs: list[float], level: float, chance: random.Random) -> None:
    ranks = list(range(len(costs)))
    chance.shuffle(ranks)
    order, _ = in_turns(costs, ranks, level)
    assert sorted(order) == list(range(len(costs)))


def test_of_so_many_in_a_row_one_is_of_each_stratum() -> None:
    costs = [float(place) for place in range(10 * STRATA)]
    order, level = in_turns(costs, random.Random(1).sample(range(len(costs)), len(costs)))
    assert level == 0.0
    for start in range(len(order) - STRATA + 1):
        assert sorted(place // 10 for place in order[start : start + STRATA]) == list(range(STRATA))
    assert any(abs(one - other) > 20 for one, other in pairwise(order))
    assert order != in_turns(costs, list(range(len(costs))))[0], "chance decides within a stratum"


def test_costs_fall_or_rise_from_those_of_the_block_before() -> None:
    costs = [100.0 + place % 20 for place in range(80)]
    ranks = random.Random(2).sample(range(80), 80)
    for level, ends_at in ((120.0, 100.0), (100.0, 119.0)):
        order, found = in_turns(costs, ranks, level)
        assert abs(found - ends_at) < 2
        assert worst_run([costs[place] for place in order], level) < 1.02


def test_the_few_that_cost_much_less_do_not_come_together() -> None:
    """Seven that cost nothing in a row would make the eighth many times as dear as their mean."""
    costs = [100.0 + place / 10 for place in range(72)] + [20.0] * 4
    order, _ = in_turns(costs, list(range(76)), 110.0)
    few = [at for at, place in enumerate(order) if costs[place] == 20.0]
    assert min(later - earlier for earlier, later in pairwise(few)) > STRATA


def test_a_run_counts_what_came_before_the_block() -> None:
    assert worst_run([1.0] * 20) == 1.0
    assert worst_run([1.0] * 20, 1.0) == 1.0
    assert worst_run([2.0] + [1.0] * 20, 1.0) == 16 / 9
    assert worst_run([1.0, 3.0]) == 1.5
