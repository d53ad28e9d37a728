"""Tasks beside a running part; some are owed to others, and done before it may end in good order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from node.concurrency.task_groups import task_scope


class TaskTracker:
    """Tasks that live inside `running`. What is begun outside of it is left undone."""

    def __init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None
        self._begun: set[asyncio.Task[None]] = set()
        self._owed = 0
        self._paid = asyncio.Event()

    @property
    def are_running(self) -> bool:
        return self._tasks is not None

    @property
    def owed(self) -> int:
        return self._owed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the tasks within the block, which ends with the error of a failed task."""
        async with task_scope() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Starts a task; None outside of `running`."""
        if self._tasks is None:
            work.close()
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
        """Starts a task that others wait for. Counted from now on: the task may begin later."""
        task = self.begin(work)
        if task is not None:
            self._owed += 1
            task.add_done_callback(self._pay)

    def _pay(self, _task: asyncio.Task[None]) -> None:
        self._owed -= 1
        self._paid.set()

    async def nothing_owed(self, patience_s: float) -> None:
        """Waits until all that is owed has been done, or so many seconds have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._owed:
                    self._paid.clear()
                    await self._paid.wait()
