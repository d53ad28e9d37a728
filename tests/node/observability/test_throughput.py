"""Rates under a clock that stands until it is turned."""

from __future__ import annotations

import pytest

from node.observability.throughput import MAX_SAMPLES, WINDOW_S, Rate
from tests.node.network.small_swarm import ManualClock


def test_nothing_added_is_no_rate() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    clock.now += 10
    assert rate.per_second() == 0.0
    assert rate.mean() == 0.0


def test_young_rates_are_divided_by_their_age() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    for _ in range(4):
        clock.now += 1
        rate.add(50)
    assert rate.per_second() == pytest.approx(50)
    assert rate.mean() == pytest.approx(50)


def test_old_amounts_leave_the_window_but_not_the_mean() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    clock.now += 5
    rate.add(1000)
    clock.now += WINDOW_S + 1
    rate.add(30)
    assert rate.per_second() == pytest.approx(30 / WINDOW_S)
    assert rate.mean() == pytest.approx(1030 / (5 + WINDOW_S + 1))
    clock.now += WINDOW_S + 1
    assert rate.per_second() == 0.0


def test_more_samples_than_are_kept_count_over_the_time_they_cover() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    for _ in range(2 * MAX_SAMPLES):
        clock.now += 0.001
        rate.add(1)
    assert rate.per_second() == pytest.approx(1000, rel=0.01)
