"""What can be done to a swarm on purpose, and that it ends. Nodes are stand-ins; tests/chaos has real ones."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lab.chaos.chaos_scenario import ChaosScenario
from lab.chaos.faults import Child, Crash, FullDisk, OneWay, Resets, Restart, Worsen
from lab.emulation.link_shape import Fault
from lab.experiment.log_watch import LogWatch
from lab.experiment.metrics import Kind
from lab.experiment.run import Run, until
from lab.experiment.scenario import scenario_from_table
from lab.experiment.scenario_events import ScenarioEvent
from node.local_swarm import local_swarm
from node.observability.event_json import event_to_json
from node.observability.events import Completed, RoundProgress, Visit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the laboratory reads /proc")

ROOT = Path(__file__).parent.parent.parent.parent
STAND_IN = (sys.executable, str(Path(__file__).parent.parent.parent / "node" / "local_swarm" / "stand_in_node.py"))
SCENARIO = 'name = "test"\nduration = 9\n[chaos]\nfault = "some"\n'


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local_swarm, "node_command", lambda: STAND_IN)
    monkeypatch.setattr("lab.chaos.faults.node_command", lambda: STAND_IN)
    scenario = scenario_from_table(tomllib.loads(SCENARIO), ChaosScenario)
    made = Run(scenario, tmp_path, lambda news: None, asyncio.Event())
    async with made.lab.started():
        await until(lambda: len(made.lab.serving()) == len(made.lab.swarm.peers))
        yield made


def kinds(run: Run) -> list[Kind]:
    return [mark.kind for mark in run.marks if mark.kind is not Kind.NOTE]


async def do(run: Run, event: ScenarioEvent) -> None:
    event.do(run)
    await until(lambda: not run.waiting)


async def test_links_get_worse_and_are_mended(run: Run) -> None:
    emulation = run.lab.emulation
    before = emulation.site(3)
    Worsen(at_s=0, peers=(3,), fault=Fault.HALF_OPEN, for_s=0.1).do(run)
    assert not emulation.passes((0, 3))
    await until(lambda: not run.waiting)
    assert emulation.site(3) == before
    assert kinds(run) == [Kind.FAULT, Kind.END]
    assert run.marks[0].lasts


async def test_a_way_is_blocked_and_opened_again(run: Run) -> None:
    OneWay(at_s=0, from_=(3,), to=(0, 1), for_s=0.1).do(run)
    assert (run.lab.emulation.passes((3, 1)), run.lab.emulation.passes((1, 3))) == (False, True)
    await until(lambda: not run.waiting)
    assert run.lab.emulation.passes((3, 1))


async def test_connections_break_for_a_while(run: Run) -> None:
    Resets(at_s=0, peers=(1,), every_bytes=100, for_s=0.1).do(run)
    assert run.lab.emulation.before_break((0, 1), 150) == 100
    await until(lambda: not run.waiting)
    assert run.lab.emulation.before_break((0, 1), 150) is None


async def test_a_disk_is_full_and_has_room_again(run: Run) -> None:
    pid = run.lab.swarm.processes()[3]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    FullDisk(at_s=0, peers=(3,), for_s=0.1).do(run)
    assert resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == 0
    await until(lambda: not run.waiting)
    assert resource.prlimit(pid, resource.RLIMIT_FSIZE) == before


async def test_what_still_lasts_when_the_run_ends_is_mended(run: Run) -> None:
    pid = run.lab.swarm.processes()[3]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    FullDisk(at_s=0, peers=(3,), for_s=600).do(run)
    await asyncio.sleep(0)
    await run.end_what_lasts()
    assert resource.prlimit(pid, resource.RLIMIT_FSIZE) == before
    assert run.waiting == ["the end of: the disk of peer 3 is full"], "its end was not seen"
    assert kinds(run) == [Kind.FAULT]


async def test_a_child_that_is_not_there_is_missed(run: Run) -> None:
    await do(run, Child(at_s=0, peers=(1, 2), which="p2pd"))
    assert run.missed == ["only 0 processes p2pd of peers 1, 2 were there"]


@pytest.mark.parametrize("politely", [True, False])
async def test_peers_end_and_start_again_as_themselves(run: Run, politely: bool) -> None:
    swarm = run.lab.swarm
    before = {peer: swarm.processes()[peer] for peer in (1, 3)}
    await do(run, Restart(at_s=0, peers=(1, 3), politely=politely))
    after = swarm.processes()
    assert before[1] != after[1]
    assert before[3] != after[3]
    assert all(swarm.progress.peers[peer].state == "serving" for peer in (1, 3))
    assert kinds(run).count(Kind.END) == 2
    assert not run.lab.killed, "what they do from now on is their own"
    assert not run.missed


async def test_a_peer_that_does_not_come_to_its_crash_point_is_missed(run: Run) -> None:
    await do(run, Crash(at_s=0, stage=1, point="sent", leave_after_s=0.1))
    assert len(run.missed) == 1
    assert "before it came to `sent`" in run.missed[0]
    assert Kind.FAULT not in kinds(run)


async def test_the_look_out_reads_logs_while_they_are_written(tmp_path: Path) -> None:
    watch = LogWatch(tmp_path, lambda: 7.0)
    progress = RoundProgress("a", "1.0", 3, 0, "a", 1, 40)
    running = asyncio.create_task(watch.run())
    waiting = asyncio.create_task(watch.until(lambda event: event.percent > 30))
    await asyncio.sleep(0)
    line = event_to_json(Completed("a", "a#1", ())) + "\n"
    with (tmp_path / "a-1.jsonl").open("w", buffering=1) as log:
        log.write(line[:20])
        log.flush()
        await asyncio.sleep(0.05)
        assert watch.completed == []
        log.write(line[20:])
        log.write(event_to_json(Visit("a", "1.0", "a#1")) + "\n")
        log.write(event_to_json(RoundProgress("a", "1.0", 3, 0, "a", 1, 20)) + "\n" + event_to_json(progress) + "\n")
    assert await waiting == progress
    assert (watch.completed, watch.visited) == ([7.0], {"a"})
    running.cancel()


def test_the_clock_of_an_odd_node_is_wrong_and_is_set_when_it_is_told() -> None:
    text = """
import os, signal, time
from lab.chaos.faulty_node import _set_clock
_set_clock(300.0, -3900.0)
from protocol.interfaces.clock import SystemClock
assert abs(SystemClock().wall() - time.time() - 300) < 5
os.kill(os.getpid(), signal.SIGUSR1)
assert abs(SystemClock().wall() - time.time() + 3600) < 5
"""
    ran = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
