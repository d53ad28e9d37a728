"""The node's part in tunnels, which follows its reachability."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from node.network.local_peer import LocalPeer
from node.network.reach_status import ReachStep
from node.network.session import NetworkSession
from protocol.dht.directory import DhtDirectory, RelayTunnels
from protocol.identity.signed_records import MAX_RELAY_LENGTH
from protocol.interfaces.transport import FarEnd
from protocol.manifest.join_link import multiaddr_of
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import PeerId

log = logging.getLogger(__name__)

STEP_S: Final = 2.0
_HIDDEN: Final = (ReachStep.REVERSE, ReachStep.UNREACHABLE)
_OFFERS: Final = (ReachStep.DIRECT, ReachStep.UNKNOWN)
"""Not with a mapped port: the DHT's own, where tunnels come in, is not mapped."""

FarEnds = Callable[[PeerId], FarEnd | None]


@dataclass(slots=True)
class RelayPart:
    """The node's part in tunnels. `relay_of` gives a peer's relay multiaddr; `announce` publishes a change of ours."""

    own: LocalPeer
    dht: DhtDirectory
    tunnels: RelayTunnels
    relay_of: Callable[[PeerId], str]
    announce: Callable[[], None]
    local_address: str
    """`host:port` that tunnels to this node lead to."""
    _attached: list[str] = field(default_factory=list)

    async def follow(self) -> None:
        """Updates the part in tunnels to where the node stands now."""
        hidden = self.own.reach.step in _HIDDEN
        # A node that cannot be dialled is no place to keep records at: others would wait for it at every look-up.
        self.dht.take_part(client=hidden)
        # Others look for its relays among those that it is called through.
        relays = [relay for peer in self.own.via if (relay := self.relay_of(peer))] if hidden else []
        if relays != self._attached:
            self._attached = relays
            await self._attach(relays)
        relay = self._offer()
        if relay != self.own.relay:
            self.own.relay = relay
            self.announce()

    async def _attach(self, relays: list[str]) -> None:
        try:
            await self.tunnels.attach(relays, self.local_address)
        except Unreachable as error:
            log.info("attached to relays as soon as the DHT is back: %s", error)

    def _offer(self) -> str:
        """Where the node serves tunnels; empty while it does not, or cannot be dialled."""
        own = self.own
        if not (self.dht.serves_tunnels and own.addresses and own.reach.step in _OFFERS):
            return ""
        host = own.addresses[0].rpartition(":")[0].strip("[]")
        relay = f"{multiaddr_of(host, self.dht.port)}/p2p/{own.peer}"
        return relay if len(relay) <= MAX_RELAY_LENGTH else ""  # no record could say it


async def keep_in_step(session: NetworkSession, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Follows the node's standing every few seconds, until cancelled."""
    directory, membership_sync = session.directory, session.membership_sync
    part = RelayPart(
        session.own,
        directory,
        session.tunnels,
        session.book.relay_of,
        membership_sync.announce,
        session.local_address,
    )
    while True:
        await part.follow()
        await sleep(STEP_S)


def without_tunnels(own: LocalPeer, far_end: FarEnds) -> FarEnds:
    """The far end, without a host while the node cannot be dialled."""
    # The caller may have come through a tunnel: dialling its local end would probe our own ports.

    def found(peer: PeerId) -> FarEnd | None:
        end = far_end(peer)
        return end if end is None or own.addresses else replace(end, host="")

    return found
