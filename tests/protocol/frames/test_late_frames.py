"""The line that emulated nodes speak over is a pipe: what is under way shares the delay. In virtual time."""

from __future__ import annotations

import pytest

from tests.e2e.late_frames import LateFrames
from tests.kit.waiting import ManualClock


def ends(delay_s: float, bytes_per_s: float | None = None) -> tuple[LateFrames, LateFrames, ManualClock]:
    clock = ManualClock(100.0)

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    sender, receiver = (LateFrames(bytes_per_s, delay_s, clock.monotonic, sleep) for _ in range(2))
    return sender, receiver, clock


async def test_frames_under_way_share_the_delay() -> None:
    sender, receiver, clock = ends(0.05)
    sent = [await sender.leave(bytes([number])) for number in range(10)]
    assert [await receiver.arrive(frame) for frame in sent] == [bytes([number]) for number in range(10)]
    assert clock.now == pytest.approx(100.05)


async def test_a_line_takes_its_time_for_every_byte_and_then_delays() -> None:
    sender, receiver, clock = ends(0.5, bytes_per_s=100.0)
    sent = [await sender.leave(bytes(100)) for _ in range(3)]
    assert clock.now == pytest.approx(103.0)
    for frame in sent:
        await receiver.arrive(frame)
    assert clock.now == pytest.approx(103.5)
