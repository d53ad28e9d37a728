"""What can be done to a swarm in the laboratory. Nodes are stand-ins; tests/e2e has real ones."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from node.lab.chaos.faults import Crash
from node.lab.emulation.link_shape import Fault, LinkShape, ShapeChange
from node.lab.emulation.profiles import profile_of
from node.lab.emulation.sockets import descendants
from node.lab.wan.laboratory import Laboratory, laboratory, place
from node.lab.wan.scenario import scenario_from_table
from node.lab.wan.scenario_events import Freeze, Heal, Kill, Partition, ReplaceOne, Reshape, Start, Stop
from node.local_swarm import local_swarm
from swarm.vocabulary.errors import ConfigError, ResourceExhausted
from tests.node.lab.wan.test_scenario import BASE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads /proc")

STAND_IN = (sys.executable, str(Path(__file__).parent.parent.parent / "local_swarm" / "stand_in_node.py"))


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Laboratory]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local_swarm, "node_command", lambda: STAND_IN)
    monkeypatch.setenv("SKIPSTONE_STAND_IN", "grandchild:2")
    async with laboratory(scenario_from_table(tomllib.loads(BASE)), tmp_path / "logs") as made:
        await until(lambda: all(peer.state == "serving" for peer in made.swarm.progress.peers.values()))
        yield made


async def until(wanted: Callable[[], bool]) -> None:
    """Ends with the test's own time limit if it never comes."""
    while not wanted():
        await asyncio.sleep(0.01)


def states_of(root: int) -> set[str]:
    """Of a process and all it has started, as the kernel has them: T stands still."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for _, pid in descendants({root}))
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


async def test_peers_get_other_links(lab: Laboratory) -> None:
    said = lab.carry_out(Reshape(0, (0, 4), None, ShapeChange(fault=Fault.RESET)))
    assert said == "peers 0, 4 got another link: fault reset"
    assert lab.emulation.site(4).region == "iowa"
    assert lab.emulation.is_reset(4)
    change = ShapeChange(latency_s=0.5, jitter_s=0.0, up_bytes_per_s=1.25e6, down_bytes_per_s=2.5e6)
    said = lab.carry_out(Reshape(0, (4,), "mobile", change))
    assert said == "peer 4 got another link: mobile, latency 500 ms, jitter 0 ms, 10 Mbit/s up, 20 Mbit/s down"
    assert lab.emulation.site(4).shape == change.applied_to(profile_of("mobile").site.shape)
    assert lab.emulation.site(4).region is None
    lab.calm()
    assert lab.emulation.site(0).shape == LinkShape()


async def test_partitions_begin_and_end(lab: Laboratory) -> None:
    assert lab.carry_out(Partition(0, ((0, 1), (2,)))) == "partition: peers 0, 1 | peer 2"
    assert not lab.emulation.passes((0, 2))
    lab.carry_out(Heal(0))
    assert lab.emulation.passes((0, 2))


async def test_peers_are_killed_and_asked_to_leave_and_started(lab: Laboratory) -> None:
    lab.carry_out(Kill(0, (4,)))
    lab.carry_out(Stop(0, (1,)))
    await until(lambda: {1, 4} <= lab.swarm.ends.keys())
    assert lab.swarm.ends[4].exit_code == 137
    assert lab.killed == {4}
    assert lab.carry_out(Start(0, 2, profile_of("mobile").site)) == "peer 5 started for stage 2"
    assert lab.emulation.site(5) == profile_of("mobile").site
    assert lab.swarm.peers[5].place == place(5)


async def test_frozen_peers_stand_still_with_all_they_have_started_and_go_on(lab: Laboratory) -> None:
    root = lab.swarm.processes()[2]
    assert len(list(descendants({root}))) == 2
    lab.carry_out(Freeze(0, (2,), 0.3))
    await until(lambda: states_of(root) == {"T"})
    await until(lambda: "T" not in states_of(root))
    lab.carry_out(Freeze(0, (2,), 600.0))
    await until(lambda: states_of(root) == {"T"})
    lab.calm()
    assert "T" not in states_of(root)


async def test_a_peer_that_is_frozen_again_stands_still_as_long_as_the_longer_time(lab: Laboratory) -> None:
    roots = lab.swarm.processes()
    lab.carry_out(Freeze(0, (1, 2), 0.3))
    lab.carry_out(Freeze(0, (2,), 600.0))
    await until(lambda: "T" not in states_of(roots[1]))
    await asyncio.sleep(0.1)  # both were due to go on at the same moment
    assert states_of(roots[2]) == {"T"}
    lab.calm()
    assert "T" not in states_of(roots[2])


async def test_a_peer_with_a_command_of_its_own_starts_again_without_it(lab: Laboratory) -> None:
    command = ("/usr/bin/env", "SKIPSTONE_STAND_IN=crash:1", *STAND_IN)
    index = lab.start(1, profile_of("none").site, command)
    await until(lambda: index in lab.swarm.ends and index not in lab.swarm.processes())
    assert lab.swarm.ends[index].exit_code == 71
    lab.swarm.restart_peer(index)
    await until(lambda: lab.swarm.progress.peers[index].state == "serving")
    assert index not in lab.swarm.ends


async def test_a_laboratory_says_so_when_it_cannot_do_something(lab: Laboratory) -> None:
    with pytest.raises(ConfigError, match="crash"):
        lab.carry_out(Crash(0, 1, "sent", 1, False, 0.0, profile_of("none").site))


async def test_a_replaced_peer_is_none_of_the_last_ones(lab: Laboratory) -> None:
    """Five peers over three stages: two stages have a spare one."""
    said = [lab.carry_out(ReplaceOne(0)) for _ in range(3)]
    assert [line.startswith("peer") for line in said] == [True, True, False]
    assert said[2] == "nobody could be spared to be replaced", "those that were started do not serve yet"
    stages = [lab.swarm.peers[index].stage for index in sorted(lab.killed)]
    assert [lab.swarm.peers[index].stage for index in (5, 6)] == [
        lab.swarm.peers[int(line.split()[1])].stage for line in said[:2]
    ]
    assert len(set(stages)) == 2


def test_addresses_are_the_members_own() -> None:
    places = [place(index) for index in range(1000)]
    assert len({each.host for each in places} | {each.told_host for each in places}) == 2000
    assert (places[0].host, places[999].told_host) == ("127.77.0.1", "127.78.3.250")
    with pytest.raises(ResourceExhausted):
        place(60_000)
