"""What can be done to a swarm in the laboratory. Nodes are stand-ins; tests/e2e has real ones."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from lab.emulation.link_shape import MBIT, Fault, LinkShape, profile_of
from lab.emulation.sockets import descendants
from lab.experiment.laboratory import place
from lab.experiment.metrics import Kind
from lab.experiment.run import Run
from lab.experiment.scenario import Scenario, scenario_from_table
from lab.experiment.scenario_events import (
    Churn,
    Freeze,
    Heal,
    Kill,
    Partition,
    ReplaceOne,
    Reshape,
    ScenarioEvent,
    Start,
    Stop,
)
from node.local_swarm import local_swarm
from swarm.vocabulary.errors import ResourceExhausted
from tests.lab.experiment.test_scenario import BASE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads /proc")

STAND_IN = (sys.executable, str(Path(__file__).parent.parent.parent / "node" / "local_swarm" / "stand_in_node.py"))


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local_swarm, "node_command", lambda: STAND_IN)
    monkeypatch.setenv("SKIPSTONE_STAND_IN", "grandchild:2")
    scenario = scenario_from_table(tomllib.loads(BASE), Scenario)
    made = Run(scenario, tmp_path, lambda news: None, asyncio.Event())
    async with made.lab.started():
        await until(lambda: len(made.lab.serving()) == len(made.lab.swarm.peers))
        yield made


def said(run: Run, event: ScenarioEvent) -> str:
    """Lets it happen. The line in the diary."""
    run.do(event)
    return run.marks[-1].what


async def until(wanted: Callable[[], bool]) -> None:
    """Ends with the test's own time limit if it never comes."""
    while not wanted():
        await asyncio.sleep(0.01)


def states_of(root: int) -> set[str]:
    """Of a process and all it has started, as the kernel has them: T stands still."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for _, pid in descendants({root}))
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


async def test_peers_get_other_links(run: Run) -> None:
    emulation = run.lab.emulation
    changed = Reshape(at_s=0, peers=(0, 4), fault=Fault.RESET)
    assert said(run, changed) == "peers 0, 4 got another link: fault reset"
    assert emulation.site(4).region == "iowa"
    assert emulation.is_reset(4)
    mobile = Reshape(at_s=0, peers=(4,), profile="mobile", latency_ms=500, jitter_ms=0, up_mbit=10, down_mbit=20)
    assert said(run, mobile) == (
        "peer 4 got another link: mobile, latency 500 ms, jitter 0 ms, 10 Mbit/s up, 20 Mbit/s down"
    )
    shape = LinkShape(0.5, 0.0, 10 * MBIT, 20 * MBIT, profile_of("mobile").site.shape.fault)
    assert emulation.site(4).shape == shape
    assert emulation.site(4).region is None
    run.lab.calm()
    assert emulation.site(0).shape == LinkShape()


async def test_partitions_begin_and_end(run: Run) -> None:
    assert said(run, Partition(at_s=0, sides=((0, 1), (2,)))) == "partition: peers 0, 1 | peer 2"
    assert not run.lab.emulation.passes((0, 2))
    assert said(run, Heal(at_s=0)) == "the partition is healed"
    assert run.lab.emulation.passes((0, 2))
    run.do(Partition(at_s=0, sides=((0, 1), (2,)), for_s=0.1))
    assert not run.lab.emulation.passes((0, 2))
    await until(lambda: not run.waiting)
    assert run.lab.emulation.passes((0, 2))
    assert [mark.kind for mark in run.marks] == [Kind.FAULT, Kind.END] * 2
    assert [mark.lasts for mark in run.marks] == [True, False] * 2


async def test_peers_are_killed_and_asked_to_leave_and_started(run: Run) -> None:
    lab = run.lab
    run.do(Kill(at_s=0, peers=(4,)))
    run.do(Stop(at_s=0, peers=(1,)))
    await until(lambda: {1, 4} <= lab.swarm.ends.keys())
    assert lab.swarm.ends[4].exit_code == 137
    assert lab.killed == {4}
    assert 4 not in run.failures
    assert said(run, Start(at_s=0, stage=2, profile="mobile")) == "peer 5 started for stage 2"
    assert lab.emulation.site(5) == profile_of("mobile").site
    assert lab.swarm.peers[5].place == place(5)
    run.do(Start(at_s=0, stage=1))
    assert lab.emulation.site(6) == lab.emulation.site(0), "the first group's"


async def test_frozen_peers_stand_still_with_all_they_have_started_and_go_on(run: Run) -> None:
    root = run.lab.swarm.processes()[2]
    assert len(list(descendants({root}))) == 2
    run.do(Freeze(at_s=0, peers=(2,), for_s=0.3))
    await until(lambda: states_of(root) == {"T"})
    await until(lambda: "T" not in states_of(root))
    run.do(Freeze(at_s=0, peers=(2,), for_s=600.0))
    await until(lambda: states_of(root) == {"T"})
    run.lab.calm()
    assert "T" not in states_of(root)


async def test_a_peer_that_is_frozen_again_stands_still_as_long_as_the_longer_time(run: Run) -> None:
    roots = run.lab.swarm.processes()
    run.do(Freeze(at_s=0, peers=(1, 2), for_s=0.3))
    run.do(Freeze(at_s=0, peers=(2,), for_s=600.0))
    await until(lambda: "T" not in states_of(roots[1]))
    await asyncio.sleep(0.1)  # both were due to go on at the same moment
    assert states_of(roots[2]) == {"T"}
    run.lab.calm()
    assert "T" not in states_of(roots[2])


async def test_a_peer_with_a_command_of_its_own_starts_again_without_it(run: Run) -> None:
    swarm = run.lab.swarm
    command = ("/usr/bin/env", "SKIPSTONE_STAND_IN=crash:1", *STAND_IN)
    index = run.lab.start(1, profile_of("none").site, command)
    await until(lambda: index in swarm.ends and index not in swarm.processes())
    assert swarm.ends[index].exit_code == 71
    swarm.restart_peer(index)
    await until(lambda: swarm.progress.peers[index].state == "serving")
    assert index not in swarm.ends


async def test_what_is_not_possible_is_missed_and_ends_nothing(run: Run) -> None:
    assert said(run, Start(at_s=0, stage=9)).startswith("start was not possible: stage 9 is not one of")
    assert len(run.missed) == 1


async def test_a_replaced_peer_is_none_of_the_last_ones(run: Run) -> None:
    """Five peers over three stages: two stages have a spare one."""
    lines = [said(run, ReplaceOne(at_s=0)) for _ in range(3)]
    assert [line.startswith("peer") for line in lines] == [True, True, False]
    assert lines[2] == "nobody could be spared to be replaced", "those that were started do not serve yet"
    peers = run.lab.swarm.peers
    stages = [peers[index].stage for index in sorted(run.lab.killed)]
    assert [peers[index].stage for index in (5, 6)] == [peers[int(line.split()[1])].stage for line in lines[:2]]
    assert len(set(stages)) == 2


async def test_churn_replaces_one_peer_after_the_other(run: Run) -> None:
    run.do(Churn(at_s=0, share_per_minute=10.0, for_s=2.4))
    await until(lambda: not run.waiting)
    assert [mark.kind for mark in run.marks] == [Kind.FAULT] * 2
    assert len(run.lab.killed) == 2


def test_addresses_are_the_members_own() -> None:
    places = [place(index) for index in range(1000)]
    assert len({each.host for each in places} | {each.told_host for each in places}) == 2000
    assert (places[0].host, places[999].told_host) == ("127.77.0.1", "127.78.3.250")
    with pytest.raises(ResourceExhausted):
        place(60_000)
