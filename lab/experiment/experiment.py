"""Experiments: several runs, each into its own folder, and the undisturbed run that one is compared with.

FOLDER/scenario.toml   as run
FOLDER/logs/           an event log for each node, for `skipstone check`
FOLDER/undisturbed/    likewise of the run without what was done to the first one
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

from lab.experiment.run import Run, Tell
from lab.experiment.scenario import Scenario
from swarm.vocabulary.errors import ConfigError

UNDISTURBED = "undisturbed"
LONGEST_CALM = 3.0
"""The comparison gets so many times the first run's time for the same tokens, and a minute more."""

AnyRun = TypeVar("AnyRun", bound=Run)


class Experiment:
    """The common part of the commands' experiments. `stop` may be set from outside: the run under way ends soon, no
    other begins, and the report tells of what there is.
    """

    def __init__(self, folder: Path, tell: Tell, stop: asyncio.Event) -> None:
        self.folder = folder
        self.tell = tell
        self.stop = stop
        self._running: Run | None = None

    def kill(self) -> None:
        """Kills every node now; see `Run.kill`."""
        if self._running is not None:
            self._running.kill()

    async def carry_out(self, run: AnyRun) -> AnyRun:
        """Carries a run out and returns it at its end. Errors as `Run.to_the_end`."""
        self._running = run
        await run.to_the_end()
        return run

    async def undisturbed(self, run: Run, scenario: Scenario, tell: Tell) -> Run | None:
        """Runs the scenario undisturbed for as many tokens as another run. None when it was cut short or too slow: at
        other tokens there is nothing to compare.
        """
        if self.stop.is_set():
            return None
        folder = run.folder / UNDISTURBED
        make_folder(folder)
        longest_s, tokens = LONGEST_CALM * run.seconds + 60.0, run.progress.tokens
        calm = await self.carry_out(Run(scenario, folder, tell, self.stop, longest_s=longest_s, tokens=tokens))
        return calm if calm.progress.tokens >= tokens else None


def make_folder(folder: Path, scenario: str | None = None) -> None:
    """Makes a run's folder, with the text of the scenario that is to be run. Raises ConfigError when something is in it
    already, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty", hint="Name a new folder with --out.")
        if scenario is not None:
            (folder / "scenario.toml").write_text(scenario)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from None
