"""Several scenarios, one after the other, and their folder.

NAME/scenario.toml   as run
NAME/logs/           an event log for each node, for `skipstone check`
report.md, .json     written anew after each scenario, so that a series that breaks off leaves them too
chaos.png            where matplotlib is installed
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from node.chaos.bench import Mark
from node.chaos.picture import draw
from node.chaos.plan import ChaosPlan
from node.chaos.report import Judged, judged, report_json, report_text
from node.chaos.trial import Trying
from node.wan.runner import make_folder
from swarm.errors import SkipstoneError


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
        self._trying: Trying | None = None

    def kill(self) -> None:
        """Kills every node now; see `Trying.kill`."""
        if self._trying is not None:
            self._trying.kill()

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
        self._trying = Trying(plan, folder, self._happened, self._stop)
        try:
            return judged(await self._trying.to_the_end())
        except SkipstoneError as error:
            return Judged(plan, None, (str(error),))

    def _write(self, done: list[Judged]) -> None:
        picture = draw(self._folder, [each.trial for each in done if each.trial is not None])
        (self._folder / "report.md").write_text(report_text(done, picture))
        (self._folder / "report.json").write_text(json.dumps(report_json(done), indent=1) + "\n")
