"""Saves are asked for or due, never two at a time, and never a reason to stop training."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from node.checkpoint.folder import load_newest, save_state
from node.checkpoint.saver import Saver, SaveRequests
from node.checkpoint.state import ReplicaState
from node.concurrency.compute_thread import ComputeThread
from node.observability.events import Event, Note
from swarm.vocabulary.errors import ResourceExhausted
from tests.node.checkpoint.saved_states import ONE, PEER, SteppedStorage, folder_at, state_of

LONG_S = 30.0


@dataclass
class Bench:
    """A saver at work, the replica it saves, and what it says."""

    path: Path
    steps: int = 1
    captures: int = 0
    events: list[Event] = field(default_factory=list)
    disk: Callable[[str], None] = lambda step: None
    requests: SaveRequests = field(default_factory=SaveRequests)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def capture(self) -> ReplicaState:
        assert threading.current_thread().name == "compute"
        self.captures += 1
        return state_of(float(self.captures), steps=self.steps)

    def newest(self) -> int:
        found = load_newest(folder_at(self.path), PEER)
        return 0 if found is None else found.header.number

    @asynccontextmanager
    async def saver(self, every_s: float = LONG_S) -> AsyncIterator[Saver]:
        folder = folder_at(self.path, SteppedStorage(lambda step: self.disk(step)))
        write = partial(save_state, folder, PEER, ONE)
        with (
            ComputeThread() as compute,
            Saver(self.capture, write, compute, self.requests, self, every_s) as saver,
        ):
            running = asyncio.create_task(saver.run())
            try:
                yield saver
            finally:
                running.cancel()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_request_is_followed_by_a_save(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.saver():
        bench.requests.request_save("round 1")
        await until(lambda: bench.newest() == 1)
        bench.requests.request_save("round 2")
        await until(lambda: bench.newest() == 2)
    assert bench.events == []


async def test_the_interval_saves_only_what_has_changed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.saver(every_s=0.01):
        await until(lambda: bench.captures > 5)
        assert bench.newest() == 1
        bench.steps = 2
        await until(lambda: bench.newest() == 2)


async def test_a_failure_is_a_warning_and_the_next_one_may_succeed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def full(step: str) -> None:
        raise OSError(28, "No space left on device")

    bench.disk = full
    async with bench.saver() as saver:
        bench.requests.request_save("round 1")
        await until(lambda: bench.events)
        (note,) = bench.events
        assert isinstance(note, Note)
        assert note.level == "warning"
        assert "No space left" in note.message
        with pytest.raises(ResourceExhausted):
            await saver.save_at_the_end()
        bench.disk = lambda step: None
        await saver.save_at_the_end()
    assert bench.newest() == 1


async def test_two_writes_never_overlap_and_the_last_one_waits_for_the_one_before(tmp_path: Path) -> None:
    bench, gate, reached = Bench(tmp_path), threading.Event(), threading.Event()
    active, overlaps = 0, 0

    def slow(step: str) -> None:
        nonlocal active, overlaps
        active += 1
        overlaps += active > 1
        if step == "rename":
            reached.set()
            assert gate.wait(LONG_S)
        active -= 1

    bench.disk = slow
    async with bench.saver() as saver:
        bench.requests.request_save("round 1")
        await until(reached.is_set)
        last = asyncio.create_task(saver.save_at_the_end())
        await until(lambda: bench.captures == 2)
        gate.set()
        await last
    assert overlaps == 0
    assert bench.newest() == 2
