"""An experiment: one scenario or several, each run into a folder, compared if asked for, and reported.

FOLDER/scenario.toml   as run
FOLDER/logs/           an event log for each node
FOLDER/metrics.jsonl   a row a second (`recorder.Row`)
FOLDER/*.png           plots, with matplotlib
FOLDER/undisturbed/    logs and metrics of the run without faults
FOLDER/report.md       of a single scenario; a suite has one for all, and report.json, above the scenarios' folders
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab.outcome import Outcome
from lab.report import Result, draw, report_text, suite_json, suite_text
from lab.run import Run, Tell
from lab.scenario import Scenario
from swarm.vocabulary.errors import ConfigError, SkipstoneError

UNDISTURBED = "undisturbed"
LONGEST_CALM = 3.0
"""Longest time of the undisturbed run, over the first run's, plus a minute."""


class Experiment:
    """Runs scenarios into a folder. `stop` ends the current run soon, in good order, and starts no other."""

    def __init__(self, folder: Path, tell: Tell, stop: asyncio.Event) -> None:
        self.folder = folder
        self._tell = tell
        self._stop = stop
        self._running: Run | None = None

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()

    async def run(self, scenario: Scenario, text: str, *, compare: bool) -> Result:
        """Runs one scenario, whose file holds `text`. Raises as `Run.to_the_end`; ConfigError for a used folder."""
        self._tell(f"{scenario.name}: starting the swarm")
        result = await self._one(scenario, text, self.folder, compare=compare)
        (self.folder / "report.md").write_text(report_text(result))
        return result

    async def run_suite(self, scenarios: Sequence[tuple[Scenario, str]]) -> list[Result]:
        """Runs scenarios one after the other; writes the report after each, so that a broken-off suite has one."""
        make_folder(self.folder)
        results: list[Result] = []
        for scenario, text in scenarios:
            if self._stop.is_set():
                break
            expected = scenario.chaos
            self._tell(scenario.name if expected is None else f"{scenario.name}: {expected.fault}")
            compare = expected is not None and expected.loss_ratio is not None
            try:
                result = await self._one(scenario, text, self.folder / scenario.name, compare=compare)
            except SkipstoneError as error:
                result = Result(scenario, None, (str(error),))
            results.append(result)
            outcome = result.outcome
            recovery = f", recovery {outcome.recovery_s:.1f} s" if outcome is not None and outcome.counted else ""
            self._tell(f"  {'passed' if result.passed else 'NOT PASSED'}{recovery}")
            for objection in result.objections:
                self._tell(f"    {objection}")
            (self.folder / "report.md").write_text(suite_text(results))
            (self.folder / "report.json").write_text(json.dumps(suite_json(results), indent=1) + "\n")
        return results

    async def _one(self, scenario: Scenario, text: str, folder: Path, *, compare: bool) -> Result:
        make_folder(folder, text)
        outcome = await self._carry_out(Run(scenario, folder, self._tell, self._stop))
        if compare and not self._stop.is_set():
            outcome = replace(outcome, undisturbed=await self._undisturbed(outcome, folder / UNDISTURBED))
        try:
            plots = await asyncio.to_thread(draw, folder, outcome)
        except ConfigError as error:
            return Result(scenario, outcome, outcome.objections, (), f"{error}. {error.hint}")
        return Result(scenario, outcome, outcome.objections, plots)

    async def _undisturbed(self, outcome: Outcome, folder: Path) -> Outcome | None:
        """Runs the scenario undisturbed for as many tokens. None if it did not come that far: nothing to compare."""
        without = outcome.scenario.undisturbed()
        self._tell(f"{without.name}: starting the swarm")
        make_folder(folder)
        longest_s = LONGEST_CALM * outcome.seconds + 60.0
        run = Run(without, folder, self._tell, self._stop, longest_s=longest_s, tokens=outcome.tokens)
        calm = await self._carry_out(run)
        return calm if calm.tokens >= outcome.tokens else None

    async def _carry_out(self, run: Run) -> Outcome:
        self._running = run
        return await run.to_the_end()


def make_folder(folder: Path, scenario: str | None = None) -> None:
    """Makes a run's folder with the scenario's text. Raises ConfigError if it is not empty, or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty", hint="Name a new folder with --out.")
        if scenario is not None:
            (folder / "scenario.toml").write_text(scenario)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from None
