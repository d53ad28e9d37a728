"""What a link measures of itself, under a clock that the test moves."""

from __future__ import annotations

import pytest

from protocol.transport.link import MOST_ON_THE_WAY, Meter


class HandClock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def test_the_meter_smooths_round_trips_and_ignores_strange_pongs() -> None:
    clock = HandClock()
    meter = Meter(clock)
    token = meter.ping()
    clock.now += 0.8
    meter.pong(token + 1)
    assert meter.figures().round_trip_s == 0
    meter.pong(token)
    meter.pong(token)
    assert meter.figures().round_trip_s == pytest.approx(0.8)
    token = meter.ping()
    clock.now += 1.6
    meter.pong(token)
    assert meter.figures().round_trip_s == pytest.approx(1.2)


def test_the_meter_knows_silence_and_forgives_our_own() -> None:
    clock = HandClock()
    meter = Meter(clock)
    meter.heard(10)
    clock.now += 5
    assert meter.silence_s() == 5
    meter.forgive(4)
    assert meter.silence_s() == 1
    meter.forgive(40)
    assert meter.silence_s() == 0


def test_goodput_is_told_by_the_pongs_behind_whole_tensors() -> None:
    clock = HandClock()
    meter = Meter(clock)
    meter.wrote(1000)
    meter.sending(1, 1000)
    clock.now += 1.0
    meter.pong(1)
    assert meter.figures().goodput_bytes_per_s == 0, "nothing was asked yet"
    token = meter.ping_after(1)
    clock.now += 1.0
    assert not meter.pong(token), "it is no round trip"
    assert meter.figures().goodput_bytes_per_s == 500
    assert meter.figures().sent_bytes == 1000
    assert meter.figures().round_trip_s == 0


def test_a_tensor_that_was_given_up_is_not_waited_for() -> None:
    clock = HandClock()
    meter = Meter(clock)
    meter.sending(1, 1000)
    clock.now += 100.0
    meter.gave_up(1)
    meter.sending(3, 1000)
    clock.now += 1.0
    meter.pong(meter.ping_after(3))
    assert meter.figures().goodput_bytes_per_s == 1000


def test_who_answers_nothing_fills_no_memory() -> None:
    meter = Meter(HandClock())
    for transfer in range(3 * MOST_ON_THE_WAY):
        meter.sending(transfer, 1000)
        meter.ping_after(transfer)
    assert len(meter._behind) == MOST_ON_THE_WAY
    assert len(meter._goodput._on_the_way) == MOST_ON_THE_WAY
