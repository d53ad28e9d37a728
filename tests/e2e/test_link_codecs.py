"""Real processes compress what they send over links that are too slow, and nothing over fast ones."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.world.arms import GREEDY, SWARM
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, LocalSwarmOptions
from node.observability.events import Abandoned
from protocol.manifest.manifest import Manifest, manifest_from_table
from tests.e2e.emulated import Network, Spec, status_of
from tests.e2e.small_run import HOME, PATIENCE_S, Watch, read_flights, small_run, write_text

pytestmark = pytest.mark.e2e

PEERS = 4
FORWARD_S = 0.04
TENSOR_BYTES = 4 * 2 * 32 * 32
SLOW_BYTES_PER_S = 4 * TENSOR_BYTES


def compressible(text: Path) -> Manifest:
    table = small_run(text, staleness=1).model_dump()
    return manifest_from_table(table | {"codecs": {"activations": "int4", "gradients": "int8"}})


async def codecs_when(link: str, network: Path, good: Callable[[set[str]], bool]) -> set[str]:
    """What all links use, as the nodes say when asked, as soon as it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answers = [peer["answered"] for peer in (await status_of(link, network))["peers"]]
            if len(answers) == PEERS and all(answers) and good(used := chosen(answers)):
                return used


def chosen(answers: list[dict[str, Any]]) -> set[str]:
    links = [link for answer in answers for link in answer["codecs"]["links"].values()]
    kinds = ("activations", "gradients")
    return {f"{kind} {link[kind]['codec']}" for link in links for kind in kinds if kind in link}


@pytest.mark.parametrize(
    ("bytes_per_s", "rule", "expected"),
    [
        (SLOW_BYTES_PER_S, GREEDY, {"activations int4", "gradients int8"}),
        pytest.param(None, SWARM, {"activations none", "gradients none"}, marks=pytest.mark.long),
    ],
)
async def test_what_a_link_carries_decides_whoever_chooses_the_paths(
    tmp_path: Path, bytes_per_s: float | None, rule: str, expected: set[str]
) -> None:
    """An emulated data node that does not ask the rule it was given ends with an error (`FlightRecord`)."""
    manifest, network = compressible(write_text(tmp_path / "text")), tmp_path / "network.json"

    def deployment(index: int) -> Deployment:
        flights = str(tmp_path / f"flights-{index}")
        spec = Spec(FORWARD_S, str(network), bytes_per_s=bytes_per_s, rule=rule, flights=flights)
        return Deployment(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    async with LocalSwarm(manifest, LocalSwarmOptions(peers=PEERS, threads=1), deployments=deployment) as swarm:
        Network({peer.peer: "here" for peer in swarm.peers}, {"here": {"here": 0.001}}).write(network)
        watch = Watch(swarm)
        await watch.step(3)
        assert await codecs_when(str(swarm.link), network, lambda used: used == expected) == expected
        await watch.step(6)
        await swarm.stop()
    assert not any(isinstance(event, Abandoned) for event in watch.seen)
    assert [end.exit_code for end in swarm.ends.values()] == [0] * PEERS
    assert all(0 < loss < 7 for loss in watch.losses())
    assert any(mark.kind == HOME for file in tmp_path.glob("flights-*") for mark in read_flights(file))
