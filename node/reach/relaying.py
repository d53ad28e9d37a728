"""The node's part in tunnels, kept in step with how others reach it: to whom it is attached, what it offers, how it takes part in the DHT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from node.presence import Presence
from node.reach.standing import ReachStep
from protocol.join_link import multiaddr_of
from swarm.errors import Unreachable

log = logging.getLogger(__name__)

STEP_S: Final = 2.0
_HIDDEN: Final = (ReachStep.REVERSE, ReachStep.UNREACHABLE)
_OFFERS: Final = (ReachStep.DIRECT, ReachStep.UNKNOWN)
"""Not with a mapped port: the DHT's own, where tunnels come in, is not mapped."""


async def keep_in_step(presence: Presence, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Until cancelled, sees every few seconds that the tunnels go with where the node stands."""
    relays: list[str] = []
    while True:
        hidden = presence.own.reach.step in _HIDDEN
        # A node that cannot be dialled is no place to keep records at: others would wait for it at every look-up.
        await presence.directory.take_part(client=hidden)
        wanted = relays_of(presence) if hidden else []
        if wanted != relays:
            await _attach(presence, wanted)
            relays = wanted
        offer(presence)
        await sleep(STEP_S)


def relays_of(presence: Presence) -> list[str]:
    """Where those that the node is called through serve tunnels: others look for its relays among them."""
    known = (presence.membership.get(peer) for peer in presence.own.via)
    return [announcement.relay for announcement in known if announcement is not None and announcement.relay]


def offer(presence: Presence) -> None:
    """Announces that the node serves tunnels, while it does and can be dialled."""
    own, directory = presence.own, presence.directory
    relay = ""
    if directory.serves_tunnels and own.addresses and own.reach.step in _OFFERS:
        host = own.addresses[0].rpartition(":")[0].strip("[]")
        relay = f"{multiaddr_of(host, directory.port)}/p2p/{own.peer}"
    if relay != own.relay:
        own.relay = relay
        presence.neighbourhood.announce()


async def _attach(presence: Presence, relays: list[str]) -> None:
    try:
        await presence.tunnels.attach(relays, presence.local_address)
    except Unreachable as error:
        log.info("attached to relays as soon as the DHT is back: %s", error)
