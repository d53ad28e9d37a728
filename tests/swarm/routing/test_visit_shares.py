"""Shares of visits: the best that there are within the ratio, dealt exactly, and changed only for a reason."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.routing.path_rules import PathRules, order_tree
from swarm.routing.stage_balance import most_lanes, ring_stages, visits
from swarm.routing.visit_shares import (
    FINENESS,
    WORTH_DEALING,
    VisitShares,
    best_shares,
    capacities_of,
    dealt_sets,
    equal_shares,
    first_deal,
    moved_sets,
    reconsidered,
    share_period,
)
from tests.swarm.routing.small_swarms import swarm

RATIOS = st.sampled_from([1.05, 1.25, 1.5, 2.0])
SPEEDS = st.floats(0.1, 10)


@st.composite
def problems(draw: st.DrawFn, most: int = 20) -> tuple[PathRules, list[float], int]:
    """Rules, capacities, and a period over which shares within the ratio exist."""
    stages = draw(st.integers(3, most))
    rules = PathRules(stages, draw(st.integers(1, stages - 2)), visit_ratio=draw(RATIOS))
    capacities = draw(st.lists(SPEEDS, min_size=stages - 1, max_size=stages - 1))
    period = share_period(rules)
    assert period is not None
    return rules, capacities, period


# ---- which shares ----------------------------------------------------------------------------------------------------


@given(problems())
def test_shares_sum_up_and_are_within_the_ratio(problem: tuple[PathRules, list[float], int]) -> None:
    rules, capacities, period = problem
    shares = best_shares(rules, capacities, period).value
    assert shares.of == period
    assert sum(shares.visits) == period * rules.per_path
    assert 1 <= min(shares.visits) <= max(shares.visits) <= period
    assert max(shares.visits) <= rules.visit_ratio * min(shares.visits) + 1e-6
    assert shares.rate(capacities) >= equal_shares(rules).rate(capacities) * (1 - 1e-9)


@given(st.data())
@settings(deadline=None)
def test_no_other_shares_let_more_through(data: st.DataObject) -> None:
    """Against all whole numbers of visits that there are."""
    stages, of = data.draw(st.integers(3, 5)), data.draw(st.integers(2, 7))
    rules = PathRules(stages, data.draw(st.integers(1, stages - 2)), visit_ratio=data.draw(RATIOS))
    capacities = data.draw(st.lists(st.sampled_from([1.0, 2.0]) | SPEEDS, min_size=stages - 1, max_size=stages - 1))
    rates = [
        min(capacity * of / count for capacity, count in zip(capacities, counts, strict=True))
        for counts in itertools.product(range(1, of + 1), repeat=stages - 1)
        if sum(counts) == of * rules.per_path and max(counts) <= rules.visit_ratio * min(counts) + 1e-9
    ]
    if rates:
        assert best_shares(rules, capacities, of).value.rate(capacities) == pytest.approx(max(rates))
    else:
        with pytest.raises(ValueError, match="within the ratio"):
            best_shares(rules, capacities, of)


def test_only_the_weak_stage_is_visited_less() -> None:
    """What it is not visited is shared out evenly, not by speed: equal visits are best for learning."""
    rules = PathRules(5, 3, visit_ratio=1.5)
    found = best_shares(rules, [1.0, 4.0, 3.0, 5.0], 16)
    assert found.value == VisitShares((9, 13, 13, 13), 16)
    assert found.reason == (
        "stage 1 is full first, with 9 visits in 16 microbatches; 1.33 times what equal visits let through"
    )


@pytest.mark.parametrize("capacities", [[2.0] * 4, [2.0, 2.0, 0.0, 1.0]])
def test_equal_capacities_and_missing_ones_give_equal_visits(capacities: list[float]) -> None:
    found = best_shares(PathRules(5, 3, visit_ratio=1.5), capacities, 16)
    assert found.value.visits == (12,) * 4
    assert found.reason.startswith("equal")


@given(st.integers(1, 80), st.data())
def test_the_period_fits_and_is_fine(stages: int, data: st.DataObject) -> None:
    rules = PathRules(stages, data.draw(st.integers(0, stages - 1)), visit_ratio=data.draw(RATIOS))
    period = share_period(rules)
    if period is None:
        skips = 0 < rules.per_path < rules.skippable
        assert not skips or equal_shares(rules).of > most_lanes(rules)
    else:
        assert period <= most_lanes(rules)
        assert period >= min(FINENESS, most_lanes(rules) // 2)
    assert share_period(PathRules(stages, rules.per_path)) is None


def test_the_period_is_one_in_which_a_weak_stage_may_be_visited_seldom() -> None:
    expected = {1.25: (28, 35, 35, 34), 1.5: (24, 36, 36, 36), 2.0: (12, 24, 24, 24)}
    for ratio, wanted in expected.items():
        rules = PathRules(5, 3, visit_ratio=ratio)
        period = share_period(rules)
        assert period is not None
        assert best_shares(rules, [1.0, 9.0, 9.0, 9.0], period).value == VisitShares(wanted, sum(wanted) // 3)


@pytest.mark.parametrize(("microbatches", "period"), [(6, 6), (16, 16), (1, None), (131, None), (130, 65)])
def test_the_period_of_an_iteration_divides_it(microbatches: int, period: int | None) -> None:
    rules = PathRules(5, 3, visit_ratio=2.0)
    assert most_lanes(rules) == 64
    expected = None if period is None else max(n for n in range(1, 65) if microbatches % n == 0)
    assert share_period(rules, microbatches) == expected


def test_capacities_are_those_of_the_live_replicas() -> None:
    costs = swarm([1, 2, 1], {"1.0": 1.0, "1.1": 0.5, "2.0": 2.0})
    assert capacities_of(costs) == pytest.approx((1 / 2.7 + 1 / 1.45, 1 / 5.2))
    assert capacities_of(costs.without(frozenset(costs.stages[2])))[1] == 0


# ---- which stages ----------------------------------------------------------------------------------------------------


@given(problems(), st.integers(0, 10**9))
def test_a_period_visits_every_stage_exactly_as_often_as_it_should(
    problem: tuple[PathRules, list[float], int], first: int
) -> None:
    rules, capacities, period = problem
    shares = best_shares(rules, capacities, period).value
    paths = [shares.stages_at(first + k) for k in range(period)]
    assert all(len(path) == rules.per_path and rules.fault(path) is None for path in paths)
    assert tuple(visits(paths)[stage] for stage in range(1, rules.stages)) == shares.visits


@given(problems(), st.integers(0, 100), st.integers(1, 40))
def test_short_stretches_are_balanced_too(problem: tuple[PathRules, list[float], int], first: int, length: int) -> None:
    rules, capacities, period = problem
    shares = best_shares(rules, capacities, period).value
    counted = visits(shares.stages_at(first + k) for k in range(length))
    assert all(abs(counted[s] - length * shares.share(s)) <= 3 for s in range(1, rules.stages))


@given(st.integers(2, 20), st.integers(0, 100), st.data())
def test_equal_shares_are_the_ring(stages: int, turn: int, data: st.DataObject) -> None:
    rules = PathRules(stages, data.draw(st.integers(1, stages - 1)))
    assert equal_shares(rules).stages_at(turn) == ring_stages(stages, rules.per_path, turn)
    period = share_period(PathRules(stages, rules.per_path, visit_ratio=1.5))
    if period is not None:
        even = best_shares(PathRules(stages, rules.per_path, visit_ratio=1.5), [3.0] * (stages - 1), period).value
        assert even.stages_at(turn) == ring_stages(stages, rules.per_path, turn)


def test_sets_without_a_legal_order_are_mended_and_the_sum_stays() -> None:
    rules = PathRules(7, 2, max_forward_jump=3, max_back_stops=1, max_back_distance=1, visit_ratio=1.5)
    shares, sets = first_deal(rules, [1.0, 2.0, 3.0, 1.0, 1.0, 4.0], 18, first=5)
    assert not all(order_tree(rules, frozenset(shares.value.stages_at(k))) for k in range(18))
    assert all(order_tree(rules, stages) for stages in sets)
    assert tuple(visits(sets)[stage] for stage in range(1, 7)) == shares.value.visits == (5, 7, 7, 5, 5, 7)


def test_shares_that_no_legal_orders_make_up_are_equal() -> None:
    rules = PathRules(9, 3, max_forward_jump=3, max_back_stops=1, max_back_distance=1, visit_ratio=1.5)
    capacities = next(
        list(each)
        for each in itertools.product([1.0, 4.0], repeat=8)
        if not _can_be_dealt(rules, best_shares(rules, each, 16).value)
    )
    shares, sets = first_deal(rules, capacities, 16)
    assert shares.value.is_equal
    assert shares.reason == "equal: too few orders are legal for other shares"
    assert set(visits(sets).values()) == {6}


def _can_be_dealt(rules: PathRules, shares: VisitShares) -> bool:
    try:
        return bool(dealt_sets(rules, shares))
    except ValueError:
        return False


# ---- changes ---------------------------------------------------------------------------------------------------------


@given(problems(), st.data())
def test_lanes_move_to_other_shares_by_few_exchanges(
    problem: tuple[PathRules, list[float], int], data: st.DataObject
) -> None:
    rules, capacities, period = problem
    others = data.draw(st.lists(SPEEDS, min_size=len(capacities), max_size=len(capacities)))
    before, after = (best_shares(rules, each, period).value for each in (capacities, others))
    sets = dealt_sets(rules, before)
    moved = moved_sets(rules, sets, before, after)
    assert tuple(visits(moved)[stage] for stage in range(1, rules.stages)) == after.visits
    assert all(order_tree(rules, stages) for stages in moved)
    changed = sum(len(new - old) for new, old in zip(moved, sets, strict=True))
    least = sum(max(0, b - a) for a, b in zip(before.visits, after.visits, strict=True))
    assert least <= changed <= 2 * least


def test_what_was_traded_stays_traded() -> None:
    rules = PathRules(5, 2, visit_ratio=2.0)
    before, after = VisitShares((8, 8, 8, 8), 16), VisitShares((6, 9, 9, 8), 16)
    sets = dealt_sets(rules, before)
    lane = next(k for k, stages in enumerate(sets) if 4 in stages and 2 not in stages)
    sets[lane] = sets[lane] - {4} | {2}
    assert visits(moved_sets(rules, sets, before, after)) == Counter({1: 6, 2: 10, 3: 9, 4: 7})


def test_shares_stay_until_others_are_worth_it() -> None:
    rules = PathRules(5, 3, visit_ratio=1.5)
    held = best_shares(rules, [1.0, 4.0, 4.0, 4.0], 16).value
    for others in ([1.1, 4.0, 4.0, 4.0], [0.5, 4.0, 5.0, 4.0], [0.0, 1.0, 1.0, 1.0]):
        kept = reconsidered(rules, held, others, 16)
        assert kept.value is held
        assert kept.reason.startswith("kept")
    others = [4.0, 4.0, 1.0, 4.0]
    found = reconsidered(rules, held, others, 16)
    assert found.value.visits == (13, 13, 9, 13)
    assert found.value.rate(others) >= (1 + WORTH_DEALING) * held.rate(others)


def test_without_stages_nothing_is_full() -> None:
    assert VisitShares((), 1).rate([]) == math.inf
