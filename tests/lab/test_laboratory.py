"""What can be done to a swarm in the laboratory. Nodes are stand-ins; tests/e2e has real ones."""

import asyncio
import resource
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from lab import scenario as scenarios
from lab.emulation.emulation import MBIT, Fault, LinkShape, profile_of
from lab.emulation.proxy import descendants
from lab.laboratory import Kind, Laboratory, LogWatch, deployment
from node.local_swarm import local_swarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.event_json import event_to_json
from node.observability.events import Completed, RoundProgress, Visit
from tests.lab.test_scenario import BASE
from tests.node.local_swarm.test_local_swarm import ROOT, STAND_IN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads /proc")


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Laboratory]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local_swarm, "node_command", lambda: STAND_IN)
    monkeypatch.setattr("lab.scenario.node_command", lambda: STAND_IN)
    monkeypatch.setenv("SKIPSTONE_STAND_IN", "grandchild:2")
    scenario = scenarios.scenario_from_table(tomllib.loads(BASE))
    options = LocalSwarmOptions(peers=5, steps=None, threads=1, log_dir=tmp_path)
    made = Laboratory(scenario.manifest, options, scenario.sites, scenario.seed, lambda mark: None)
    async with made.started():
        await until(lambda: len(made.serving()) == 5)
        made.begin()
        yield made


def said(lab: Laboratory, event: scenarios.ScenarioEvent) -> str:
    lab.attempt(event.NAME, lambda: event.do(lab))
    return lab.marks[-1].what


async def until(wanted: Callable[[], bool]) -> None:
    """Ends with the test's own time limit if it never comes."""
    while not wanted():
        await asyncio.sleep(0.01)


def states_of(root: int) -> set[str]:
    """Of a process and all it has started, as the kernel has them: T stands still."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for _, pid in descendants({root}))
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


async def test_peers_get_other_links(lab: Laboratory) -> None:
    emulation = lab.emulation
    changed = scenarios.Reshape(at_s=0, peers=(0, 4), fault=Fault.RESET)
    assert said(lab, changed) == "peers 0, 4 get another link: fault reset"
    assert emulation.site(4).region == "iowa"
    assert emulation.is_reset(4)
    mobile = scenarios.Reshape(
        at_s=0, peers=(4,), profile="mobile", latency_ms=500, jitter_ms=0, up_mbit=10, down_mbit=20
    )
    assert said(lab, mobile) == (
        "peer 4 get another link: mobile, latency 500 ms, jitter 0 ms, 10 Mbit/s up, 20 Mbit/s down"
    )
    assert emulation.site(4).shape == LinkShape(0.5, 0.0, 10 * MBIT, 20 * MBIT, profile_of("mobile").site.shape.fault)
    assert emulation.site(4).region is None
    lab.calm()
    assert emulation.site(0).shape == LinkShape()


async def test_partitions_begin_and_end(lab: Laboratory) -> None:
    assert said(lab, scenarios.Partition(at_s=0, sides=((0, 1), (2,)))) == "partition: peers 0, 1 | peer 2"
    assert not lab.emulation.passes((0, 2))
    assert said(lab, scenarios.Heal(at_s=0)) == "the partition is healed"
    assert lab.emulation.passes((0, 2))
    scenarios.Partition(at_s=0, sides=((0, 1), (2,)), for_s=0.1).do(lab)
    assert not lab.emulation.passes((0, 2))
    await until(lambda: not lab.waiting)
    assert lab.emulation.passes((0, 2))
    assert [mark.kind for mark in lab.marks] == [Kind.FAULT, Kind.END] * 2
    assert [mark.lasts for mark in lab.marks] == [True, False] * 2


async def test_peers_are_killed_and_asked_to_leave_and_started(lab: Laboratory) -> None:
    scenarios.Kill(at_s=0, peers=(4,)).do(lab)
    scenarios.Stop(at_s=0, peers=(1,)).do(lab)
    await until(lambda: {1, 4} <= lab.swarm.ends.keys())
    assert lab.swarm.ends[4].exit_code == 137
    assert lab.killed == {4}
    assert 4 not in lab.failures
    assert said(lab, scenarios.Start(at_s=0, stage=2, profile="mobile")) == "peer 5 started for stage 2"
    assert lab.emulation.site(5) == profile_of("mobile").site
    assert lab.swarm.peers[5].deployment == deployment(5)
    scenarios.Start(at_s=0, stage=1).do(lab)
    assert lab.emulation.site(6) == lab.emulation.site(0), "the first group's"


async def test_frozen_peers_and_their_children_stand_still_as_long_as_the_longest_freeze(lab: Laboratory) -> None:
    roots = lab.swarm.processes()
    assert len(list(descendants({roots[2]}))) == 2
    scenarios.Freeze(at_s=0, peers=(1, 2), for_s=0.3).do(lab)
    scenarios.Freeze(at_s=0, peers=(2,), for_s=600.0).do(lab)
    await until(lambda: states_of(roots[1]) == states_of(roots[2]) == {"T"})
    await until(lambda: "T" not in states_of(roots[1]))
    await asyncio.sleep(0.1)  # both were due to go on at the same moment
    assert states_of(roots[2]) == {"T"}
    lab.calm()
    assert "T" not in states_of(roots[2])


async def test_a_peer_with_a_command_of_its_own_starts_again_without_it(lab: Laboratory) -> None:
    swarm = lab.swarm
    index = lab.start(1, profile_of("none").site, ("/usr/bin/env", "SKIPSTONE_STAND_IN=crash:1", *STAND_IN))
    await until(lambda: index in swarm.ends and index not in swarm.processes())
    assert swarm.ends[index].exit_code == 71
    swarm.restart_peer(index)
    await until(lambda: swarm.progress.peers[index].state == "serving")
    assert index not in swarm.ends


async def test_a_replaced_peer_is_none_of_the_last_ones(lab: Laboratory) -> None:
    """Five peers over three stages: two stages have a spare one."""
    for _ in range(3):
        scenarios.replace_one(lab)
    lines = [mark.what for mark in lab.marks]
    assert [line.startswith("peer") for line in lines] == [True, True, False]
    assert lines[2] == "no peer replaced: every module has only one replica", "those that were started do not serve yet"
    peers = lab.swarm.peers
    stages = [peers[index].stage for index in sorted(lab.killed)]
    assert [peers[index].stage for index in (5, 6)] == [peers[int(line.split()[1])].stage for line in lines[:2]]
    assert len(set(stages)) == 2


async def test_churn_replaces_one_peer_after_the_other(lab: Laboratory) -> None:
    scenarios.Churn(at_s=0, share_per_minute=10.0, for_s=2.4).do(lab)
    await until(lambda: not lab.waiting)
    assert [mark.kind for mark in lab.marks] == [Kind.FAULT] * 2
    assert len(lab.killed) == 2


def test_addresses_are_the_members_own() -> None:
    deployments = [deployment(index) for index in range(1000)]
    assert len({each.host for each in deployments} | {each.advertised_host for each in deployments}) == 2000
    assert (deployments[0].host, deployments[999].advertised_host) == ("127.77.0.1", "127.78.3.250")


def kinds(lab: Laboratory) -> list[Kind]:
    return [mark.kind for mark in lab.marks if mark.kind is not Kind.NOTE]


async def do(lab: Laboratory, event: scenarios.ScenarioEvent) -> None:
    event.do(lab)
    await until(lambda: not lab.waiting)


async def test_faults_last_a_while_and_are_mended(lab: Laboratory) -> None:
    emulation, pid = lab.emulation, lab.swarm.processes()[3]
    site, limit = emulation.site(3), resource.prlimit(pid, resource.RLIMIT_FSIZE)
    scenarios.Worsen(at_s=0, peers=(3,), fault=Fault.HALF_OPEN, for_s=0.2).do(lab)
    scenarios.OneWay(at_s=0, from_=(2,), to=(0, 1), for_s=0.2).do(lab)
    scenarios.Resets(at_s=0, peers=(1,), every_bytes=100, for_s=0.2).do(lab)
    scenarios.FullDisk(at_s=0, peers=(3,), for_s=0.2).do(lab)
    ways = [(0, 3), (3, 0), (2, 1), (1, 2)]
    assert [emulation.passes(way) for way in ways] == [False, True, False, True]
    assert emulation.before_break((0, 1), 150) == 100
    assert resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == 0
    await until(lambda: not lab.waiting)
    assert all(emulation.passes(way) for way in ways)
    assert emulation.before_break((0, 1), 150) is None
    assert (emulation.site(3), resource.prlimit(pid, resource.RLIMIT_FSIZE)) == (site, limit)
    assert kinds(lab) == [Kind.FAULT] * 4 + [Kind.END] * 4
    assert [mark.lasts for mark in lab.marks] == [True] * 4 + [False] * 4


async def test_what_still_lasts_when_the_run_ends_is_mended(lab: Laboratory) -> None:
    pid = lab.swarm.processes()[3]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    scenarios.FullDisk(at_s=0, peers=(3,), for_s=600).do(lab)
    await asyncio.sleep(0)
    await lab.end_what_lasts()
    assert resource.prlimit(pid, resource.RLIMIT_FSIZE) == before
    assert lab.waiting == ["the end of: the disk of peer 3 is full"], "its end was not seen"
    assert kinds(lab) == [Kind.FAULT]


@pytest.mark.parametrize("politely", [True, False])
async def test_peers_end_and_start_again_as_themselves(lab: Laboratory, politely: bool) -> None:
    swarm = lab.swarm
    before = {peer: swarm.processes()[peer] for peer in (1, 3)}
    await do(lab, scenarios.Restart(at_s=0, peers=(1, 3), politely=politely))
    after = swarm.processes()
    assert before[1] != after[1]
    assert before[3] != after[3]
    assert all(swarm.progress.peers[peer].state == "serving" for peer in (1, 3))
    assert kinds(lab).count(Kind.END) == 2
    assert not lab.killed, "what they do from now on is their own"
    assert not lab.missed


async def test_what_is_not_possible_is_missed_and_ends_nothing(lab: Laboratory) -> None:
    assert said(lab, scenarios.Start(at_s=0, stage=9)).startswith("start was not possible: stage 9 is not one of")
    await do(lab, scenarios.Crash(at_s=0, stage=1, point="sent", leave_after_s=0.1))
    assert Kind.FAULT not in kinds(lab)
    await do(lab, scenarios.Child(at_s=0, peers=(1, 2), which="p2pd"))
    _, crash, child = lab.missed
    assert "before it came to `sent`" in crash
    assert child == "found only 0 processes p2pd of peers 1, 2"


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
    assert (watch.completed, watch.visits) == ([7.0], {"a": 1})
    running.cancel()


def test_the_clock_of_an_odd_node_is_wrong_and_is_set_when_it_is_told() -> None:
    text = """
import os, signal, time
from lab.faulty_node import _set_clock
_set_clock(300.0, -3900.0)
from protocol.interfaces.clock import SystemClock
assert abs(SystemClock().wall() - time.time() - 300) < 5
os.kill(os.getpid(), signal.SIGUSR1)
assert abs(SystemClock().wall() - time.time() + 3600) < 5
"""
    ran = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
