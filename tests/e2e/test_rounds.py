"""Rounds among real processes when one dies, freezes or lies in the middle. All cases: `benchmarks/faults.py`."""

import signal
from pathlib import Path

import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import RoundProgress
from tests.e2e.home_network import split_network, why_no_namespaces
from tests.e2e.parting import ROUNDS_APART, TWO_AND_TWO, part, parted_run
from tests.e2e.round_watch import LogTail, watching
from tests.e2e.small_run import checked, write_text
from tests.e2e.striking import MODULE, Striker, heavy_run, replicas_of, see_it_through

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


async def test_survivors_commit_alike_when_the_convener_freezes_and_when_a_reducer_is_killed(tmp_path: Path) -> None:
    manifest = heavy_run(write_text(tmp_path / "text"), blocks=2)
    options = LocalSwarmOptions(peers=4, threads=1, log_dir=tmp_path / "logs")
    async with LocalSwarm(manifest, options) as swarm, watching(swarm, MODULE) as watch:
        everybody = frozenset(replicas_of(swarm))
        await watch.all_together(everybody, 0)
        tail = LogTail(tmp_path / "logs", RoundProgress)
        striker = Striker(swarm, tail)
        frozen = await striker.strike("convener", 50, signal.SIGSTOP)
        assert (await see_it_through(swarm, watch, frozen, frozen=True)).caught_up
        killed = await striker.strike("reducer", 10, signal.SIGKILL)
        await see_it_through(swarm, watch, killed, frozen=False)
        tail.close()
        await swarm.stop()
        assert set(map(len, watch.digests(everybody).values())) == {1}
    assert {index: end.exit_code for index, end in swarm.ends.items() if end.exit_code} == {
        killed.index: 128 + signal.SIGKILL
    }
    checked(tmp_path / "logs")


@pytest.mark.long  # in virtual time: tests/swarm/averaging/test_round_world.py
async def test_two_and_two_part_go_on_and_are_one_again(tmp_path: Path) -> None:
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    manifest = parted_run(write_text(tmp_path / "text"))
    options = LocalSwarmOptions(peers=len(TWO_AND_TWO), threads=1, log_dir=tmp_path / "logs")
    with split_network(TWO_AND_TWO) as network:
        async with (
            LocalSwarm(manifest, options, deployments=network.deployment) as swarm,
            watching(swarm, MODULE) as watch,
        ):
            parted = await part(swarm, watch, network, tmp_path / "logs")
            await swarm.stop()
            assert [len(side) for side in parted.sides] == [2, 2]
            assert min(parted.apart) >= ROUNDS_APART
    assert {end.exit_code for end in swarm.ends.values()} == {0}
    assert checked(tmp_path / "logs")["forks healed"] >= 1
