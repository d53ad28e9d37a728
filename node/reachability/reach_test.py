"""Reachability test by dialling back: a witness dials, and a node asks a few peers to be its witnesses."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from node.network.session import address_towards
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import FarEnd, Question, QuestionAbout
from protocol.nat.dial_back import (
    DIAL_BACK_S,
    DialBackOutcome,
    DialBackResult,
    decode_dial_back,
    dial_back,
    encode_dial_back,
)
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.rate_limits import TokenBuckets
from swarm.membership.membership import Membership
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import Busy, PeerError
from swarm.vocabulary.types import PeerId, PeerState, short

log = logging.getLogger(__name__)

WITNESSES: Final = 3
MAX_ASKED: Final = 9  # Stops when WITNESSES have answered
ASK_TIMEOUT_S: Final = DIAL_BACK_S + 7.0  # The dial-back, plus opening a link first
MAX_AT_ONCE: Final = 8
BURST: Final = 16
REFILL_S: Final = 10.0  # Per address: enough for several nodes of one household that start together

Got = TypeVar("Got")


@dataclass(slots=True, eq=False)
class Witness:
    """Tester of other peers' reachability: answers DIAL_BACK questions by dialling the address of the asker's link."""

    # The asker cannot choose the host, so it cannot aim us at a third party.

    far_end: Callable[[PeerId], FarEnd | None]
    clock: Clock
    dial: Callable[[str, int, bytes], Awaitable[DialBackResult]] = dial_back
    _allowance: TokenBuckets = field(default_factory=lambda: TokenBuckets(BURST, REFILL_S))
    _testing: set[PeerId] = field(default_factory=set)

    async def answer(self, asker: PeerId, question: Question) -> bytes:
        """Dials the asker's port and returns the result. Raises Busy at the limits of asker, address or all askers."""
        end = self.far_end(asker)
        if end is None:
            return encode_dial_back(DialBackResult("", DialBackOutcome.NOT_TRIED, "your link has just ended"))
        if asker in self._testing or len(self._testing) >= MAX_AT_ONCE:
            raise Busy("a dial-back is in progress; ask again in a few seconds")
        if not self._allowance.take(end.host, self.clock.monotonic()):
            raise Busy("too many dial-backs to your address; ask again in a minute")
        self._testing.add(asker)
        try:
            return encode_dial_back(await self.dial(end.host, question.port, end.certificate))
        finally:
            self._testing.remove(asker)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Result of one peer's attempt to dial a port of ours."""

    witness: PeerId
    result: DialBackResult
    local_host: str | None  # Our address towards the witness; if the witness sees another one, the node is behind NAT


Ask = Callable[[int], Awaitable[Sequence[Attempt]]]  # Lets a few peers dial a port of ours; empty without peers


def witnesses_of(
    membership: Membership, links: GrpcTransport, choose: Callable[[list[Announcement]], None] = random.shuffle
) -> Ask:
    """Returns a function that asks up to three peers in different networks; `choose` orders the candidates."""

    async def ask(port: int) -> list[Attempt]:
        candidates = [a for a in membership.peers() if a.is_reachable and a.state is not PeerState.VISITING]
        choose(candidates)
        order = [a.peer for a in scattered(candidates)][:MAX_ASKED]
        return await in_waves(order, WITNESSES, lambda peer: _ask_one(links, peer, port))

    return ask


async def in_waves(
    peers: Sequence[PeerId], wanted: int, attempt: Callable[[PeerId], Awaitable[Got | None]]
) -> list[Got]:
    """Runs `attempt` on peers in waves until `wanted` attempts succeed. Returns their results."""
    found: list[Got] = []
    while peers and (missing := wanted - len(found)):
        now, peers = peers[:missing], peers[missing:]
        found += [got for got in await asyncio.gather(*map(attempt, now)) if got is not None]
    return found


def scattered(candidates: Sequence[Announcement]) -> list[Announcement]:
    """Orders peers: one of each network first, then the others, and peers without addresses last."""
    # A peer without addresses must be called, which fails before this node knows its own address.
    first: list[Announcement] = []
    later: list[Announcement] = []
    seen: set[str] = set()
    for announcement in candidates:
        if announcement.addresses:
            network = network_of(announcement.addresses[0])
            (later if network in seen else first).append(announcement)
            seen.add(network)
    return first + later + [announcement for announcement in candidates if not announcement.addresses]


def network_of(address: str) -> str:
    """Returns the network of a `host:port`: the /24 of an IPv4 address, the /48 of an IPv6 one, a name itself."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((found, 24 if found.version == 4 else 48), strict=False))


async def _ask_one(links: GrpcTransport, peer: PeerId, port: int) -> Attempt | None:
    try:
        answer = await links.ask(peer, Question(QuestionAbout.DIAL_BACK, port=port), ASK_TIMEOUT_S)
        result = decode_dial_back(answer)
    except PeerError as error:
        log.info("%s cannot be a witness: %s", short(peer), error)
        return None
    end = links.far_end(peer)
    return Attempt(peer, result, None if end is None else address_towards(end.host))
