"""A home behind a router with address translation, beside public hosts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from node.local_swarm.setup import Deployment, node_command
from node.observability.event_json import event_from_json
from node.observability.events import Event, NodeStatus, Reach

Side = Literal["a", "b"]


def why_no_namespaces() -> str | None:
    """Why this machine cannot do it; None when it can."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if shutil.which("ip") is None:
        return "the `ip` command (iproute2) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"skipstone-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "name", "bridge0", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no network namespace or bridge can be made: {error.stderr.strip()}"
    finally:
        subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
    return None


def skip_because(reason: str | None) -> None:
    if reason is not None:
        pytest.skip(reason)


@dataclass(frozen=True, slots=True)
class SplitNetwork:
    """`sides` says where each node is, by index; both bridges and the cable between them are in the namespace `hub`."""

    hub: str
    sides: str
    addresses: str = "10.91.0.{}"

    def deployment(self, index: int) -> Deployment:
        host = self.addresses.format(index + 1)
        return Deployment(host=host, command=("ip", "netns", "exec", self._name(index), *node_command()))

    def side(self, side: Side) -> list[int]:
        return [index for index, where in enumerate(self.sides) if where == side]

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        ip("-n", self.hub, "link", "set", "dev", "cable-a", "down")

    def heal(self) -> None:
        ip("-n", self.hub, "link", "set", "dev", "cable-a", "up")

    def make(self) -> None:
        """Raises subprocess.CalledProcessError."""
        ip("netns", "add", self.hub)
        self._in_hub("link", "add", "name", "cable-a", "type", "veth", "peer", "name", "cable-b")
        for side in ("a", "b"):
            self._in_hub("link", "add", "name", f"bridge-{side}", "type", "bridge")
            self._in_hub("link", "set", "dev", f"bridge-{side}", "up")
            self._in_hub("link", "set", "dev", f"cable-{side}", "master", f"bridge-{side}")
            self._in_hub("link", "set", "dev", f"cable-{side}", "up")
        for index, side in enumerate(self.sides):
            ip("netns", "add", self._name(index))
            _plug_in(self._name(index), "eth0", self.addresses.format(index + 1), self.hub, f"bridge-{side}")

    def _name(self, index: int) -> str:
        return f"{self.hub}-{index}"

    def _in_hub(self, *words: str) -> None:
        ip("-n", self.hub, *words)


def split_network(sides: str, **more: str) -> AbstractContextManager[SplitNetwork]:
    """Made, and removed at the end. `sides` is `a` or `b` for each node in order, such as "aabb"."""
    return _made(SplitNetwork(f"skipstone-{os.getpid()}-{next(_counter)}", sides, **more))


@contextmanager
def _made(network: Made) -> Iterator[Made]:
    try:
        network.make()
        yield network
    finally:  # devices are deleted with their namespaces
        for name in subprocess.run(("ip", "netns", "list"), capture_output=True, text=True).stdout.split():
            if name == network.hub or name.startswith(f"{network.hub}-"):
                subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def _plug_in(namespace: str, device: str, address: str, hub: str, bridge: str) -> None:
    """Makes a device with this address in the namespace, on a bridge of the hub."""
    port = f"to-{namespace.removeprefix(hub + '-')}"
    ip("-n", hub, "link", "add", "name", port, "type", "veth", "peer", "name", device, "netns", namespace)
    ip("-n", hub, "link", "set", "dev", port, "master", bridge)
    ip("-n", hub, "link", "set", "dev", port, "up")
    prefix = ("/64", "nodad") if ":" in address else ("/24",)
    ip("-n", namespace, "address", "add", f"{address}{prefix[0]}", "dev", device, *prefix[1:])
    for name in ("lo", device):
        ip("-n", namespace, "link", "set", "dev", name, "up")


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)


ROUTER_OUTSIDE = "25.0.0.1"
HOME = "192.168.77.10"
_ROUTER_INSIDE = "192.168.77.1"
_PUBLIC = "25.0.0.{}"
_PATIENCE_S = 20.0
_RELAYED_MB_PER_HOUR = 1000
_counter = itertools.count()

_RULES = """
table inet home {
    chain input {
        type filter hook input priority 0; policy accept;
        iifname "wan" ct state new ANSWER
    }
    chain forward {
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "lan" accept
        jump mapped
    }
    chain mapped { }
    chain prerouting {
        type nat hook prerouting priority -100;
        jump mapped_in
    }
    chain mapped_in { }
    chain postrouting {
        type nat hook postrouting priority 100;
        jump mapped_out
        oifname "wan" masquerade
    }
    chain mapped_out { }
}
"""
_SHUT = """
table inet shut {
    chain input {
        type filter hook input priority 0; policy accept;
        iifname "eth0" ct state new ANSWER
    }
}
"""
_MINIUPNPD = """
ext_ifname=wan
listening_ip=lan
enable_upnp={upnp}
enable_natpmp={natpmp}
secure_mode=yes
upnp_table_name=home
upnp_nat_table_name=home
upnp_forward_chain=mapped
upnp_nat_chain=mapped_in
upnp_nat_postrouting_chain=mapped_out
uuid=6a0d3f0e-3c1b-4d22-9e4b-3f5f6b7a8c9d
allow 1024-65535 192.168.77.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""
REFUSES = "reject with tcp reset"
_SPEAKS_UPNP = "HTTP listening on port"
_SPEAKS_NATPMP = "Listening for NAT-PMP"


def why_no_home() -> str | None:
    """Why this machine cannot have a home with a router; None when it can."""
    if (reason := why_no_namespaces()) is not None:
        return reason
    return None if shutil.which("nft") else "the `nft` command (nftables) is not installed"


def why_no_mapping() -> str | None:
    """Why the router cannot map ports; None when it can."""
    return None if shutil.which("miniupnpd") else "miniupnpd is not installed (Debian: miniupnpd-nftables)"


@dataclass(frozen=True, slots=True)
class HomeNetwork:
    """`public` hosts on one wire, which the router's outside is on too; `home` behind the router."""

    hub: str
    public: int
    answers: str = "drop"
    """What the router and `shut` do with a connection from outside: `drop`, as most homes, or `REFUSES` at once."""

    def deployment(self, index: int) -> Deployment:
        """A public host, for `node.local_swarm.local_swarm.LocalSwarm`."""
        return self._deployment(index)

    def relaying_deployment(self, index: int) -> Deployment:
        """Likewise, for a node that carries what others say to each other."""
        return self._deployment(index, f"SKIPSTONE_SERVE_RELAY={_RELAYED_MB_PER_HOUR}")

    def inside(self, where: int | str) -> tuple[str, ...]:
        """What a command is started with to run on a public host, or in `home` or `router`."""
        return ("ip", "netns", "exec", f"{self.hub}-{where}")

    def mapped_ports(self) -> list[int]:
        command = (*self.inside("router"), "nft", "list", "chain", "inet", "home", "mapped_in")
        rules = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return [int(rules[at + 1]) for at, word in enumerate(rules) if word == "dport"]

    def shut(self, index: int) -> None:
        """From now on nobody can connect to this public host; it can connect to others."""
        command, rules = (*self.inside(index), "nft", "-f", "-"), _SHUT.replace("ANSWER", self.answers)
        subprocess.run(command, check=True, capture_output=True, text=True, input=rules)

    @contextmanager
    def mapping_router(self, folder: Path, *, upnp: bool = True, natpmp: bool = True) -> Iterator[None]:
        """Within the block the router takes orders. `folder` gets its configuration and its log."""
        settings = folder / "miniupnpd.conf"
        settings.write_text(_MINIUPNPD.format(upnp=_word(upnp), natpmp=_word(natpmp)))
        command = (*self.inside("router"), "miniupnpd", "-d", "-f", str(settings), "-P", str(folder / "pid"))
        with (folder / "miniupnpd.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)  # `ip netns exec` becomes the program itself
        try:
            expected = [line for line, switch in ((_SPEAKS_UPNP, upnp), (_SPEAKS_NATPMP, natpmp)) if switch]
            self._wait_for_router(process, folder / "miniupnpd.log", expected)
            yield
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)

    def make(self) -> None:
        """Raises subprocess.CalledProcessError."""
        router, home = f"{self.hub}-router", f"{self.hub}-home"
        hosts = [f"{self.hub}-{index}" for index in range(self.public)]
        for namespace in (self.hub, *hosts, router, home):
            ip("netns", "add", namespace)
        ip("-n", self.hub, "link", "add", "name", "internet", "type", "bridge")
        ip("-n", self.hub, "link", "set", "dev", "internet", "up")
        for index, host in enumerate(hosts):
            _plug_in(host, "eth0", _PUBLIC.format(10 + index), self.hub, "internet")
        _plug_in(router, "wan", ROUTER_OUTSIDE, self.hub, "internet")
        ip("-n", home, "link", "set", "dev", "lo", "up")
        ip("-n", router, "link", "add", "name", "lan", "type", "veth", "peer", "name", "eth0", "netns", home)
        for namespace, device, address in ((router, "lan", _ROUTER_INSIDE), (home, "eth0", HOME)):
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
            ip("-n", namespace, "link", "set", "dev", device, "up")
        ip("-n", home, "route", "add", "default", "via", _ROUTER_INSIDE)
        self._on_router("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._on_router("nft", "-f", "-", text=_RULES.replace("ANSWER", self.answers))

    def _deployment(self, index: int, *variables: str) -> Deployment:
        command = (*self.inside(index), "env", *variables, *node_command())
        return Deployment(host=_PUBLIC.format(10 + index), command=command)

    def _on_router(self, *words: str, text: str = "") -> None:
        subprocess.run((*self.inside("router"), *words), check=True, capture_output=True, text=True, input=text)

    def _wait_for_router(self, process: subprocess.Popen[bytes], log: Path, expected: list[str]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not all(line in (said := log.read_text(errors="replace")) for line in expected):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"miniupnpd does not serve:\n{said}")
            time.sleep(0.05)


def home_network(public: int, answers: str = "drop") -> AbstractContextManager[HomeNetwork]:
    return _made(HomeNetwork(f"skipstone-{os.getpid()}-home{next(_counter)}", public, answers))


Made = TypeVar("Made", SplitNetwork, HomeNetwork)


def _word(switch: bool) -> str:
    return "yes" if switch else "no"


PATIENCE_S = 120.0

Kind = TypeVar("Kind")


@dataclass(eq=False)
class WatchedNode:
    seen: list[Event] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            event = event_from_json(line)
            if event is not None:
                self.seen.append(event)
                self._news.set()

    async def until(self, kind: type[Kind], wanted: Callable[[Kind], bool] = lambda _: True) -> Kind:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.seen:
                    if isinstance(event, kind) and wanted(event):
                        return event
                self._news.clear()
                await self._news.wait()

    async def reached(self) -> Reach:
        return await self.until(Reach)

    async def serving(self) -> NodeStatus:
        return await self.until(NodeStatus, lambda event: event.state == "serving")


@asynccontextmanager
async def node_at(
    network: HomeNetwork, where: int | str, folder: Path, link: str, *, stage: int = 1, options: tuple[str, ...] = ()
) -> AsyncIterator[WatchedNode]:
    """A node in that place, which nobody has told an address; stopped in good order at the end."""
    arguments = ("join", link, "--json", "--stop-on-eof", "--stage", str(stage), "--threads", "1", *options)
    identity = ("--identity", str(folder / f"{where}.key"))
    async with watched_node(*network.inside(where), *node_command(), *arguments, *identity) as node:
        yield node


@asynccontextmanager
async def joined(folder: Path, name: str, target: str, *options: str) -> AsyncIterator[WatchedNode]:
    """A node of this name on the loopback, with its key in the folder; stopped in good order at the end."""
    words = ("join", target, "--identity", str(folder / f"{name}.key"), "--listen", "127.0.0.1", "--threads", "1")
    told = ("--advertise", "127.0.0.1", "--json", "--stop-on-eof", "--yes")
    async with watched_node(*node_command(), *words, *told, *options) as node:
        yield node


@asynccontextmanager
async def watched_node(*command: str) -> AsyncIterator[WatchedNode]:
    """A node that this command starts with `--json --stop-on-eof`; stopped in good order at the end."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    node = WatchedNode()
    reading = asyncio.create_task(node.read(process.stdout))
    try:
        yield node
        process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


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


async def answering(network: HomeNetwork, link: str, reached: Reach) -> dict[str, Any]:
    """What a visitor on a public host is told by the node at home; its record may need a moment to get around."""
    addresses = [reached.address] if reached.address else []
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, status = await asks(network, 1, "status", link)
            found = [peer for peer in status["peers"] if peer["peer"] == reached.peer]
            if found and found[0]["answered"] and found[0]["addresses"] == addresses:
                return dict(found[0])


def finding(report: dict[str, Any], check: str) -> dict[str, str]:
    return next(line for line in report["checks"] if line["check"] == check)


def environment() -> dict[str, str]:
    packages = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))}
