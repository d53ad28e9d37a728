"""Task groups that raise their first error itself, tasks that others wait for, and daemon threads."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from swarm.vocabulary.errors import SkipstoneError

Result = TypeVar("Result")


@asynccontextmanager
async def task_scope() -> AsyncIterator[asyncio.TaskGroup]:
    """Opens a TaskGroup that raises its first SkipstoneError, else its first error, instead of the group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        found = leaves(group)
        # Callers handle our own errors, so prefer these.
        raise next((each for each in found if isinstance(each, SkipstoneError)), found[0]) from group


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` as tasks within the block, and cancels them at its end. Raises errors as `task_scope`."""
    async with task_scope() as tasks:
        running = [tasks.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def set_or_after(event: asyncio.Event, seconds: float) -> None:
    """Waits until the event is set, at the latest for `seconds`, and clears it. For the only task that waits for it."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)  # half the cost of `asyncio.timeout`
    try:
        await event.wait()
    finally:
        timer.cancel()
    event.clear()


async def unless(stop: asyncio.Event, wanted: Awaitable[Result]) -> Result | None:
    """Awaits `wanted`; returns None and cancels it if `stop` is set first."""

    async def getting() -> Result:
        return await wanted

    async with task_scope() as tasks:
        work, stopping = tasks.create_task(getting()), tasks.create_task(stop.wait())
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not work.done():
            work.cancel()
            return None
    return work.result()


def leaves(error: BaseException) -> list[BaseException]:
    """Returns all errors in nested exception groups as a list, first error first."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


class TaskTracker:
    """Background tasks, which run only while `running` is active. Coroutines passed at other times are dropped."""

    def __init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None
        self._begun: set[asyncio.Task[Any]] = set()
        self.owed = 0  # Tasks started by `owe` that are not done
        self._paid = asyncio.Event()

    @property
    def are_running(self) -> bool:
        return self._tasks is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accepts tasks within the block, and waits for them at its end. Raises the error of a failed task."""
        async with task_scope() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any] | None:
        """Starts `work` as a task; drops `work` and returns None outside `running`."""
        if self._tasks is None:
            work.close()  # a coroutine that is never awaited would warn
            return None
        task = self._tasks.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    def cancel(self) -> None:
        self._tasks = None
        for task in self._begun:
            task.cancel()

    def owe(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` as a task that `nothing_owed` waits for, even before the task first runs."""
        task = self.begin(work)
        if task is not None:
            self.owed += 1
            task.add_done_callback(self._pay)

    def _pay(self, _task: asyncio.Task[None]) -> None:
        self.owed -= 1
        self._paid.set()

    async def nothing_owed(self, patience_s: float) -> None:
        """Waits until all tasks started by `owe` are done, at most `patience_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.owed:
                    self._paid.clear()
                    await self._paid.wait()


def settle(future: Future[Result], job: Callable[[], Result]) -> None:
    """Runs `job` and puts its result or error into `future`, unless the future was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(job())
        except BaseException as error:  # the future passes it to the caller
            future.set_exception(error)


async def aside(work: Callable[[], Result], limit_s: float | None) -> Result:
    """Runs `work` in a daemon thread, which blocks neither loop nor exit. Raises TimeoutError after `limit_s`."""
    future: Future[Result] = Future()
    threading.Thread(target=settle, args=(future, work), name="aside", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await asyncio.wrap_future(future)
