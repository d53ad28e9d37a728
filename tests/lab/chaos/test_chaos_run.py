"""When a chaos run is over, and what it keeps of what it has seen. Nothing is started; tests/chaos has real nodes."""

from __future__ import annotations

import asyncio
import math
import sys
import time
import tomllib
from pathlib import Path

import pytest

from lab.chaos.chaos_run import ChaosRun
from lab.chaos.chaos_scenario import ChaosScenario
from lab.chaos.recovery import WINDOW_S
from lab.experiment.metrics import Kind, Mark
from lab.experiment.scenario import scenario_from_table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the laboratory reads /proc")

SCENARIO = """
name = "test"
duration = 20
[chaos]
fault = "some"
save_every = 5
[[event]]
at = 10
action = "kill"
peers = [4]
"""


@pytest.fixture
def run(tmp_path: Path) -> ChaosRun:
    scenario = scenario_from_table(tomllib.loads(SCENARIO), ChaosScenario)
    made = ChaosRun(scenario, tmp_path, lambda news: None, asyncio.Event())
    made._began = time.monotonic() - 30.0
    made.watch.completed = [-1.0, *(number / 10 for number in range(100)), *(14 + number / 10 for number in range(160))]
    return made


def test_the_pace_is_that_before_the_first_event(run: ChaosRun) -> None:
    assert run.pace == pytest.approx(10, abs=0.5)
    run.note("a newcomer")
    run.marks[0] = Mark(1.0, Kind.NOTE, "a newcomer")
    assert run.pace == 0.0, "too short to say"


def test_recoveries_are_of_faults_and_their_ends(run: ChaosRun) -> None:
    run.marks += [
        Mark(10.0, Kind.FAULT, "peer 4 killed"),
        Mark(11.0, Kind.NOTE, "a note"),
        Mark(12.0, Kind.FAULT, "frozen", lasts=True),
        Mark(13.0, Kind.END, "over: frozen"),
    ]
    killed, frozen, over = run.recoveries(run.now())
    assert (killed.counts, frozen.counts, over.counts) == (True, False, True)
    assert (killed.mark, over.mark) == (run.marks[0], run.marks[3])
    assert 4 - WINDOW_S / 2 <= killed.pace_s <= 4
    assert all(each.pace_s == math.inf for each in run.recoveries(12.5)), "seen only until then"


async def test_a_run_that_is_stopped_is_over_at_once(run: ChaosRun) -> None:
    run.timeline = asyncio.create_task(asyncio.sleep(600))
    run._watching = asyncio.create_task(run.watch.run())
    run.stop.set()
    async with asyncio.timeout(5):
        await run.until_over()
    run.timeline.cancel()
