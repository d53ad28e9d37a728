"""A scenario from start to end: its run, the undisturbed one if asked for, and the folder with everything about both.

scenario.toml    as run
logs/            an event log for each node, for `skipstone check`
metrics.jsonl    a row a second (`metrics.Row`)
report.md        what came of it
*.png            plots, where matplotlib is installed
undisturbed/     logs and metrics of the comparison
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.lab.wan.metrics import Row
from node.lab.wan.outcome import Happened, Outcome
from node.lab.wan.plots import draw_all
from node.lab.wan.run import Limits, News, Run, Tell, make_folder
from node.lab.wan.scenario import Scenario
from node.lab.wan.wan_report import loss_ratio, report_text
from swarm.vocabulary.errors import ConfigError

UNDISTURBED = "undisturbed"
LONGEST_CALM = 3.0
"""The comparison gets so many times the first run's time for the same tokens, and a minute more."""


@dataclass(frozen=True, slots=True)
class Result:
    """What `Experiment.run` has found."""

    outcome: Outcome
    undisturbed: Outcome | None
    plots: tuple[str, ...]
    why_no_plots: str | None

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        calm = self.undisturbed
        return {
            **self.outcome.as_json(),
            "undisturbed": None if calm is None else calm.as_json(),
            "loss_ratio": None if calm is None else loss_ratio(self.outcome, calm),
            "plots": list(self.plots),
        }


class Experiment:
    """Runs once. `stop` may be set from outside: the run under way ends soon, and the report tells of what there is."""

    def __init__(self, scenario: Scenario, text: str, folder: Path, tell: Tell, stop: asyncio.Event) -> None:
        """`text` is the scenario's file as run."""
        self.scenario = scenario
        self._text = text
        self._folder = folder
        self._tell = tell
        self._stop = stop
        self._run: Run | None = None

    def kill(self) -> None:
        """Kills every node now; see `Run.kill`."""
        if self._run is not None:
            self._run.kill()

    async def run(self, *, compare: bool) -> Result:
        """Fills the folder. Errors as `Run.to_the_end`; ConfigError when the folder is not empty."""
        make_folder(self._folder)
        (self._folder / "scenario.toml").write_text(self._text)
        outcome, rows = await self._one(self.scenario, self._folder, Limits(duration_s=self.scenario.duration_s))
        runs = {self.scenario.name: rows}
        calm: Outcome | None = None
        if compare and not self._stop.is_set():
            limits = Limits(duration_s=LONGEST_CALM * outcome.seconds + 60.0, tokens=outcome.tokens)
            folder = self._folder / UNDISTURBED
            make_folder(folder)
            calm, runs[UNDISTURBED] = await self._one(self.scenario.undisturbed(), folder, limits)
            if calm.tokens < outcome.tokens:
                calm = None  # cut short or too slow: at other tokens there is nothing to compare
        plots, why_not = await asyncio.to_thread(_draw, self._folder, runs, outcome.diary)
        (self._folder / "report.md").write_text(report_text(self.scenario, outcome, calm, plots))
        return Result(outcome, calm, plots, why_not)

    async def _one(self, scenario: Scenario, folder: Path, limits: Limits) -> tuple[Outcome, list[Row]]:
        self._tell(News(begun=scenario.name))
        self._run = Run(scenario, folder, limits, self._tell, self._stop)
        return await self._run.to_the_end(), self._run.rows


def _draw(folder: Path, runs: dict[str, list[Row]], diary: Sequence[Happened]) -> tuple[tuple[str, ...], str | None]:
    """The names of the pictures, or why there are none: without them a run is still one."""
    try:
        return draw_all(folder, runs, diary), None
    except ConfigError as error:
        return (), f"{error}. {error.hint}"
