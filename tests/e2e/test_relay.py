"""Two nodes of which neither can be dialled average with each other, because a third one carries what they say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import NodeStatus, PeerChange, RoundCommitted
from tests.e2e.home_network import (
    PATIENCE_S,
    HomeNetwork,
    WatchedNode,
    answering,
    asks,
    home_network,
    node_at,
    why_no_home,
)
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

RELAYING, SHUT = 1, 2


@pytest.mark.timeout(400)
async def test_nodes_that_nobody_can_dial_average_through_a_relay(tmp_path: Path) -> None:
    reason = why_no_home()
    if reason is not None:
        pytest.skip(reason)
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1), inner_steps=5, staleness=1)
    with home_network(3) as network:
        network.shut(SHUT)
        options = LocalSwarmOptions(peers=2, threads=1)
        async with LocalSwarm(manifest, options, places=lambda index: place(network, index)) as swarm:
            watch = Watch(swarm)
            await watch.step(1)
            link = str(swarm.link)
            async with node_at(network, "home", tmp_path, link) as home, node_at(network, SHUT, tmp_path, link) as shut:
                peers = [await hidden(each) for each in (home, shut)]
                relay = swarm.peers[RELAYING].peer
                carried = await status_of(
                    network, link, relay, lambda said: said["relay"]["opened"] > 0 and said["relay"]["attached"] == 2
                )
                assert carried["relay"]["at"].endswith(f"/p2p/{relay}")
                await home.until(RoundCommitted, lambda event: set(peers) <= set(event.members))
                said = await status_of(network, link, peers[0], lambda said: said["relays"] != [])
                assert said["relays"] == [{"relay": carried["relay"]["at"], "standing": True, "reason": ""}]
                swarm.request_stop()
                await watch.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}


def place(network: HomeNetwork, index: int) -> Place:
    return network.relaying_place(index) if index == RELAYING else network.place(index)


async def hidden(node: WatchedNode) -> str:
    """Its id, when it serves and has found that nobody can dial it."""
    reached = await node.reached()
    assert (reached.step, reached.address) == ("reverse", ""), reached
    await node.until(NodeStatus, lambda event: event.state == "serving")
    return reached.peer


async def status_of(network: HomeNetwork, link: str, peer: str, wanted: Any) -> dict[str, Any]:
    """What a peer answers a visitor on a public host, once that is what is wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, status = await asks(network, 0, "status", link)
            said = [each["answered"] for each in status["peers"] if each["peer"] == peer and each["answered"]]
            if said and wanted(said[0]):
                return dict(said[0])


STEPS_ALONE = 5


@pytest.mark.timeout(400)
async def test_a_node_that_nobody_can_dial_averages_and_then_serves_its_stage_alone(tmp_path: Path) -> None:
    reason = why_no_home()
    if reason is not None:
        pytest.skip(reason)
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1), inner_steps=5, staleness=1)
    logs = tmp_path / "logs"
    options = LocalSwarmOptions(peers=2, threads=1, log_dir=logs)
    with home_network(2) as network:
        async with LocalSwarm(manifest, options, places=network.place) as swarm:
            watch = Watch(swarm)
            await watch.step(1)
            link = str(swarm.link)
            async with node_at(network, "home", tmp_path, link, options=("--log-dir", str(logs))) as home:
                await is_called(network, link, home, swarm)
                replica = swarm.peers[1].peer
                await home.until(RoundCommitted, lambda event: {replica, event.peer} <= set(event.members))
                swarm.terminate(1)
                await home.until(PeerChange, lambda event: (event.peer, event.change) == (replica, "down"))
                await watch.step(swarm.progress.step + STEPS_ALONE)
                swarm.request_stop()
                await watch.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}
    report = json.loads(CliRunner().invoke(app, ["check", str(logs), "--json"]).stdout)
    assert report["ok"], report["violations"]


async def is_called(network: HomeNetwork, link: str, home: WatchedNode, swarm: LocalSwarm) -> None:
    """It finds that it cannot be dialled, announces whom it holds on to, and a visitor that it has no link to gets an
    answer."""
    reached = await home.reached()
    assert (reached.step, reached.address) == ("reverse", ""), reached
    assert "2 of 2 peers could not connect" in reached.reason
    await home.until(NodeStatus, lambda event: event.state == "serving")
    peer = await answering(network, link, reached)
    assert peer["answered"]["reach"]["step"] == "reverse"
    assert sorted(peer["via"]) == sorted(planned.peer for planned in swarm.peers)
