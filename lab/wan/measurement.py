"""The measurement of a scenario: its run, the undisturbed one if asked for, and the folder with everything about both.

Besides what `lab.experiment.experiment` names:

metrics.jsonl    a row a second (`metrics.Row`)
report.md        what came of it
*.png            plots, where matplotlib is installed
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from lab.experiment.experiment import UNDISTURBED, Experiment, make_folder
from lab.experiment.run import Run
from lab.experiment.scenario import Scenario
from lab.wan.outcome import Outcome, outcome_of
from lab.wan.plots import draw_all
from lab.wan.wan_report import loss_ratio, report_text
from swarm.vocabulary.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Result:
    """The findings of `Measurement.run`."""

    outcome: Outcome
    undisturbed: Outcome | None
    plots: tuple[str, ...]
    why_no_plots: str | None

    def as_json(self) -> dict[str, Any]:
        """The JSON object for `--json`."""
        calm = self.undisturbed
        return {
            **self.outcome.as_json(),
            "undisturbed": None if calm is None else calm.as_json(),
            "loss_ratio": None if calm is None else loss_ratio(self.outcome, calm),
            "plots": list(self.plots),
        }


class Measurement(Experiment):
    """A measurement of one scenario; runs once."""

    async def run(self, scenario: Scenario, text: str, *, compare: bool) -> Result:
        """Runs the scenario and fills the folder. `text` is the scenario's file as run. Errors as `Run.to_the_end`;
        ConfigError when the folder is not empty.
        """
        make_folder(self.folder, text)
        self.tell(f"{scenario.name}: starting the swarm")
        run = await self.carry_out(Run(scenario, self.folder, self.tell, self.stop))
        calm: Run | None = None
        runs = {scenario.name: run.rows}
        if compare and not self.stop.is_set():
            without = scenario.undisturbed()
            self.tell(f"{without.name}: starting the swarm")
            calm = await self.undisturbed(run, without, self.tell)
            if calm is not None:
                runs[UNDISTURBED] = calm.rows
        found, other = outcome_of(run), None if calm is None else outcome_of(calm)
        plots, why_no_plots = await asyncio.to_thread(self._draw, runs, found)
        (self.folder / "report.md").write_text(report_text(scenario, found, other, plots))
        return Result(found, other, plots, why_no_plots)

    def _draw(self, runs: dict[str, Any], outcome: Outcome) -> tuple[tuple[str, ...], str | None]:
        """The names of the pictures, or why there are none: without them a run is still one."""
        try:
            return draw_all(self.folder, runs, outcome.diary), None
        except ConfigError as error:
            return (), f"{error}. {error.hint}"
