"""Carries one chaos scenario out: starts its swarm, does what is due, looks on, waits until it has recovered, and ends
it in good order."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from node.concurrency.task_groups import task_scope
from node.lab.audit.log_files import check_folder
from node.lab.chaos.chaos_scenario import ChaosPlan
from node.lab.chaos.fault_context import Bench, Kind, Mark, until
from node.lab.chaos.faults import Deed
from node.lab.chaos.observation import Resources, Watch
from node.lab.chaos.recovery import WINDOW_S, Held, Recovery, pace_back_after, pace_before, served_after, stand_together
from node.lab.chaos.verdict import Facts
from node.lab.wan.laboratory import Laboratory, Saving, laboratory
from node.lab.wan.run import held_out_loss
from node.lab.wan.scenario_events import Freeze, Happening, Heal, Kill, Partition, ReplaceOne, Reshape
from node.local_swarm.swarm_progress import PeerProgress
from swarm.pipeline.settlement import ASK_S
from swarm.vocabulary.errors import SkipstoneError, Stalled

START_LIMIT_S = 180.0
DEED_LIMIT_S = 150.0
"""For what a deed waits for, such as a peer that comes to its crash point: after the scenario's duration."""
LOOK_S = 0.1
CALM_S = ASK_S + 1.0
"""After the last recovery, before the swarm is stopped: a hop that has not heard whether its gradient counts asks in
time."""
LOGS = "logs"
CHECKPOINTS = "checkpoints"
_FAULTS = (Kill, Partition, ReplaceOne, Reshape)


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen, besides the logs."""

    plan: ChaosPlan
    started_after_s: float
    seconds: float
    """From the moment when all were at work to the end of the trial."""
    pace: float
    """Microbatches a second before the first fault."""
    recoveries: tuple[Recovery, ...]
    marks: tuple[Mark, ...]
    completed: tuple[float, ...]
    facts: Facts
    tokens: int = 0
    """Trained when the held-out loss was asked for."""
    held_out: float | None = None
    """Through the swarm as it was at the end; None when it was not measured."""


class Trying:
    """One run of a plan into one folder, which must be there. `stop` may be set from outside and ends it soon, in good
    order."""

    def __init__(self, plan: ChaosPlan, folder: Path, tell: Callable[[Mark], None], stop: asyncio.Event) -> None:
        self._plan = plan
        self._folder = folder
        self._tell = tell
        self._stop = stop
        self._began = math.inf
        self._served: list[tuple[float, bool]] = []
        self._resources = Resources()
        self._tokens = 0
        self._held_out: float | None = None
        self._lab: Laboratory | None = None

    def kill(self) -> None:
        """Kills every node now. Touches no event loop, so a signal handler may call it; `stop` must be set, too."""
        if self._lab is not None:
            self._lab.swarm.signal_all(signal.SIGKILL)

    async def to_the_end(self) -> Trial:
        """Raises SkipstoneError when the swarm could not be started or does not begin to train."""
        started, logs = time.monotonic(), self._folder / LOGS
        logs.mkdir()
        watch = Watch(logs, self._now)
        saving = None
        if self._plan.save_every_s is not None:
            saving = Saving(self._folder / CHECKPOINTS, self._plan.save_every_s)
        async with laboratory(self._plan.scenario, logs, saving) as lab, task_scope() as tasks:
            self._lab = lab
            bench = Bench(lab, watch, self._now, self._tell)
            reading = tasks.create_task(_read_events(lab))
            async with _cancelled_at_the_end(tasks, watch.run()):
                await self._all_at_work(lab, watch)
                async with _cancelled_at_the_end(tasks, self._look_on(lab)):
                    await self._follow(bench)
                    await self._recovered(bench)
            seconds = self._now()
            lab.calm()
            if self._plan.scenario.held_out:
                self._tokens = lab.swarm.progress.tokens
                self._held_out = await held_out_loss(lab, self._plan.scenario.held_out, self._stop)
            await lab.swarm.stop()
            await reading
        completed = tuple(at for at in watch.completed if 0 <= at <= seconds)
        return await self._trial(bench, completed, started, seconds)

    async def _trial(self, bench: Bench, completed: tuple[float, ...], started: float, seconds: float) -> Trial:
        lab = bench.lab
        report = await asyncio.to_thread(check_folder, self._folder / LOGS)
        ends = {peer: end.exit_code for peer, end in lab.swarm.ends.items()}
        facts = Facts(
            report=report,
            failures={peer: code for peer, code in ends.items() if code and peer not in lab.killed},
            missed=(*bench.missed, *(f"in vain: waited for {what}" for what in bench.waiting)),
            odd=bench.odd,
            liars=frozenset(bench.liars),
            accused=bench.watch.accused,
            peers={peer.index: peer.peer for peer in lab.swarm.peers},
            resources=self._resources.peaks(),
            logs=self._folder / LOGS,
            cut_short=self._stop.is_set(),
        )
        pace = pace_before(completed, self._first_fault(bench))
        recoveries = self._recoveries(bench, completed, seconds)
        return Trial(
            self._plan,
            self._began - started,
            seconds,
            pace,
            recoveries,
            tuple(bench.marks),
            completed,
            facts,
            self._tokens,
            self._held_out,
        )

    def _now(self) -> float:
        return time.monotonic() - self._began if self._began < math.inf else -1.0

    # ---- the course of things ------------------------------------------------------------------------------------

    async def _all_at_work(self, lab: Laboratory, watch: Watch) -> None:
        """Until everybody serves and a step is done: who does not serve yet cannot be missed."""
        deadline = time.monotonic() + START_LIMIT_S

        def over() -> bool:
            progress = lab.swarm.progress
            if time.monotonic() > deadline or progress.is_over:
                raise Stalled(f"the swarm is not at work after {START_LIMIT_S:.0f} s", hint="Look into its logs.")
            all_serve = all(peer.state == "serving" for peer in progress.peers.values())
            return all_serve and progress.step > 0 and bool(watch.completed)

        await self._until(over)
        self._began = time.monotonic()

    async def _follow(self, bench: Bench) -> None:
        """All that the scenario has happen, and what comes of it later."""
        for happening in self._plan.scenario.happenings:
            await self._until_s(happening.at_s)
            if self._stop.is_set():
                return
            self._carry_out(bench, happening)
        await self._until_s(self._plan.scenario.duration_s)
        limit_s = self._now() + DEED_LIMIT_S
        await self._until(lambda: not bench.waiting or self._now() > limit_s)

    def _carry_out(self, bench: Bench, happening: Happening) -> None:
        try:
            if isinstance(happening, Deed):
                happening.do(bench)
                return
            what = bench.lab.carry_out(happening)
        except SkipstoneError as error:
            bench.miss(f"{happening.NAME} was not possible: {error}")
            return
        match happening:
            case Freeze(_, _, for_s):
                bench.lasts(what, for_s, lambda: None)
            case Heal():
                bench.end(what)
            case _ if isinstance(happening, _FAULTS):
                bench.fault(what, lasts=isinstance(happening, Partition))
            case _:
                bench.note(what)

    async def _recovered(self, bench: Bench) -> None:
        """Until the swarm is back after everything that was done to it and stands together, or the scenario's limit has
        passed."""
        last_s = max((mark.at_s for mark in bench.marks if mark.kind is not Kind.NOTE), default=0.0)
        limit_s = last_s + self._plan.expected.recovery_s + WINDOW_S

        def over() -> bool:
            now = self._now()
            recoveries = self._recoveries(bench, bench.watch.completed, now)
            back = all(math.isfinite(each.seconds) for each in recoveries if each.counts)
            return now >= limit_s or (back and stand_together(self._anchors(bench)))

        await self._until(over)
        await self._until_s(self._now() + CALM_S)

    async def _until_s(self, at_s: float) -> None:
        await self._until(lambda: self._now() >= at_s)

    async def _until(self, over: Callable[[], bool]) -> None:
        await until(lambda: self._stop.is_set() or over())

    # ---- looking on ----------------------------------------------------------------------------------------------

    async def _look_on(self, lab: Laboratory) -> None:
        while True:
            served = self._all_served(lab)
            if not self._served or self._served[-1][1] is not served:
                self._served.append((self._now(), served))
            self._resources.sample(lab.swarm.processes())
            await asyncio.sleep(LOOK_S)

    def _all_served(self, lab: Laboratory) -> bool:
        stages = {peer.stage for index, peer in _serving(lab).items() if index not in lab.frozen}
        return len(stages) == self._plan.scenario.manifest.stages.count

    def _anchors(self, bench: Bench) -> list[Sequence[Held]]:
        """Of each serving replica that has been in a round."""
        serving, anchors = _serving(bench.lab).values(), bench.watch.anchors
        return [tuple(anchors[peer.peer]) for peer in serving if peer.peer in anchors]

    def _first_fault(self, bench: Bench) -> float:
        """From then on the pace is no measure any more: also newcomers take the machine's time."""
        happenings = self._plan.scenario.happenings
        return min([*(mark.at_s for mark in bench.marks), *(each.at_s for each in happenings[:1])], default=0.0)

    def _recoveries(self, bench: Bench, completed: tuple[float, ...] | list[float], now: float) -> tuple[Recovery, ...]:
        pace = pace_before(completed, self._first_fault(bench))
        return tuple(
            Recovery(
                mark.at_s,
                mark.what,
                mark.kind is Kind.END,
                pace_back_after(completed, mark.at_s, pace, now),
                served_after(self._served, mark.at_s),
                counts=not mark.lasts,
            )
            for mark in bench.marks
            if mark.kind is not Kind.NOTE
        )


def _serving(lab: Laboratory) -> dict[int, PeerProgress]:
    """The living nodes that say so, frozen ones included, by number."""
    peers = lab.swarm.progress.peers.items()
    return {index: peer for index, peer in peers if peer.exit_code is None and peer.state == "serving"}


async def _read_events(lab: Laboratory) -> None:
    async for _ in lab.swarm.events():
        pass


@asynccontextmanager
async def _cancelled_at_the_end(tasks: asyncio.TaskGroup, work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = tasks.create_task(work)
    try:
        yield
    finally:
        task.cancel()
