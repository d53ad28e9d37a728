"""The threads that own the compute devices. `swarm.pipeline.compute_queue` chooses the first one's next job."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Self, TypeVar

import torch

from node.concurrency.task_groups import settle
from node.model.device import device_errors, flush_denormals
from swarm.pipeline.compute_queue import GIVEN_WAY, ArrivalForecast, ComputeQueue, IdleWork, Priority
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.statistics import ExponentialBackoff

__all__ = ["GIVEN_WAY", "ComputeThread", "Priority"]

LONGEST_REST_S: Final = 10.0

Result = TypeVar("Result")


class ComputeThread:
    """Thread of a compute device: runs jobs by priority, and idle work between them. Flushes denormals to zero."""

    def __init__(
        self,
        limit: int = 4096,
        set_up: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        name: str = "compute",
    ) -> None:
        self._set_up = set_up
        self._settle = settle
        self._queue = ComputeQueue(limit)
        self.forecast = ArrivalForecast()  # Of the tensors for all modules that compute here
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.share = 1.0  # Of the time in which the thread may compute
        self.busy_s = 0.0
        self.idle_work_s = 0.0
        self.idle_s = 0.0

    @property
    def idle_waiting(self) -> int:
        return self._queue.idle_waiting

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=60.0)
        for tell_its_caller in self._queue.clear():  # jobs that never ran raise StateError in their callers
            tell_its_caller()

    async def run(self, priority: Priority, job: Callable[[], Result]) -> Result:
        """Queues a job and returns its result. Raises the errors of the job and of `post`."""
        return await asyncio.wrap_future(self.post(priority, job))

    def post(self, priority: Priority, job: Callable[[], Result]) -> Future[Result]:
        """Queues a job from any other thread. Raises ResourceExhausted, or StateError after the end."""
        future: Future[Result] = Future()

        def work() -> Result:
            self._check_running()  # `__exit__` runs the remaining jobs elsewhere, so they must fail here
            with device_errors():
                return job()

        with self._wake:
            self._check_running()
            self._queue.put(priority, partial(settle, future, work))
            self._wake.notify()
        return future

    def submit(self, chunks: Iterator[None], name: str) -> IdleWork:
        """Queues chunks of work for idle time. Call it only on the compute thread. Raises ResourceExhausted."""
        return self._queue.submit(chunks, name)

    def expect(self, jobs: tuple[float, ...]) -> None:
        """Sets when jobs should arrive (`time.monotonic`). Idle work that would last beyond one does not start."""
        self._queue.expected = jobs

    def give_up_idle_work(self) -> None:
        """Cancels all submitted idle work. Call it in a job on the compute thread."""
        self._queue.give_up_idle_work()

    def _check_running(self) -> None:
        if self._stopping:
            raise StateError("the compute thread has stopped")

    def _work(self) -> None:
        flush_denormals()  # first, because torch's worker threads inherit the setting
        self._set_up()
        cores = CoreUse(torch.get_num_threads())
        ended: float | None = None
        while (turn := self._next_turn()) is not None:
            begun = time.perf_counter()
            self.idle_s += 0.0 if ended is None else begun - ended
            if isinstance(turn, IdleWork):
                turn.compute_chunk()
                self._settle()  # device work is asynchronous: wait for it, so that the chunk's time is known
                ended = time.perf_counter()
                self.idle_work_s += ended - begun
            else:
                turn()
                ended = time.perf_counter()
                self.busy_s += ended - begun
            cores.look(ended)
            if self.share < 1.0:
                self._rest((ended - begun) * (1 / self.share - 1))

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + min(LONGEST_REST_S, seconds)
        with self._wake:
            while not self._stopping and (left_s := until - time.monotonic()) > 0:
                self._wake.wait(left_s)

    def _next_turn(self) -> Callable[[], None] | IdleWork | None:
        with self._wake:
            while not self._stopping:
                now = time.monotonic()
                turn = self._queue.take(now)
                if turn is not None:
                    return turn
                self._wake.wait(self._queue.rest_s(now))
        return None


LOOK_S: Final = 1.0  # Interval between looks. Half of it must be time of the thread, with its waiting for a core
LEAST_HELD_UP: Final = 0.02  # On a quiet machine a thread was held up for 0.7 % of its time at most
ALL_AGAIN: Final = ExponentialBackoff(first_s=30.0, longest_s=480.0)  # Pauses before all threads are tried again


def threads_beside(threads: int, held_up: float) -> int:
    """Returns how many of a thread's OpenMP threads to use if it waits for a core in a share `held_up` of its time."""
    # A barrier waits for the slowest thread while the others spin. On two cores with another busy program, two threads
    # took 2.0 s for what one did in 1.3 s. If it is one thread that waits, n - 1 are faster from 1 / n^2 on.
    if held_up < LEAST_HELD_UP or threads**2 * held_up <= 1:
        return threads
    return max(1, int(threads * (1 - held_up)))


def thread_times(path: Path = Path("/proc/thread-self/schedstat")) -> tuple[float, float] | None:
    """Returns how long the calling thread has computed and has waited for a core, in seconds; None if not Linux."""
    try:
        computed, waited = path.read_text().split()[:2]
    except OSError:
        return None
    return int(computed) / 1e9, int(waited) / 1e9


class CoreUse:
    """Sets how many OpenMP threads the calling thread uses: fewer while other programs hold it up."""

    def __init__(
        self,
        most: int,
        times: Callable[[], tuple[float, float] | None] = thread_times,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._most = self._threads = most
        self._times, self._use = times, use
        self._known = times()
        self._look_at = self._all_again_at = 0.0
        self._reductions = 0

    def look(self, now: float) -> None:
        """Judges the time since the last look. Call it often, in the thread itself."""
        if self._most == 1 or self._known is None or now < self._look_at or (times := self._times()) is None:
            return
        self._look_at = now + LOOK_S
        computed, waited = (after - before for after, before in zip(times, self._known, strict=True))
        if computed + waited < LOOK_S / 2:
            return
        self._known = times
        was_all, wanted = self._threads == self._most, threads_beside(self._threads, waited / (computed + waited))
        if wanted < self._threads and was_all:
            self._reductions += 1
            self._all_again_at = now + ALL_AGAIN.seconds(self._reductions)
        elif was_all:
            self._reductions = 0
        elif now >= self._all_again_at:
            wanted = self._most
        if wanted != self._threads:
            self._threads = wanted
            self._use(wanted)


class DeviceThreads:
    """The devices of one node except the first, each with a thread. CPU devices share the cores."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in devices[1:]]
        self._cores = max(1, torch.get_num_threads() // len(devices))
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"compute {device}", daemon=True)
            for queue, device in zip(self._queues, devices[1:], strict=True)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(timeout=60.0)

    def set_up(self) -> None:
        """Makes the calling thread flush denormals to zero, and use only its share of the cores."""
        flush_denormals()
        if self.devices[0].type == "cpu":
            torch.set_num_threads(self._cores)

    def settle(self) -> None:
        """Waits until the first device has finished the work that the calling thread queued there."""
        kind = self.devices[0].type
        if kind == "cuda":
            torch.cuda.current_stream(self.devices[0]).synchronize()
        elif kind == "mps":
            torch.mps.synchronize()

    def at_once(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Runs one job per device, the first in the calling thread. Raises the failure that caused the others."""
        futures: list[Future[Result]] = [Future() for _ in jobs]
        for queue, job, future in zip(self._queues, jobs[1:], futures[1:], strict=True):
            queue.put(partial(settle, future, job))
        settle(futures[0], jobs[0])
        failures = [error for future in futures if (error := future.exception()) is not None]
        # A broken barrier is only the consequence of another job's failure.
        for error in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _work(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        self.set_up()
        while (job := queue.get()) is not None:
            job()
