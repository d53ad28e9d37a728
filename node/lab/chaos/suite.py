"""Several scenarios, one after the other, and their folder.

NAME/scenario.toml   as run
NAME/logs/           an event log for each node, for `skipstone check`
NAME/undisturbed/    likewise of the run that its held-out loss is compared with
report.md, .json     written anew after each scenario, so that a series that breaks off leaves them too
chaos.png            where matplotlib is installed
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from node.lab.chaos.chaos_report import Judged, draw, judged, report_json, report_text
from node.lab.chaos.chaos_scenario import ChaosPlan
from node.lab.chaos.fault_context import Mark
from node.lab.chaos.trial import Trial, Trying
from node.lab.wan.experiment import LONGEST_CALM, UNDISTURBED
from node.lab.wan.run import Limits, Run, make_folder
from swarm.vocabulary.errors import SkipstoneError


class Series:
    """Runs once. `stop` may be set from outside: the trial under way ends soon, and no other begins.

    Args:
        began, happened, ended: told as it goes.
    """

    def __init__(
        self,
        folder: Path,
        stop: asyncio.Event,
        began: Callable[[ChaosPlan], None],
        happened: Callable[[Mark], None],
        ended: Callable[[Judged], None],
    ) -> None:
        self._folder = folder
        self._stop = stop
        self._began, self._happened, self._ended = began, happened, ended
        self._running: Trying | Run | None = None

    def kill(self) -> None:
        """Kills every node now; see `Trying.kill`."""
        if self._running is not None:
            self._running.kill()

    async def run(self, plans: Sequence[ChaosPlan]) -> list[Judged]:
        """Raises ConfigError when the folder is not empty."""
        make_folder(self._folder)
        done: list[Judged] = []
        for plan in plans:
            if self._stop.is_set():
                break
            self._began(plan)
            done.append(await self._one(plan))
            self._ended(done[-1])
            await asyncio.to_thread(self._write, done)
        return done

    async def _one(self, plan: ChaosPlan) -> Judged:
        folder = self._folder / plan.name
        make_folder(folder)
        (folder / "scenario.toml").write_text(plan.text)
        self._running = Trying(plan, folder, self._happened, self._stop)
        try:
            trial = await self._running.to_the_end()
            return judged(trial, await self._undisturbed(trial, folder / UNDISTURBED))
        except SkipstoneError as error:
            return Judged(plan, None, (str(error),))

    async def _undisturbed(self, trial: Trial, folder: Path) -> float | None:
        """The held-out loss after as many tokens when nothing happens; None where it is not wanted, or could not be
        measured."""
        if trial.plan.expected.loss_ratio is None or self._stop.is_set():
            return None
        make_folder(folder)
        limits = Limits(duration_s=LONGEST_CALM * trial.seconds, tokens=trial.tokens)
        scenario = trial.plan.scenario.uneventful()
        self._running = Run(scenario, folder, limits, lambda news: None, self._stop)
        outcome = await self._running.to_the_end()
        return outcome.held_out_loss if outcome.tokens >= trial.tokens else None

    def _write(self, done: list[Judged]) -> None:
        picture = draw(self._folder, [each.trial for each in done if each.trial is not None])
        (self._folder / "report.md").write_text(report_text(done, picture))
        (self._folder / "report.json").write_text(json.dumps(report_json(done), indent=1) + "\n")
