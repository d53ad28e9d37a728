"""A machine's presence in the network of one run: its directory, its links, its view of the others."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from node.concurrency.task_groups import task_scope
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer, OwnRecord
from node.network.membership_sync import KnownPeers, MembershipSync
from node.observability.events import Event, EventSink
from protocol.dht.directory import DhtDirectory, DirectorySettings, RelayTunnels
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signatures import Routes
from protocol.interfaces.clock import Clock, SystemClock
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.join_link import JoinLink
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from protocol.nat.reverse_connect import Calls
from protocol.transport.dialer import Ways
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.membership.membership import Membership
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import ManifestError, PeerError, ProtocolViolation, Unreachable
from swarm.vocabulary.types import PeerId, PeerState, RunId, short

Answer = TypeVar("Answer")


log = logging.getLogger(__name__)


ASK_TIMEOUT_S = 10.0
PAUSE_S = 0.3
LOOK_AROUND_S = 1.5  # One look-up of every module
ASKED_AT_ONCE = 16  # For the manifest
MAX_LINK_PEERS = 4
ANY_HOST = ("0.0.0.0", "::", "[::]")  # noqa: S104 - names of "all interfaces", not a decision to bind to them


@dataclass(frozen=True, slots=True)
class Answered(Generic[Answer]):
    """A good answer, as opposed to the reason why there is none."""

    answer: Answer


async def first_good(peers: Sequence[PeerId], ask: Callable[[PeerId], Awaitable[Answer]]) -> Answered[Answer] | str:
    """Asks all peers at once. Returns the first good answer, or the last failure."""

    async def attempt(peer: PeerId) -> Answered[Answer] | str:
        try:
            return Answered(await ask(peer))
        except (PeerError, ManifestError) as error:
            return f"{short(peer)}: {error}"

    why = "nobody was asked"
    async with task_scope() as tasks:
        waiting = {tasks.create_task(attempt(peer)) for peer in peers}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                result = task.result()
                if isinstance(result, Answered):
                    for other in waiting:
                        other.cancel()
                    return result
                why = result
    return why


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The addresses where this machine listens and what it tells others about that. A port of 0 is any free one."""

    listen: str
    advertise: str | None = None
    port: int = 0
    dht_port: int = 0

    def local(self, port: int) -> str:
        """The `host:port` of a port of ours, for this machine itself."""
        return f"{'127.0.0.1' if self.listen in ANY_HOST else self.listen}:{port}"

    def told_host(self, initial_peers: tuple[str, ...]) -> str:
        """The advertised host: as wished, else the bound address, else the one that leads to the first initial peer."""
        if self.advertise:
            return self.advertise
        return address_to_reach(initial_peers) if self.listen in ANY_HOST else self.listen


@dataclass(frozen=True, slots=True)
class NetworkSession:
    """The session in one run: everything that is not a module. Made by `present`."""

    run: RunId
    identity: Identity
    own: LocalPeer
    membership_sync: MembershipSync
    dispatcher: Dispatcher
    directory: DhtDirectory
    transport: GrpcTransport
    tunnels: RelayTunnels
    book: KnownPeers
    routes: Routes
    local_address: str  # `host:port` for this machine's own programs
    introduced: frozenset[PeerId]  # Peers in the join link

    @property
    def membership(self) -> Membership:
        return self.membership_sync.membership

    @property
    def link(self) -> JoinLink:
        return JoinLink(self.run, tuple(self.directory.multiaddrs()[:MAX_LINK_PEERS]))

    def others(self) -> list[Announcement]:
        """The visible peers of the run, but for those that only look around as well."""
        return [seen for seen in self.membership.peers() if seen.state is not PeerState.VISITING]

    async def look_around(self, manifest: Manifest) -> list[Announcement]:
        """Looks up every module once, which takes a moment. Returns `others`."""
        self.membership_sync.watch(manifest.modules())
        await asyncio.sleep(LOOK_AROUND_S)
        return self.others()

    async def withdraw(self, limit_s: float) -> None:
        """Announces to linked peers and to the directory that this node hosts nothing any more."""
        self.own.state, self.own.module = PeerState.VISITING, None
        self.transport.announce(self.membership_sync.record.fresh())
        try:
            async with asyncio.timeout(limit_s):
                await self.directory.publish(self.own.announcement())
        except (Unreachable, ProtocolViolation, TimeoutError) as error:
            log.info("the directory learns of our leaving by silence: %s", error)

    async def fetch_manifest(self, patience_s: float) -> SignedManifest:
        """Asks visible peers for the manifest, those in the link first. Raises Unreachable after `patience_s`."""

        async def ask(peer: PeerId) -> SignedManifest:
            text = await self.transport.ask(peer, Question(QuestionAbout.MANIFEST), ASK_TIMEOUT_S)
            return read_signed_manifest(text, self.run)

        what = "has given this run's manifest"
        return await self.first_answer(ask, lambda state: True, patience_s, what, ASKED_AT_ONCE)

    async def first_answer(
        self,
        ask: Callable[[PeerId], Awaitable[Answer]],
        wanted: Callable[[PeerId], bool],
        patience_s: float,
        what: str,
        at_once: int = 1,
    ) -> Answer:
        """The first good answer; `what` completes "no peer ...". Raises Unreachable after `patience_s`."""
        last = "none was found in the directory"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            peers = [known.peer for known in self.others() if known.is_reachable and wanted(known.peer)]
            peers.sort(key=lambda peer: peer not in self.introduced)
            for first in range(0, len(peers), at_once):
                result = await first_good(peers[first : first + at_once], ask)
                if isinstance(result, Answered):
                    return result.answer
                last = result
                log.info("%s", last)
            if loop.time() >= deadline:
                raise Unreachable(
                    f"no peer {what} within {patience_s:.0f} s; {last}",
                    hint="Check the link, that its peers run, and that their ports can be reached from here.",
                )
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def present(
    identity: Identity, run: RunId, where: Whereabouts, settings: DirectorySettings, clock: Clock, events: EventSink
) -> AsyncIterator[NetworkSession]:
    """Enters a run's network as a visitor and leaves it after the block. Raises ConfigError if a port is taken."""
    credentials = make_credentials(identity, run)
    own = LocalPeer(run, identity.peer, credentials.certificate_der, clock)
    membership, book = Membership(run, identity.peer), KnownPeers()
    record, dispatcher = OwnRecord(own, identity), Dispatcher(own, membership)
    async with AsyncExitStack() as stack:
        directory = DhtDirectory(settings, identity, run, clock)
        tunnels = RelayTunnels(directory, book.relay_of)
        transport = GrpcTransport(
            credentials,
            book,
            dispatcher,
            clock,
            TransportSettings(listen_host=where.listen, listen_port=where.port),
            own_record=record.fresh,
            ways=Ways(Calls(book, clock, record.fresh, lambda: bool(own.addresses)), tunnels),
        )
        membership_sync = MembershipSync(own, record, membership, book, events, directory, transport)
        stack.enter_context(membership_sync.receiving(dispatcher))
        await stack.enter_async_context(transport)
        host = await asyncio.to_thread(where.told_host, settings.initial_peers)  # names may have to be looked up
        own.addresses = (f"{host}:{transport.port}",)
        await stack.enter_async_context(directory)
        tasks = await stack.enter_async_context(task_scope())
        running = tasks.create_task(membership_sync.run())
        try:
            introduced = frozenset(PeerId(multiaddr.rpartition("/")[2]) for multiaddr in settings.initial_peers)
            yield NetworkSession(
                run,
                identity,
                own,
                membership_sync,
                dispatcher,
                directory,
                transport,
                tunnels,
                book,
                Routes(identity, run),
                where.local(transport.port),
                introduced,
            )
        finally:
            running.cancel()


def address_towards(host: str) -> str | None:
    """This machine's address towards a host; None without a route. Sends no packet; names are looked up (IPv4)."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def address_to_reach(multiaddrs: tuple[str, ...]) -> str:
    """This machine's IPv4 address on the way to the first of them that can be found; it is sent no packet for that."""
    for multiaddr in multiaddrs:
        parts = multiaddr.split("/")
        if len(parts) > 2 and parts[1] in ("ip4", "dns4") and (own := address_towards(parts[2])) is not None:
            return own
    return "127.0.0.1"


class _Silent:
    """Takes events and keeps none: a visitor reports its result only."""

    def emit(self, event: Event) -> None:
        return


@asynccontextmanager
async def visit(link: JoinLink, listen: str | None = None, port: int = 0) -> AsyncIterator[NetworkSession]:
    """Enters a run as a visitor, with a new key and a DHT client that listens nowhere."""
    # Links listen only where the first peer is reached from: a peer that nobody can dial has to call back.
    if listen is None:
        listen = await asyncio.to_thread(address_to_reach, link.peers)  # names may have to be looked up
    settings = DirectorySettings("", 0, (), link.peers, client=True)
    where = Whereabouts(listen=listen, port=port)
    async with present(Identity.generate(), link.run, where, settings, SystemClock(), _Silent()) as session:
        yield session
