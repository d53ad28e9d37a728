"""One direction of an emulated connection in virtual time, on a machine that wakes it late."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any

import pytest

from lab.emulation.emulation import Emulation
from lab.emulation.link_shape import LinkShape, Site
from lab.emulation.proxy import Pipe

SENDER, RECEIVER = 0, 1
RATE = 1_000_000.0
"""Bytes a second; the pipe takes in five milliseconds' worth at a time."""
DELAY_S = 0.1


class LateClock:
    """Virtual time, in which every sleep lasts longer than asked."""

    def __init__(self, late_s: float) -> None:
        self.now = 0.0
        self._late_s = late_s
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = itertools.count()

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds + self._late_s, next(self._numbers), woken))
        await woken.wait()

    async def run(self) -> None:
        while True:
            for _ in range(10):  # whoever can go on does so first
                await asyncio.sleep(0)
            if self._sleepers:
                self.now, _, woken = heapq.heappop(self._sleepers)
                woken.set()


class Receiver:
    """The far end's socket: when which byte came."""

    def __init__(self, clock: LateClock) -> None:
        self._clock = clock
        self.arrivals: list[tuple[float, int]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.arrivals.append((self._clock.now, len(data)))

    async def drain(self) -> None:
        return

    def write_eof(self) -> None:
        return


async def carried(size_bytes: int, late_s: float, *, down: float = RATE) -> list[tuple[float, int]]:
    emulation, clock = Emulation(seed=1), LateClock(late_s)
    emulation.place(SENDER, Site(LinkShape(latency_s=DELAY_S, up_bytes_per_s=RATE)))
    emulation.place(RECEIVER, Site(LinkShape(down_bytes_per_s=down)))
    reader, receiver = asyncio.StreamReader(), Receiver(clock)
    reader.feed_data(bytes(size_bytes))
    reader.feed_eof()
    writer: Any = receiver
    ticking = asyncio.create_task(clock.run())
    await Pipe(emulation, (SENDER, RECEIVER), reader, writer, lambda: clock.now, clock.sleep).run()
    ticking.cancel()
    assert sum(size for _, size in receiver.arrivals) == size_bytes
    return receiver.arrivals


@pytest.mark.parametrize("late_s", [0.0, 0.004, 0.03])
@pytest.mark.parametrize("down", [RATE, RATE / 2])
async def test_a_busy_machine_does_not_make_the_link_narrower(late_s: float, down: float) -> None:
    """Where each piece began when the process woke, half a megabyte took 3.6 s for 1.1, thirty milliseconds late."""
    size_bytes = 500_000
    last, _ = (await carried(size_bytes, late_s, down=down))[-1]
    ideal_s = size_bytes / min(RATE, down) + DELAY_S
    assert ideal_s * 0.97 <= last <= ideal_s + 3 * late_s + 0.01


@pytest.mark.parametrize("late_s", [0.0, 0.03])
async def test_nothing_comes_sooner_than_the_link_allows(late_s: float) -> None:
    passed = 0
    for at, size in await carried(200_000, late_s):
        passed += size
        assert at >= DELAY_S + passed / RATE - 0.01 - 1e-9, "its burst apart"


async def test_what_is_sent_later_is_not_taken_for_sent_when_the_process_overslept() -> None:
    emulation, clock = Emulation(seed=1), LateClock(0.03)
    emulation.place(SENDER, Site(LinkShape(latency_s=DELAY_S, up_bytes_per_s=RATE)))
    emulation.place(RECEIVER, Site(LinkShape()))
    reader, receiver = asyncio.StreamReader(), Receiver(clock)
    writer: Any = receiver
    ticking = asyncio.create_task(clock.run())
    reader.feed_data(bytes(100_000))
    pipe = asyncio.create_task(
        Pipe(emulation, (SENDER, RECEIVER), reader, writer, lambda: clock.now, clock.sleep).run()
    )
    await clock.sleep(2.0)
    begun = clock.now
    reader.feed_data(b"x")
    reader.feed_eof()
    await pipe
    ticking.cancel()
    assert receiver.arrivals[-1][1] == 1
    assert receiver.arrivals[-1][0] >= begun + DELAY_S
