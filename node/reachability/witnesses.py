"""Reachability with the help of peers: witnesses dial back, and peers pass calls on to one that cannot be dialled."""

import asyncio
import ipaddress
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from node.network.local_peer import LocalPeer
from node.network.session import address_towards
from protocol.identity.signed_records import decode_announced
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import FarEnd, Question, QuestionAbout
from protocol.nat import dial_back as nat
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.rate_limits import TokenBuckets
from protocol.transport.settings import host_of
from swarm.membership.membership import Membership, by_worth, relays_first
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import Busy, PeerError, Rejected, Unreachable
from swarm.vocabulary.types import PeerId, PeerState, RunId, short

log = logging.getLogger(__name__)

WITNESSES: Final = 3
MAX_ASKED: Final = 9  # Stops when WITNESSES have answered
ASK_TIMEOUT_S: Final = nat.DIAL_BACK_S + 7.0  # The dial-back, plus opening a link first
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
    dial: Callable[[str, int, bytes], Awaitable[nat.DialBackResult]] = nat.dial_back
    _allowance: TokenBuckets = field(default_factory=lambda: TokenBuckets(BURST, REFILL_S))
    _testing: set[PeerId] = field(default_factory=set)

    async def answer(self, asker: PeerId, question: Question) -> bytes:
        """Dials the asker's port and returns the result. Raises Busy at the limits of asker, address or all askers."""
        end = self.far_end(asker)
        if end is None:
            return nat.encode_dial_back(nat.DialBackResult("", nat.DialBackOutcome.NOT_TRIED, "your link has ended"))
        if asker in self._testing or len(self._testing) >= MAX_AT_ONCE:
            raise Busy("a dial-back is in progress; ask again in a few seconds")
        if not self._allowance.take(end.host, self.clock.monotonic()):
            raise Busy("too many dial-backs to your address; ask again in a minute")
        self._testing.add(asker)
        try:
            return nat.encode_dial_back(await self.dial(end.host, question.port, end.certificate))
        finally:
            self._testing.remove(asker)


@dataclass(frozen=True, slots=True)
class Attempt:
    witness: PeerId
    result: nat.DialBackResult
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
    host = host_of(address)
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((found, 24 if found.version == 4 else 48), strict=False))


async def _ask_one(links: GrpcTransport, peer: PeerId, port: int) -> Attempt | None:
    try:
        answer = await links.ask(peer, Question(QuestionAbout.DIAL_BACK, port=port), ASK_TIMEOUT_S)
        result = nat.decode_dial_back(answer)
    except PeerError as error:
        log.info("%s cannot be a witness: %s", short(peer), error)
        return None
    end = links.far_end(peer)
    return Attempt(peer, result, None if end is None else address_towards(end.host))


WANTED: Final = 3
MAX_TRIED: Final = 9  # Stops when WANTED links are open
CONNECT_S: Final = 6.0
AVOIDED_S: Final = 60.0  # Pause before an unreachable peer is tried again


@dataclass(slots=True, eq=False)
class Attachments:
    """Links that a node behind NAT keeps open, so that peers can call it through them. The transport owns them."""

    own: LocalPeer
    membership: Membership
    links: GrpcTransport
    connect_s: float = CONNECT_S
    _held: tuple[PeerId, ...] = field(default=(), init=False)
    _avoided: dict[PeerId, float] = field(default_factory=dict, init=False)  # End of the pause, monotonic

    async def hold(self) -> tuple[PeerId, ...]:
        """Opens links to the best peers, at most three. Returns the connected ones."""
        known = [a for a in self.membership.peers() if not self.membership.is_given_up(a.peer)]
        best = by_worth(self.own.peer, self.own.module, known, self._held)
        best = relays_first(best, {a.peer for a in known if a.relay})
        order = sorted(best, key=self._is_avoided)[:MAX_TRIED]  # avoided peers are tried last, but not skipped
        held = await in_waves(order, WANTED, self._connect)
        self._avoided = {peer: until for peer, until in self._avoided.items() if self._is_avoided(peer)}
        self._held = tuple(held)
        return self._held

    async def _connect(self, peer: PeerId) -> PeerId | None:
        try:
            async with asyncio.timeout(self.connect_s):
                await self.links.connect(peer)
        except (PeerError, TimeoutError) as error:
            log.info("cannot hold a link to %s: %s", short(peer), error)
            self._avoided[peer] = self.own.clock.monotonic() + AVOIDED_S
            return None
        return peer

    def _is_avoided(self, peer: PeerId) -> bool:
        return self._avoided.get(peer, 0.0) > self.own.clock.monotonic()


FOLLOW_S: Final = 5.0  # To open the link: as long as dialling
PASS_ON_S: Final = FOLLOW_S + 1.0
PASSED_ON_BURST: Final = 32
PASSED_ON_REFILL_S: Final = 2.0  # Per address: enough for a data node that calls all its hops at once
MAX_AT_ONCE_TO_ONE: Final = 4  # Half of its open questions, so that status questions still pass
FOLLOWED_BURST: Final = 4
FOLLOWED_REFILL_S: Final = 5.0  # Per caller
MAX_FOLLOWED_AT_ONCE: Final = 16


@dataclass(slots=True, eq=False)
class Switchboard:
    """Passes calls on between linked peers (CALL), connects when called (CALLED). `learn` stores a caller's record."""

    # A caller can name only itself: its signed record gives the address. Both sides limit the rate.

    run: RunId
    own: PeerId
    links: GrpcTransport
    learn: Callable[[PeerId, bytes], None]
    clock: Clock
    _passed_on: TokenBuckets = field(default_factory=lambda: TokenBuckets(PASSED_ON_BURST, PASSED_ON_REFILL_S))
    _followed: TokenBuckets = field(default_factory=lambda: TokenBuckets(FOLLOWED_BURST, FOLLOWED_REFILL_S))
    _open: Counter[PeerId] = field(default_factory=Counter)
    _following: set[PeerId] = field(default_factory=set)

    async def pass_on(self, asker: PeerId, question: Question) -> bytes:
        """Asks a linked peer to open a link to the asker. Raises Busy, Rejected, or the called peer's error."""
        end = self.links.far_end(asker)
        if end is None or not self._passed_on.take(end.host, self.clock.monotonic()):
            raise Busy("too many calls from your address; call again in a few seconds")
        if self._read(question.record).peer != asker:  # otherwise a caller could aim the called peer at a third party
            raise Rejected("the record in the call belongs to another peer")
        called = question.peer
        if called is None or not self.links.is_linked(called):
            raise Rejected("the called peer has no link to this one")
        if self._open[called] >= MAX_AT_ONCE_TO_ONE:
            raise Busy("the called peer is busy with other calls; call again in a few seconds")
        self._open[called] += 1
        try:
            return await self.links.ask(called, Question(QuestionAbout.CALLED, record=question.record), PASS_ON_S)
        finally:
            self._open -= Counter((called,))  # also drops zero counts

    async def follow(self, _sender: PeerId, question: Question) -> bytes:
        """Opens a link to the caller, whose record is in `question`. Raises Busy, Rejected, or the dial's error."""
        caller = self._read(question.record).peer
        if self.links.is_linked(caller):
            return b""
        if caller in self._following or len(self._following) >= MAX_FOLLOWED_AT_ONCE:
            raise Busy("a call is already in progress")
        if not self._followed.take(caller, self.clock.monotonic()):
            raise Busy("too many calls from this caller")
        self.learn(caller, question.record)
        self._following.add(caller)
        try:
            async with asyncio.timeout(FOLLOW_S):
                await self.links.connect(caller)
        except TimeoutError:
            raise Unreachable(f"could not connect to {short(caller)} within {FOLLOW_S:g} s") from None
        finally:
            self._following.remove(caller)
        return b""

    def _read(self, record: bytes) -> Announcement:
        """Decodes a caller's record. Raises ProtocolViolation if it is invalid, Rejected if it cannot be dialled."""
        caller = decode_announced(record, run=self.run, now=self.clock.wall())
        if not caller.addresses:
            raise Rejected("a caller must be reachable itself")
        if caller.peer == self.own:
            raise Rejected("a peer cannot call itself")
        return caller
