"""A node behind address translation that nothing maps a port for: others call it, and it does its share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import NodeStatus, PeerChange, RoundCommitted
from tests.e2e.home_network import HomeNetwork, home_network, why_no_home
from tests.e2e.home_node import WatchedNode, answering, node_at
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

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
    assert "2 of 2 peers asked could not connect" in reached.reason
    await home.until(NodeStatus, lambda event: event.state == "serving")
    peer = await answering(network, link, reached)
    assert peer["answered"]["reach"]["step"] == "reverse"
    assert sorted(peer["via"]) == sorted(planned.peer for planned in swarm.peers)
