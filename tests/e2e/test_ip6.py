"""Whole runs over IPv6: `up` on `::1`, and a node that joins from another network namespace."""

import json
import re
import socket
from pathlib import Path

import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import Step
from protocol.identity.keys import Identity
from protocol.manifest.signing import sign_manifest
from tests.e2e.home_network import joined, skip_because, split_network, why_no_namespaces
from tests.e2e.small_run import Watch, skipstone, small_run, write_text

pytestmark = pytest.mark.e2e


def why_no_ip6() -> str | None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"this machine has no IPv6 loopback: {error.strerror}"
    return None


async def test_up_trains_on_the_ip6_loopback(tmp_path: Path) -> None:
    skip_because(why_no_ip6())
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    (tmp_path / "run.toml").write_bytes(sign_manifest(manifest, Identity.generate()).text)
    options = (str(tmp_path / "run.toml"), "--steps", "2", "--listen", "[::1]", "--json")
    code, said, errors = await skipstone("up", *options)
    events = [json.loads(line) for line in said.splitlines()]
    assert code == 0, errors
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    serving = [event for event in events if event.get("state") == "serving"]
    assert all(event["address"].startswith("[::1]:") for event in serving), serving


async def test_a_node_joins_from_another_namespace(tmp_path: Path) -> None:
    skip_because(why_no_namespaces())
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    with split_network("ab", addresses="fd91::{}") as network:
        options = LocalSwarmOptions(peers=2, steps=2, threads=1)
        async with LocalSwarm(manifest, options, deployments=network.deployment) as swarm:
            assert str(swarm.link.peers[0]).startswith("/ip6/fd91::1/tcp/")
            await Watch(swarm).to_the_end(swarm)
    assert swarm.progress.step == 2


@pytest.mark.timeout(300)
async def test_a_short_link_is_joined_over_ip6_and_outlives_a_restart(tmp_path: Path) -> None:
    skip_because(why_no_ip6())
    run, here = tmp_path / "run.toml", ("--listen", "::1", "--advertise", "[::1]")
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    run.write_bytes(sign_manifest(manifest, Identity.load_or_create(tmp_path / "data.key")).text)
    async with joined(tmp_path, "data", str(run), "--stage", "0", *here) as data:
        link = (await data.serving()).link
        assert re.fullmatch(r"skipstone:[a-z2-7]{26}@\[::1\]:[0-9]+", link)
        async with joined(tmp_path, "friend", link, "--no-data", *here):
            await data.until(Step, lambda step: step.step >= 2)
    async with joined(tmp_path, "data", str(run), "--stage", "0", *here) as data:
        assert (await data.serving()).link == link
