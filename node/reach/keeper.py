"""A running node's reachability: found out when it starts and now and then, announced when it changes, given back when it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from node.events import EventSink, Reach
from node.own_state import OwnState
from node.presence import Presence
from node.reach.dial_back import Witness, witnesses_of
from node.reach.ladder import climb
from node.reach.nat_pmp import NatPmp
from node.reach.port_mapping import PortMapper, Router
from node.reach.standing import ReachMode, ReachStep, Standing
from node.reach.upnp import Upnp
from node.task_scope import task_scope

log = logging.getLogger(__name__)

AGAIN_S: Final = {
    ReachStep.DIRECT: 600.0,
    ReachStep.MAPPED: 600.0,
    ReachStep.UNREACHABLE: 120.0,
}
"""Addresses change, routers restart, and their owners switch things on: the ladder is climbed again after so long."""
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 60.0
"""While nobody could be asked, the pause grows from the one to the other."""

Climb = Callable[[], Awaitable[Standing]]


def ways_to_map() -> tuple[PortMapper, ...]:
    """NAT-PMP first: it asks the gateway alone, and needs nothing installed."""
    return (NatPmp(), Upnp())


@dataclass(slots=True)
class Adoption:
    """What a standing changes about this node. `announce` tells the others."""

    own: OwnState
    events: EventSink
    announce: Callable[[], None]
    before: tuple[str, ...]
    """The addresses that the node has without the ladder."""

    def adopt(self, standing: Standing) -> None:
        """Takes it over; that nobody could be asked just now changes nothing about what is known."""
        known = self.own.reach
        if standing.step is ReachStep.UNKNOWN and known.step is not ReachStep.UNKNOWN:
            return
        self.own.reach = standing
        addresses = self.before if standing.address is None else (standing.address,)
        if addresses == self.own.addresses and standing.step is known.step:
            return
        self.own.addresses = addresses
        self.announce()
        address = ", ".join(addresses)
        self.events.emit(Reach(self.own.peer, standing.step.value, address, standing.reason, standing.fix))


@asynccontextmanager
async def reachable(
    mode: ReachMode, told_host: str | None, presence: Presence, events: EventSink
) -> AsyncIterator[None]:
    """Within the block the node climbs the ladder, follows what it finds, and is a witness for others."""
    transport, own = presence.transport, presence.own
    presence.reception.witness = Witness(transport.far_end, own.clock)
    router = Router(ways_to_map()) if mode is ReachMode.AUTO else None
    ask = witnesses_of(presence.membership, transport)
    adoption = Adoption(own, events, presence.neighbourhood.announce, own.addresses)

    async def climbing() -> Standing:
        return await climb(transport.port, told_host, ask, router)

    try:
        async with task_scope() as tasks:
            watching = tasks.create_task(watch(climbing, adoption, router))
            try:
                yield
            finally:
                watching.cancel()
    finally:
        presence.reception.witness = None
        if router is not None:
            await router.close()


async def watch(
    climbing: Climb,
    adoption: Adoption,
    router: Router | None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Climbs, and climbs again when it is time or the router has taken its mapping back; until cancelled."""
    pause_s = FIRST_PAUSE_S
    while True:
        standing = await climbing()
        adoption.adopt(standing)
        wait_s = AGAIN_S.get(standing.step, pause_s)
        if standing.step is ReachStep.UNKNOWN:
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        if router is not None and router.mapping is not None:
            await _until_lost(router, wait_s, sleep)
        else:
            await sleep(wait_s)


async def _until_lost(router: Router, wait_s: float, sleep: Callable[[float], Awaitable[None]]) -> None:
    """For so many seconds, or until the mapping is lost."""

    async def wait() -> None:
        await sleep(wait_s)

    async with task_scope() as tasks:
        keeping, waiting = tasks.create_task(router.keep()), tasks.create_task(wait())
        await asyncio.wait((keeping, waiting), return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            log.info("%s", keeping.result().reason)
        keeping.cancel()
        waiting.cancel()
