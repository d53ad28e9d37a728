"""What a link carries, from when its answers come: the same whatever lies in buffers on the way."""

from __future__ import annotations

import pytest

from protocol.transport.link import MOST_ON_THE_WAY, Goodput


def over_a_line(
    goodput: Goodput, sizes: list[int], rate: float, round_trip_s: float, at_once: int, now: float
) -> float:
    """Sends over a line that takes `rate` bytes a second, keeping `at_once` tensors under way; gives the time of the
    last answer."""
    free, waiting = now, list(enumerate(sizes))
    answers: list[tuple[float, int]] = []
    while waiting or answers:
        while waiting and len(answers) < at_once:
            number, size = waiting.pop(0)
            goodput.sent(number, size, now)
            free = max(free, now) + size / rate
            answers.append((free + round_trip_s, number))
        now, number = answers.pop(0)
        goodput.accepted(number, round_trip_s, now)
    return now


@pytest.mark.parametrize("rate", [2.5e6, 12.5e6, 125e6])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_the_rate_of_the_line_is_found_however_long_its_round_trip(
    rate: float, round_trip_s: float, at_once: int
) -> None:
    goodput = Goodput()
    over_a_line(goodput, [2_000_000] * 40, rate, round_trip_s, at_once, now=0.0)
    assert goodput.bytes_per_s == pytest.approx(rate, rel=0.05)


def test_pauses_do_not_count() -> None:
    goodput, now = Goodput(), 0.0
    for _ in range(20):
        now = over_a_line(goodput, [1_000_000], 1e7, 0.05, 1, now) + 10.0
    assert goodput.bytes_per_s == pytest.approx(1e7, rel=1e-6)


def test_a_line_that_changes_is_known_after_a_few_tensors() -> None:
    goodput = Goodput()
    now = over_a_line(goodput, [1_000_000] * 20, 1e8, 0.01, 1, 0.0)
    now = over_a_line(goodput, [1_000_000] * 10, 2e6, 0.01, 1, now)
    assert goodput.bytes_per_s == pytest.approx(2e6, rel=0.3)
    over_a_line(goodput, [1_000_000] * 200, 1e8, 0.01, 1, now)
    assert goodput.bytes_per_s == pytest.approx(1e8, rel=0.3)


def test_what_was_not_sent_was_refused_or_is_answered_twice_says_nothing() -> None:
    goodput = Goodput()
    goodput.accepted(1, 0.0, 1.0)
    goodput.sent(2, 1000, 1.0)
    goodput.gave_up(2)
    goodput.accepted(2, 0.0, 2.0)
    assert goodput.bytes_per_s == 0.0
    goodput.sent(3, 1000, 3.0)
    goodput.accepted(3, 0.0, 4.0)
    goodput.accepted(3, 0.0, 9.0)
    assert goodput.bytes_per_s == pytest.approx(1000.0)


def test_answers_that_come_together_after_a_delay_count_together() -> None:
    goodput = Goodput()
    for number in range(10):
        goodput.sent(number, 100_000, 0.0)
    for number in range(10):
        goodput.accepted(number, 0.0, 1.0 + number * 1e-4)
    assert goodput.bytes_per_s == pytest.approx(1_000_000, rel=0.05)


def test_a_peer_that_never_answers_fills_no_memory_and_spoils_no_later_measurement() -> None:
    goodput = Goodput()
    for number in range(2 * MOST_ON_THE_WAY):
        goodput.sent(number, 1_000_000, 0.001 * number)
    goodput.accepted(0, 0.0, 3.0)
    assert goodput.bytes_per_s == 0.0, "it was given up"
    for number in range(2 * MOST_ON_THE_WAY):
        goodput.gave_up(number)
    over_a_line(goodput, [2_000_000] * 40, 12.5e6, 0.02, 2, now=10.0)
    assert goodput.bytes_per_s == pytest.approx(12.5e6, rel=0.05)
