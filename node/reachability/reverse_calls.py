"""The roles in a call that are not the caller's: who passes it on, and who is called and opens the link."""

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
from protocol.transport.rate_limits import Allowance
from swarm.membership.membership import Membership, by_worth, relays_first
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import Busy, PeerError, Rejected, Unreachable
from swarm.vocabulary.types import PeerId, RunId, short

log = logging.getLogger(__name__)

WANTED: Final = 3
MAX_TRIED: Final = 9  # Until WANTED links are open
CONNECT_S: Final = 6.0
AVOIDED_S: Final = 60.0  # Pause of an unreachable peer


@dataclass(slots=True, eq=False)
class Attachments:
    """The held links of this node. They are the transport's, like all others, and stay as long as both sides live."""

    own: LocalPeer
    membership: Membership
    links: GrpcTransport
    connect_s: float = CONNECT_S
    _held: tuple[PeerId, ...] = field(default=(), init=False)
    _avoided: dict[PeerId, float] = field(default_factory=dict, init=False)  # Until when

    async def hold(self) -> tuple[PeerId, ...]:
        """Opens links to the best peers, as far as they can be had. Returns those that do, at most three."""
        known = [a for a in self.membership.peers() if not self.membership.is_given_up(a.peer)]
        best = by_worth(self.own.peer, self.own.module, known, self._held)
        best = relays_first(best, {a.peer for a in known if a.relay})
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
            log.info("%s cannot be held on to: %s", short(peer), error)
            self._avoided[peer] = self.own.clock.monotonic() + AVOIDED_S
            return None
        return peer

    def _is_avoided(self, peer: PeerId) -> bool:
        return self._avoided.get(peer, 0.0) > self.own.clock.monotonic()


FOLLOW_S: Final = 5.0  # For opening the link: as much as dialling
PASS_ON_S: Final = FOLLOW_S + 1.0
PASSED_ON_BURST: Final = 32
PASSED_ON_REFILL_S: Final = 2.0  # Of one address: enough for a data node that calls all its hops at once
MAX_AT_ONCE_TO_ONE: Final = 4  # Half of its open questions, so that it can still be asked for its state
FOLLOWED_BURST: Final = 4
FOLLOWED_REFILL_S: Final = 5.0  # Of one caller
MAX_FOLLOWED_AT_ONCE: Final = 16


@dataclass(slots=True, eq=False)
class Switchboard:
    """Answers CALL and CALLED questions. `learn` makes the caller's record known, so that it can be dialled."""

    # A caller names only itself: its own signed record says whom to dial. Both sides limit the rate.

    run: RunId
    own: PeerId
    links: GrpcTransport
    learn: Callable[[PeerId, bytes], None]
    clock: Clock
    _passed_on: Allowance = field(default_factory=lambda: Allowance(PASSED_ON_BURST, PASSED_ON_REFILL_S))
    _followed: Allowance = field(default_factory=lambda: Allowance(FOLLOWED_BURST, FOLLOWED_REFILL_S))
    _open: Counter[PeerId] = field(default_factory=Counter)
    _following: set[PeerId] = field(default_factory=set)

    async def pass_on(self, asker: PeerId, question: Question) -> bytes:
        """Has a linked peer open a link to the asker. Raises Busy, Rejected, or the called peer's error."""
        end = self.links.far_end(asker)
        if end is None or not self._passed_on.take(end.host, self.clock.monotonic()):
            raise Busy("enough calls from your address were passed on; call again in a few seconds")
        if self._read(question.record).peer != asker:
            raise Rejected("the record that came with the call is another peer's")
        called = question.peer
        if called is None or not self.links.is_linked(called):
            raise Rejected("the peer that you call has no link to this one")
        if self._open[called] >= MAX_AT_ONCE_TO_ONE:
            raise Busy("the peer that you call is being called by others; call again in a few seconds")
        self._open[called] += 1
        try:
            return await self.links.ask(called, Question(QuestionAbout.CALLED, record=question.record), PASS_ON_S)
        finally:
            self._open -= Counter((called,))  # and nothing is kept of 0

    async def follow(self, _sender: PeerId, question: Question) -> bytes:
        """Opens a link to the owner of the record unless there is one. Raises Busy, Rejected, or the dial's error."""
        caller = self._read(question.record).peer
        if self.links.is_linked(caller):
            return b""
        if caller in self._following or len(self._following) >= MAX_FOLLOWED_AT_ONCE:
            raise Busy("a call is being followed already")
        if not self._followed.take(caller, self.clock.monotonic()):
            raise Busy("this caller was dialled often enough")
        self.learn(caller, question.record)
        self._following.add(caller)
        try:
            async with asyncio.timeout(FOLLOW_S):
                await self.links.connect(caller)
        except TimeoutError:
            raise Unreachable(f"{short(caller)} could not be connected to within {FOLLOW_S:g} s") from None
        finally:
            self._following.remove(caller)
        return b""

    def _read(self, record: bytes) -> Announcement:
        """Raises ProtocolViolation when the record proves nothing, Rejected when it leads nowhere."""
        caller = decode_announced(record, run=self.run, now=self.clock.wall())
        if not caller.addresses:
            raise Rejected("whoever calls must be able to be dialled")
        if caller.peer == self.own:
            raise Rejected("a peer does not call itself")
        return caller
