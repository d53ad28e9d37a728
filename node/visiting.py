"""A short stay in a run's network, to ask or to fetch something without taking part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.clock import SystemClock
from node.events import Event
from node.presence import Presence, Whereabouts, address_to_reach, present
from protocol.directory import DirectorySettings
from protocol.identity import Identity
from protocol.join_link import JoinLink


class _Silent:
    """Takes events and keeps none: a visitor reports its result only."""

    def emit(self, event: Event) -> None:
        return


@asynccontextmanager
async def visit(link: JoinLink, listen: str | None = None, port: int = 0) -> AsyncIterator[Presence]:
    """A visitor's presence on this machine: any port unless one is given, a key of its own, and nothing kept for others in the DHT.

    Its DHT listens nowhere. For links it listens where the first peer of `link` is reached from, and on no other interface: a peer that nobody can
    dial has to be called, and dials whoever calls it.
    """
    if listen is None:
        listen = await asyncio.to_thread(address_to_reach, link.peers)  # names may have to be looked up
    settings = DirectorySettings("", 0, (), link.peers, client=True)
    where = Whereabouts(listen=listen, port=port)
    async with present(Identity.generate(), link.run, where, settings, SystemClock(), _Silent()) as presence:
        yield presence
