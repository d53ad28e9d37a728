"""Held links: links to a few peers that can be dialled, through which this node is called while it can not be dialled
itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from node.network.local_peer import LocalPeer
from swarm.membership.contact_selection import by_worth, relays_first
from swarm.membership.membership import Membership
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.types import PeerId, short

log = logging.getLogger(__name__)

WANTED: Final = 3
MAX_TRIED: Final = 9
"""Peers that are tried at most until so many links stand."""
CONNECT_S: Final = 6.0
AVOIDED_S: Final = 60.0
"""A peer that could not be connected to is tried after all others for so long; by then its record has been renewed or
has expired."""


class Links(Protocol):
    """The part of `protocol.transport.grpc_transport.GrpcTransport` that held links need."""

    async def connect(self, peer: PeerId) -> None:
        """Opens a link unless there is one. Raises PeerError."""
        ...


class Attachments:
    """The held links of this node. They are the transport's, like all others, and stay as long as both sides live."""

    def __init__(self, own: LocalPeer, membership: Membership, links: Links, connect_s: float = CONNECT_S) -> None:
        self._own = own
        self._membership = membership
        self._links = links
        self._connect_s = connect_s
        self._held: tuple[PeerId, ...] = ()
        self._avoided: dict[PeerId, float] = {}
        """Until when."""

    async def hold(self) -> tuple[PeerId, ...]:
        """Opens links to the best peers, as far as they can be had. Returns those that do, at most three."""
        known = [a for a in self._membership.peers() if not self._membership.is_given_up(a.peer)]
        best = by_worth(self._own.peer, self._own.module, known, self._held)
        best = relays_first(best, {a.peer for a in known if a.relay})
        order = sorted(best, key=self._is_avoided)[:MAX_TRIED]
        held: list[PeerId] = []
        while order and len(held) < WANTED:
            wanted = WANTED - len(held)
            now, order = order[:wanted], order[wanted:]
            stand = await asyncio.gather(*(self._connect(peer) for peer in now))
            held += [peer for peer, stands in zip(now, stand, strict=True) if stands]
        self._avoided = {peer: until for peer, until in self._avoided.items() if self._is_avoided(peer)}
        self._held = tuple(held)
        return self._held

    async def _connect(self, peer: PeerId) -> bool:
        try:
            async with asyncio.timeout(self._connect_s):
                await self._links.connect(peer)
        except (PeerError, TimeoutError) as error:
            log.info("%s cannot be held on to: %s", short(peer), error)
            self._avoided[peer] = self._own.clock.monotonic() + AVOIDED_S
            return False
        return True

    def _is_avoided(self, peer: PeerId) -> bool:
        return self._avoided.get(peer, 0.0) > self._own.clock.monotonic()
