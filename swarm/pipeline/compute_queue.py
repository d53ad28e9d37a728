"""The queue of a compute device: jobs that a microbatch waits for, and work for idle time.

Idle work is cut into chunks of a few milliseconds, so it delays a job by one chunk at most (a low-priority lane as in
PipeFisher, Osawa et al. 2022, arXiv:2211.14133). Headers announce jobs in advance (`ArrivalForecast`).
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import PeerId, Reasoned

GIVEN_WAY: Final = 16
"""Later training jobs that pass an evaluation."""
CHUNK_S: Final = 0.005
"""Longest time of a chunk of idle work, in seconds."""
MOST_WAITING: Final = 1024
MOST_SENDERS: Final = 256

Job = Callable[[], None]


class Priority(enum.IntEnum):
    """The urgency of a job: smaller goes first; equal ones in order of arrival."""

    UPKEEP = 0
    """An inner step that is due, or freeing memory."""
    TRAIN = 1
    """Both directions alike: simulated swarms were up to 7 % slower with gradients first, and never faster."""
    EVALUATE = 2
    """After all waiting training jobs and GIVEN_WAY later ones, so that a busy peer does not starve it."""


def puts_weights_off(staleness: int, devices: int) -> Reasoned[bool]:
    """Whether a stage peer puts weight gradients off to its idle time."""
    if devices > 1:
        return Reasoned(False, "several devices compute each microbatch together")
    if staleness > 0:
        # In a simulation of four stages 50 ms apart a window of 6 instead of 4 was worth 42 %, deferred weights 17 %,
        # for the same memory.
        return Reasoned(False, f"with a staleness of {staleness} more microbatches under way fill idle time better")
    return Reasoned(True, "steps wait for each other (staleness 0), so nothing else fills the time in between")


class IdleWork:
    """A piece of idle work, in chunks."""

    def __init__(self, waiting: dict[IdleWork, None], chunks: Iterator[None], name: str) -> None:
        self.name = name
        self._waiting = waiting
        self._chunks = chunks
        self._error: Exception | None = None

    def compute_chunk(self) -> None:
        """Computes the next chunk. An error ends the work, and is kept for `finish`."""
        try:
            next(self._chunks)
        except StopIteration:
            self.cancel()
        except Exception as error:
            self._error = error
            self.cancel()

    def finish(self) -> None:
        """Computes what is left. Raises what the work raises, or has raised before."""
        chunks = self._chunks
        self.cancel()
        if self._error is not None:
            raise self._error
        deque(chunks, maxlen=0)

    def cancel(self) -> None:
        """Gives up what is left, and lets go of the memory that it holds. Does nothing after the end."""
        self._waiting.pop(self, None)
        self._chunks = iter(())


class ComputeQueue:
    """The jobs and the idle work of one compute device. Not thread-safe: see `ComputeThread`."""

    def __init__(self, limit: int, idle_limit: int = MOST_WAITING) -> None:
        self._limit, self._idle_limit = limit, idle_limit
        self._jobs: list[tuple[Priority, int, int, Job]] = []
        """A heap by: upkeep or not, place in line, order of arrival."""
        self._numbers = itertools.count()
        self._idle: dict[IdleWork, None] = {}
        self.expected: tuple[float, ...] = ()
        """Times at which jobs will come, by the clock of `take`. A job that is CHUNK_S late is not waited for."""

    @property
    def idle_waiting(self) -> int:
        return len(self._idle)

    def put(self, priority: Priority, job: Job) -> None:
        if len(self._jobs) >= self._limit:
            raise ResourceExhausted(f"{self._limit} jobs wait for the compute device")
        number = next(self._numbers)
        place = number + GIVEN_WAY + 1 if priority is Priority.EVALUATE else number
        heapq.heappush(self._jobs, (min(priority, Priority.TRAIN), place, number, job))

    def submit(self, chunks: Iterator[None], name: str) -> IdleWork:
        """Adds idle work in chunks of about CHUNK_S. Raises ResourceExhausted when too much waits."""
        if len(self._idle) >= self._idle_limit:
            raise ResourceExhausted(f"{self._idle_limit} pieces of work wait for idle time")
        work = IdleWork(self._idle, chunks, name)
        self._idle[work] = None
        return work

    def take(self, now: float) -> Job | IdleWork | None:
        """Removes the most urgent job, or returns the oldest idle work for a chunk if no job is expected meanwhile."""
        if self._jobs:
            *_, job = heapq.heappop(self._jobs)
            return job
        return next(iter(self._idle), None) if self._free_from(now) <= now else None

    def rest_s(self, now: float) -> float | None:
        """Returns the seconds until `take` has idle work again, if no job comes before; None without idle work."""
        return max(0.0, self._free_from(now) - now) if self._idle else None

    def _free_from(self, now: float) -> float:
        """Returns the first time from `now` on at which no job is expected within a chunk."""
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
    """The expected arrival times of tensors in flight, by the speed of earlier ones from the same sender."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[PeerId, Hashable], _Arriving] = {}
        self._seconds_per_byte: dict[PeerId, Ewma] = {}
        """Most recent sender last."""
        self._latest = -math.inf

    @property
    def expected(self) -> tuple[float, ...]:
        return (*(each.expected for each in self._arriving.values()), self._latest)

    def announced(self, sender: PeerId, tensor: Hashable, size_bytes: int, now: float) -> None:
        """Takes in the header of an admitted tensor. Their number is bounded by the receive buffers."""
        known = self._seconds_per_byte.get(sender)
        expected = -math.inf if known is None else now + known.mean * size_bytes
        self._arriving[sender, tensor] = _Arriving(size_bytes, now, expected)

    def arrived(self, sender: PeerId, tensor: Hashable, now: float) -> None:
        arriving = self._arriving.pop((sender, tensor), None)
        self._latest = now
        if arriving is None or not arriving.size_bytes:
            return
        known = self._seconds_per_byte.pop(sender, None) or Ewma()
        known.add((now - arriving.since) / arriving.size_bytes)
        self._seconds_per_byte[sender] = known
        if len(self._seconds_per_byte) > MOST_SENDERS:
            del self._seconds_per_byte[next(iter(self._seconds_per_byte))]

    def broken_off(self, sender: PeerId, tensor: Hashable) -> None:
        self._arriving.pop((sender, tensor), None)
