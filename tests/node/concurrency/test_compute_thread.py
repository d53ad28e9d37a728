"""The compute thread: one job at a time, the most urgent first, and no caller left without an answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from node.concurrency.compute_thread import GIVEN_WAY, ComputeThread, Priority
from swarm.vocabulary.errors import ResourceExhausted, StateError

PATIENCE_S = 20.0


@asynccontextmanager
async def queue_behind(compute: ComputeThread) -> AsyncIterator[Callable[[], None]]:
    """A job keeps the thread until what is yielded is called, or the block ends: others queue up behind it."""
    begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert may_end.wait(PATIENCE_S)

    first = asyncio.create_task(compute.run(Priority.UPKEEP, job))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    try:
        yield may_end.set
    finally:
        first.cancel()
        may_end.set()


async def test_results_and_errors_come_back_to_who_asked() -> None:
    with ComputeThread() as compute:
        assert await compute.run(Priority.TRAIN, lambda: threading.current_thread().name) == "compute"
        with pytest.raises(ZeroDivisionError):
            await compute.run(Priority.TRAIN, lambda: 1 // 0)
        assert await compute.run(Priority.TRAIN, lambda: 7) == 7


async def test_a_job_without_memory_fails_in_our_words() -> None:
    def job() -> None:
        raise MemoryError

    with ComputeThread() as compute:
        with pytest.raises(ResourceExhausted, match="out of memory"):
            await compute.run(Priority.UPKEEP, job)
        assert await compute.run(Priority.TRAIN, lambda: 7) == 7


async def test_the_most_urgent_goes_first_and_equals_in_order() -> None:
    done: list[tuple[Priority, int]] = []
    with ComputeThread() as compute:
        async with queue_behind(compute) as let_go, asyncio.TaskGroup() as tasks:
            for number in range(2):
                for priority in reversed(Priority):
                    tasks.create_task(compute.run(priority, lambda p=priority, n=number: done.append((p, n))))
            await asyncio.sleep(0)
            let_go()
    assert done == [(priority, number) for priority in Priority for number in range(2)]


async def test_an_evaluation_gives_way_to_so_many_and_no_more() -> None:
    done: list[str] = []
    with ComputeThread() as compute:
        async with queue_behind(compute) as let_go, asyncio.TaskGroup() as tasks:
            for what in ("before", "evaluation", *("later",) * (2 * GIVEN_WAY), "upkeep"):
                kinds = {"evaluation": Priority.EVALUATE, "upkeep": Priority.UPKEEP}
                tasks.create_task(compute.run(kinds.get(what, Priority.TRAIN), lambda w=what: done.append(w)))
            await asyncio.sleep(0)
            let_go()
    assert done[:2] == ["upkeep", "before"]
    assert done.index("evaluation") == 2 + GIVEN_WAY


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
            with pytest.raises(ResourceExhausted, match="2 jobs wait"):
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
    async with asyncio.timeout(PATIENCE_S):
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


async def test_the_thread_is_set_up_first() -> None:
    done: list[str] = []
    with ComputeThread(set_up=lambda: done.append("set up")) as compute:
        await compute.run(Priority.TRAIN, lambda: done.append("job"))
    assert done == ["set up", "job"]


async def test_busy_and_idle_seconds_are_counted() -> None:
    with ComputeThread() as compute:
        for _ in range(3):
            await compute.run(Priority.TRAIN, lambda: sum(range(1000)))
        await compute.run(Priority.TRAIN, lambda: None)
        assert compute.busy_s > 0
        assert compute.idle_s > 0


async def test_work_that_was_put_off_is_computed_where_nothing_waits() -> None:
    done: list[str] = []

    def chunks(ended: threading.Event) -> Iterator[None]:
        for number in range(3):
            done.append(f"chunk {number}")
            yield
        ended.set()

    ended = threading.Event()
    with ComputeThread() as compute:
        async with queue_behind(compute) as let_go, asyncio.TaskGroup() as tasks:
            tasks.create_task(compute.run(Priority.TRAIN, lambda: compute.submit(chunks(ended), "work")))
            for name in ("first", "second"):
                tasks.create_task(compute.run(Priority.EVALUATE, lambda name=name: done.append(name)))
            await asyncio.sleep(0)
            let_go()
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
        await compute.run(Priority.TRAIN, lambda: None)
    assert done == ["first", "second", "chunk 0", "chunk 1", "chunk 2"]
    assert compute.idle_waiting == 0
    assert compute.idle_work_s > 0


async def test_a_device_that_works_asynchronously_is_waited_for_after_each_chunk() -> None:
    done: list[str] = []
    ended = threading.Event()

    def chunks() -> Iterator[None]:
        for _ in range(2):
            done.append("chunk")
            yield
        ended.set()

    with ComputeThread(settle=lambda: done.append("settled")) as compute:
        await compute.run(Priority.TRAIN, lambda: compute.submit(chunks(), "work"))
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
    assert done[:4] == ["chunk", "settled", "chunk", "settled"]


async def test_work_is_finished_in_the_job_that_needs_it_and_given_up_by_another() -> None:
    done: list[int] = []

    def chunks(number: int) -> Iterator[None]:
        done.append(number)
        yield

    with ComputeThread() as compute:

        def job() -> None:
            needed, _ = (compute.submit(chunks(number), "work") for number in range(2))
            needed.finish()
            compute.give_up_idle_work()

        await compute.run(Priority.UPKEEP, job)
        await compute.run(Priority.TRAIN, lambda: None)
    assert done == [0]


async def test_no_chunk_begins_before_what_is_expected_and_what_does_not_come_is_not_waited_for() -> None:
    done: list[str] = []
    ended = threading.Event()

    def chunks() -> Iterator[None]:
        done.append("chunk")
        ended.set()
        yield

    with ComputeThread() as compute:
        compute.expect((time.monotonic() + 3600,))
        await compute.run(Priority.TRAIN, lambda: compute.expect((time.monotonic(),)))
        await compute.run(Priority.TRAIN, lambda: (compute.submit(chunks(), "work"), done.append("job")))
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
    assert done == ["job", "chunk"]
