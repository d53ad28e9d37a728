"""A home behind a router with address translation, beside public hosts."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from node.local_swarm.setup import Place, node_command
from tests.e2e.split_network import ip, why_no_namespaces

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
        iifname "wan" ct state new drop
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
        iifname "eth0" ct state new drop
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

    name: str
    public: int

    def place(self, index: int) -> Place:
        """A public host, for `node.local_swarm.local_swarm.LocalSwarm`."""
        return self._place(index)

    def relaying_place(self, index: int) -> Place:
        """Likewise, for a node that carries what others say to each other."""
        return self._place(index, f"SKIPSTONE_SERVE_RELAY={_RELAYED_MB_PER_HOUR}")

    def inside(self, where: int | str) -> tuple[str, ...]:
        """What a command is started with to run on a public host, or in `home` or `router`."""
        return ("ip", "netns", "exec", f"{self.name}-{where}")

    def mapped_ports(self) -> list[int]:
        """Those of the router that lead into the home."""
        rules = subprocess.run(
            (*self.inside("router"), "nft", "list", "chain", "inet", "home", "mapped_in"),
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        return [int(rules[at + 1]) for at, word in enumerate(rules) if word == "dport"]

    def shut(self, index: int) -> None:
        """From now on nobody can connect to this public host; it can connect to others."""
        command = (*self.inside(index), "nft", "-f", "-")
        subprocess.run(command, check=True, capture_output=True, text=True, input=_SHUT)

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
        ip("netns", "add", self.name)
        self._in_hub("link", "add", "name", "internet", "type", "bridge")
        self._in_hub("link", "set", "dev", "internet", "up")
        for where in (*range(self.public), "router", "home"):
            ip("netns", "add", f"{self.name}-{where}")
            ip("-n", f"{self.name}-{where}", "link", "set", "dev", "lo", "up")
        for index in range(self.public):
            self._plug_in(str(index), "eth0", _PUBLIC.format(10 + index))
        self._plug_in("router", "wan", ROUTER_OUTSIDE)
        router, home = f"{self.name}-router", f"{self.name}-home"
        ip("-n", router, "link", "add", "name", "lan", "type", "veth", "peer", "name", "eth0", "netns", home)
        for namespace, device, address in ((router, "lan", _ROUTER_INSIDE), (home, "eth0", HOME)):
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
            ip("-n", namespace, "link", "set", "dev", device, "up")
        ip("-n", home, "route", "add", "default", "via", _ROUTER_INSIDE)
        self._on_router("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._on_router("nft", "-f", "-", text=_RULES)

    def remove(self) -> None:
        """Whatever of it is there. Devices go with their namespaces."""
        for where in (*map(str, range(self.public)), "home", "router"):
            subprocess.run(("ip", "netns", "del", f"{self.name}-{where}"), capture_output=True, check=False)
        subprocess.run(("ip", "netns", "del", self.name), capture_output=True, check=False)

    def _place(self, index: int, *variables: str) -> Place:
        command = (*self.inside(index), "env", *variables, *node_command())
        return Place(host=_PUBLIC.format(10 + index), command=command)

    def _plug_in(self, where: str, device: str, address: str) -> None:
        namespace, port = f"{self.name}-{where}", f"to-{where}"
        self._in_hub("link", "add", "name", port, "type", "veth", "peer", "name", device, "netns", namespace)
        self._in_hub("link", "set", "dev", port, "master", "internet")
        self._in_hub("link", "set", "dev", port, "up")
        ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
        ip("-n", namespace, "link", "set", "dev", device, "up")

    def _in_hub(self, *words: str) -> None:
        ip("-n", self.name, *words)

    def _on_router(self, *words: str, text: str = "") -> None:
        subprocess.run((*self.inside("router"), *words), check=True, capture_output=True, text=True, input=text)

    def _wait_for_router(self, process: subprocess.Popen[bytes], log: Path, expected: list[str]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not all(line in (said := log.read_text(errors="replace")) for line in expected):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"miniupnpd does not serve:\n{said}")
            time.sleep(0.05)


@contextmanager
def home_network(public: int) -> Iterator[HomeNetwork]:
    """Made, and removed at the end."""
    network = HomeNetwork(f"skipstone-{os.getpid()}-home{next(_counter)}", public)
    try:
        network.make()
        yield network
    finally:
        network.remove()


def _word(switch: bool) -> str:
    return "yes" if switch else "no"
