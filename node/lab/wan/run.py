"""Runs a scenario: starts its swarm in the laboratory, does what is due, measures, and ends it in good order.

Times count from the first step that the swarm has finished, so that a slow start of the processes moves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from node.concurrency.task_groups import task_scope, unless
from node.lab.audit.audit import Report
from node.lab.audit.log_files import check_folder
from node.lab.wan.laboratory import Laboratory, laboratory
from node.lab.wan.metrics import Meter, Row, row_line
from node.lab.wan.outcome import Capacity, Happened, Outcome, capacity_of, last_loss, totals, utilization_of
from node.lab.wan.scenario import Scenario
from node.lab.wan.scenario_events import Happening
from node.local_swarm.swarm_progress import SwarmProgress
from node.network.client import query_evaluation, query_status
from node.observability.events import Step
from swarm.vocabulary.errors import ConfigError, SkipstoneError, Stalled

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

ROW_S = 1.0
START_LIMIT_S = 180.0
"""For the first step after the start of the processes."""
ASK_LIMIT_S = 120.0
ASK_TRIES = 2
LOGS = "logs"
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class News:
    """For whoever watches: a run that begins, a new row, or something that has happened."""

    begun: str | None = None
    """The scenario's name."""
    row: Row | None = None
    happened: Happened | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a run is over, whichever comes first."""

    duration_s: float = math.inf
    tokens: float = math.inf


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known at the end of a run, besides what was gathered on the way."""

    progress: SwarmProgress
    """When the time was over; the nodes' own accounts come later."""
    started_after_s: float
    seconds: float
    capacity: Capacity
    held_out: float | None
    report: Report


Tell = Callable[[News], None]


class Run:
    """One run of a scenario into one folder. `stop` may be set from outside and ends it soon, in good order."""

    def __init__(self, scenario: Scenario, folder: Path, limits: Limits, tell: Tell, stop: asyncio.Event) -> None:
        self.rows: list[Row] = []
        self.diary: list[Happened] = []
        self._scenario = scenario
        self._folder = folder
        self._limits = limits
        self._tell = tell
        self._stop = stop
        self._stepped = asyncio.Event()
        self._meter = Meter({})
        self._began = math.nan
        self._tokens_before = 0
        self._lab: Laboratory | None = None

    def kill(self) -> None:
        """Kills every node now. Touches no event loop, so a signal handler may call it; `stop` must be set, too."""
        if self._lab is not None:
            self._lab.swarm.signal_all(signal.SIGKILL)

    async def to_the_end(self) -> Outcome:
        """Raises SkipstoneError when the swarm could not be started or does not begin to train."""
        started = time.monotonic()
        logs = self._folder / LOGS
        logs.mkdir()  # the check wants it also when no node came as far as writing a log
        async with laboratory(self._scenario, logs) as lab, task_scope() as tasks:
            self._lab = lab
            reading = tasks.create_task(self._read_events(lab))
            await self._first_step(lab)
            started_after_s = self._began - started
            working = [tasks.create_task(self._follow_timeline(lab)), tasks.create_task(self._measure(lab))]
            await self._until_over(lab)
            for task in working:
                task.cancel()
            seconds, progress = self._now(), lab.swarm.progress  # it trains on while it is asked
            lab.calm()
            capacity, held_out = await self._ask(lab)
            await lab.swarm.stop()
            await reading
        report = await asyncio.to_thread(check_folder, logs)
        return self._outcome(lab, _Facts(progress, started_after_s, seconds, capacity, held_out, report))

    def _outcome(self, lab: Laboratory, facts: _Facts) -> Outcome:
        progress, ends = facts.progress, lab.swarm.ends.items()
        return Outcome(
            name=self._scenario.name,
            started_after_s=facts.started_after_s,
            seconds=facts.seconds,
            steps=progress.step,
            tokens=progress.tokens,
            tokens_per_s=(progress.tokens - self._tokens_before) / max(1e-9, facts.seconds),
            capacity=facts.capacity,
            utilization=utilization_of(lab.swarm.progress),
            loss_first=progress.loss_first,
            loss_last=last_loss(self.rows),
            held_out_loss=facts.held_out,
            up_bytes=totals(self.rows, "up"),
            down_bytes=totals(self.rows, "down"),
            failures={peer: end.exit_code for peer, end in ends if end.exit_code and peer not in lab.killed},
            diary=tuple(self.diary),
            check=facts.report,
        )

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _read_events(self, lab: Laboratory) -> None:
        async for event in lab.swarm.events():
            if isinstance(event, Step):
                self._meter.step(event)
                self._stepped.set()

    async def _first_step(self, lab: Laboratory) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not (self._stepped.is_set() or self._stop.is_set() or lab.swarm.progress.is_over):
            if time.monotonic() > deadline:
                raise Stalled(
                    f"the swarm has not finished a step within {START_LIMIT_S:.0f} s",
                    hint=f"Look into {self._folder / LOGS}; a link may be too slow for the run.",
                )
            await asyncio.sleep(0.1)
        self._began = time.monotonic()
        self._tokens_before = lab.swarm.progress.tokens
        self._meter = Meter(lab.emulation.passed())

    async def _until_over(self, lab: Laboratory) -> None:
        while not (self._stop.is_set() or lab.swarm.progress.is_over):
            left_s = self._limits.duration_s - self._now()
            if left_s <= 0 or lab.swarm.progress.tokens >= self._limits.tokens:
                return
            await asyncio.sleep(min(left_s, 0.1))

    async def _follow_timeline(self, lab: Laboratory) -> None:
        for happening in self._scenario.happenings:
            await asyncio.sleep(max(0.0, happening.at_s - self._now()))
            self._write_down(_carried_out(lab, happening))

    def _write_down(self, what: str) -> None:
        happened = Happened(round(self._now(), 2), what)
        self.diary.append(happened)
        self._tell(News(happened=happened))

    async def _measure(self, lab: Laboratory) -> None:
        """A row a second. A line is short, and whoever reads the file while it grows wants it at once."""
        with (self._folder / METRICS).open("w", buffering=1) as file:
            turn = 0
            while True:
                row = self._meter.row(self._now(), lab.swarm.progress, lab.emulation.passed())
                self.rows.append(row)
                file.write(row_line(row) + "\n")
                self._tell(News(row=row))
                turn += 1
                await asyncio.sleep(max(0.0, turn * ROW_S - self._now()))

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _ask(self, lab: Laboratory) -> tuple[Capacity, float | None]:
        """What the peers announce that they can compute, and the held-out loss. Nothing of it when the run was cut
        short."""
        capacity = Capacity((), None)
        if self._stop.is_set():
            return capacity, None
        status = await _asked(lambda: query_status(lab.swarm.link), self._stop)
        if status is not None:
            speeds = ((_stage(peer.module), peer.tokens_per_s) for peer in status.peers)
            capacity = capacity_of(speeds, self._scenario.manifest)
        if not self._scenario.held_out:
            return capacity, None
        return capacity, await held_out_loss(lab, self._scenario.held_out, self._stop)


async def held_out_loss(lab: Laboratory, microbatches: int, stop: asyncio.Event) -> float | None:
    """Of the swarm's model as it is now; None when nobody says it soon, or `stop` is set."""
    answer = await _asked(lambda: query_evaluation(lab.swarm.link, microbatches), stop)
    return None if answer is None else float(answer["loss"])


async def _asked(question: Callable[[], Awaitable[Answer]], stop: asyncio.Event) -> Answer | None:
    """An answer of the swarm; None when there is none soon: peers that were asked may just have been killed."""
    for _ in range(ASK_TRIES):
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                return await unless(stop, question())
        except (SkipstoneError, TimeoutError) as error:
            log.info("the swarm was asked in vain: %s", error)
    return None


def make_folder(folder: Path) -> None:
    """Makes it. Raises ConfigError when something is in it already, or it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty", hint="Name a new folder with --out.")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from None


def _carried_out(lab: Laboratory, happening: Happening) -> str:
    """What was done, or why it could not be: one mishap does not end the run."""
    try:
        return lab.carry_out(happening)
    except SkipstoneError as error:
        return f"{happening.NAME} was not possible: {error}"


def _stage(module: object) -> int:
    number = str(module).partition(".")[0]
    return int(number) if number.isdecimal() else -1
