"""hivemind's libp2p daemon (`p2pd`, a Go program) with our settings, and its streams. Imports hivemind."""

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from protocol.generated import dht_process_pb2
from protocol.libp2p import child_process
from protocol.manifest.join_link import multiaddr_of
from protocol.nat.relay import RelayStream
from protocol.transport.settings import is_free
from swarm.vocabulary.errors import ConfigError, IdentityError, Unreachable
from swarm.vocabulary.types import PeerId


class _Daemon(P2P):  # type: ignore[misc]  # hivemind has no types
    """p2pd that cannot outlive this process, with its sockets in a private folder instead of /tmp."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        # The defaults (256, 512, 2 minutes) keep a flood of idle connections too long.
        command: list[str] = P2P._make_process_args(*args, **kwargs, connLo=160, connHi=256, connGrace="20s")
        return [sys.executable, "-I", "-S", str(child_process.__file__), str(os.getpid()), *command]


async def start_daemon(start: dht_process_pb2.DhtStart) -> P2P:
    """Starts p2pd and connects to it. Raises ConfigError if it does not start, IdentityError for another peer id."""
    # Disabled: relaying (p2pd's would carry 4 GiB per circuit), port mapping (it trusts every device in the local
    # network), AutoNAT. No initial peers, because p2pd does not start while they are unreachable.
    os.environ.setdefault("GOMEMLIMIT", "512MiB")  # soft limit for Go's garbage collector
    folder = Path(start.folder)
    _Daemon._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
    listening: dict[str, Any] = {"host_maddrs": None, "no_listen": True}
    try:
        if start.host:
            # p2pd would share a port (SO_REUSEPORT) and get only some connections.
            if not is_free(start.host, start.port):
                raise OSError("another program uses the port, or the address is not this machine's")
            hosts = ("::", "0.0.0.0") if start.host == "::" else (start.host,)  # noqa: S104 - Go separates them
            listening = {"host_maddrs": [multiaddr_of(host, start.port) for host in hosts]}
        daemon = await _Daemon.create(
            **listening,
            announce_maddrs=list(start.announce) or None,
            identity_path=str(folder / start.identity),
            check_if_identity_free=False,  # hivemind's check supports only RSA keys
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
        raise IdentityError(f"the DHT started as {daemon.peer_id} instead of {start.peer}")
    return daemon


async def any_answers(addresses: list[Multiaddr]) -> bool:
    # Check by TCP first: after a failed dial p2pd refuses to retry for 5 s, too long for a swarm that starts together.
    return any(await asyncio.gather(*map(_answers, addresses)))


async def _answers(address: Multiaddr) -> bool:
    hosts = [address[name] for name in ("ip4", "ip6", "dns", "dns4", "dns6") if name in address]
    if not hosts or "tcp" not in address or "p2p-circuit" in address:
        return True  # cannot be checked here, so let p2pd try
    try:
        _, writer = await asyncio.open_connection(hosts[0], int(address["tcp"]))
    except OSError:
        return False
    writer.close()
    return True


PROTOCOL: Final = "/skipstone/relay/1"
DIAL_S: Final = 5.0
# Relay addresses come from peers, so allow only these transports of libp2p
_RELAY: Final = re.compile(
    r"(?P<way>/(ip4|ip6|dns4|dns6)/[A-Za-z0-9.:-]+/tcp/[0-9]{1,5})/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{46,64})"
)


class Libp2pStreams:
    """Opens streams to relays, and accepts streams from peers."""

    def __init__(self, daemon: P2P) -> None:
        self._daemon = daemon

    async def dial(self, relay: str) -> RelayStream:
        """Opens a stream to a relay; see `protocol.nat.relay.Dial`."""
        match = _RELAY.fullmatch(relay)
        if match is None:
            raise Unreachable(f"{relay[:128]!r} is not of the form /ip4/ADDRESS/tcp/PORT/p2p/PEER")
        try:
            peer, way = PeerID.from_base58(match["peer"]), Multiaddr(match["way"])
            async with asyncio.timeout(DIAL_S):
                if not await any_answers([way]):
                    raise Unreachable(f"the relay does not answer at {match['way']}")
                await self._daemon._client.connect(peer, [way])
                _, reader, writer = await self._daemon.call_binary_stream_handler(peer, PROTOCOL)
        except (P2PDaemonError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise Unreachable(f"no stream to the relay at {match['way']}: {error}") from None
        except TimeoutError:
            raise Unreachable(f"no stream to the relay at {match['way']} within {DIAL_S:g} s") from None
        return RelayStream(PeerId(match["peer"]), reader, writer)

    async def take(self, serve: Callable[[RelayStream], Awaitable[None]]) -> None:
        """Starts to accept streams, and runs `serve` for each of them. Raises P2PDaemonError."""

        async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(RelayStream(PeerId(info.peer_id.to_base58()), reader, writer))

        await self._daemon.add_binary_stream_handler(PROTOCOL, handle)
