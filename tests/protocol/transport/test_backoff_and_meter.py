"""How long a peer is left alone, under a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.transport.dialer import MAX_REMEMBERED_PEERS, Backoff
from protocol.transport.meter import MOST_ON_THE_WAY, Meter
from swarm.vocabulary.types import PeerId

PEER = PeerId("peer")


class HandClock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def test_waits_double_up_to_the_limit_and_end_with_success() -> None:
    backoff = Backoff(HandClock(), 0.5, 3.0, lambda: 0.0)
    waits = []
    for _ in range(5):
        backoff.failed(PEER)
        waits.append(backoff.wait_s(PEER))
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.succeeded(PEER)
    assert backoff.wait_s(PEER) == 0
    assert backoff.wait_s(PeerId("another")) == 0


def test_waiting_uses_the_wait_up() -> None:
    clock = HandClock()
    backoff = Backoff(clock, 2.0, 3.0, lambda: 0.0)
    backoff.failed(PEER)
    clock.now += 1.5
    assert backoff.wait_s(PEER) == pytest.approx(0.5)
    clock.now += 1.5
    assert backoff.wait_s(PEER) == 0


@given(st.integers(1, 200), st.floats(0, 1))
def test_a_wait_is_never_longer_than_the_limit_nor_less_than_half_of_the_first(failures: int, jitter: float) -> None:
    backoff = Backoff(HandClock(), 0.5, 3.0, lambda: jitter)
    for _ in range(failures):
        backoff.failed(PEER)
    assert 0.25 <= backoff.wait_s(PEER) <= 3.0 + 1e-9


def test_only_so_many_peers_are_remembered() -> None:
    backoff = Backoff(HandClock(), 0.5, 3.0, lambda: 0.0)
    for n in range(MAX_REMEMBERED_PEERS + 1):
        backoff.failed(PeerId(str(n)))
    assert backoff.wait_s(PeerId("0")) == 0
    assert backoff.wait_s(PeerId("1")) > 0


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
