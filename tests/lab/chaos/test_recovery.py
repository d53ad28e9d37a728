"""How long a recovery took, from times that are written by hand."""

from __future__ import annotations

import math

import pytest

from lab.chaos.recovery import WINDOW_S, pace_back_after, pace_before, rerouted_after, served_after


def steady(first: float, last: float, a_second: int = 10) -> list[float]:
    return [first + number / a_second for number in range(int((last - first) * a_second))]


def test_the_pace_before_is_the_median_of_its_windows() -> None:
    assert pace_before(steady(0, 10), 10) == pytest.approx(10, abs=0.5)
    slow_start = [0.5, *steady(2, 20)]
    assert pace_before(slow_start, 20) == pytest.approx(10, abs=0.5)
    assert pace_before(steady(0, 10), 1.0) == 0.0, "too short to say"


def test_a_pace_that_never_falls_is_back_at_once() -> None:
    assert pace_back_after(steady(0, 30), 10, 10, 30) == 0.0


def test_a_pause_counts_to_its_end() -> None:
    times = steady(0, 10) + steady(17, 30)
    back = pace_back_after(times, 10, 10, 30)
    assert 7 - WINDOW_S / 2 <= back <= 7, "a window that begins in the pause may have enough already"


def test_less_than_half_is_not_back() -> None:
    assert pace_back_after(steady(0, 10) + steady(10, 40, a_second=4), 10, 10, 40) == math.inf


def test_what_cannot_be_seen_yet_is_not_back() -> None:
    assert pace_back_after(steady(0, 12), 10, 10, 12) == math.inf


def test_a_swarm_that_stops_after_one_more_step_is_not_back() -> None:
    assert pace_back_after([*steady(0, 10), 11.0], 10, 10, 40) == math.inf


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ([(0.0, True)], 0.0),
        ([], 0.0),
        ([(0.0, True), (5.05, False), (9.0, True)], 4.0),
        ([(0.0, True), (4.0, False), (9.0, True)], 4.0),
        ([(0.0, True), (5.05, False)], math.inf),
        ([(0.0, True), (2.0, False), (4.0, True)], 0.0),
        ([(0.0, True), (8.0, False), (9.0, True)], 0.0),
    ],
    ids=["always", "unknown", "noticed late", "before", "never again", "long over", "something later"],
)
def test_a_module_without_a_replica_counts_until_it_has_one(changes: list[tuple[float, bool]], after: float) -> None:
    assert served_after(changes, 5.0) == after


def test_a_scenario_may_ask_for_more_of_the_pace() -> None:
    times = steady(0, 10) + steady(10, 20, a_second=7) + steady(20, 40, a_second=9)
    assert pace_back_after(times, 10, 10, 40) == 0.0
    assert 7 <= pace_back_after(times, 10, 10, 40, share=0.8) <= 10


def test_documents_are_back_when_none_goes_elsewhere_any_more() -> None:
    changes = [(0.0, True), (10.0, False), (24.0, True)]
    assert rerouted_after(changes, [11.0, 12.0, 25.5]) == 1.5
    assert rerouted_after(changes, [11.0, 12.0]) == rerouted_after(changes, []) == 0.0
    assert rerouted_after(changes[:2], [11.0]) is None, "the expert is still not served"
