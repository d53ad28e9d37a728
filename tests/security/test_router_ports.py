"""Nobody asks a router for a port unless told so, and who only looks around listens nowhere.

As a command, as root in a network namespace of its own (`unshare -n`), it prints one JSON object: `asked` counts
datagrams to a router by kind, `daemons` has the arguments of every p2pd.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.home_network import skip_because, why_no_namespaces

PATIENCE_S = 60.0
LISTEN_S = 3.0
ASKS = {1900: "SSDP", 5350: "NAT-PMP", 5351: "NAT-PMP"}
UDP = 17
NETWORK = (
    "ip link set lo up",
    "ip link add home0 type veth peer name home1",
    "ip link set home1 up",
    "ip addr add 192.168.77.2/24 dev home0",
    "ip link set home0 up multicast on",
    "ip route add default via 192.168.77.1",
    # A router that does not exist has an address, so that what is meant for it is really sent.
    "ip neigh add 192.168.77.1 lladdr 02:00:00:00:00:01 dev home0",
)


def listen(sniffer: socket.socket, asked: Counter[str]) -> None:
    while True:
        packet = sniffer.recv(2048)
        if packet[12:14] != b"\x08\x00" or packet[23] != UDP:
            continue
        start = 14 + (packet[14] & 15) * 4
        port = int.from_bytes(packet[start + 2 : start + 4], "big")
        if port in ASKS:
            asked[ASKS[port]] += 1


def daemons() -> dict[str, list[str]]:
    own, found = os.stat("/proc/self/ns/net").st_ino, dict[str, list[str]]()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if entry.name.isdigit() and words[0].endswith("/p2pd") and os.stat(entry / "ns/net").st_ino == own:
                found[entry.name] = words[1:]
        except OSError:
            continue  # it ended meanwhile
    return found


def main() -> None:
    for command in NETWORK:
        subprocess.run(command.split(), check=True)
    asked: Counter[str] = Counter()
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    sniffer.bind(("home0", 0))
    threading.Thread(target=listen, args=(sniffer, asked), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "text").write_text("What is sent to a router is listened to. " * 500)
        environment = {**os.environ, "SKIPSTONE_HOME": str(here / "home")}
        skipstone = [sys.executable, "-P", "-m", "skipstone"]
        new = [*skipstone, "new", str(here / "run.toml"), "--data", f"path:{here / 'text'}"]
        subprocess.run(new, env=environment, check=True, stdout=subprocess.DEVNULL)
        # fmt: off
        join = [*skipstone, "join", str(here / "run.toml"), "--reach", "direct", "--threads", "1", "--json",
                "--link-file", str(here / "link"), "--stop-on-eof"]
        # fmt: on
        with subprocess.Popen(join, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as node:
            until = time.monotonic() + PATIENCE_S
            while not (here / "link").exists() and node.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            seen = daemons()
            status = [*skipstone, "status", (here / "link").read_text().strip(), "--json"]
            with subprocess.Popen(status, env=environment, stdout=subprocess.DEVNULL) as asking:
                while asking.poll() is None and time.monotonic() < until:
                    seen |= daemons()
                    time.sleep(0.05)
            time.sleep(LISTEN_S)
            assert node.stdin is not None
            node.stdin.close()
    print(json.dumps({"asked": asked, "daemons": list(seen.values()), "ends": [asking.returncode, node.returncode]}))


@pytest.mark.e2e
def test_neither_a_node_with_reach_direct_nor_status_asks_the_router() -> None:
    skip_because(why_no_namespaces())
    command = ("unshare", "-n", sys.executable, "-m", "tests.security.test_router_ports")
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert seen["ends"] == [0, 0]
    assert seen["asked"] == {}
    node, visitor = seen["daemons"]
    assert {"-natPortMap=0", "-autonat=0"} <= set(node) & set(visitor)
    assert "-noListenAddrs=1" in visitor
    assert not any(word.startswith("-hostAddrs") for word in visitor)


if __name__ == "__main__":
    main()
