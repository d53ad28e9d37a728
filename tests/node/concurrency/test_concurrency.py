"""The compute thread: one job at a time, the most urgent first, and no caller left without an answer."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from node.concurrency.compute_thread import ComputeThread, CoreUse, Priority, thread_times, threads_beside
from node.concurrency.machine_runner import MachineRunner
from node.concurrency.task_groups import TaskTracker
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Transport
from swarm.vocabulary.errors import PeerError, ResourceExhausted, StateError, Unreachable
from swarm.vocabulary.pipeline_messages import Close
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.kit.waiting import LONG_S, until


@asynccontextmanager
async def queue_behind(compute: ComputeThread) -> AsyncIterator[Callable[[], None]]:
    """A job keeps the thread until what is yielded is called, or the block ends: others queue up behind it."""
    begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert may_end.wait(LONG_S)

    first = asyncio.create_task(compute.run(Priority.UPKEEP, job))
    await until(begun.is_set)
    try:
        yield may_end.set
    finally:
        first.cancel()
        may_end.set()


async def test_results_and_errors_come_back_to_who_asked() -> None:
    def without_memory() -> None:
        raise MemoryError

    with ComputeThread() as compute:
        assert await compute.run(Priority.TRAIN, lambda: threading.current_thread().name) == "compute"
        with pytest.raises(ZeroDivisionError):
            await compute.run(Priority.TRAIN, lambda: 1 // 0)
        with pytest.raises(ResourceExhausted, match="out of memory"):
            await compute.run(Priority.UPKEEP, without_memory)
        assert await compute.run(Priority.TRAIN, lambda: 7) == 7
        assert min(compute.busy_s, compute.idle_s) > 0


async def test_who_does_not_wait_any_more_is_not_worked_for() -> None:
    done: list[str] = []
    with ComputeThread() as compute:
        async with queue_behind(compute) as let_go:
            cancelled = asyncio.create_task(compute.run(Priority.TRAIN, lambda: done.append("cancelled")))
            kept = asyncio.create_task(compute.run(Priority.TRAIN, lambda: done.append("kept")))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait((cancelled,))
            let_go()
            await kept
    assert done == ["kept"]


async def test_who_is_cancelled_in_mid_job_harms_nobody() -> None:
    with ComputeThread() as compute:
        async with queue_behind(compute):
            pass  # cancels its job while it runs, then lets it end
        assert await compute.run(Priority.TRAIN, lambda: 1) == 1


async def test_the_queue_is_bounded() -> None:
    with ComputeThread(limit=2) as compute:
        async with queue_behind(compute) as let_go, asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(compute.run(Priority.TRAIN, lambda: None))
            await asyncio.sleep(0)
            with pytest.raises(ResourceExhausted, match="2 jobs are queued"):
                await compute.run(Priority.UPKEEP, lambda: None)
            let_go()


async def test_stopping_answers_who_waits_and_who_comes_later() -> None:
    done: list[int] = []
    with ComputeThread() as compute:
        async with queue_behind(compute) as let_go:
            waiting = [asyncio.create_task(compute.run(Priority.TRAIN, lambda: done.append(1))) for _ in range(3)]
            await asyncio.sleep(0)
            threading.Thread(target=once_it_stops, args=(compute, let_go)).start()
            compute.__exit__(None, None, None)
    async with asyncio.timeout(LONG_S):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StateError] * 3
        with pytest.raises(StateError, match="stopped"):
            await compute.run(Priority.TRAIN, lambda: done.append(2))
    assert done == []


def once_it_stops(compute: ComputeThread, let_go: Callable[[], None]) -> None:
    """Lets the job that holds the thread end, but only when the thread has been told to stop."""
    while not compute._stopping:
        threading.Event().wait(0.001)
    let_go()


def chunks(done: list[str], *names: str, ended: threading.Event | None = None) -> Iterator[None]:
    for name in names:
        done.append(name)
        yield
    if ended is not None:
        ended.set()


async def test_work_that_was_put_off_is_computed_where_nothing_waits() -> None:
    done, ended, names = list[str](), threading.Event(), ("chunk 0", "chunk 1", "chunk 2")
    with ComputeThread() as compute:
        async with queue_behind(compute) as let_go, asyncio.TaskGroup() as tasks:
            work = chunks(done, *names, ended=ended)
            tasks.create_task(compute.run(Priority.TRAIN, lambda: compute.submit(work, "work")))
            for name in ("first", "second"):
                tasks.create_task(compute.run(Priority.EVALUATE, lambda name=name: done.append(name)))
            await asyncio.sleep(0)
            let_go()
        assert await asyncio.to_thread(ended.wait, LONG_S)
        await compute.run(Priority.TRAIN, lambda: None)
    assert done == ["first", "second", *names]
    assert compute.idle_waiting == 0
    assert compute.idle_work_s > 0


async def test_a_device_that_works_asynchronously_is_waited_for_after_each_chunk() -> None:
    done, ended = list[str](), threading.Event()
    work = chunks(done, "chunk", "chunk", ended=ended)
    with ComputeThread(set_up=lambda: done.append("set up"), settle=lambda: done.append("settled")) as compute:
        await compute.run(Priority.TRAIN, lambda: compute.submit(work, "work"))
        assert await asyncio.to_thread(ended.wait, LONG_S)
    assert done[:5] == ["set up", "chunk", "settled", "chunk", "settled"]


async def test_work_is_finished_in_the_job_that_needs_it_and_given_up_by_another() -> None:
    done: list[str] = []
    with ComputeThread() as compute:

        def job() -> None:
            needed, _ = (compute.submit(chunks(done, name), "work") for name in ("needed", "given up"))
            needed.finish()
            compute.give_up_idle_work()

        await compute.run(Priority.UPKEEP, job)
        await compute.run(Priority.TRAIN, lambda: None)
    assert done == ["needed"]


async def test_no_chunk_begins_before_what_is_expected_and_what_does_not_come_is_not_waited_for() -> None:
    done, ended = list[str](), threading.Event()
    work = chunks(done, "chunk", ended=ended)
    with ComputeThread() as compute:
        compute.expect((time.monotonic() + 3600,))
        await compute.run(Priority.TRAIN, lambda: compute.expect((time.monotonic(),)))
        await compute.run(Priority.TRAIN, lambda: (compute.submit(work, "work"), done.append("job")))
        assert await asyncio.to_thread(ended.wait, LONG_S)
    assert done == ["job", "chunk"]


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

    async def send_control(self, peer: PeerId, message: Any) -> None:
        await self.open.wait()
        if peer == B:
            raise Unreachable("b is gone")
        self.sent.append(peer)


class Runner(MachineRunner[str, str]):
    """Says what it is to do, and handles `then` when it does the first thing."""

    def __init__(self) -> None:
        self.machine, self.wire = Machine(), Wire()
        super().__init__(self.machine.handle, TICK, cast(Transport, self.wire), SystemClock(), 2)
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


async def test_an_event_ends_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.concurrency.machine_runner.QUIET", 1)
    async with at_work() as runner:
        runner.handle("first")
        await some_turns()
        assert runner.machine.events == [TICK, "first", TICK]


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


async def set_when(gate: asyncio.Event, done: list[str], what: str) -> None:
    await gate.wait()
    done.append(what)


async def test_what_is_begun_outside_is_left_undone() -> None:
    chores, done, gate = TaskTracker(), list[str](), asyncio.Event()
    gate.set()
    chores.begin(set_when(gate, done, "before"))
    chores.owe(set_when(gate, done, "owed before"))
    assert not chores.are_running
    async with chores.running():
        assert chores.are_running
    chores.owe(set_when(gate, done, "after"))
    await asyncio.sleep(0)
    assert done == []
    assert chores.owed == 0


async def test_what_is_owed_counts_before_its_task_begins_and_until_it_is_done() -> None:
    chores, done, first, second = TaskTracker(), list[str](), asyncio.Event(), asyncio.Event()
    async with chores.running():
        chores.owe(set_when(first, done, "first"))
        chores.owe(set_when(second, done, "second"))
        chores.begin(set_when(second, done, "owed to nobody"))
        assert chores.owed == 2
        waiting = asyncio.create_task(chores.nothing_owed(60))
        first.set()
        await until(lambda: chores.owed == 1)
        assert not waiting.done()
        second.set()
        await waiting
        assert chores.owed == 0
    assert sorted(done) == ["first", "owed to nobody", "second"]


async def test_patience_ends() -> None:
    chores, impatient = TaskTracker(), asyncio.Event()

    async def go_on() -> None:
        async with chores.running():
            chores.owe(set_when(asyncio.Event(), [], "never"))
            await chores.nothing_owed(0.001)
            impatient.set()
            await asyncio.Event().wait()

    going_on = asyncio.create_task(go_on())
    await impatient.wait()
    assert chores.owed == 1
    going_on.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going_on
    assert chores.owed == 0


async def test_what_fails_is_no_longer_owed_and_ends_the_block_with_its_own_error() -> None:
    async def fail() -> None:
        raise Unreachable("gone")

    chores = TaskTracker()

    async def go_on() -> None:
        async with chores.running():
            chores.owe(fail())
            await asyncio.Event().wait()

    with pytest.raises(Unreachable):
        await go_on()
    assert chores.owed == 0


@pytest.mark.parametrize(
    ("threads", "held_up", "wanted"),
    [(1, 0.9, 1), (2, 0.2, 2), (2, 0.39, 1), (8, 0.01, 8), (8, 1 / 9, 7), (8, 0.33, 5), (64, 0.015, 64), (16, 0.95, 1)],
)
def test_fewer_threads_are_used_the_longer_others_hold_them_up(threads: int, held_up: float, wanted: int) -> None:
    assert threads_beside(threads, held_up) == wanted


class OtherPrograms:
    """Cores with `busy` programs beside our threads, all with equal shares, second by second."""

    def __init__(self, cores: int) -> None:
        self.cores, self.busy, self.used = cores, 0, list[int]()
        self.threads, self.now, self._computed, self._waited = cores, 0.0, 0.0, 0.0
        self.use = CoreUse(cores, lambda: (self._computed, self._waited), self._set)

    def _set(self, threads: int) -> None:
        self.threads = threads

    def run(self, seconds: int, computing: float = 1.0) -> list[int]:
        self.used = []
        for _ in range(seconds):
            share = min(1.0, self.cores / (self.threads + self.busy))
            self._computed, self._waited = self._computed + computing * share, self._waited + computing * (1 - share)
            self.now += 1.0
            self.use.look(self.now)
            self.used.append(self.threads)
        return self.used


def test_threads_give_way_to_a_busy_program_and_come_back_when_it_ends() -> None:
    machine = OtherPrograms(cores=8)
    assert set(machine.run(60)) == {8}
    machine.busy = 2
    used = machine.run(1000)
    assert set(used[2:]) == {6, 8}
    assert used.count(8) < 30, "all threads are tried less and less often"
    machine.busy = 0
    assert set(machine.run(1000)[500:]) == {8}


def test_a_thread_that_hardly_computes_is_not_judged() -> None:
    machine = OtherPrograms(cores=2)
    machine.busy = 2
    assert set(machine.run(4, computing=0.1)) == {2}
    assert 1 in machine.run(20, computing=0.1)


def test_the_times_of_a_thread_are_its_own() -> None:
    if (before := thread_times()) is None:
        pytest.skip("only Linux counts how long a thread waits for a core")
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    after = thread_times()
    assert after is not None
    assert 0.15 < after[0] - before[0] < 1.0
    assert thread_times(Path("/proc/nothing")) is None
