"""A home behind real address translation: it is not dialled, it has a port mapped, it is dialled."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from tests.e2e import home_network as homes
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

CALL = "import socket,sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).recv(1))"


def calls(network: homes.HomeNetwork, port: int) -> subprocess.CompletedProcess[str]:
    command = (*network.inside(0), sys.executable, "-c", CALL, homes.ROUTER_OUTSIDE, str(port))
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", ["nat-pmp", "upnp"])
def test_a_port_is_mapped_through_a_real_router_and_taken_back(tmp_path: Path, way: str) -> None:
    homes.skip_because(homes.why_no_home() or homes.why_no_mapping())
    if way == "upnp" and importlib.util.find_spec("miniupnpc") is None:
        pytest.skip("miniupnpc is not installed (the extra `nat`)")
    ways = {"upnp": way == "upnp", "natpmp": way == "nat-pmp"}
    with homes.home_network(1, homes.REFUSES) as network, network.mapping_router(tmp_path, **ways):
        command = (*network.inside("home"), sys.executable, "-m", "tests.e2e.map_port", way)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mapping:
            assert mapping.stdout is not None
            said = json.loads(mapping.stdout.readline())
            assert said.get("external_host") == homes.ROUTER_OUTSIDE, said
            port = said["external_port"]
            # The router answers before its rule is in force, and makes the rule anew when a request comes twice.
            begun, expected = time.monotonic(), ([port], "b'!'\n")
            while (seen := (network.mapped_ports(), calls(network, port).stdout)) != expected:
                assert time.monotonic() - begun < 10, seen
                time.sleep(0.05)
            mapping.communicate()
        assert (mapping.returncode, network.mapped_ports()) == (0, [])
        assert calls(network, port).returncode != 0


@pytest.mark.timeout(400)
async def test_a_node_at_home_climbs_from_reverse_to_mapped(tmp_path: Path) -> None:
    homes.skip_because(homes.why_no_home())
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    with homes.home_network(2, homes.REFUSES) as network:
        async with LocalSwarm(manifest, LocalSwarmOptions(peers=2, threads=1), deployments=network.deployment) as swarm:
            await Watch(swarm).step(1)
            link = str(swarm.link)
            code, report = await homes.asks(network, "home", "doctor", link)
            reach = homes.finding(report, "reach")
            assert (code, reach["level"]) == (0, "warn"), report
            assert reach["found"].startswith("reverse: called through ")
            assert "2 of 2 peers could not connect" in reach["found"]
            assert "NAT-PMP: the router at 192.168.77.1" in reach["found"]
            assert homes.HOME in reach["fix"]
            assert homes.finding(report, "clock")["level"] == "ok"
            if homes.why_no_mapping() is None:
                with network.mapping_router(tmp_path):
                    await maps_and_is_reached(network, tmp_path, link)


async def maps_and_is_reached(network: homes.HomeNetwork, folder: Path, link: str) -> None:
    """A node in the home has its port mapped, is reached by who had no link to it, and gives the mapping back."""
    code, report = await homes.asks(network, "home", "doctor", link)
    assert (code, homes.finding(report, "reach")["level"]) == (0, "ok"), report
    assert homes.finding(report, "reach")["found"].startswith("mapped: mapped by NAT-PMP: 2 of 2 peers")
    assert network.mapped_ports() == [], "the doctor leaves nothing behind"
    async with homes.node_at(network, "home", folder, link) as node:
        reached = await node.reached()
        assert (reached.step, reached.address.partition(":")[0]) == ("mapped", homes.ROUTER_OUTSIDE), reached
        assert network.mapped_ports() == [int(reached.address.partition(":")[2])]
        assert (await homes.answering(network, link, reached))["answered"]["reach"]["step"] == "mapped"
    assert network.mapped_ports() == []
