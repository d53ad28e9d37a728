"""Tensors are expected after as long as those before took from the same sender, for each byte."""

from __future__ import annotations

import math

import pytest

from swarm.pipeline.compute_queue import MOST_SENDERS, ArrivalForecast
from swarm.vocabulary.types import PeerId

NEAR, FAR = PeerId("near"), PeerId("far")


def taught() -> ArrivalForecast:
    """By a tensor of each: 1000 bytes in 0.1 s, and in 2 s."""
    forecast = ArrivalForecast()
    for sender, seconds in ((NEAR, 0.1), (FAR, 2.0)):
        forecast.announced(sender, "first", 1000, 0.0)
        forecast.arrived(sender, "first", seconds)
    return forecast


def test_of_a_senders_first_tensor_nothing_is_known() -> None:
    forecast = ArrivalForecast()
    forecast.announced(NEAR, 1, 1000, 5.0)
    assert all(at == -math.inf for at in forecast.expected)
    forecast.arrived(NEAR, 1, 5.1)
    assert forecast.expected == (5.1,), "its job is about to be queued"


def test_tensors_are_expected_by_their_size_and_sender() -> None:
    forecast = taught()
    forecast.announced(NEAR, 1, 3000, 10.0)
    forecast.announced(FAR, 1, 500, 10.0)
    assert forecast.expected[:2] == pytest.approx((10.3, 11.0))
    forecast.arrived(NEAR, 1, 10.25)
    forecast.broken_off(FAR, 1)
    assert forecast.expected == (10.25,)


def test_a_line_that_becomes_slower_is_noticed() -> None:
    forecast = taught()
    for number in range(60):
        forecast.announced(NEAR, number, 1000, 10.0 * number)
        forecast.arrived(NEAR, number, 10.0 * number + 0.5)
    forecast.announced(NEAR, "next", 1000, 1000.0)
    assert forecast.expected[0] == pytest.approx(1000.5, abs=0.02)


def test_what_was_never_announced_and_empty_tensors_teach_nothing() -> None:
    forecast = ArrivalForecast()
    forecast.arrived(NEAR, 1, 1.0)
    forecast.broken_off(NEAR, 2)
    forecast.announced(NEAR, 3, 0, 2.0)
    forecast.arrived(NEAR, 3, 2.0)
    forecast.announced(NEAR, 4, 100, 3.0)
    assert forecast.expected == (-math.inf, 2.0)


def test_only_so_many_senders_are_remembered_those_that_sent_last() -> None:
    forecast = taught()
    for number in range(MOST_SENDERS):
        forecast.announced(PeerId(f"peer {number}"), 1, 10, 20.0)
        forecast.arrived(PeerId(f"peer {number}"), 1, 21.0)
        if number % 50 == 0:
            forecast.announced(NEAR, number, 1000, 20.0)
            forecast.arrived(NEAR, number, 20.1)
    assert len(forecast._seconds_per_byte) == MOST_SENDERS
    assert NEAR in forecast._seconds_per_byte
    assert FAR not in forecast._seconds_per_byte
