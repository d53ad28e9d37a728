"""The start of hivemind's libp2p daemon (`p2pd`, a Go program) with a node's settings.

This module imports hivemind, so it belongs into the DHT's process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from protocol.generated import dht_process_pb2
from protocol.libp2p import die_with_parent
from swarm.vocabulary.errors import ConfigError, IdentityError

_MEMORY_GOAL = "512MiB"
"""For Go's garbage collector: p2pd itself limits nothing."""
_CONNECTIONS = {"connLo": 160, "connHi": 256, "connGrace": "20s"}
"""p2pd's connection manager: above `connHi` connections it closes those that are least worth to it and older than
`connGrace`, until `connLo` are left. Its own defaults (256, 512, two minutes) let a flood of idle connections stay too
long beside a node's other files."""


class _Daemon(P2P):  # type: ignore[misc]  # hivemind has no types
    """p2pd that cannot outlive this process, with its sockets in a folder of its own instead of /tmp."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        command: list[str] = P2P._make_process_args(*args, **kwargs, **_CONNECTIONS)
        return [sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid()), *command]


async def start_daemon(start: dht_process_pb2.DhtStart) -> P2P:
    """Starts p2pd and connects to it. It is not given the initial peers: it would refuse to start while they are away.

    Relaying for others is left off: p2pd's relay service gives away up to 4 GiB per circuit without asking its owner.
    It never asks a router for a port either, whatever the node does for its own (`node.reachability`): whoever answers
    its call on the local network would be listened to. Nor does it dial back for others (AutoNAT). Without `start.host`
    it listens nowhere.

    Raises:
        ConfigError: it does not start; most often because the port is taken.
        IdentityError: it came up under another peer id.
    """
    os.environ.setdefault("GOMEMLIMIT", _MEMORY_GOAL)
    folder = Path(start.folder)
    _Daemon._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
    listening: dict[str, Any] = {"host_maddrs": None, "no_listen": True}
    try:
        if start.host:
            address = ipaddress.ip_address(start.host)
            _check_port(address, start.port)
            listening = {"host_maddrs": [f"/ip{address.version}/{address}/tcp/{start.port}"]}
        daemon = await _Daemon.create(
            **listening,
            announce_maddrs=list(start.announce) or None,
            identity_path=str(folder / start.identity),
            check_if_identity_free=False,  # hivemind's check takes every key for RSA
            dht_mode="client" if start.client else "server",
            auto_nat=False,
            nat_port_map=False,
            use_relay=False,
            use_auto_relay=False,
            startup_timeout=start.timeout_s,
            idle_timeout=start.timeout_s,
        )
    except (P2PDaemonError, OSError, ValueError) as error:
        raise ConfigError(
            f"the DHT's network daemon did not start on {start.host} port {start.port}: {error}",
            hint="Choose another port, or end the program that uses this one.",
        ) from error
    if daemon.peer_id.to_base58() != start.peer:
        await daemon.shutdown()
        raise IdentityError(f"the DHT came up as {daemon.peer_id}, not as {start.peer}")
    return daemon


async def any_answers(addresses: list[Multiaddr]) -> bool:
    """Whether somebody listens at one of the addresses. p2pd is only asked to dial then: after a dial that failed it
    refuses to try again for 5 s and more, too long for a swarm whose nodes all start at once.
    """
    answers = await asyncio.gather(*(_answers(address) for address in addresses))
    return any(answers)


async def _answers(address: Multiaddr) -> bool:
    hosts = [address[name] for name in ("ip4", "ip6", "dns", "dns4", "dns6") if name in address]
    if not hosts or "tcp" not in address or "p2p-circuit" in address:
        return True  # not ours to tell
    try:
        _, writer = await asyncio.open_connection(hosts[0], int(address["tcp"]))
    except OSError:
        return False
    writer.close()
    return True


def _check_port(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    """Raises OSError when somebody listens there: p2pd would share the port with them (SO_REUSEPORT) and get half the
    calls."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former life may linger
        probe.bind((str(address), port))
