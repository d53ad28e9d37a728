"""A home behind real address translation: it is not reached, it has a port mapped, it is reached."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node.event_lines import event_from_json
from node.events import Reach
from node.local_setup import LocalSwarmOptions, node_command
from node.local_swarm import LocalSwarm
from tests.e2e.home_network import HOME, ROUTER_OUTSIDE, HomeNetwork, home_network, why_no_home, why_no_mapping
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

PATIENCE_S = 120.0
CALL = "import socket,sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).recv(1))"


def skip_unless_possible(*, mapping: bool) -> None:
    reason = why_no_home() or (why_no_mapping() if mapping else None)
    if reason is not None:
        pytest.skip(reason)


def calls(network: HomeNetwork, port: int) -> subprocess.CompletedProcess[str]:
    """A public host connects to a port of the router."""
    command = (*network.inside(0), sys.executable, "-c", CALL, ROUTER_OUTSIDE, str(port))
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", ["nat-pmp", "upnp"])
def test_a_port_is_mapped_through_a_real_router_and_taken_back(tmp_path: Path, way: str) -> None:
    skip_unless_possible(mapping=True)
    if way == "upnp" and importlib.util.find_spec("miniupnpc") is None:
        pytest.skip("miniupnpc is not installed (the extra `nat`)")
    with (
        home_network(1) as network,
        network.mapping_router(tmp_path, upnp=way == "upnp", natpmp=way == "nat-pmp"),
    ):
        command = (*network.inside("home"), sys.executable, "-m", "tests.e2e.map_port", way)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mapping:
            assert mapping.stdout is not None
            said = json.loads(mapping.stdout.readline())
            assert said.get("external_host") == ROUTER_OUTSIDE, said
            port = said["external_port"]
            assert network.mapped_ports() == [port]
            assert calls(network, port).stdout == "b'!'\n"
            mapping.communicate()
        assert mapping.returncode == 0
        assert network.mapped_ports() == []
        assert calls(network, port).returncode != 0


def test_a_router_that_maps_nothing_leaves_a_reason_for_each_way() -> None:
    skip_unless_possible(mapping=False)
    with home_network(1) as network:
        for way in ("nat-pmp", "upnp"):
            command = (*network.inside("home"), sys.executable, "-m", "tests.e2e.map_port", way)
            said = subprocess.run(command, capture_output=True, text=True, check=True, input="").stdout
            assert "router at 192.168.77.1" in json.loads(said)["reason"]


@asynccontextmanager
async def node_at_home(network: HomeNetwork, folder: Path, link: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A node of stage 1 in the home, which nobody has told an address; stopped in good order at the end."""
    arguments = ("join", link, "--json", "--stop-on-eof", "--stage", "1", "--threads", "1", "--identity")
    process = await asyncio.create_subprocess_exec(
        *network.inside("home"),
        *node_command(),
        *arguments,
        str(folder / "home.key"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def next_reach(process: asyncio.subprocess.Process) -> Reach:
    """The next event of that kind."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stdout:
            event = event_from_json(line)
            if isinstance(event, Reach):
                return event
    raise AssertionError("the node ended before it knew how it is reached")


async def asks(network: HomeNetwork, where: int | str, *arguments: str) -> tuple[int | None, dict[str, Any]]:
    """What a command with `--json` says there, and its exit code."""
    process = await asyncio.create_subprocess_exec(
        *network.inside(where),
        *node_command(),
        *arguments,
        "--json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    out, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert b"Traceback" not in errors, errors.decode()
    return process.returncode, json.loads(out)


def environment() -> dict[str, str]:
    import os

    packages = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))}


def finding(report: dict[str, Any], check: str) -> dict[str, str]:
    return next(line for line in report["checks"] if line["check"] == check)


@pytest.mark.timeout(400)
async def test_a_node_at_home_climbs_from_unreachable_to_mapped(tmp_path: Path) -> None:
    skip_unless_possible(mapping=False)
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    with home_network(2) as network:
        async with LocalSwarm(manifest, LocalSwarmOptions(peers=2, threads=1), places=network.place) as swarm:
            watch = Watch(swarm)
            await watch.step(1)
            link = str(swarm.link)
            code, report = await asks(network, "home", "doctor", link)
            reach = finding(report, "reach")
            assert (code, reach["level"]) == (1, "fail"), report
            assert reach["found"].startswith("unreachable: 2 of 2 peers asked could not connect")
            assert "NAT-PMP: the router at 192.168.77.1" in reach["found"]
            assert HOME in reach["fix"]
            assert finding(report, "clock")["level"] == "ok"
            if why_no_mapping() is None:
                with network.mapping_router(tmp_path):
                    await maps_and_is_reached(network, tmp_path, link)


async def maps_and_is_reached(network: HomeNetwork, folder: Path, link: str) -> None:
    """A node in the home has its port mapped, is reached by who had no link to it, and gives the mapping back."""
    code, report = await asks(network, "home", "doctor", link)
    assert (code, finding(report, "reach")["level"]) == (0, "ok"), report
    assert finding(report, "reach")["found"].startswith("mapped: mapped by NAT-PMP: 2 of 2 peers")
    assert network.mapped_ports() == [], "the doctor leaves nothing behind"
    async with node_at_home(network, folder, link) as node:
        reached = await next_reach(node)
        assert (reached.step, reached.address.partition(":")[0]) == ("mapped", ROUTER_OUTSIDE), reached
        assert network.mapped_ports() == [int(reached.address.partition(":")[2])]
        peer = await answering(network, link, reached)
        assert peer["answered"]["reach"]["step"] == "mapped"
    assert network.mapped_ports() == []


async def answering(network: HomeNetwork, link: str, reached: Reach) -> dict[str, Any]:
    """What a visitor on a public host is told by the node at home; its record may need a moment to get around."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, status = await asks(network, 1, "status", link)
            found = [peer for peer in status["peers"] if peer["peer"] == reached.peer]
            if found and found[0]["answered"] and found[0]["addresses"] == [reached.address]:
                return dict(found[0])
