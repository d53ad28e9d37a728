"""The learning rate at the places that matter, and its shape between them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.model import optimizer
from protocol.manifest.manifest import TrainingSection
from tests.node.small_manifest import small_manifest


def training(kind: str, warmup: int, total: int, final: float = 0.1, peak: float = 0.5) -> TrainingSection:
    schedule: dict[str, Any] = {"kind": kind, "warmup_steps": warmup, "total_steps": total, "final_ratio": final}
    return small_manifest(training__schedule=schedule, training__inner={"learning_rate": peak}).training


def learning_rate(section: TrainingSection, step: float) -> float:
    """After so many steps of whole microbatches."""
    return optimizer.learning_rate(section, step * section.inner_tokens)


def test_it_rises_linearly_to_the_peak() -> None:
    section = training("cosine", 4, 100)
    assert [learning_rate(section, step) for step in (1, 2, 3, 4)] == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize(
    ("kind", "halfway", "end"), [("constant", 0.5, 0.5), ("linear", 0.275, 0.05), ("cosine", 0.275, 0.05)]
)
def test_it_falls_to_the_final_ratio_and_stays_there(kind: str, halfway: float, end: float) -> None:
    section = training(kind, 10, 110)
    assert learning_rate(section, 60) == pytest.approx(halfway)
    assert learning_rate(section, 110) == pytest.approx(end)
    assert learning_rate(section, 10_000) == pytest.approx(end)


def test_cosine_falls_slowly_first() -> None:
    assert learning_rate(training("cosine", 0, 100), 25) > learning_rate(training("linear", 0, 100), 25)


def test_without_warm_up_the_first_step_is_not_nothing() -> None:
    assert learning_rate(training("linear", 0, 100), 1) == pytest.approx(0.5 * (0.1 + 0.9 * 0.99))


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.integers(1, 200),
    st.floats(0, 1),
    st.integers(1, 400),
)
def test_it_never_leaves_its_bounds_and_never_rises_after_the_warm_up(
    kind: str, warmup: int, length: int, final: float, step: int
) -> None:
    section = training(kind, warmup, warmup + length, final)
    rate, following = learning_rate(section, step), learning_rate(section, step + 1)
    assert 0 <= rate <= 0.5 * (1 + 1e-12)
    assert (following > rate) == (step < warmup) or following == pytest.approx(rate)
