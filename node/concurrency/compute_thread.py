"""The one thread that owns the compute device, and the queue before it. (Rounds have such a thread for their
arithmetic, too.)"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from node.model.device import flush_denormals
from swarm.vocabulary.errors import ResourceExhausted, StateError

Result = TypeVar("Result")
GIVEN_WAY = 16


class Priority(enum.IntEnum):
    """The urgency of a job: smaller goes first; equal ones in order of arrival."""

    UPKEEP = 0
    """An inner step that is due, or freeing what is not needed any more."""
    TRAIN = 1
    """Both ways alike: simulated swarms of unequal peers were up to 7 % slower when gradients went first, and never
    faster. Slots bound the memory."""
    EVALUATE = 2
    """After the training jobs that wait, and GIVEN_WAY of those that come later: on a busy peer it would never have its
    turn."""


class ComputeThread:
    """Runs jobs one at a time, the most urgent first, away from the event loop. Denormal numbers are zero there.

    Args:
        limit: jobs waiting at most; the callers' own bounds keep well below it.
        set_up: called first on the thread (to choose a device, say).
        name: of the thread, for those who look at the process.
    """

    def __init__(self, limit: int = 4096, set_up: Callable[[], None] = lambda: None, name: str = "compute") -> None:
        self._limit = limit
        self._set_up = set_up
        self._jobs: list[tuple[Priority, int, int, Callable[[], None]]] = []
        """Each with what decides its turn: upkeep or not, its place in line, and the order of arrival among equals."""
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.busy_s = 0.0
        """Seconds spent in jobs."""
        self.idle_s = 0.0
        """Seconds spent waiting for a job, since the first one."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=60.0)
        for *_, tell_its_caller in self._jobs:
            tell_its_caller()
        self._jobs.clear()

    async def run(self, priority: Priority, job: Callable[[], Result]) -> Result:
        """Queues a job and waits for its result; whatever it raises is raised here.

        A caller that is cancelled does not stop a job that has begun.

        Raises:
            ResourceExhausted: too many jobs wait already.
            StateError: the thread has been stopped, before or while the job waited.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(outcome: Callable[[Any], None], value: object) -> None:
            if not future.done():
                outcome(value)

        def work() -> None:
            if future.cancelled():
                return
            try:
                self._check_running()
                result = job()
            except Exception as error:  # handed to whoever waits
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, result)

        with self._wake:
            self._check_running()
            if len(self._jobs) >= self._limit:
                raise ResourceExhausted(f"{self._limit} jobs wait for the compute device")
            number, last = next(self._numbers), priority is Priority.EVALUATE
            place = number + GIVEN_WAY + 1 if last else number
            heapq.heappush(self._jobs, (min(priority, Priority.TRAIN), place, number, work))
            self._wake.notify()
        return await future

    def _check_running(self) -> None:
        if self._stopping:
            raise StateError("the compute thread has stopped")

    def _work(self) -> None:
        flush_denormals()  # first: torch's workers do as the thread that starts them
        self._set_up()
        ended: float | None = None
        while True:
            with self._wake:
                while not self._jobs and not self._stopping:
                    self._wake.wait()
                if self._stopping:
                    return
                *_, job = heapq.heappop(self._jobs)
            begun = time.perf_counter()
            self.idle_s += 0.0 if ended is None else begun - ended
            job()
            ended = time.perf_counter()
            self.busy_s += ended - begun
