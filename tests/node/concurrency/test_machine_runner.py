"""A runner hands its machine one event after the other, ticks, and sends with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from node.concurrency.machine_runner import MachineRunner
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Transport
from swarm.vocabulary.errors import PeerError, Unreachable
from swarm.vocabulary.pipeline_messages import Close
from swarm.vocabulary.types import MicrobatchId, PeerId

A, B = PeerId("a"), PeerId("b")
WORD = Close(MicrobatchId(A, 1), "over")
TICK = "tick"


class Machine:
    """Answers every event but ticks with actions of two parts."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def handle(self, event: str, now: float) -> list[str]:
        self.events.append(event)
        return [] if event == TICK else [f"{event}.1", f"{event}.2"]


class Wire:
    """Sends nothing before it is let, and nothing to B ever."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.sent: list[PeerId] = []

    async def tell(self, peer: PeerId, message: Any) -> None:
        await self.open.wait()
        if peer == B:
            raise Unreachable("b is gone")
        self.sent.append(peer)


class Runner(MachineRunner[str, str]):
    """Says what it is to do, and handles `then` when it does the first thing."""

    def __init__(self) -> None:
        self.machine, self.wire = Machine(), Wire()
        super().__init__(self.machine, TICK, cast(Transport, self.wire), SystemClock(), 2)
        self.done: list[str] = []
        self.then: str | None = None
        self.lost: list[PeerId] = []

    def _carry_out(self, action: str) -> None:
        then, self.then = self.then, None
        if then is not None:
            self.handle(then)
        self.done.append(action)

    def _not_sent(self, to: PeerId, error: PeerError) -> None:
        self.lost.append(to)

    def _pause_s(self) -> float:
        return 60.0


@asynccontextmanager
async def at_work() -> AsyncIterator[Runner]:
    runner = Runner()
    running = asyncio.create_task(runner.run())
    await asyncio.sleep(0)
    try:
        yield runner
    finally:
        runner.stop()
        await asyncio.wait_for(running, 5)


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_an_action_brings_about_comes_after_the_actions_of_its_event() -> None:
    async with at_work() as runner:
        runner.then = "second"
        runner.handle("first")
        assert runner.done == ["first.1", "first.2", "second.1", "second.2"]


async def test_it_ticks_at_its_start_and_when_it_is_woken() -> None:
    async with at_work() as runner:
        assert runner.machine.events == [TICK]
        runner.wake()
        await some_turns()
        assert runner.machine.events == [TICK, TICK]


async def test_before_and_after_it_runs_nothing_happens() -> None:
    early = Runner()
    early.handle("before")
    assert early.send(A, WORD)
    async with at_work() as runner:
        pass
    runner.handle("after")
    assert early.machine.events == [] == early.wire.sent
    assert runner.machine.events == [TICK]


async def test_only_so_many_messages_wait_for_one_peer() -> None:
    async with at_work() as runner:
        assert [runner.send(A, WORD) for _ in range(3)] == [True, True, False]
        assert runner.send(B, WORD)
        runner.wire.open.set()
        await some_turns()
        assert runner.wire.sent == [A, A]
        assert runner.lost == [B]
        assert runner.send(A, WORD)


async def test_stopping_ends_its_tasks() -> None:
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with at_work() as runner:
        runner.begin(endless())
        await some_turns()
    assert ended.is_set()
