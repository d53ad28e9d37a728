"""Synchronisation of the membership view with the directory and with linked peers, both ways."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from node.concurrency.task_groups import TaskTracker, set_or_after, task_scope
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer, OwnRecord
from node.observability.events import EventSink, PeerChange
from node.observability.status import parse_status
from protocol.identity.signed_records import RECORD_LIFETIME_S, decode_announced
from protocol.interfaces.directory import Contact, Directory
from protocol.interfaces.transport import Question, QuestionAbout, Transport
from protocol.transport.duplicate_identity import end_for, is_duplicate
from swarm.membership.membership import Change, Membership
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Stalled, Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState

log = logging.getLogger(__name__)

LOOK_UP_EAGER_S = 0.5
LOOK_UP_CALM_S = 5.0
LOOKED_UP_AT_ONCE = 256
"""Modules looked up at once. More are looked up in turns, to bound the directory's load."""
PUSH_S = 2.0
PUBLISH_RETRY_S = 1.0
PROBE_TIMEOUT_S = 5.0
CLOCK_STEP_S = 5.0
"""What the wall clock gains or loses against the steady one between two looks, from which it is worth a word."""
FEW_REPLICAS = 2
MAX_ASKED = 64


class KnownPeers:
    """The contacts from the membership view: a `protocol.interfaces.directory.AddressBook`."""

    def __init__(self) -> None:
        self._contacts: dict[PeerId, Contact] = {}

    def replace_all(self, announcements: Iterable[Announcement]) -> None:
        """Replaces the contacts: from now on exactly these can be dialled."""
        self._contacts = {a.peer: Contact(a.peer, a.addresses, a.certificate, a.via, a.relay) for a in announcements}

    def contact(self, peer: PeerId) -> Contact | None:
        return self._contacts.get(peer)

    def relay_of(self, peer: PeerId) -> str:
        """The multiaddr at which the peer serves tunnels; empty when it does not, or is not known."""
        contact = self._contacts.get(peer)
        return "" if contact is None else contact.relay


class MembershipSync:
    """Keeps this node's membership view, and the others' view of this node, up to date."""

    def __init__(
        self,
        own: LocalPeer,
        record: OwnRecord,
        membership: Membership,
        book: KnownPeers,
        events: EventSink,
        directory: Directory,
        transport: Transport,
    ) -> None:
        self.membership = membership
        self.record = record
        self.changed = asyncio.Event()
        """Set whenever the view changes; whoever waits for a change clears it first."""
        self.looked = asyncio.Event()
        """Set when the directory has been read for the modules that are watched; it may have known nobody."""
        self._own = own
        self._book = book
        self._clock = own.clock
        self._events = events
        self._modules: tuple[ModuleId, ...] = (ModuleId(0), ModuleId(1))
        self._publish_now = asyncio.Event()
        self._look_now = asyncio.Event()
        self._linked: set[PeerId] = set()
        self._directory = directory
        self._transport = transport
        self._tasks = TaskTracker()

    def watch(self, modules: Sequence[ModuleId]) -> None:
        """Sets which modules' replicas to look up. Until this is called: those that every run is likely to have."""
        self._modules = tuple(modules)
        self.looked.clear()
        self._look_now.set()

    def announce(self) -> None:
        """Tells others soon that something about this node has changed."""
        self._publish_now.set()

    def receiving(self, dispatcher: Dispatcher) -> AbstractContextManager[None]:
        """Registers for what links say of peers, within the block."""
        return dispatcher.registered(announced=self.announced, link_up=self.link_up, link_down=self.link_down)

    async def run(self) -> None:
        """Looks up and publishes periodically, until cancelled."""
        async with self._tasks.running(), task_scope() as loops:
            loops.create_task(self._look_up_for_ever())
            loops.create_task(self._publish_for_ever())
            loops.create_task(self._push_for_ever())

    # ---- what the links bring ------------------------------------------------------------------------------------

    def announced(self, sender: PeerId, record: bytes) -> None:
        """Takes a linked peer's own record, or one that proves that another process uses our key."""
        # On a link from its owner a record is fresh, so a clock that jumps costs nobody its linked peers.
        try:
            announcement = decode_announced(record, run=self.membership.run, now=None)
        except ProtocolViolation as error:
            log.debug("record from %s: %s", sender, error)
            return
        if announcement.peer == sender:
            self._observe([announcement], wall=announcement.expires_at - RECORD_LIFETIME_S)
        elif is_duplicate(
            announcement, self._own.peer, self._own.certificate, self._own.incarnation, self._clock.wall()
        ):
            self._tasks.begin(end_for(announcement))

    def link_up(self, peer: PeerId) -> None:
        self._linked.add(peer)
        self.membership.recover(peer)
        self._events.emit(PeerChange(peer, "up", ""))
        self.changed.set()

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        """Notes that a link ended or failed. A visitor is gone with its link."""
        known = self.membership.get(peer)
        if known is not None and known.state is PeerState.VISITING:
            self.membership.forget(peer)
            self._publish_view()
        elif known is None:  # a path led to a peer that we have not heard of yet
            self._look_now.set()
        elif not self.membership.is_suspect(peer, self._clock.monotonic()):
            self._tasks.begin(self._probe(peer))
        self.membership.fail(peer, self._clock.monotonic())
        if peer in self._linked:
            self._linked.remove(peer)
            self._events.emit(PeerChange(peer, "down", str(error)))
        self.changed.set()

    async def _probe(self, peer: PeerId) -> None:
        """Asks the peer at once, so that no microbatch has to find out whether it is gone."""
        try:
            await self._transport.ask(peer, Question(QuestionAbout.STATUS), PROBE_TIMEOUT_S)
        except (Unreachable, Stalled) as error:
            log.debug("%s does not answer: %s", peer, error)
            self.membership.give_up(peer, self._clock.monotonic())
            self.changed.set()
        except PeerError as error:
            log.debug("%s is there, but has nothing to say: %s", peer, error)

    async def serves(self, peer: PeerId, module: ModuleId) -> bool:
        """Whether the peer answers, when asked, that it serves the module. A refusal is no such answer."""
        try:
            said = parse_status(await self._transport.ask(peer, Question(QuestionAbout.STATUS), PROBE_TIMEOUT_S))
        except (Unreachable, Stalled):
            self.membership.give_up(peer, self._clock.monotonic())
            self.changed.set()
            return False
        except PeerError:
            return False
        return (said.module, said.state) == (str(module), PeerState.SERVING.name.lower())

    async def alive(self, modules: Sequence[ModuleId]) -> list[Announcement]:
        """All announcements but those of peers that no longer answer."""
        # A record outlives its peer by up to a minute. Only modules with few peers are asked: one more or less decides
        # there.
        known = [a for a in self.membership.peers() if a.module is not None]
        replicas, wanted = Counter(a.module for a in known), frozenset(modules)
        few = [a for a in known if a.module in wanted and replicas[a.module] <= FEW_REPLICAS]
        asked = [a.peer for a in few if a.is_reachable][:MAX_ASKED]
        await asyncio.gather(*(self._probe(peer) for peer in asked))
        return [a for a in known if not self.membership.is_given_up(a.peer)]

    # ---- loops ---------------------------------------------------------------------------------------------------

    async def _look_up_for_ever(self) -> None:
        while True:
            watched = self._modules
            try:
                for start in range(0, len(watched), LOOKED_UP_AT_ONCE):
                    found = await self._directory.look_up(watched[start : start + LOOKED_UP_AT_ONCE])
                    self._observe(found, self._clock.wall())
                    if watched is not self._modules:
                        break
                    if start + LOOKED_UP_AT_ONCE < len(watched):
                        await asyncio.sleep(LOOK_UP_EAGER_S)
                else:
                    self.looked.set()
            except Unreachable as error:
                log.info("directory: %s", error)
            gone = self.membership.expire(self._clock.monotonic())
            if gone:
                self._publish_view()
            await set_or_after(self._look_now, LOOK_UP_CALM_S if self._is_complete() else LOOK_UP_EAGER_S)

    async def _publish_for_ever(self) -> None:
        while True:
            wait = RECORD_LIFETIME_S / 3
            try:
                announcement = self._own.announcement()
                self._transport.announce(self.record.of(announcement))
                if self.record.is_encodable:
                    await self._directory.publish(announcement)
                else:
                    wait = PUBLISH_RETRY_S
            except Unreachable as error:
                log.info("directory: %s", error)
                wait = PUBLISH_RETRY_S
            await set_or_after(self._publish_now, wait)

    async def _push_for_ever(self) -> None:
        """Load and progress reach those who use us faster than the directory could carry them."""
        offset_s = self._clock_offset_s()
        while True:
            await asyncio.sleep(PUSH_S)
            before_s, offset_s = offset_s, self._clock_offset_s()
            if abs(offset_s - before_s) > CLOCK_STEP_S:
                log.warning(
                    (
                        "this machine's clock was set by %+.0f s (or the machine slept); links go on, newcomers "
                        "find this node while it is right"
                    ),
                    offset_s - before_s,
                )
                self.announce()
            self._transport.announce(self.record.fresh())

    def _clock_offset_s(self) -> float:
        return self._clock.wall() - self._clock.monotonic()

    # ---- the view ------------------------------------------------------------------------------------------------

    def _observe(self, announcements: Sequence[Announcement], wall: float) -> None:
        now = self._clock.monotonic()
        changes = [self.membership.observe(a, now=now, wall=wall) for a in announcements]
        if any(change is not Change.IGNORED for change in changes):
            self._publish_view()

    def _publish_view(self) -> None:
        self._book.replace_all(self.membership.peers())
        self.changed.set()

    def _is_complete(self) -> bool:
        """Whether every module but our own has somebody to go to; while not, news is wanted fast."""
        now = self._clock.monotonic()
        joining = self._own.state in (PeerState.VISITING, PeerState.JOINING)
        return not joining and self.membership.with_replicas(now) | {self._own.module} >= set(self._modules)
