"""The queue of a compute device: jobs of microbatches, and low-priority work for idle time.

Idle work runs in chunks of a few milliseconds, so it delays a job by at most one chunk (PipeFisher, Osawa et al. 2022,
arXiv:2211.14133). Tensor headers announce jobs in advance (`ArrivalForecast`).
"""

import enum
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.statistics import Ewma, Latest
from swarm.vocabulary.types import PeerId, Reasoned

GIVEN_WAY: Final = 16  # Training jobs that may overtake an evaluation job
CHUNK_S: Final = 0.005  # Longest chunk of idle work, in seconds
MOST_WAITING: Final = 1024
MOST_SENDERS: Final = 256

Job = Callable[[], None]


class Priority(enum.IntEnum):
    """Priority of a job, smallest first; equal ones in order of arrival."""

    UPKEEP = 0  # A due inner step, or freeing memory
    TRAIN = 1  # Forward and backward equally: a simulated swarm was never faster with gradients first
    EVALUATE = 2  # After the queued training jobs and GIVEN_WAY later ones, so that a busy peer does not starve it


def puts_weights_off(staleness: int, devices: int) -> Reasoned[bool]:
    """Decides whether a peer defers the computation of weight gradients to idle time of its device."""
    if devices > 1:
        return Reasoned(False, "several devices compute each microbatch together")
    if staleness > 0:
        # More microbatches in flight use the same memory and fill idle time better (42 % against 17 % in a simulation).
        return Reasoned(False, f"with a staleness of {staleness} more microbatches in flight fill idle time better")
    return Reasoned(True, "steps wait for each other (staleness 0), so no microbatch can fill the idle time")


class IdleWork:
    """A low-priority computation for idle time of the device, split into chunks."""

    def __init__(self, waiting: "dict[IdleWork, None]", chunks: Iterator[None], name: str) -> None:
        self.name = name
        self._waiting = waiting
        self._chunks = chunks
        self._error: Exception | None = None

    def compute_chunk(self) -> None:
        """Computes the next chunk. After an error no chunks follow, and `finish` raises the error."""
        try:
            next(self._chunks)
        except StopIteration:
            self.cancel()
        except Exception as error:
            self._error = error
            self.cancel()

    def finish(self) -> None:
        """Computes all remaining chunks. Raises their error, or the error of an earlier chunk."""
        chunks = self._chunks
        self.cancel()
        if self._error is not None:
            raise self._error
        deque(chunks, maxlen=0)

    def cancel(self) -> None:
        """Drops the remaining chunks and their memory. Does nothing if all chunks are computed."""
        self._waiting.pop(self, None)
        self._chunks = iter(())


class ComputeQueue:
    """Queue of one compute device: urgent jobs, and work for idle time. Not thread-safe: see `ComputeThread`."""

    def __init__(self, limit: int, idle_limit: int = MOST_WAITING) -> None:
        self._limit, self._idle_limit = limit, idle_limit
        self._jobs: list[tuple[Priority, int, int, Job]] = []  # Heap: (upkeep or not, position, order of arrival)
        self._numbers = itertools.count()
        self._idle: dict[IdleWork, None] = {}
        # Expected arrival times of jobs, by the clock of `take`. Jobs more than CHUNK_S late no longer count.
        self.expected: tuple[float, ...] = ()

    @property
    def idle_waiting(self) -> int:
        return len(self._idle)

    def put(self, priority: Priority, job: Job) -> None:
        if len(self._jobs) >= self._limit:
            raise ResourceExhausted(f"{self._limit} jobs are queued for the compute device")
        number = next(self._numbers)
        place = number + GIVEN_WAY + 1 if priority is Priority.EVALUATE else number
        heapq.heappush(self._jobs, (min(priority, Priority.TRAIN), place, number, job))

    def submit(self, chunks: Iterator[None], name: str) -> IdleWork:
        """Queues work for idle time, in chunks of about CHUNK_S. Raises ResourceExhausted if the queue is full."""
        if len(self._idle) >= self._idle_limit:
            raise ResourceExhausted(f"{self._idle_limit} pieces of work wait for idle time")
        work = IdleWork(self._idle, chunks, name)
        self._idle[work] = None
        return work

    def take(self, now: float) -> Job | IdleWork | None:
        """Removes and returns the most urgent job; else returns the oldest idle work, unless a job is expected soon."""
        if self._jobs:
            *_, job = heapq.heappop(self._jobs)
            return job
        return next(iter(self._idle), None) if self._free_from(now) <= now else None

    def rest_s(self, now: float) -> float | None:
        """Returns the seconds until `take` returns idle work, if no job arrives first; None without idle work."""
        return max(0.0, self._free_from(now) - now) if self._idle else None

    def _free_from(self, now: float) -> float:
        """Returns the earliest time, `now` or later, at which no job is expected within CHUNK_S."""
        for at in sorted(self.expected):
            if at - CHUNK_S < now < at + CHUNK_S:
                now = at + CHUNK_S
        return now

    def give_up_idle_work(self) -> None:
        for work in list(self._idle):
            work.cancel()

    def clear(self) -> list[Job]:
        self.give_up_idle_work()
        jobs = [job for *_, job in sorted(self._jobs, key=lambda each: each[:3])]
        self._jobs.clear()
        return jobs


@dataclass(frozen=True, slots=True)
class _Arriving:
    size_bytes: int
    since: float
    expected: float


class ArrivalForecast:
    """Expected arrival times of tensors in flight, from the speed of the sender's earlier tensors."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[PeerId, Hashable], _Arriving] = {}
        self._seconds_per_byte = Latest[PeerId, Ewma](MOST_SENDERS)
        self._latest = -math.inf

    @property
    def expected(self) -> tuple[float, ...]:
        return (*(each.expected for each in self._arriving.values()), self._latest)

    def announced(self, sender: PeerId, tensor: Hashable, size_bytes: int, now: float) -> None:
        """Adds an admitted tensor to the forecast, at its header. Receive buffers bound the number of such tensors."""
        known = self._seconds_per_byte.get(sender)
        expected = -math.inf if known is None else now + known.mean * size_bytes
        self._arriving[sender, tensor] = _Arriving(size_bytes, now, expected)

    def arrived(self, sender: PeerId, tensor: Hashable, now: float) -> None:
        arriving = self._arriving.pop((sender, tensor), None)
        self._latest = now
        if arriving is None or not arriving.size_bytes:
            return
        known = self._seconds_per_byte[sender] = self._seconds_per_byte.get(sender) or Ewma()
        known.add((now - arriving.since) / arriving.size_bytes)

    def broken_off(self, sender: PeerId, tensor: Hashable) -> None:
        self._arriving.pop((sender, tensor), None)
