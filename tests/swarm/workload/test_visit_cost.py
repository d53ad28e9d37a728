"""What a visit takes is learnt from visits, and where these do not tell it is as the manifest says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.vocabulary.announcement import NO_SPEED
from swarm.workload.visit_cost import VisitCost

SHARE = 1 / 3000


def microbatch(chance: random.Random) -> tuple[int, int, int]:
    lengths = [chance.randint(20, 4000) for _ in range(chance.randint(4, 20))]
    return sum(lengths), sum(length * length for length in lengths), len(lengths)


def fitted(a: float, b: float, c: float, e: float, noise: float, count: int = 120) -> tuple[VisitCost, float]:
    """And the mean relative error on microbatches that it has not seen."""
    chance, model = random.Random(7), VisitCost(SHARE)

    def seconds(tokens: int, squares: int, documents: int) -> float:
        return a * tokens + b * squares + c * documents + e

    for _ in range(count):
        seen = microbatch(chance)
        model.add(*seen, seconds(*seen) * (1 + chance.uniform(-noise, noise)))
    others = [microbatch(chance) for _ in range(50)]
    return model, sum(abs(model.seconds(*one) / seconds(*one) - 1) for one in others) / len(others)


@given(st.floats(1e-6, 1e-3), st.floats(0, 3), st.floats(0, 50), st.floats(0, 1000))
def test_it_learns_what_visits_cost(a: float, times_share: float, c: float, e: float) -> None:
    """Of whatever size the parts are: `c` and `e` are in tokens."""
    _, error = fitted(a, times_share * SHARE * a, c * a, e * a, noise=0.0)
    assert error <= 0.01


def test_noise_is_averaged_out() -> None:
    _, error = fitted(1e-5, 1e-5 / 3000, 1e-5, 1e-3, noise=0.1)
    assert error <= 0.04


def test_where_all_are_alike_the_manifest_tells_the_parts_apart() -> None:
    model = VisitCost(SHARE)
    for _ in range(30):
        model.add(6000, 12_000_000, 6, 1.0)
    speed = model.speed()
    assert speed.quadratic_share == pytest.approx(SHARE, rel=0.02)
    assert speed.seconds(6000, 12_000_000) == pytest.approx(1.0, rel=1e-3)
    assert model.seconds(3000, 6_000_000, 3) == pytest.approx(0.5, rel=0.02)


def test_rows_of_one_stream_have_a_speed_and_nothing_else() -> None:
    model = VisitCost(0.0)
    assert model.speed() == NO_SPEED
    for _ in range(3):
        model.add(512, 0, 0, 0.25)
    assert model.speed().tokens_per_s == pytest.approx(2048, rel=1e-3)
    assert model.speed().quadratic_share == 0.0


def test_a_peer_that_becomes_slower_says_so_soon() -> None:
    model = VisitCost(0.0)
    for _ in range(100):
        model.add(512, 0, 0, 0.25)
    for _ in range(20):
        model.add(512, 0, 0, 0.5)
    assert model.speed().tokens_per_s < 2048 / 1.7


def test_one_visit_that_was_held_up_changes_little() -> None:
    model, _ = fitted(1e-5, 1e-5 / 3000, 0.0, 0.0, noise=0.0)
    before = model.seconds(8000, 16_000_000, 8)
    model.add(8000, 16_000_000, 8, 1000.0)
    assert model.seconds(8000, 16_000_000, 8) <= 1.2 * before


def test_longer_documents_are_expected_to_take_longer() -> None:
    model, _ = fitted(1e-5, 1e-5 / 3000, 0.0, 0.0, noise=0.0)
    assert model.speed().seconds(8000, 8000**2) > 1.5 * model.speed().seconds(8000, 8 * 1000**2)
