"""The run of a scenario: starts its swarm in the laboratory, lets happen what is due, looks on, and ends it in good
order.

Times count from the moment when the run has begun, so that a slow start of the processes moves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TypeVar

from lab.audit import Report, check_folder
from lab.emulation.link_shape import Site
from lab.experiment.laboratory import Laboratory
from lab.experiment.log_watch import LogWatch
from lab.experiment.metrics import Kind, Mark, Meter, Row, row_line
from lab.experiment.scenario import Scenario
from lab.experiment.scenario_events import ScenarioEvent
from node.concurrency.task_groups import task_scope, unless
from node.local_swarm.child_process import ChildEnd
from node.local_swarm.swarm_progress import SwarmProgress
from node.network.client import query_evaluation, query_status
from node.observability.events import Step
from node.observability.status import SwarmStatus
from swarm.vocabulary.errors import SkipstoneError, Stalled

log = logging.getLogger(__name__)

ROW_S = 1.0
LOOK_S = 0.05
START_LIMIT_S = 180.0
"""From the start of the processes until the run has begun."""
ASK_LIMIT_S = 120.0
ASK_TRIES = 2
LOGS = "logs"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"

Answer = TypeVar("Answer")

Tell = Callable[[str | Row | Mark], None]
"""For whoever watches: a line of text, a second's figures, or a line of the diary."""


class Run:
    """One run of a scenario into one folder, which must be there. `stop` may be set from outside and ends it soon, in
    good order. Begins with the swarm's first step, and measures a row a second.

    Args:
        longest_s, tokens: when it is over, whichever comes first; by itself after the scenario's duration.
        save_every_s: seconds between checkpoints; None for none.

    Raises:
        ConfigError: this system cannot tell whose a connection is.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        tell: Tell,
        stop: asyncio.Event,
        *,
        longest_s: float | None = None,
        tokens: float = math.inf,
        save_every_s: float | None = None,
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.logs = folder / LOGS
        saving = None if save_every_s is None else (folder / CHECKPOINTS, save_every_s)
        self.lab = Laboratory(scenario, self.logs, saving)
        self.watch = LogWatch(self.logs, self.now)
        """Looks into the logs where a run has a use for that."""
        self.lots = random.Random(f"{scenario.seed} victims")  # noqa: S311 - no secret
        self.marks: list[Mark] = []
        """The diary."""
        self.missed: list[str] = []
        """What could not be done as the scenario wants it: it then shows nothing."""
        self.waiting: list[str] = []
        """What is still to come of what has been done."""
        self.odd: dict[int, bool] = {}
        """Peers that are not like the others, and whether they should be worked with."""
        self.liars: set[str] = set()
        """Peers that lie in rounds."""
        self.rows: list[Row] = []
        self.stop = stop
        self._tell = tell
        self._longest_s = longest_s or scenario.duration_s
        self._tokens = tokens
        self._meter = Meter({})
        self._began = math.inf
        self._later: set[asyncio.Task[None]] = set()
        # What came of it; set at the end.
        self.started_after_s: float
        """From the start of the processes until it began."""
        self.seconds: float
        """From there on until its time was over."""
        self.tokens_before: int
        self.progress: SwarmProgress
        """When the time was over; the nodes' own accounts come later."""
        self.status: SwarmStatus | None = None
        """What the nodes announced at the end; None when nobody said it."""
        self.held_out_loss: float | None = None
        """Of the swarm's model as it was at the end, over an ideal network; None when it was not measured."""
        self.report: Report

    def kill(self) -> None:
        """Kills every node now. Touches no event loop, so a signal handler may call it; `stop` must be set, too."""
        self.lab.swarm.signal_all(signal.SIGKILL)

    def now(self) -> float:
        """The seconds since it has begun; -1 before."""
        return time.monotonic() - self._began if self._began < math.inf else -1.0

    @property
    def first_site(self) -> Site:
        """The site of newcomers of whom nothing else is said."""
        return self.scenario.groups[0].site

    @property
    def failures(self) -> dict[int, int]:
        """The exit codes of nodes that ended neither in good order nor by our hand."""
        ends = self.lab.swarm.ends.items()
        return {peer: end.exit_code for peer, end in ends if end.exit_code and peer not in self.lab.killed}

    async def to_the_end(self) -> None:
        """Runs to the end. Raises SkipstoneError when the swarm could not be started or does not begin to train."""
        started = time.monotonic()
        self.logs.mkdir()  # the check wants it also when no node came as far as writing a log
        async with self.lab.started(), task_scope() as tasks:
            reading = tasks.create_task(self._read_events())
            await self.until_begun()
            self._began = time.monotonic()
            self.started_after_s = self._began - started
            self.tokens_before = self.lab.swarm.progress.tokens
            self.timeline = tasks.create_task(self._follow_timeline())
            observing = tasks.create_task(self.observe())
            await self.until_over()
            await _cancelled({self.timeline, observing})
            self.seconds, self.progress = self.now(), self.lab.swarm.progress  # it trains on while it is asked
            await self.end_what_lasts()
            if not self.stop.is_set():
                await self.ask()
            await self.lab.swarm.stop()
            await reading
        self.report = await asyncio.to_thread(check_folder, self.logs)

    # ---- what other kinds of runs do otherwise -------------------------------------------------------------------

    async def until_begun(self) -> None:
        """Waits until the time of the run may begin. Raises Stalled."""
        deadline = time.monotonic() + START_LIMIT_S

        def over() -> bool:
            if time.monotonic() > deadline:
                raise Stalled(
                    f"the swarm is not at work after {START_LIMIT_S:.0f} s",
                    hint=f"Look into {self.logs}; a link may be too slow for the run.",
                )
            return self.begins()

        await self.until(over)

    def begins(self) -> bool:
        """Whether the time of the run may begin."""
        return self.lab.swarm.progress.step > 0 or self.lab.swarm.progress.is_over

    async def until_over(self) -> None:
        """Waits until the time of the run is over."""

        def over() -> bool:
            progress = self.lab.swarm.progress
            return progress.is_over or self.now() >= self._longest_s or progress.tokens >= self._tokens

        await self.until(over)

    async def observe(self) -> None:
        """Writes a row a second, until cancelled. A line is short, and whoever reads the file while it grows wants it
        at once.
        """
        self._meter = Meter(self.lab.emulation.passed())
        with (self.folder / METRICS).open("w", buffering=1) as file:
            while True:
                row = self._meter.row(self.now(), self.lab.swarm.progress, self.lab.emulation.passed())
                self.rows.append(row)
                file.write(row_line(row) + "\n")
                self._tell(row)
                await asyncio.sleep(max(0.0, len(self.rows) * ROW_S - self.now()))

    async def ask(self) -> None:
        """Asks the nodes what there is to ask when the time is over and nothing disturbs them any more."""
        self.status = await self._asked(lambda: query_status(self.lab.swarm.link))
        await self.evaluate()

    # ---- the course of things ------------------------------------------------------------------------------------

    async def end_what_lasts(self) -> None:
        """Mends what is broken and forgets what is still to come, so that nodes can stop in good order."""
        await _cancelled(self._later)
        self.lab.calm()

    async def evaluate(self) -> None:
        """Asks for the held-out loss, where the scenario wants it."""
        if self.scenario.held_out:
            answer = await self._asked(lambda: query_evaluation(self.lab.swarm.link, self.scenario.held_out))
            self.held_out_loss = None if answer is None else float(answer["loss"])

    async def until(self, over: Callable[[], bool]) -> None:
        """Waits until a condition holds, or `stop` is set."""
        await until(lambda: self.stop.is_set() or over())

    async def _follow_timeline(self) -> None:
        for event in self.scenario.events:
            await asyncio.sleep(max(0.0, event.at_s - self.now()))
            self.do(event)

    def do(self, event: ScenarioEvent) -> None:
        """Carries an event out, now; one mishap does not end the run."""
        try:
            event.do(self)
        except SkipstoneError as error:
            self.miss(f"{event.NAME} was not possible: {error}")

    async def _read_events(self) -> None:
        async for event in self.lab.swarm.events():
            if isinstance(event, Step):
                self._meter.step(event)

    async def _asked(self, question: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """An answer of the swarm; None when there is none soon: peers that were asked may just have been killed."""
        for _ in range(ASK_TRIES):
            try:
                async with asyncio.timeout(ASK_LIMIT_S):
                    return await unless(self.stop, question())
            except (SkipstoneError, TimeoutError) as error:
                log.info("the swarm was asked in vain: %s", error)
        return None

    # ---- the diary -----------------------------------------------------------------------------------------------

    def fault(self, what: str, *, lasts: bool = False) -> None:
        """Notes in the diary that something has been broken at this moment."""
        self._mark(Mark(self.now(), Kind.FAULT, what, lasts))

    def end(self, what: str) -> None:
        """Notes in the diary that a fault is over."""
        self._mark(Mark(self.now(), Kind.END, what))

    def note(self, what: str) -> None:
        """Notes in the diary what is worth telling."""
        self._mark(Mark(self.now(), Kind.NOTE, what))

    def miss(self, what: str) -> None:
        """Notes in the diary that the scenario could not be carried out as written."""
        self.missed.append(what)
        self.note(what)

    def _mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        self._tell(mark)

    # ---- what events leave behind --------------------------------------------------------------------------------

    def later(self, work: Coroutine[None, None, None], what: str) -> None:
        """Starts the rest of an event, which ends with the run if not before."""

        async def do() -> None:
            try:
                await work
            except SkipstoneError as error:
                self.miss(f"not possible: {error}")
            self.waiting.remove(what)

        self.waiting.append(what)
        task = self.lab.spawn(do())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def lasts(self, what: str, for_s: float, mend: Callable[[], None]) -> None:
        """Lets a fault last: it is mended after a while, or when the run ends."""
        self.fault(what, lasts=True)

        async def mend_later() -> None:
            try:
                await asyncio.sleep(for_s)
            finally:
                mend()
            self.end(f"over: {what}")

        self.later(mend_later(), f"the end of: {what}")

    async def ended(self, peer: int) -> ChildEnd:
        """Waits until the peer's process is gone, and everything that it has started."""
        swarm = self.lab.swarm
        await until(lambda: peer in swarm.ends and peer not in swarm.processes())
        await asyncio.sleep(LOOK_S)  # the swarm lets go of it
        return swarm.ends[peer]

    async def restarted(self, peer: int) -> None:
        """Starts a peer that has ended again, as itself, and waits until it serves. From now on its end is its own."""
        self.lab.swarm.restart_peer(peer)
        self.lab.killed.discard(peer)
        self.note(f"peer {peer} started again")
        await self.serving(peer)

    async def visited(self, peer: int) -> None:
        """Waits until a gradient of the peer's has counted."""
        name = self.lab.swarm.peers[peer].peer
        await until(lambda: name in self.watch.visited)

    async def serving(self, peer: int) -> None:
        """Waits until the peer says that it serves."""
        await until(lambda: self.lab.swarm.progress.peers[peer].state == "serving")


async def until(over: Callable[[], bool]) -> None:
    """Polls a condition: what is waited for is in other processes."""
    while True:
        if over():
            return
        await asyncio.sleep(LOOK_S)


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels them, and waits until they have done what is left to do."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(set(tasks))
