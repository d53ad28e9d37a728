"""The queue before a compute device: jobs that somebody waits for, and work for the time in which there are none.

Whoever waits for a job waits for a microbatch's next hop, so work for idle time is cut into chunks of a few
milliseconds, and one begins only when no job waits: a job that comes is late by one chunk at most (a lane of lower
priority, as in PipeFisher, Osawa et al. 2022, arXiv:2211.14133, but without a schedule, since nobody knows when peers
send). It is computed in the order in which it came, so that what has its deadline first is done first. What the idle
time was too short for is computed at the deadline, in the job that needs it.

Where the headers of tensors under way say that a job is about to come (`swarm.pipeline.arrival_forecast`), no chunk
begins that would last longer: docs/BENCHMARKS.md has what that is worth.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import Reasoned

GIVEN_WAY: Final = 16
CHUNK_S: Final = 0.005
"""What a chunk of work for idle time should take at most."""
MOST_WAITING: Final = 1024
"""Pieces of work for idle time: more than a module has matrices."""

Job = Callable[[], None]


class Priority(enum.IntEnum):
    """The urgency of a job: smaller goes first; equal ones in order of arrival."""

    UPKEEP = 0
    """An inner step that is due, or freeing what is not needed any more."""
    TRAIN = 1
    """Both ways alike: simulated swarms of unequal peers were up to 7 % slower when gradients went first, and never
    faster. Slots bound the memory."""
    EVALUATE = 2
    """After the training jobs that wait, and GIVEN_WAY of those that come later: on a busy peer it would never have its
    turn. That is why it is no work for idle time, which has no turn there; besides, somebody waits for it, and a visit
    is no chunk of a few milliseconds."""


def puts_weights_off(staleness: int, devices: int) -> Reasoned[bool]:
    """Whether a stage peer puts weight gradients off to its idle time.

    Where steps wait for each other (staleness 0) no larger window can fill the time that messages are on their way.
    Where they do not, another microbatch under way fills it better: in a simulation of four stages 50 ms apart a window
    of 6 instead of 4 was worth 42 %, weights that are put off 17 %, for the same memory.
    """
    if devices > 1:
        return Reasoned(False, "several devices compute each microbatch together")
    if staleness > 0:
        return Reasoned(False, f"with a staleness of {staleness} more microbatches under way fill idle time better")
    return Reasoned(True, "steps wait for each other (staleness 0), so nothing else fills the time in between")


class IdleWork:
    """A piece of work that was put off, until it has been computed, in chunks or by `finish`, or given up.

    Implements `node.model.optimizers.inner_rule.Deferred`.
    """

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
            self._leave()
        except Exception as error:
            self._error = error
            self._leave()

    def finish(self) -> None:
        """Computes what has not been computed yet; raises what the work raises, or has raised before."""
        chunks = self._chunks
        self._leave()
        if self._error is not None:
            raise self._error
        deque(chunks, maxlen=0)

    def cancel(self) -> None:
        """Gives up what has not been computed yet; nothing if there is nothing left."""
        self._leave()

    def _leave(self) -> None:
        """Lets go of the chunks and what they hold; an end that has come already stays as it is."""
        self._waiting.pop(self, None)
        self._chunks = iter(())


class ComputeQueue:
    """The jobs and the idle work of one compute device. Not made for several threads: see `ComputeThread`.

    Args:
        limit: jobs waiting at most.
        idle_limit: pieces of idle work waiting at most.
    """

    def __init__(self, limit: int, idle_limit: int = MOST_WAITING) -> None:
        self._limit, self._idle_limit = limit, idle_limit
        self._jobs: list[tuple[Priority, int, int, Job]] = []
        """Each with what decides its turn: upkeep or not, its place in line, and the order of arrival among equals."""
        self._numbers = itertools.count()
        self._idle: dict[IdleWork, None] = {}
        """In order of arrival."""
        self.expected: tuple[float, ...] = ()
        """When jobs will come, in seconds of the clock of `take`. What has not come CHUNK_S later is not waited for."""

    @property
    def idle_waiting(self) -> int:
        """The pieces of idle work that are not done."""
        return len(self._idle)

    def put(self, priority: Priority, job: Job) -> None:
        """Adds a job that somebody waits for. Raises ResourceExhausted when too many wait."""
        if len(self._jobs) >= self._limit:
            raise ResourceExhausted(f"{self._limit} jobs wait for the compute device")
        number, last = next(self._numbers), priority is Priority.EVALUATE
        place = number + GIVEN_WAY + 1 if last else number
        heapq.heappush(self._jobs, (min(priority, Priority.TRAIN), place, number, job))

    def submit(self, chunks: Iterator[None], name: str) -> IdleWork:
        """Adds work for idle time, which is done when `chunks` end; each of them takes some CHUNK_S at most.

        Raises:
            ResourceExhausted: too much waits already.
        """
        if len(self._idle) >= self._idle_limit:
            raise ResourceExhausted(f"{self._idle_limit} pieces of work wait for idle time")
        work = IdleWork(self._idle, chunks, name)
        self._idle[work] = None
        return work

    def take(self, now: float) -> Job | IdleWork | None:
        """What is to be done now: the most urgent job, which leaves the queue; only where none waits, and none is
        expected within a chunk, the oldest idle work, of which one chunk is to be computed; else None."""
        if self._jobs:
            *_, job = heapq.heappop(self._jobs)
            return job
        return next(iter(self._idle), None) if self._free_from(now) <= now else None

    def rest_s(self, now: float) -> float | None:
        """The seconds until `take` has idle work again, if no job comes before; None where none waits."""
        return max(0.0, self._free_from(now) - now) if self._idle else None

    def _free_from(self, now: float) -> float:
        """The first moment from now on in which no job is expected within a chunk."""
        for at in sorted(self.expected):
            if at - CHUNK_S < now < at + CHUNK_S:
                now = at + CHUNK_S
        return now

    def give_up_idle_work(self) -> None:
        """Cancels all work for idle time."""
        for work in list(self._idle):
            work.cancel()

    def clear(self) -> list[Job]:
        """Gives up all idle work and takes out all jobs, which are returned, the most urgent first."""
        self.give_up_idle_work()
        jobs = [job for *_, job in sorted(self._jobs, key=lambda each: each[:3])]
        self._jobs.clear()
        return jobs
