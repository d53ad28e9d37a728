"""A run of a chaos scenario: it begins when all are at work, and is over when the swarm has recovered from everything
that was done to it."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.lab.chaos.chaos_scenario import ChaosScenario
from node.lab.chaos.recovery import (
    WINDOW_S,
    Recovery,
    pace_back_after,
    pace_before,
    rerouted_after,
    served_after,
    stand_together,
)
from node.lab.experiment.log_watch import Held
from node.lab.experiment.metrics import Kind
from node.lab.experiment.run import LOOK_S, Run, Tell
from swarm.pipeline.custody import ASK_S
from swarm.vocabulary.errors import Stalled

LATER_LIMIT_S = 150.0
"""For what an event waits for, such as a peer that comes to its crash point: after everything that has a known end."""
CALM_S = ASK_S + 1.0
"""After the last recovery, before the swarm is stopped: a hop that has not heard whether its gradient counts asks in
time."""
SAMPLE_S = 1.0


class ChaosRun(Run):
    """A run of a chaos scenario, its times counted from the moment when all were at work."""

    def __init__(self, scenario: ChaosScenario, folder: Path, tell: Tell, stop: asyncio.Event) -> None:
        super().__init__(scenario, folder, tell, stop, save_every_s=scenario.chaos.save_every_s)
        self.resources = Resources()
        self._recovery_s, self._share = scenario.chaos.recovery_s, scenario.chaos.pace_share
        self._served: list[tuple[float, bool]] = []

    @property
    def completed(self) -> list[float]:
        """The times of completed microbatches, since the run has begun."""
        return [at for at in self.watch.completed if at >= 0]

    @property
    def pace(self) -> float:
        """Completed microbatches a second before the first fault. From the first event on it is no measure any more:
        also newcomers take the machine's time.
        """
        firsts = [*(mark.at_s for mark in self.marks), *(event.at_s for event in self.scenario.events[:1])]
        return pace_before(self.completed, min(firsts, default=0.0))

    def recoveries(self, until_s: float) -> tuple[Recovery, ...]:
        """The recoveries after each fault and each end of one, by what was seen until then."""
        completed, pace = [at for at in self.completed if at <= until_s], self.pace
        return tuple(
            Recovery(
                mark,
                pace_back_after(completed, mark.at_s, pace, until_s, self._share),
                served_after(self._served, mark.at_s),
            )
            for mark in self.marks
            if mark.kind is not Kind.NOTE
        )

    def rerouted_for_s(self) -> float | None:
        """How long documents went to other experts after all modules were served again; None when they are not."""
        return rerouted_after(self._served, [at for at in self.watch.rerouted if 0 <= at <= self.seconds])

    def begins(self) -> bool:
        """Whether the run begins: everybody serves and a step is done: who does not serve yet cannot be missed."""
        progress = self.lab.swarm.progress
        if progress.is_over:
            raise Stalled("the swarm has ended before it was at work", hint=f"Look into {self.logs}.")
        all_serve = len(self.lab.serving()) == len(progress.peers)
        return all_serve and progress.step > 0 and bool(self.watch.completed)

    async def until_begun(self) -> None:
        """Waits for the beginning, with an eye on the logs from now on."""
        self._watching = self.lab.spawn(self.watch.run())
        await super().until_begun()

    async def until_over(self) -> None:
        """Waits until all that the scenario has happen is over, the swarm is back after everything that was done to it
        and stands together, or the limits for that have passed.
        """
        await self.until(lambda: self.timeline.done() and self.now() >= self.scenario.duration_s)
        limit_s = max([self.now(), *(event.over_s for event in self.scenario.events)]) + LATER_LIMIT_S
        await self.until(lambda: not self.waiting or self.now() > limit_s)
        last_s = max((mark.at_s for mark in self.marks if mark.kind is not Kind.NOTE), default=0.0)
        limit_s = last_s + self._recovery_s + WINDOW_S

        def over() -> bool:
            back = all(math.isfinite(each.seconds) for each in self.recoveries(self.now()) if each.counts)
            return self.now() >= limit_s or (back and stand_together(self._anchors()))

        await self.until(over)
        calm_s = self.now() + CALM_S
        await self.until(lambda: self.now() >= calm_s)
        self._watching.cancel()

    async def observe(self) -> None:
        """Observes what is served and what the nodes take of the machine, until cancelled."""
        while True:
            modules = {peer.module for index, peer in self.lab.serving().items() if index not in self.lab.frozen}
            served = len(modules) == len(self.scenario.manifest.modules())
            if not self._served or self._served[-1][1] is not served:
                self._served.append((self.now(), served))
            self.resources.sample(self.lab.swarm.processes())
            await asyncio.sleep(LOOK_S)

    async def ask(self) -> None:
        """Asks for the held-out loss alone."""
        await self.evaluate()

    def _anchors(self) -> list[Sequence[Held]]:
        """Of each serving replica that has been in a round."""
        anchors = self.watch.anchors
        return [tuple(anchors[peer.peer]) for peer in self.lab.serving().values() if peer.peer in anchors]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest use of resources of any node's process."""

    memory_bytes: int = 0
    descriptors: int = 0
    threads: int = 0


class Resources:
    """The recorder of the peaks, from /proc; `sample` may be called as often as one likes."""

    def __init__(self) -> None:
        self.peaks = Peaks()
        """So far."""
        self._sampled_at = 0.0

    def sample(self, processes: Mapping[int, int]) -> None:
        """Looks at the processes (ids by peer), once a second at most."""
        if time.monotonic() - self._sampled_at < SAMPLE_S:
            return
        self._sampled_at = time.monotonic()
        for pid in processes.values():
            try:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:  # it has ended
                continue
            memory = 1024 * int(status.get("VmRSS", "0 kB").split()[0])
            self.peaks = Peaks(
                max(self.peaks.memory_bytes, memory),
                max(self.peaks.descriptors, descriptors),
                max(self.peaks.threads, int(status.get("Threads", "0"))),
            )
