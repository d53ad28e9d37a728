"""Two nodes of which neither can be dialled average with each other, because a third one carries what they say."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, LocalSwarmOptions
from node.observability.events import PeerChange, RoundCommitted
from tests.e2e import home_network as homes
from tests.e2e.small_run import Watch, checked, small_run, write_text

pytestmark = pytest.mark.e2e

RELAYING, SHUT = 1, 2


@pytest.mark.long  # the next one averages through a relay, too
@pytest.mark.timeout(400)
async def test_nodes_that_nobody_can_dial_average_through_a_relay(tmp_path: Path) -> None:
    homes.skip_because(homes.why_no_home())
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1), inner_steps=5, staleness=1)
    with homes.home_network(3, answers=homes.REFUSES) as network:  # time limits are the next test's part
        network.shut(SHUT)
        options = LocalSwarmOptions(peers=2, threads=1)
        async with LocalSwarm(manifest, options, deployments=lambda index: deployment(network, index)) as swarm:
            watch = Watch(swarm)
            await watch.step(1)
            link = str(swarm.link)
            async with (
                homes.node_at(network, "home", tmp_path, link) as home,
                homes.node_at(network, SHUT, tmp_path, link) as shut,
            ):
                peers, relay = [await hidden(each) for each in (home, shut)], swarm.peers[RELAYING].peer
                await home.until(RoundCommitted, lambda event: set(peers) <= set(event.members))
                async with asyncio.timeout(homes.PATIENCE_S):
                    while not carries(carried := await answers(network, link), relay, peers[0]):
                        pass
                at = carried[relay]["relay"]["at"]
                assert at.endswith(f"/p2p/{relay}")
                assert carried[peers[0]]["relays"] == [{"relay": at, "standing": True, "reason": ""}]
                swarm.request_stop()
                await watch.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}


def deployment(network: homes.HomeNetwork, index: int) -> Deployment:
    return network.relaying_deployment(index) if index == RELAYING else network.deployment(index)


async def hidden(node: homes.WatchedNode) -> str:
    """Its id, when it serves and has found that nobody can dial it."""
    reached = await node.reached()
    assert (reached.step, reached.address) == ("reverse", ""), reached
    await node.serving()
    return reached.peer


async def answers(network: homes.HomeNetwork, link: str) -> dict[str, dict[str, Any]]:
    """What each peer that answers tells a visitor on a public host."""
    _, status = await homes.asks(network, 0, "status", link)
    return {each["peer"]: each["answered"] for each in status["peers"] if each["answered"]}


def carries(answers: dict[str, dict[str, Any]], relay: str, hidden: str) -> bool:
    """Whether the relay tells of both attached peers and of a tunnel, and the hidden peer of its relay."""
    if not {relay, hidden} <= answers.keys():
        return False
    told = answers[relay]["relay"]
    return bool(told["opened"] > 0 and told["attached"] == 2 and answers[hidden]["relays"])


STEPS_ALONE = 5


@pytest.mark.timeout(400)
async def test_a_node_that_nobody_can_dial_averages_and_then_serves_its_stage_alone(tmp_path: Path) -> None:
    homes.skip_because(homes.why_no_home())
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1), inner_steps=5, staleness=1)
    logs = tmp_path / "logs"
    options = LocalSwarmOptions(peers=2, threads=1, log_dir=logs)
    with homes.home_network(2) as network:
        async with LocalSwarm(manifest, options, deployments=network.deployment) as swarm:
            watch = Watch(swarm)
            await watch.step(1)
            link = str(swarm.link)
            async with homes.node_at(network, "home", tmp_path, link, options=("--log-dir", str(logs))) as home:
                await is_called(network, link, home, swarm)
                replica = swarm.peers[1].peer
                await home.until(RoundCommitted, lambda event: {replica, event.peer} <= set(event.members))
                swarm.terminate(1)
                await home.until(PeerChange, lambda event: (event.peer, event.change) == (replica, "down"))
                await watch.step(swarm.progress.step + STEPS_ALONE)
                swarm.request_stop()
                await watch.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}
    checked(logs)


async def is_called(network: homes.HomeNetwork, link: str, home: homes.WatchedNode, swarm: LocalSwarm) -> None:
    """It cannot be dialled, announces whom it holds on to, and an unlinked visitor gets an answer."""
    reached = await home.reached()
    assert (reached.step, reached.address) == ("reverse", ""), reached
    assert "2 of 2 peers could not connect" in reached.reason
    await home.serving()
    peer = await homes.answering(network, link, reached)
    assert peer["answered"]["reach"]["step"] == "reverse"
    assert sorted(peer["via"]) == sorted(planned.peer for planned in swarm.peers)
