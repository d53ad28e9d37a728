"""Streams between peers over libp2p, by hivemind's daemon.

This module imports hivemind, so it belongs into the DHT's process.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from protocol.libp2p.daemon import any_answers
from protocol.libp2p.messages import RelayStream
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import PeerId

PROTOCOL: Final = "/skipstone/relay/1"
DIAL_S: Final = 5.0
_RELAY: Final = re.compile(
    r"(?P<way>/(ip4|ip6|dns4|dns6)/[A-Za-z0-9.:-]+/tcp/[0-9]{1,5})/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{46,64})"
)
"""Peers announce it, and libp2p knows transports that are not theirs to have us use."""


class Libp2pStreams:
    """Opens streams to relaying peers, and takes those that come to us."""

    def __init__(self, daemon: P2P) -> None:
        self._daemon = daemon

    async def dial(self, relay: str) -> RelayStream:
        """Opens a stream; see `protocol.libp2p.messages.Dial`."""
        match = _RELAY.fullmatch(relay)
        if match is None:
            raise Unreachable(f"{relay[:128]!r} is not like /ip4/ADDRESS/tcp/PORT/p2p/PEER")
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
        """Serves incoming streams from now on. Raises P2PDaemonError."""

        async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(RelayStream(PeerId(info.peer_id.to_base58()), reader, writer))

        await self._daemon.add_binary_stream_handler(PROTOCOL, handle)
