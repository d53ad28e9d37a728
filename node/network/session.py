"""Session of a node in one run: directory, links, and a synchronized view of the other peers."""

import asyncio
import logging
import random
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from node.concurrency.task_groups import TaskTracker, background, set_or_after, task_scope
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer, OwnRecord
from node.observability.events import Event, EventSink, PeerChange
from node.observability.status import Status, parse_status
from protocol.dht.directory import DhtDirectory, DirectorySettings, RelayTunnels
from protocol.identity.certificates import make_credentials, peer_of_certificate, run_and_dht_port
from protocol.identity.keys import Identity
from protocol.identity.signed_records import RECORD_LIFETIME_S, decode_announced
from protocol.interfaces.clock import Clock, SystemClock
from protocol.interfaces.transport import Contact, Question, QuestionAbout, Transport
from protocol.manifest.join_link import JoinLink, Link, ShortLink, multiaddr_of, short_link
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from protocol.nat.dial_back import DIAL_BACK_S, certificate_at
from protocol.transport.dialer import Calls, Ways
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.handshake import end_for, is_duplicate
from protocol.transport.settings import TransportSettings, free_ports, host_of, joined
from swarm.membership.membership import ENOUGH, STAY, LookUps, Membership, is_far, what_changed
from swarm.routing.planner import CANDIDATES
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import ManifestError, PeerError, ProtocolViolation, Rejected, Stalled, Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId, short

log = logging.getLogger(__name__)

LOOK_UP_GAP_S = 0.25  # Shortest time between look-ups
LOOK_S = 5.0  # Timeout of a look-up on demand
WHOLE = 0.25  # Share of the look-ups for modules whose known replicas are all linked: newcomers introduce themselves
WHOLE_S = 600.0  # Time after the end of a link in which each look-up is whole: the network may have been cut
GROUP_S = 60.0  # Time after a new link in which each look-up is whole: those who come together do not know each other
PUSH_S = 5.0
PUBLISH_RETRY_S = 1.0
GREET_S = 1.0
GREETED_AT_ONCE = 8
MOST_GREETED = 128  # Links beyond which no more are opened for possible work
FEW_REPLICAS = 2  # Modules with this few replicas are probed before a decision
MAX_ASKED = 64
MOST_CALLED_THROUGH = 8


@dataclass(frozen=True, slots=True)
class KnownPeers:
    """Addresses of the peers in the membership view: a `protocol.interfaces.transport.AddressBook`."""

    membership: Membership

    def contact(self, peer: PeerId) -> Contact | None:
        if (a := self.membership.get(peer)) is not None:
            return Contact(peer, a.addresses, a.certificate, a.via, a.relay)
        # A hop knows a few of many replicas. The data node that chose an unknown one can ask that one to dial us.
        data_nodes = {known.peer for known in self.membership.peers() if known.module == ModuleId(0)}
        through = some(data_nodes & self.membership.linked, MOST_CALLED_THROUGH)
        return Contact(peer, (), b"", tuple(through)) if through else None

    def relay_of(self, peer: PeerId) -> str:
        """Returns the multiaddr at which the peer relays tunnels; empty if the peer is unknown or not a relay."""
        return "" if (known := self.membership.get(peer)) is None else known.relay


@dataclass(slots=True, eq=False)
class MembershipSync:
    """Membership of a run: looks up other peers, and publishes this node's record to them."""

    own: LocalPeer
    record: OwnRecord
    membership: Membership
    events: EventSink
    directory: DhtDirectory
    transport: Transport
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # Set when the view changes; the waiter clears it
    looked: asyncio.Event = field(default_factory=asyncio.Event)  # Set once all watched modules were looked up
    _modules: tuple[ModuleId, ...] = (ModuleId(0), ModuleId(1))
    _stages: int = 2
    _look_ups: LookUps = field(default_factory=LookUps)
    _whole_until: float = 0.0
    _pushed: Announcement | None = None  # Last announcement to linked peers
    _publish_now: asyncio.Event = field(default_factory=asyncio.Event)
    _look_now: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: TaskTracker = field(default_factory=TaskTracker)

    def watch(self, modules: Sequence[ModuleId]) -> None:
        """Sets the modules whose replicas are looked up in the directory; by default the first two."""
        self._modules = tuple(modules)
        self._stages = 1 + max(module.stage for module in modules)
        self._look_ups = LookUps()
        self.looked.clear()
        self._look_now.set()

    async def look(self) -> None:
        """Looks all watched modules up now, for a decision that needs a fresh view; gives up after LOOK_S."""
        self.looked.clear()
        self._look_now.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.looked.wait(), LOOK_S)

    def announce(self) -> None:
        """Requests that this node's record is published soon, because its state changed."""
        self._publish_now.set()

    async def publish(self) -> bool:
        """Announces this node to linked peers and the directory. False without a valid record. Raises Unreachable."""
        announcement = self.own.announcement()
        record = self.record.of(announcement)
        self._push(announcement, record)
        if self.record.is_encodable:
            await self.directory.publish(announcement, record)
        return self.record.is_encodable

    def _push(self, announcement: Announcement, record: bytes = b"") -> None:
        """Sends this node's record to linked peers if it changed; signs it if it is not given."""
        if not what_changed(self._pushed, announcement):
            return
        record = record or self.record.of(announcement)
        if self.record.is_encodable:
            self._pushed = announcement
            self.transport.announce(record)

    def receiving(self, dispatcher: Dispatcher) -> AbstractContextManager[None]:
        """Receives other peers' records and link changes from the dispatcher within the block."""
        return dispatcher.registered(announced=self.announced, link_up=self.link_up, link_down=self.link_down)

    async def run(self) -> None:
        """Looks up peers and publishes this node's record periodically, until cancelled."""
        async with self._tasks.running(), task_scope() as loops:
            loops.create_task(self._look_up_for_ever())
            loops.create_task(self._publish_for_ever())
            loops.create_task(self._push_for_ever())
            loops.create_task(self._greet_for_ever())

    def announced(self, sender: PeerId, record: bytes) -> None:
        """Stores a linked peer's own record. Ends the node if a record proves that another process uses our key."""
        # A record on its owner's link is fresh, so its expiry is judged by the sender's clock, not by ours.
        try:
            announcement = decode_announced(record, run=self.membership.run, now=None)
        except ProtocolViolation as error:
            log.debug("record from %s: %s", sender, error)
            return
        if announcement.peer == sender:
            self._observe([announcement], wall=announcement.expires_at - RECORD_LIFETIME_S)
        elif is_duplicate(
            announcement, self.own.peer, self.own.certificate, self.own.incarnation, self.own.clock.wall()
        ):
            self._tasks.begin(end_for(announcement))

    def link_up(self, peer: PeerId) -> None:
        self.membership.recover(peer)
        self._look_whole(GROUP_S)
        self.events.emit(PeerChange(peer, "up", ""))
        self.changed.set()

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        """Marks the peer of a failed link as suspect and probes it; forgets a visitor (a peer without a module)."""
        now, known = self.own.clock.monotonic(), self.membership.get(peer)
        if known is not None and known.state is PeerState.VISITING:
            self.membership.forget(peer)
            self.changed.set()
        elif known is not None and not self.membership.is_suspect(peer, now):  # one probe of a suspect peer is enough
            self._tasks.begin(self._probe(peer))
            self._look_whole(WHOLE_S)
        was_linked = peer in self.membership.linked
        self.membership.fail(peer, now)
        # A path may have led to a peer that is not in our view yet.
        if known is None or known.module in self._missing() - self._look_ups.missing:
            self._look_now.set()
        if was_linked:
            self.events.emit(PeerChange(peer, "down", str(error)))
        self.changed.set()

    def _look_whole(self, seconds: float) -> None:
        if len(self.membership.linked) < ENOUGH:  # in a large swarm links come and go all the time
            self._whole_until = max(self._whole_until, self.own.clock.monotonic() + seconds)

    async def _probe(self, peer: PeerId, *, is_greeting: bool = False) -> Status | None:
        """Asks the peer for its status; marks the peer as dead if it does not answer, so that no work is sent there."""
        try:
            answer = await self.transport.ask(peer, Question(QuestionAbout.STATUS), 5.0)
            if self.membership.is_suspect(peer, now := self.own.clock.monotonic()):
                self.membership.answered(peer, now)  # it sends no record while nothing changes
                self.changed.set()
            return parse_status(answer)
        except (Unreachable, Stalled) as error:
            log.debug("%s does not answer: %s", peer, error)
            # Silence at a greeting has no consequence: a cut network would cost all replicas.
            if isinstance(error, Unreachable) or not is_greeting:
                self.membership.give_up(peer, self.own.clock.monotonic())
                self.changed.set()
        except PeerError as error:
            log.debug("%s is alive, but refused to answer: %s", peer, error)
        return None

    async def serves(self, peer: PeerId, module: ModuleId) -> bool:
        """Asks the peer whether it serves the module; False if it refuses or does not answer."""
        said = await self._probe(peer)
        return said is not None and (said.module, said.state) == (str(module), PeerState.SERVING.name.lower())

    async def alive(self, modules: Sequence[ModuleId]) -> list[Announcement]:
        """Returns the announcements of peers that host a module, without peers that did not answer a probe."""
        # A record outlives its peer by up to a minute. Probe only modules with few replicas, where one peer matters.
        known = [a for a in self.membership.peers() if a.module is not None]
        replicas, wanted = Counter(a.module for a in known), frozenset(modules)
        few = [a for a in known if a.module in wanted and replicas[a.module] <= FEW_REPLICAS]
        asked = [a.peer for a in few if a.is_reachable][:MAX_ASKED]
        await asyncio.gather(*(self._probe(peer) for peer in asked))
        return [a for a in known if not self.membership.is_given_up(a.peer)]

    async def _look_up_for_ever(self) -> None:
        while True:
            watched, alone = self._modules, False
            try:
                wide = self._look_ups.begin(begun := self.own.clock.monotonic())
                whole = not self.looked.is_set() or begun < self._whole_until
                if whole or random.random() < WHOLE:  # noqa: S311 - not a secret
                    modules = list(watched)
                else:
                    well = self._well_linked()
                    modules = [module for module in watched if module not in well]
                    modules = modules if wide.value else self.membership.not_linked(modules)
                if not (looks_far := self._look_ups.looks_far(begun, whole=whole)):
                    missing = self._missing()
                    modules = [module for module in modules if module in missing or not self._is_far(module)]
                found, wall = await self.directory.look_up(modules, wide=wide.value), self.own.clock.wall()
                if looks_far:
                    replicas = Counter(a.module for a in found)
                    self._look_ups.fewest_far = min((replicas[m] for m in modules if self._is_far(m)), default=0)
                self._observe(found, wall)
                if looks_far:
                    self._forget_far(wall)
                if watched is self._modules:  # `watch` may have replaced the modules meanwhile
                    self.looked.set()
            except Unreachable as error:
                log.info("directory: %s", error)
                alone = True
            now = self.own.clock.monotonic()
            if self.membership.expire(now):
                self.changed.set()
            # Nodes that wait for the run to begin know each other, and have nothing to tell.
            alone = alone or all(known.module is None for known in self.membership.peers())
            pause = self._look_ups.pause(self._missing(), now, random.random(), alone=alone)  # noqa: S311 - not a secret
            log.debug("next look-up in %.1f s: %s", pause.value, pause.reason)
            await asyncio.sleep(LOOK_UP_GAP_S)
            await set_or_after(self._look_now, max(0.0, pause.value - LOOK_UP_GAP_S))

    async def _publish_for_ever(self) -> None:
        while True:
            wait = RECORD_LIFETIME_S / 3  # two publications may fail before the record expires
            try:
                if not await self.publish():
                    wait = PUBLISH_RETRY_S
            except Unreachable as error:
                log.info("directory: %s", error)
                wait = PUBLISH_RETRY_S
            await set_or_after(self._publish_now, wait)

    async def _push_for_ever(self) -> None:
        """Sends this node's load and progress, as they change, to linked peers until cancelled."""
        offset_s = self._clock_offset_s()
        while True:
            await asyncio.sleep(PUSH_S)
            before_s, offset_s = offset_s, self._clock_offset_s()
            if abs(offset_s - before_s) > 5.0:
                log.warning(
                    "this machine's clock jumped by %+.0f s, or the machine slept; links continue, but new peers "
                    "find this node only while its clock is right",
                    offset_s - before_s,
                )
                self.announce()
            self._push(self.own.announcement())

    async def _greet_for_ever(self) -> None:
        """Opens links to the replicas that we work with, a few at a time, until cancelled."""
        # Only linked replicas get work while one of them serves: a name whose address is silent delays no microbatch.
        met: set[PeerId] = set()
        while True:
            await asyncio.sleep(GREET_S)
            linked = self.membership.linked
            # Stage 0 works with all modules; others introduce themselves to it and to the stages before and behind.
            useful = {module for module in self._modules if self.own.module is not None and not self._is_far(module)}
            useful -= self._well_linked()
            # A link to a joining peer brings its record as soon as it serves.
            near = (a for a in self.membership.peers() if a.module in useful)
            known = {a.peer for a in near if a.state in STAY and a.is_reachable}
            met = (met | linked) & known
            room = max(0, min(GREETED_AT_ONCE, MOST_GREETED - len(linked)))
            # Half of the room is for peers whose link broke, and the choice is random: many silent names cannot keep an
            # honest replica waiting for long.
            chosen = some(met - linked, room // 2)
            chosen += some({peer for peer in known - met if not self.membership.is_given_up(peer)}, room - len(chosen))
            await asyncio.gather(*(self._probe(peer, is_greeting=True) for peer in chosen))  # for the link

    def _clock_offset_s(self) -> float:
        return self.own.clock.wall() - self.own.clock.monotonic()

    def _observe(self, announcements: Sequence[Announcement], wall: float) -> None:
        now = self.own.clock.monotonic()
        changes = [
            self.membership.observe(a, now=now, wall=wall - self._look_ups.far_kept_s * self._is_far(a.module))
            for a in announcements
        ]
        if any(changes):
            self.changed.set()

    def _forget_far(self, wall: float) -> None:
        """Forgets unlinked peers of far stages whose records ran out before the look-up that has just ended."""
        unlinked = (known for known in self.membership.peers() if known.peer not in self.membership.linked)
        if gone := [known.peer for known in unlinked if known.expires_at < wall and self._is_far(known.module)]:
            for peer in gone:
                self.membership.forget(peer)
            self.changed.set()

    def _well_linked(self) -> set[ModuleId | None]:
        """Returns the modules that need no more links. Our own is never one: a round needs all of its replicas."""
        own, most = self.own.module, max(ENOUGH, min(sum(CANDIDATES), MOST_GREETED // len(self._modules)))
        return self.membership.well_linked(most if own == ModuleId(0) else ENOUGH) - {own}

    def _is_far(self, module: ModuleId | None) -> bool:
        return is_far(self.own.module, module, self._stages)

    def _missing(self) -> frozenset[ModuleId]:
        """Returns the watched modules, except our own, without a usable replica."""
        served = self.membership.with_replicas(self.own.clock.monotonic())
        return frozenset(self._modules) - served - {self.own.module}


def some(peers: set[PeerId], most: int) -> list[PeerId]:
    return random.sample(tuple(peers), min(most, len(peers)))


Answer = TypeVar("Answer")

ASK_TIMEOUT_S = 10.0
PAUSE_S = 0.3
LOOK_AROUND_S = 1.5  # Enough for one look-up of every module
ASKED_AT_ONCE = 16  # For the manifest
MAX_LINK_PEERS = 4
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - by the name of "all interfaces"


async def first_good(peers: Sequence[PeerId], ask: Callable[[PeerId], Awaitable[Answer]]) -> Answer:
    """Asks all peers at once. Returns the first valid answer. Raises Unreachable with the last failure."""
    answers, why = list[Answer](), "no peer was asked"

    async def attempt(peer: PeerId) -> None:
        nonlocal why
        try:
            answers.append(await ask(peer))
        except (PeerError, ManifestError) as error:
            why = f"{short(peer)}: {error}"

    async with task_scope() as tasks:
        attempts = [tasks.create_task(attempt(peer)) for peer in peers]
        for attempted in asyncio.as_completed(attempts):
            await attempted
            if answers:
                for each in attempts:
                    each.cancel()
                return answers[0]
    raise Unreachable(why)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Addresses on which this node listens, and its advertised host. Port 0 is any free port."""

    listen: str
    advertise: str | None = None
    port: int = 0

    def local(self, port: int) -> str:
        """Returns the `host:port` at which programs on this machine reach one of this node's ports."""
        return joined(LOOPBACK.get(self.listen, self.listen), port)

    def advertised_hosts(self, initial_peers: tuple[str, ...] = ()) -> list[str]:
        """Returns the hosts to advertise: the option's, the bound one, or our addresses towards peers or outside."""
        if self.advertise or self.listen not in LOOPBACK:
            return [self.advertise or self.listen]
        if (towards_peer := address_to_reach(initial_peers)) is not None:
            return [towards_peer]
        outside = ("192.0.2.1", "2001:db8::1") if self.listen == "::" else ("192.0.2.1",)
        return [own for host in outside if (own := address_towards(host)) is not None] or [LOOPBACK[self.listen]]


@dataclass(frozen=True, slots=True)
class NetworkSession:
    """Connection of a node to one run: identity, membership, links and directory. Made by `present`."""

    run: RunId
    identity: Identity
    own: LocalPeer
    membership_sync: MembershipSync
    dispatcher: Dispatcher
    directory: DhtDirectory
    transport: GrpcTransport
    tunnels: RelayTunnels
    book: KnownPeers
    local_address: str  # `host:port` for this machine's own programs
    introduced: frozenset[PeerId]  # Peers in the join link
    first: "NetworkSession | None" = None  # Of the node's first module, if this is a further one

    @property
    def membership(self) -> Membership:
        return self.membership_sync.membership

    @property
    def link(self) -> Link:
        """Returns a join link with our addresses. If nobody can dial us, it has the addresses of two other peers."""
        if self.first is not None:
            return self.first.link
        others = [known.addresses[0] for known in self.others() if known.addresses]
        if addresses := self.own.addresses or tuple(others[:2]):
            return short_link(self.run, addresses)
        return JoinLink(self.run, tuple(self.directory.multiaddrs()[:MAX_LINK_PEERS]))

    def others(self) -> list[Announcement]:
        """Returns the announcements of known peers, without visitors (peers that host no module)."""
        return [seen for seen in self.membership.peers() if seen.state is not PeerState.VISITING]

    async def look_around(self, manifest: Manifest) -> list[Announcement]:
        """Looks up the peers of every module for `LOOK_AROUND_S` seconds. Returns `others`."""
        self.membership_sync.watch(manifest.modules())
        await asyncio.sleep(LOOK_AROUND_S)
        return self.others()

    async def withdraw(self, limit_s: float) -> None:
        """Announces to linked peers and the directory that this node no longer hosts a module."""
        self.own.state, self.own.module = PeerState.VISITING, None
        try:
            async with asyncio.timeout(limit_s):
                await self.membership_sync.publish()
        except (Unreachable, TimeoutError) as error:
            log.info("the directory drops this node only when its record expires: %s", error)

    async def fetch_manifest(self, patience_s: float) -> SignedManifest:
        """Downloads the manifest from a peer, first from those in the link. Raises Unreachable after `patience_s`."""

        async def ask(peer: PeerId) -> SignedManifest:
            text = await self.transport.ask(peer, Question(QuestionAbout.MANIFEST), ASK_TIMEOUT_S)
            return read_signed_manifest(text, self.run)

        what = "gave this run's manifest"
        return await self.first_answer(ask, lambda state: True, patience_s, what, ASKED_AT_ONCE)

    async def first_answer(
        self,
        ask: Callable[[PeerId], Awaitable[Answer]],
        wanted: Callable[[PeerId], bool],
        patience_s: float,
        what: str,
        at_once: int = 1,
    ) -> Answer:
        """Asks `wanted` peers until one answers well. Raises Unreachable ("no peer `what`") after `patience_s`."""
        last = "the directory has none"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            peers = [known.peer for known in self.others() if known.is_reachable and wanted(known.peer)]
            # Peers named in the link were chosen by the inviter, so ask them first.
            peers.sort(key=lambda peer: peer not in self.introduced)
            for first in range(0, len(peers), at_once):
                try:
                    return await first_good(peers[first : first + at_once], ask)
                except Unreachable as error:
                    last = str(error)
                    log.info("%s", last)
            if loop.time() >= deadline:
                raise Unreachable(
                    f"no peer {what} within {patience_s:.0f} s; {last}",
                    hint="Check that the link is right, its peers run, and their ports can be reached from here.",
                )
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def present(
    identity: Identity,
    run: RunId,
    where: Whereabouts,
    settings: DirectorySettings,
    clock: Clock,
    events: EventSink,
    first: NetworkSession | None = None,  # Of the node's first module, whose DHT process a further module uses
) -> AsyncIterator[NetworkSession]:
    """Connects to a run without hosting a module, until the end of the block. Raises ConfigError if a port is taken."""
    # The certificate has the port of the DHT, which starts later.
    if settings.host and not (where.port and settings.port):
        port, dht_port = free_ports(settings.host, f"{identity.peer}{run}", 2)
        where = replace(where, port=where.port or port)
        settings = replace(settings, port=settings.port or dht_port)
    credentials = make_credentials(identity, run, settings.port)
    own = LocalPeer(run, identity.peer, credentials.certificate_der, clock)
    membership = Membership(run, identity.peer)
    book = KnownPeers(membership)
    record, dispatcher = OwnRecord(own, identity), Dispatcher(own, membership)
    async with AsyncExitStack() as stack:
        directory = DhtDirectory(settings, identity, run, clock) if first is None else first.directory
        tunnels = RelayTunnels(directory, book.relay_of)
        ways = Ways(Calls(book, clock, record.fresh, lambda: bool(own.addresses)), tunnels)
        listen = TransportSettings(listen_host=where.listen, listen_port=where.port)
        traffic = None if first is None else first.transport.traffic
        needs = credentials, book, dispatcher, clock, listen
        transport = GrpcTransport(*needs, own_record=record.fresh, ways=ways, traffic=traffic)
        sync = MembershipSync(own, record, membership, events, directory, transport)
        stack.enter_context(sync.receiving(dispatcher))
        await stack.enter_async_context(transport)
        hosts = await asyncio.to_thread(where.advertised_hosts, settings.initial_peers)  # may need DNS
        own.addresses = tuple(joined(host, transport.port) for host in hosts)
        if first is None:
            await stack.enter_async_context(directory)
        await stack.enter_async_context(background(sync.run()))
        # A multiaddr ends with its peer id.
        introduced = frozenset(PeerId(multiaddr.rpartition("/")[2]) for multiaddr in settings.initial_peers)
        ends = where.local(transport.port), introduced, first
        yield NetworkSession(run, identity, own, sync, dispatcher, directory, transport, tunnels, book, *ends)


def address_towards(host: str, *, by_ip6: bool = False) -> str | None:
    """Returns this machine's address on the route to a host; None without a route. Sends no packet, except to DNS."""
    family = socket.AF_INET6 if by_ip6 or ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # connecting a UDP socket only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def address_to_reach(multiaddrs: tuple[str, ...]) -> str | None:
    """Returns this machine's address on the route to the first resolvable multiaddr. Sends no packet, except to DNS."""
    for multiaddr in multiaddrs:
        _, kind, host, *_ = multiaddr.split("/")
        if (own := address_towards(host, by_ip6=kind.endswith("6"))) is not None:
            return own
    return None


class _Silent:
    """Event sink that drops every event, for commands that report only their result."""

    def emit(self, event: Event) -> None:
        return


async def full_link(link: Link, patience_s: float) -> JoinLink:
    """Completes a short link by the certificates of the nodes at its addresses. Raises Unreachable, Rejected."""
    if isinstance(link, JoinLink):
        return link
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        answers = await asyncio.gather(*(_node_at(address, link) for address in link.addresses))
        found = [answer for answer in answers if not isinstance(answer, PeerError)]
        if found:
            return JoinLink(found[0][0], tuple(peer for run, peer in found if run == found[0][0]), link.invitation)
        errors = [answer for answer in answers if isinstance(answer, PeerError)]
        if asyncio.get_running_loop().time() >= deadline or all(isinstance(error, Rejected) for error in errors):
            raise errors[0]
        await asyncio.sleep(PAUSE_S)


async def _node_at(address: str, link: ShortLink) -> tuple[RunId, str] | PeerError:
    """Returns the RunId and the multiaddr of the node at an address, both proven by its certificate, or the error."""
    host, port = host_of(address), int(address.rpartition(":")[2])
    hint = "Ask for the link again: the node at this address may have been replaced."
    try:
        async with asyncio.timeout(DIAL_BACK_S):
            certificate = await certificate_at(host, port)
        run, dht_port = run_and_dht_port(certificate, link.second_half)
    except (ConnectionRefusedError, TimeoutError):
        return Unreachable(f"nobody answers at {address}")
    except (ssl.SSLError, ConnectionError, EOFError, ProtocolViolation):
        return Rejected(f"{address} answers, and is not a Skipstone node", hint=hint)
    except OSError as error:
        return Unreachable(f"nobody answers at {address}: {error.strerror or error}")
    try:
        return run, f"{multiaddr_of(host, dht_port)}/p2p/{peer_of_certificate(certificate, run)}"
    except ProtocolViolation:
        return Rejected(f"the node at {address} answers, and serves another run", hint=hint)


@asynccontextmanager
async def visit(link: Link, listen: str | None = None, port: int = 0) -> AsyncIterator[NetworkSession]:
    """Connects to a run as a client within the block: new key, no module, and a DHT client that does not listen."""
    # Listen only on the interface towards the first peer; peers behind NAT must be able to call back.
    full = await full_link(link, patience_s=30.0)
    if listen is None:
        listen = await asyncio.to_thread(address_to_reach, full.peers) or "127.0.0.1"  # may need DNS
    settings = DirectorySettings("", 0, (), full.peers, client=True)
    where = Whereabouts(listen=listen, port=port)
    async with present(Identity.generate(), full.run, where, settings, SystemClock(), _Silent()) as session:
        yield session
