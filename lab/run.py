"""One run of a scenario: starts its swarm, follows the timeline, measures, and stops cleanly."""

import asyncio
import json
import logging
import math
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from lab.audit import AuditReport, check_folder
from lab.laboratory import LOOK_S, Kind, Laboratory, Mark, cancelled, until
from lab.outcome import (
    WINDOW_S,
    Outcome,
    Recorder,
    Recovery,
    Row,
    agree,
    capacity_of,
    pace_back_after,
    pace_before,
    rerouted_after,
    served_after,
    utilization_of,
)
from lab.report import Result, draw, report_text, suite_json, suite_text
from lab.scenario import PACE_SHARE, Scenario
from node.concurrency.task_groups import task_scope, unless
from node.local_swarm.setup import LocalSwarmOptions
from node.network.client import evaluation, statuses_of
from node.network.session import visit
from node.observability.events import Step
from node.observability.status import SwarmStatus
from swarm.pipeline.custody import ASK_S
from swarm.vocabulary.errors import ConfigError, SkipstoneError, Stalled

log = logging.getLogger(__name__)

ROW_S = 1.0
# Limits, in seconds, for a swarm to train and for events that take longer than planned.
START_LIMIT_S = 180.0
LATER_LIMIT_S = 150.0
# Data nodes ask after silent microbatches once in this time, so the logs settle meanwhile.
CALM_S = ASK_S + 1.0
ASK_LIMIT_S = 300.0
ASK_TRIES = 2
EVALUATIONS = 8  # Whose mean is the held-out loss

Tell = Callable[[str | Row | Mark], None]


class Run:
    """One run of a scenario in an existing folder. A run without expectations ends after `longest_s` or `tokens`."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        tell: Tell,
        stop: asyncio.Event,
        *,
        longest_s: float | None = None,
        tokens: float = math.inf,
    ) -> None:
        self.scenario = scenario
        self.logs = folder / "logs"
        options = LocalSwarmOptions(
            peers=len(scenario.sites), steps=None, threads=scenario.threads, log_dir=self.logs, router=scenario.router
        )
        if scenario.chaos is not None and scenario.chaos.save_every_s is not None:
            save_every_s = scenario.chaos.save_every_s
            options = replace(options, checkpoint_dir=folder / "checkpoints", checkpoint_every_s=save_every_s)
        self.lab = Laboratory(scenario.manifest, options, scenario.sites, scenario.seed, tell)
        self.rows: list[Row] = []
        self._metrics = folder / "metrics.jsonl"
        self._tell = tell
        self._stop = stop
        self._longest_s = longest_s or scenario.duration_s
        self._tokens = tokens
        self._recorder = Recorder({})
        self._served: list[tuple[float, bool]] = []
        self._status: SwarmStatus | None = None
        self._held_out_loss: float | None = None

    def kill(self) -> None:
        """Kills every node now. A signal handler may call it; `stop` must be set too."""
        self.lab.swarm.signal_all(signal.SIGKILL)

    async def to_the_end(self) -> Outcome:
        """Runs the scenario and returns the outcome. Raises SkipstoneError if the swarm does not start or train."""
        started = time.monotonic()
        self.logs.mkdir(exist_ok=True)
        async with self.lab.started(), task_scope() as tasks:
            reading = tasks.create_task(self._read_events())
            await self._until_begun()
            self.lab.begin()
            self._started_after_s = time.monotonic() - started
            self._tokens_before = self.lab.swarm.progress.tokens
            timeline = tasks.create_task(self._follow_timeline())
            observing = tasks.create_task(self._observe())
            await self._until_over(timeline)
            await cancelled({timeline, observing})
            # The swarm trains on while it is queried, so take the figures first.
            self._seconds, self._progress = self.lab.now(), self.lab.swarm.progress
            await self.lab.end_what_lasts()
            if not self._stop.is_set():
                await self._ask()
            await self.lab.swarm.stop()
            await reading
        return self._outcome(await asyncio.to_thread(check_folder, self.logs))

    async def _until_begun(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S

        def begins() -> bool:
            if time.monotonic() > deadline:
                raise Stalled(
                    f"the swarm does not train after {START_LIMIT_S:.0f} s",
                    hint=f"Look into {self.logs}. A link may be too slow for the run.",
                )
            progress = self.lab.swarm.progress
            if self.scenario.chaos is None:
                return progress.step > 0 or progress.is_over
            if progress.is_over:
                raise Stalled("the swarm ended before it trained", hint=f"Look into {self.logs}.")
            # The loss of a peer that does not serve yet would not show; without a round there is nothing to restore.
            least = len(progress.peers) if "restored" in self.scenario.chaos.at_least else 0
            all_ready = len(self.lab.serving()) == len(progress.peers) and len(self.lab.watch.anchors) >= least
            return all_ready and progress.step > 0 and bool(self.lab.watch.completed)

        await self._until(begins)

    async def _until_over(self, timeline: asyncio.Task[None]) -> None:
        lab = self.lab
        if self.scenario.chaos is None:
            await self._until(
                lambda: (
                    lab.swarm.progress.is_over
                    or lab.now() >= self._longest_s
                    or lab.swarm.progress.tokens >= self._tokens
                )
            )
            return
        # Wait for the planned end, then for late events, then for the recovery.
        await self._until(lambda: timeline.done() and lab.now() >= self.scenario.duration_s)
        limit_s = max([lab.now(), *(event.over_s for event in self.scenario.events)]) + LATER_LIMIT_S
        await self._until(lambda: not lab.waiting or lab.now() > limit_s)
        last_s = max((mark.at_s for mark in lab.marks if mark.kind is not Kind.NOTE), default=0.0)
        limit_s = last_s + self.scenario.chaos.recovery_s + WINDOW_S

        def recovered() -> bool:
            if lab.now() >= limit_s:
                return True
            anchors = lab.watch.anchors
            back = all(math.isfinite(each.seconds) for each in self.recoveries(lab.now()) if each.counts)
            return back and agree(anchors[peer.peer] for peer in lab.serving().values() if peer.peer in anchors)

        await self._until(recovered)
        calm_s = lab.now() + CALM_S
        await self._until(lambda: lab.now() >= calm_s)

    async def _until(self, over: Callable[[], bool]) -> None:
        await until(lambda: self._stop.is_set() or over())

    async def _follow_timeline(self) -> None:
        for event in self.scenario.events:
            await asyncio.sleep(max(0.0, event.at_s - self.lab.now()))
            self.lab.attempt(event.NAME, partial(event.do, self.lab))

    async def _read_events(self) -> None:
        async for event in self.lab.swarm.events():
            if isinstance(event, Step):
                self._recorder.step(event)

    async def _observe(self) -> None:
        """Records which modules are served, and one row per second, until cancelled."""
        lab = self.lab
        self._recorder = Recorder(lab.emulation.passed())
        with self._metrics.open("w", buffering=1) as file:  # line-buffered: people read it while it grows
            while True:
                modules = {peer.module for index, peer in lab.serving().items() if index not in lab.frozen}
                served = len(modules) == len(self.scenario.manifest.modules())
                if not self._served or self._served[-1][1] is not served:
                    self._served.append((lab.now(), served))
                if lab.now() >= len(self.rows) * ROW_S:
                    row = self._recorder.row(lab.now(), lab.swarm.progress, lab.emulation.passed())
                    self._recorder.sample(lab.swarm.processes().values())
                    self.rows.append(row)
                    file.write(json.dumps(asdict(row), separators=(",", ":")) + "\n")
                    self._tell(row)
                await asyncio.sleep(max(0.0, min(LOOK_S, len(self.rows) * ROW_S - lab.now())))

    async def _ask(self) -> None:
        """Asks the swarm for its status and its held-out loss; it trains on meanwhile, and may not answer."""
        manifest, held_out, losses = self.scenario.manifest, self.scenario.held_out, list[float]()

        async def ask() -> None:
            async with visit(self.lab.swarm.link) as session:
                if self.scenario.chaos is None:  # under chaos, the peers in the link may be gone
                    async with aclosing(statuses_of(session, manifest)) as seen:
                        self._status = await anext(seen)
                # With small steps one evaluation varies by more than `loss_ratio` may.
                while held_out and len(losses) < EVALUATIONS:
                    losses.append(float((await evaluation(session, manifest, held_out))["loss"]))

        for _ in range(ASK_TRIES if held_out or self.scenario.chaos is None else 0):
            try:
                async with asyncio.timeout(ASK_LIMIT_S):
                    await unless(self._stop, ask())
                break
            except (SkipstoneError, TimeoutError) as error:
                log.info("the swarm did not answer: %s", error)
        self._held_out_loss = statistics.fmean(losses) if losses else None

    @property
    def completed(self) -> list[float]:
        return [at for at in self.lab.watch.completed if at >= 0]

    @property
    def pace(self) -> float:
        """Completed microbatches per second before the scenario's first event, since any event may slow the machine."""
        firsts = [*(mark.at_s for mark in self.lab.marks), *(event.at_s for event in self.scenario.events[:1])]
        return pace_before(self.completed, min(firsts, default=self.lab.now()))

    def recoveries(self, until_s: float) -> tuple[Recovery, ...]:
        """Returns one recovery for each start and each end of a fault, as known at `until_s`."""
        completed, pace = [at for at in self.completed if at <= until_s], self.pace
        share = PACE_SHARE if self.scenario.chaos is None else self.scenario.chaos.pace_share
        return tuple(
            Recovery(
                mark, pace_back_after(completed, mark.at_s, pace, until_s, share), served_after(self._served, mark.at_s)
            )
            for mark in self.lab.marks
            if mark.kind is not Kind.NOTE
        )

    def _outcome(self, report: AuditReport) -> Outcome:
        lab, peers, progress = self.lab, self.lab.swarm.peers, self._progress
        announced = () if self._status is None else self._status.peers
        numbers = ((str(peer.module).partition(".")[0], peer.tokens_per_s) for peer in announced)
        speeds = ((int(number) if number.isdecimal() else -1, speed) for number, speed in numbers)
        # Without expectations the run does not wait for late events, so none is missed.
        in_vain = lab.waiting if self.scenario.chaos is not None else []
        return Outcome(
            scenario=self.scenario,
            started_after_s=self._started_after_s,
            seconds=self._seconds,
            steps=progress.step,
            tokens=progress.tokens,
            tokens_per_s=(progress.tokens - self._tokens_before) / max(1e-9, self._seconds),
            capacity=capacity_of(speeds, self.scenario.manifest),
            utilization=utilization_of(lab.swarm.progress),
            loss_first=progress.loss_first,
            held_out_loss=self._held_out_loss,
            rows=tuple(self.rows),
            marks=tuple(lab.marks),
            report=report,
            failures=lab.failures,
            missed=(*lab.missed, *(f"waited in vain for {what}" for what in in_vain)),
            cut_short=self._stop.is_set(),
            pace=self.pace,
            recoveries=self.recoveries(self._seconds),
            rerouted_for_s=rerouted_after(self._served, [at for at in lab.watch.rerouted if 0 <= at <= self._seconds]),
            peaks=self._recorder.peaks,
            odd={peer: (works, lab.watch.visits[peers[peer].peer]) for peer, works in lab.odd.items()},
            liars=frozenset(lab.liars),
            accused=lab.watch.accused,
        )


UNDISTURBED = "undisturbed"
LONGEST_CALM = 3.0


@dataclass(slots=True, eq=False)
class Experiment:
    """Runner of scenarios, with results in a folder. `stop` ends the current run cleanly and prevents further runs."""

    folder: Path
    tell: Tell
    stop: asyncio.Event
    _running: Run | None = None

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()

    async def run(self, scenario: Scenario, text: str, *, compare: bool) -> Result:
        """Runs one scenario; `text` is its file. Raises as `Run.to_the_end`, and ConfigError for a non-empty folder."""
        self.tell(f"{scenario.name}: starting the swarm")
        result = await self._one(scenario, text, self.folder, compare=compare)
        (self.folder / "report.md").write_text(report_text(result))
        return result

    async def run_suite(self, scenarios: Sequence[tuple[Scenario, str]]) -> list[Result]:
        """Runs scenarios in turn. Writes the report after each scenario, so that an interrupted suite has a report."""
        make_folder(self.folder)
        results: list[Result] = []
        for scenario, text in scenarios:
            if self.stop.is_set():
                break
            expected = scenario.chaos
            self.tell(scenario.name if expected is None else f"{scenario.name}: {expected.fault}")
            compare = expected is not None and expected.loss_ratio is not None
            try:
                result = await self._one(scenario, text, self.folder / scenario.name, compare=compare)
            except SkipstoneError as error:
                result = Result(scenario, None, (str(error),))
            results.append(result)
            outcome = result.outcome
            recovery = f", recovery {outcome.recovery_s:.1f} s" if outcome is not None and outcome.counted else ""
            self.tell(f"  {'passed' if result.passed else 'NOT PASSED'}{recovery}")
            for objection in result.objections:
                self.tell(f"    {objection}")
            (self.folder / "report.md").write_text(suite_text(results))
            (self.folder / "report.json").write_text(json.dumps(suite_json(results), indent=1) + "\n")
        return results

    async def _one(self, scenario: Scenario, text: str, folder: Path, *, compare: bool) -> Result:
        # Refuse a used folder before the swarm starts.
        make_folder(folder, text)
        self._running = Run(scenario, folder, self.tell, self.stop)
        outcome = await self._running.to_the_end()
        if compare and not self.stop.is_set():
            outcome = replace(outcome, undisturbed=await self._undisturbed(outcome, folder / UNDISTURBED))
        try:
            plots = await asyncio.to_thread(draw, folder, outcome)
        except ConfigError as error:
            return Result(scenario, outcome, outcome.objections, (), f"{error}. {error.hint}")
        return Result(scenario, outcome, outcome.objections, plots)

    async def _undisturbed(self, outcome: Outcome, folder: Path) -> Outcome | None:
        """Repeats the scenario without faults for the same number of tokens; None if the time was too short."""
        without = outcome.scenario.undisturbed()
        self.tell(f"{without.name}: starting the swarm")
        make_folder(folder)
        longest_s = LONGEST_CALM * outcome.seconds + 60.0
        self._running = Run(without, folder, self.tell, self.stop, longest_s=longest_s, tokens=outcome.tokens)
        calm = await self._running.to_the_end()
        return calm if calm.tokens >= outcome.tokens else None


def make_folder(folder: Path, scenario: str | None = None) -> None:
    """Creates a run's folder with the scenario's text. Raises ConfigError if it is not empty or not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty", hint="Choose a new folder with --out.")
        if scenario is not None:
            (folder / "scenario.toml").write_text(scenario)
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror or error}") from None
