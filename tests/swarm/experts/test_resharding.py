"""Who is to have a document follows from what it loses elsewhere: in about equal shares, and bounded."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.experts.resharding import (
    DEVIATIONS,
    EVEN,
    MOST_REGRET,
    alternatives,
    even_prices,
    regrets,
    wanted_experts,
)
from swarm.vocabulary.types import Route

EXPERTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(EXPERTS, st.randoms())
def test_every_expert_is_tried_the_own_route_first_and_none_twice(experts: list[int], draw: random.Random) -> None:
    route = tuple(draw.randrange(count) for count in experts)
    tried = alternatives(route, experts)
    assert tried[0] == route
    assert len(set(tried)) == len(tried)
    assert {(stage, of[stage]) for of in tried for stage in range(len(experts))} == {
        (stage, expert) for stage, count in enumerate(experts) for expert in range(count)
    }
    if len(tried) < math.prod(experts):
        assert all(sum(a != b for a, b in zip(of, route, strict=True)) <= 1 for of in tried)


def test_a_document_on_a_wrong_route_is_told_of_one_that_differs_in_every_stage() -> None:
    losses: dict[Route, float] = {(0, 0): 3.0, (0, 1): 3.2, (1, 0): 3.1, (1, 1): 2.5}
    tried = alternatives((0, 0), (2, 2))
    told = regrets((0, 0), (2, 2), [losses[route] for route in tried]).value
    assert told is not None
    assert told == (pytest.approx((0.0, -0.5)), pytest.approx((0.0, -0.5)))


def test_regrets_are_bounded_and_losses_that_no_model_has_are_refused() -> None:
    assert regrets((0,), (2,), [1.0, 50.0]).value == ((0.0, MOST_REGRET),)
    assert regrets((0,), (2,), [50.0, 0.0]).value == ((0.0, -MOST_REGRET),)
    for broken in (math.nan, math.inf, -1.0):
        assert regrets((0,), (2,), [1.0, broken]).value is None


@given(
    st.integers(2, 4).flatmap(
        lambda experts: st.lists(
            st.lists(st.floats(-1, 1), min_size=experts, max_size=experts), min_size=64, max_size=120
        )
    )
)
def test_prices_never_make_shares_less_even_and_add_nothing(costs: list[list[float]]) -> None:
    prices = even_prices(costs, 1.0)

    def largest(of: list[float]) -> int:
        taken = Counter(min(range(len(of)), key=lambda e: (cost[e] + of[e], e)) for cost in costs)
        return max(taken.values())

    assert largest(prices) <= largest([0.0] * len(prices))
    assert sum(prices) == pytest.approx(0, abs=1e-9)


def test_whoever_fits_everybody_gets_its_share_of_them_those_that_need_it_most() -> None:
    """One expert is better for all, the more so the higher a document's number."""
    count = 400
    told = [(0.0, -0.1 - 0.8 * number / count) for number in range(count)]
    wanted = wanted_experts(told)
    taken = [each.expert for each in wanted]
    allowed = (EVEN + DEVIATIONS * math.sqrt(1 / count)) * count / 2
    assert count - allowed <= sum(taken) <= allowed
    assert taken == sorted(taken)
    assert min(each.weight for each in wanted) < 0.05, "at the border it makes no difference"
    assert wanted[0].weight == wanted[-1].weight == 1.0


def test_what_chance_has_drawn_unevenly_stays_where_it_fits() -> None:
    told = [(0.0, 0.9)] * 35 + [(0.9, 0.0)] * 29
    assert [each.expert for each in wanted_experts(told)] == [0] * 35 + [1] * 29
    assert even_prices(told, 1.0) == [0.0, 0.0]


def test_experts_that_are_alike_teach_nothing() -> None:
    assert all(each.weight == 0 for each in wanted_experts([(0.0, 0.0, 0.0)] * 50))
    draw = random.Random(1)
    noisy = [(0.0, draw.gauss(0, 0.001)) for _ in range(100)]
    assert sum(each.weight for each in wanted_experts(noisy)) < 3
