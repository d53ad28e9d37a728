"""Shapers and delay lines, in virtual time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.emulation.flow import BURST_S, DelayLine, Shaper

SENDS = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 100_000)), min_size=1, max_size=50)


def test_a_shaper_without_limit_lets_everything_go_at_once() -> None:
    shaper = Shaper(math.inf)
    assert [shaper.grant(10**9, now) for now in (0.0, 0.0, 3.0)] == [0.0, 0.0, 3.0]


def test_all_who_draw_on_a_shaper_share_its_rate() -> None:
    shaper = Shaper(1000.0)
    assert shaper.grant(500, 0.0) == pytest.approx(0.5 - BURST_S)
    assert shaper.grant(500, 0.0) == pytest.approx(1.0 - BURST_S)
    assert shaper.grant(500, 5.0) == pytest.approx(5.5 - BURST_S), "what was not used is not saved up"


def test_a_new_rate_holds_for_what_comes_after_it() -> None:
    shaper = Shaper(1000.0)
    shaper.grant(1000, 0.0)
    shaper.bytes_per_s = 100.0
    assert shaper.grant(100, 0.0) == pytest.approx(2.0 - BURST_S)


@given(SENDS, st.floats(100, 1e6))
def test_no_more_passes_than_the_rate_and_one_burst(sends: list[tuple[float, int]], rate: float) -> None:
    shaper = Shaper(rate)
    now, left_at, passed = 0.0, 0.0, 0
    for pause_s, size_bytes in sends:
        now = max(now + pause_s, left_at)
        granted = shaper.grant(size_bytes, now)
        assert granted >= max(now, left_at)
        left_at, passed = granted, passed + size_bytes
    assert passed <= (left_at + BURST_S) * rate * (1 + 1e-9) + 1


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), max_size=50))
def test_a_line_keeps_the_order_and_never_shortens_a_delay(sends: list[tuple[float, float]]) -> None:
    line = DelayLine()
    now, arrivals = 0.0, []
    for pause_s, delay_s in sends:
        now += pause_s
        arrivals.append(line.arrival(now, delay_s))
        assert arrivals[-1] >= now + delay_s
    assert arrivals == sorted(arrivals)


def test_equal_delays_arrive_as_they_were_sent() -> None:
    line = DelayLine()
    assert [line.arrival(at, 0.08) for at in (0.0, 0.01, 2.0)] == pytest.approx([0.08, 0.09, 2.08])
