"""A suite: several chaos scenarios, one after the other. In their folder, besides one for each by its name
(`lab.experiment.experiment` says what is in those):

report.md, .json     written anew after each scenario, so that a suite that breaks off leaves them too
chaos.png            where matplotlib is installed

It stands alone because it is what the command runs; what it has in common with other experiments is there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from lab.chaos.chaos_report import Judged, draw, judged, report_json, report_text
from lab.chaos.chaos_run import ChaosRun
from lab.chaos.chaos_scenario import ChaosScenario
from lab.chaos.verdict import trial_of
from lab.experiment.experiment import Experiment, make_folder
from swarm.vocabulary.errors import SkipstoneError


class Suite(Experiment):
    """A suite of scenarios; runs once."""

    async def run(self, scenarios: Sequence[tuple[ChaosScenario, str]]) -> list[Judged]:
        """Runs the scenarios, each given with its text. Raises ConfigError when the folder is not empty."""
        make_folder(self.folder)
        done: list[Judged] = []
        for scenario, text in scenarios:
            if self.stop.is_set():
                break
            self.tell(f"{scenario.name}: {scenario.chaos.fault}")
            done.append(await self._one(scenario, text))
            self.tell(f"  {'passed' if done[-1].passed else 'NOT PASSED'}, recovery {done[-1].recovery_s:.1f} s")
            for objection in done[-1].objections:
                self.tell(f"    {objection}")
            await asyncio.to_thread(self._write, done)
        return done

    async def _one(self, scenario: ChaosScenario, text: str) -> Judged:
        folder = self.folder / scenario.name
        make_folder(folder, text)
        try:
            run = await self.carry_out(ChaosRun(scenario, folder, self.tell, self.stop))
            calm = None
            if scenario.chaos.loss_ratio is not None:
                calm = await self.undisturbed(run, scenario.uneventful(), lambda news: None)
            return judged(trial_of(run, None if calm is None else calm.held_out_loss))
        except SkipstoneError as error:
            return Judged(scenario, None, (str(error),))

    def _write(self, done: list[Judged]) -> None:
        picture = draw(self.folder, [each.trial for each in done if each.trial is not None])
        (self.folder / "report.md").write_text(report_text(done, picture))
        (self.folder / "report.json").write_text(json.dumps(report_json(done), indent=1) + "\n")
