"""Jobs and idle work in virtual time: no chunk begins while somebody waits; nothing is lost or done twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.pipeline.compute_queue import (
    CHUNK_S,
    GIVEN_WAY,
    MOST_SENDERS,
    ArrivalForecast,
    ComputeQueue,
    IdleWork,
    Priority,
)
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import PeerId

MOST_WORK = 3


@dataclass(frozen=True, slots=True)
class Submitted:
    """Work that a job submits, and which of the later jobs ends it (1: the next one), if any does."""

    chunks: tuple[float, ...]
    ended_after: int | None
    finished: bool  # Or cancelled


@dataclass(frozen=True, slots=True)
class Planned:
    """A job: how long after the one before it comes, how long it takes, what it submits."""

    after_s: float
    takes_s: float
    priority: Priority
    work: tuple[Submitted, ...]
    announced: bool = False  # Whether it is known when it comes


SECONDS = st.sampled_from([0.0, 0.001, 0.004, 0.02, 0.3])
WORK = st.builds(
    Submitted,
    chunks=st.lists(st.sampled_from([0.001, 0.003, CHUNK_S]), max_size=6).map(tuple),
    ended_after=st.none() | st.integers(1, 3),
    finished=st.booleans(),
)
JOBS = st.lists(
    st.builds(
        Planned, SECONDS, SECONDS, st.sampled_from(Priority), st.lists(WORK, max_size=2).map(tuple), st.booleans()
    ),
    max_size=12,
)
FALSE_ALARMS = st.lists(st.floats(0, 1), max_size=4).map(tuple)


@dataclass(slots=True, eq=False)
class Piece:
    number: int
    planned: Submitted
    ends_at_job: int | None
    done: list[int] = field(default_factory=list)
    handle: IdleWork | None = None
    cancelled: bool = False

    def chunks(self, device: Device) -> Iterator[None]:
        for index, seconds in enumerate(self.planned.chunks):
            assert not self.cancelled
            device.now += seconds
            self.done.append(index)
            device.computed.append((self.number, index))
            yield


class Device:
    def __init__(self, planned: list[Planned], false_alarms: tuple[float, ...] = ()) -> None:
        self.now = 0.0
        self.queue = ComputeQueue(limit=len(planned) + 1, idle_limit=MOST_WORK)
        self.pieces: list[Piece] = []
        self.refused = 0
        self.computed: list[tuple[int, int]] = []  # (piece, chunk), in order
        self.in_idle_time: list[int] = []  # Pieces, a chunk each
        self.waited: list[float] = []  # Of each job: from when it came, or the job before it ended, to its beginning
        self._coming = list[tuple[float, Planned]]()
        self._waiting = 0
        self._jobs_done = 0
        self._job_ended = 0.0
        at = 0.0
        for job in planned:
            at += job.after_s
            self._coming.append((at, job))
        self.announced = [at for at, job in self._coming if job.announced]
        self.queue.expected = (*self.announced, *false_alarms)

    def run(self) -> None:
        while True:
            self._arrivals()
            turn = self.queue.take(self.now)
            if turn is None:
                rest_s = self.queue.rest_s(self.now)
                until = [at for at, _ in self._coming[:1]] + ([] if rest_s is None else [self.now + rest_s])
                if not until:
                    return
                self.now = max(self.now, min(until))
            elif isinstance(turn, IdleWork):
                assert self._waiting == 0, "a chunk begins while a job waits"
                assert not any(self.now < at < self.now + CHUNK_S for at in self.announced), "a job is about to come"
                piece = next(piece for piece in self.pieces if piece.handle is turn)
                self.in_idle_time.append(piece.number)
                turn.compute_chunk()
            else:
                turn()

    def _arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            at, job = self._coming.pop(0)
            self._waiting += 1
            self.queue.put(job.priority, partial(self._job, at, job))

    def _job(self, came: float, job: Planned) -> None:
        self._waiting -= 1
        self.waited.append(self.now - max(came, self._job_ended))
        self._jobs_done += 1
        for piece in self.pieces:
            if piece.ends_at_job == self._jobs_done:
                self._end(piece)
        self.now += job.takes_s
        for work in job.work:
            ends_at = None if work.ended_after is None else self._jobs_done + work.ended_after
            piece = Piece(len(self.pieces), work, ends_at)
            try:
                piece.handle = self.queue.submit(piece.chunks(self), f"piece {piece.number}")
            except ResourceExhausted:
                self.refused += 1
                assert self.queue.idle_waiting == MOST_WORK
            else:
                self.pieces.append(piece)
        self._job_ended = self.now

    def _end(self, piece: Piece) -> None:
        if piece.planned.finished:
            piece.handle.finish()
            assert len(piece.done) == len(piece.planned.chunks), "a deadline passes with work undone"
        else:
            piece.handle.cancel()
            piece.cancelled = True


@given(JOBS, FALSE_ALARMS)
def test_no_chunk_begins_while_a_job_waits_or_is_about_to_come_and_no_work_is_lost(
    planned: list[Planned], false_alarms: tuple[float, ...]
) -> None:
    device = Device(planned, false_alarms)
    device.run()
    assert device.queue.idle_waiting == 0
    assert len(device.pieces) + device.refused == sum(len(job.work) for job in planned)
    for piece in device.pieces:
        whole = list(range(len(piece.planned.chunks)))
        assert piece.done == (whole[: len(piece.done)] if piece.cancelled else whole)
    assert len(set(device.computed)) == len(device.computed)
    assert device.in_idle_time == sorted(device.in_idle_time), "in order of arrival"
    assert all(wait <= CHUNK_S + 1e-9 for wait in device.waited)


@given(st.lists(st.floats(0, 10), max_size=6), st.floats(0, 10))
def test_idle_work_rests_around_what_is_expected_and_no_longer(expected: list[float], now: float) -> None:
    queue = ComputeQueue(limit=1)
    assert queue.rest_s(now) is None
    work = queue.submit(iter([None]), "work")
    queue.expected = tuple(expected)
    rest_s = queue.rest_s(now)
    assert 0 <= rest_s <= 2 * CHUNK_S * len(expected)
    assert (queue.take(now) is work) == (rest_s == 0)
    assert queue.take(now + rest_s) is work or rest_s < 1e-9
    assert (rest_s > 0) == any(at - CHUNK_S < now < at + CHUNK_S for at in expected)


def test_work_that_fails_tells_whoever_needs_it_and_nobody_else() -> None:
    def failing() -> Iterator[None]:
        yield
        raise MemoryError("no room")

    queue = ComputeQueue(limit=1)
    work, other = queue.submit(failing(), "failing"), queue.submit(iter([None]), "other")
    while (turn := queue.take(0.0)) is not None:
        turn.compute_chunk()
    with pytest.raises(MemoryError, match="no room"):
        work.finish()
    other.finish()


def test_what_is_finished_twice_or_cancelled_afterwards_is_computed_once() -> None:
    done: list[int] = []

    def chunks() -> Iterator[None]:
        for number in range(3):
            done.append(number)
            yield

    queue = ComputeQueue(limit=1)
    work = queue.submit(chunks(), "work")
    work.finish()
    work.finish()
    work.cancel()
    assert done == [0, 1, 2]
    assert queue.take(0.0) is None


def test_the_most_urgent_job_goes_first_and_an_evaluation_gives_way_to_so_many() -> None:
    queue, done = ComputeQueue(limit=100), list[str]()
    for name in ("before", "evaluation", *(f"later {n}" for n in range(GIVEN_WAY + 2)), "upkeep"):
        kinds = {"evaluation": Priority.EVALUATE, "upkeep": Priority.UPKEEP}
        queue.put(kinds.get(name, Priority.TRAIN), partial(done.append, name))
    while (turn := queue.take(0.0)) is not None:
        assert not isinstance(turn, IdleWork)
        turn()
    assert done[:2] == ["upkeep", "before"]
    assert done.index("evaluation") == 2 + GIVEN_WAY


def test_what_is_given_up_leaves_jobs_to_be_told() -> None:
    queue, done = ComputeQueue(limit=2), list[str]()
    work = queue.submit(iter([None]), "work")
    queue.put(Priority.TRAIN, partial(done.append, "train"))
    queue.put(Priority.UPKEEP, partial(done.append, "upkeep"))
    with pytest.raises(ResourceExhausted, match="2 jobs are queued"):
        queue.put(Priority.TRAIN, partial(done.append, "too many"))
    for job in queue.clear():
        job()
    assert done == ["upkeep", "train"]
    assert queue.take(0.0) is None
    work.finish()


NEAR, FAR = PeerId("near"), PeerId("far")


def taught() -> ArrivalForecast:
    """By a tensor of each: 1000 bytes in 0.1 s, and in 2 s."""
    forecast = ArrivalForecast()
    for sender, seconds in ((NEAR, 0.1), (FAR, 2.0)):
        forecast.announced(sender, "first", 1000, 0.0)
        forecast.arrived(sender, "first", seconds)
    return forecast


def test_of_a_senders_first_tensor_nothing_is_known_and_empty_or_unannounced_ones_teach_nothing() -> None:
    forecast = ArrivalForecast()
    forecast.announced(NEAR, 1, 1000, 5.0)
    assert all(at == -math.inf for at in forecast.expected)
    forecast.arrived(NEAR, 1, 5.1)
    assert forecast.expected == (5.1,), "its job is about to be queued"
    forecast = ArrivalForecast()
    forecast.arrived(NEAR, 1, 1.0)
    forecast.broken_off(NEAR, 2)
    forecast.announced(NEAR, 3, 0, 2.0)
    forecast.arrived(NEAR, 3, 2.0)
    forecast.announced(NEAR, 4, 100, 3.0)
    assert forecast.expected == (-math.inf, 2.0)


def test_tensors_are_expected_by_their_size_and_sender_and_a_slower_line_is_noticed() -> None:
    forecast = taught()
    forecast.announced(NEAR, 1, 3000, 10.0)
    forecast.announced(FAR, 1, 500, 10.0)
    assert forecast.expected[:2] == pytest.approx((10.3, 11.0))
    forecast.arrived(NEAR, 1, 10.25)
    forecast.broken_off(FAR, 1)
    assert forecast.expected == (10.25,)
    forecast = taught()
    for number in range(60):
        forecast.announced(NEAR, number, 1000, 10.0 * number)
        forecast.arrived(NEAR, number, 10.0 * number + 0.5)
    forecast.announced(NEAR, "next", 1000, 1000.0)
    assert forecast.expected[0] == pytest.approx(1000.5, abs=0.02)


def test_only_so_many_senders_are_remembered_those_that_sent_last() -> None:
    forecast = taught()
    for number in range(MOST_SENDERS):
        forecast.announced(PeerId(f"peer {number}"), 1, 10, 20.0)
        forecast.arrived(PeerId(f"peer {number}"), 1, 21.0)
        if number % 50 == 0:
            forecast.announced(NEAR, number, 1000, 20.0)
            forecast.arrived(NEAR, number, 20.1)
    assert len(forecast._seconds_per_byte) == MOST_SENDERS
    assert NEAR in forecast._seconds_per_byte
    assert FAR not in forecast._seconds_per_byte
