"""Calls to a peer that cannot be dialled: a third peer passes the call on, and the called peer opens the link."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from node.network.local_peer import LocalPeer
from node.reachability.reach_test import in_waves
from protocol.identity.signed_records import decode_announced
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.rate_limits import TokenBuckets
from swarm.membership.membership import Membership, by_worth, relays_first
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import Busy, PeerError, Rejected, Unreachable
from swarm.vocabulary.types import PeerId, RunId, short

log = logging.getLogger(__name__)

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
        # Avoided peers are tried last, but not skipped.
        order = sorted(best, key=self._is_avoided)[:MAX_TRIED]
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
        # Otherwise a caller could aim the called peer at a third party.
        if self._read(question.record).peer != asker:
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
