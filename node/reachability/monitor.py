"""Monitor of a node's reachability. A node is reachable if half of the peers asked to connect succeed."""

import asyncio
import ipaddress
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from node.concurrency.task_groups import background, task_scope
from node.network.local_peer import LocalPeer
from node.network.reach_status import NOT_LOOKED, ReachMode, ReachStep, Standing, held_by
from node.network.session import NetworkSession
from node.observability.events import EventSink, Reach
from node.reachability.port_mapping import Mapping, NotMapped, Router
from node.reachability.witnesses import Ask, Attachments, Attempt, Switchboard, Witness, witnesses_of
from protocol.dht.directory import DhtDirectory, RelayTunnels
from protocol.identity.signed_records import MAX_RELAY_LENGTH
from protocol.interfaces.transport import FarEnd, QuestionAbout
from protocol.manifest.join_link import multiaddr_of
from protocol.nat.dial_back import DialBackOutcome
from protocol.transport.settings import host_of, joined
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import PeerId


def judge(attempts: Sequence[Attempt], port: int, advertised_host: str | None) -> Standing:
    """Derives the node's reachability from peers' attempts to dial `port`. Never replaces an `advertised_host`."""
    # A peer in our own network proves little. Peers that see a public address count first.
    tried = [t for t in attempts if t.result.outcome is not DialBackOutcome.NOT_TRIED]
    if not tried:
        return Standing(ReachStep.UNKNOWN, "no peer of the run could test this node")
    counted = [t for t in tried if ipaddress.ip_address(t.result.host).is_global] or tried
    reached = [t for t in counted if t.result.outcome is DialBackOutcome.REACHED]
    if 2 * len(reached) >= len(counted):  # half is enough, because single peers may have bad routes
        host = _most_common(reached)
        said = f"{len(reached)} of {len(counted)} peers connected to {joined(host, port)}"
        address = None if advertised_host is not None else joined(host, port)
        return Standing(ReachStep.DIRECT, said, address, seen_host=host)
    host = _most_common(counted)
    if advertised_host is not None and advertised_host != host:
        said = f"peers see this machine at {host}, but port {port} does not answer; they cannot test {advertised_host}"
        return Standing(ReachStep.UNKNOWN, said, seen_host=host)
    return _unreachable(counted, host, port)


async def climb(port: int, advertised_host: str | None, ask: Ask, router: Router | None) -> Standing:
    """Lets peers dial `port`, then a port mapped by `router`, if given. Keeps the mapping only if it helped."""
    if router is not None and router.mapping is not None:  # test the mapping that we hold before requesting another one
        standing = await _tested(router.mapping, advertised_host, ask)
        if standing.step is not ReachStep.UNREACHABLE:
            return standing
        await router.close()
    standing = judge(await ask(port), port, advertised_host)
    if standing.step is not ReachStep.UNREACHABLE or not standing.translated or router is None:
        return standing
    mapping = await router.open(port)
    if isinstance(mapping, NotMapped):
        return replace(standing, reason=f"{standing.reason}; {mapping.reason}")
    again = await _tested(mapping, advertised_host, ask)
    if again.step is ReachStep.MAPPED:
        return again
    await router.close()
    return replace(standing, reason=f"{standing.reason}; {_why_in_vain(mapping, again)}")


async def _tested(mapping: Mapping, advertised_host: str | None, ask: Ask) -> Standing:
    standing = judge(await ask(mapping.external_port), mapping.external_port, advertised_host)
    if standing.step is not ReachStep.DIRECT:
        return standing
    address = joined(advertised_host or standing.seen_host, mapping.external_port)
    why = f"mapped by {mapping.how}: {standing.reason}"
    return replace(standing, step=ReachStep.MAPPED, address=address, reason=why)


def _unreachable(counted: Sequence[Attempt], host: str, port: int) -> Standing:
    translated = any(t.local_host not in (None, t.result.host) for t in counted)
    failed = [t.result.outcome for t in counted if t.result.outcome is not DialBackOutcome.REACHED]
    why = _IN_WORDS[Counter(failed).most_common(1)[0][0]]
    said = f"{len(failed)} of {len(counted)} peers could not connect to {joined(host, port)}: {why}"
    local = next((t.local_host for t in counted if t.local_host is not None), None)
    fix = f"Open TCP port {port} in the firewall of this machine or its network; "
    if translated:
        fix = f"Enable UPnP or NAT-PMP in your router, or forward its TCP port {port} to {local}:{port}; "
    fix += f"then use --port {port}."
    return Standing(ReachStep.UNREACHABLE, said, fix=fix, translated=translated, seen_host=host)


_IN_WORDS = {
    DialBackOutcome.CLOSED: "the connection was refused",
    DialBackOutcome.SILENT: "nothing came back",
    DialBackOutcome.ANOTHER: "something else answers there",
}


def _why_in_vain(mapping: Mapping, tested: Standing) -> str:
    if mapping.external_host and tested.seen_host and mapping.external_host != tested.seen_host:
        return (
            f"the router mapped a port, but its address is {mapping.external_host} and peers see"
            f" {tested.seen_host}: a second router sits in front, often the provider's"
        )
    return f"the router mapped port {mapping.external_port} by {mapping.how}, but {tested.reason}"


def _most_common(attempts: Sequence[Attempt]) -> str:
    return Counter(t.result.host for t in attempts).most_common(1)[0][0]


log = logging.getLogger(__name__)

FarEnds = Callable[[PeerId], FarEnd | None]


@dataclass(slots=True)
class RelayPart:
    """Relayed tunnels: an unreachable node uses peers' relays (`relay_of`), a reachable one may offer its own relay."""

    own: LocalPeer
    dht: DhtDirectory
    tunnels: RelayTunnels
    relay_of: Callable[[PeerId], str]
    announce: Callable[[], None]
    local_address: str  # `host:port` where tunnels end
    _attached: list[str] = field(default_factory=list)

    async def follow(self) -> None:
        """Adapts the DHT and the tunnels to the node's current reachability."""
        hidden = self.own.reach.step in (ReachStep.REVERSE, ReachStep.UNREACHABLE)
        # An unreachable node must not store DHT records: every look-up would wait for it.
        self.dht.take_part(client=hidden)
        # Peers look for its relays among the peers that pass calls on to it.
        relays = [relay for peer in self.own.via if (relay := self.relay_of(peer))] if hidden else []
        if relays != self._attached:
            self._attached = relays
            try:
                await self.tunnels.attach(relays, self.local_address)
            except Unreachable as error:
                log.info("will attach to relays once the DHT is back: %s", error)
        relay = self._offer()
        if relay != self.own.relay:
            self.own.relay = relay
            self.announce()

    def _offer(self) -> str:
        """Returns the multiaddr where this node relays tunnels; empty if it cannot be dialled or does not relay."""
        own = self.own
        offers = own.reach.step in (ReachStep.DIRECT, ReachStep.UNKNOWN)  # a mapped node lacks one for the DHT's port
        if not (self.dht.serves_tunnels and own.addresses and offers):
            return ""
        relay = f"{multiaddr_of(host_of(own.addresses[0]), self.dht.port)}/p2p/{own.peer}"
        return relay if len(relay) <= MAX_RELAY_LENGTH else ""  # too long for a record


async def keep_in_step(session: NetworkSession) -> None:
    """Adapts the node's DHT and tunnels to its reachability every few seconds until cancelled."""
    announce, relay_of = session.membership_sync.announce, session.book.relay_of
    part = RelayPart(session.own, session.directory, session.tunnels, relay_of, announce, session.local_address)
    while True:
        await part.follow()
        await asyncio.sleep(2.0)


def without_tunnels(own: LocalPeer, far_end: FarEnds) -> FarEnds:
    """Wraps the lookup of a link's remote address: leaves out the host while links to us come through tunnels."""
    # The caller may come through a tunnel: dialling its local end would probe our own ports.

    def found(peer: PeerId) -> FarEnd | None:
        end = far_end(peer)
        return end if end is None or own.addresses else replace(end, host="")

    return found


# Seconds until the next test: addresses change and routers restart.
AGAIN_S: Final = {ReachStep.DIRECT: 600.0, ReachStep.MAPPED: 600.0, ReachStep.UNREACHABLE: 120.0}
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 60.0  # First and longest pause while no peer can test us
CONFIRM_S: Final = 5.0  # Pause before a second test: busy peers look like a firewall
HOLD_S: Final = 2.0  # Interval of checks of the held links

Climb = Callable[[], Awaitable[Standing]]
Hold = Callable[[], Awaitable[tuple[PeerId, ...]]]  # Opens the held links and returns their peers
Sleep = Callable[[float], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Adoption:
    """Applies a new reachability result to this node. `announce` publishes the change."""

    own: LocalPeer
    events: EventSink
    announce: Callable[[], None]
    before: tuple[str, ...]  # Addresses before any test
    climbed: Standing = NOT_LOOKED  # Last result

    def adopt(self, standing: Standing, via: tuple[PeerId, ...] = ()) -> None:
        """Sets the node's reachability and addresses. An unreachable node announces the peers in `via` instead."""
        self.climbed = standing
        known, known_via = self.own.reach, self.own.via
        self.own.reach, self.own.via = held_by(standing, via), via
        if standing.step is ReachStep.UNREACHABLE:
            addresses: tuple[str, ...] = ()  # peers would waste time on dialling them
        else:
            addresses = self.before if standing.address is None else (standing.address,)
        # A new reason alone is not worth an announcement.
        same_way = addresses == self.own.addresses and self.own.reach.step is known.step
        self.own.addresses = addresses
        if not same_way or via != known_via:
            self.announce()
        if not same_way:
            step, reason, fix = self.own.reach.step.value, self.own.reach.reason, self.own.reach.fix
            self.events.emit(Reach(self.own.peer, step, ", ".join(addresses), reason, fix))


@asynccontextmanager
async def reachable(
    mode: ReachMode, advertised_host: str | None, session: NetworkSession, events: EventSink
) -> AsyncIterator[None]:
    """Tests the node's reachability repeatedly within the block, and answers reachability questions of peers."""
    transport, own, membership_sync = session.transport, session.own, session.membership_sync
    router = Router() if mode is ReachMode.AUTO else None
    ask = witnesses_of(session.membership, transport)
    hold = Attachments(own, session.membership, transport).hold
    adoption = Adoption(own, events, membership_sync.announce, own.addresses)
    switchboard = Switchboard(session.run, own.peer, transport, membership_sync.announced, own.clock)
    answers = {
        QuestionAbout.DIAL_BACK: Witness(without_tunnels(own, transport.far_end), own.clock).answer,
        QuestionAbout.CALL: switchboard.pass_on,
        QuestionAbout.CALLED: switchboard.follow,
    }

    async def climbing() -> Standing:
        return await climb(transport.port, advertised_host, ask, router)

    try:
        with session.dispatcher.registered(answers=answers):
            work = [watch(climbing, hold, adoption, router)]
            if session.first is None:  # Further modules of a node use the DHT of its first one
                work.append(keep_in_step(session))
            async with background(*work):
                yield
    finally:
        if router is not None:
            await router.close()


async def watch(
    climbing: Climb, hold: Hold, adoption: Adoption, router: Router | None, sleep: Sleep = asyncio.sleep
) -> None:
    """Tests reachability at intervals, and when the router drops its port mapping, until cancelled."""
    pause_s = FIRST_PAUSE_S
    while True:
        found = await climbing()
        if found.step is ReachStep.UNREACHABLE and adoption.climbed.step is not ReachStep.UNREACHABLE:
            await sleep(CONFIRM_S)
            found = await climbing()
        wait_s = AGAIN_S.get(found.step, pause_s)
        if found.step is ReachStep.UNKNOWN:
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            if adoption.climbed.step is not ReachStep.UNKNOWN:
                found = adoption.climbed  # no peer could test now, so keep the last result
        if found.step is ReachStep.UNREACHABLE:
            for _ in range(math.ceil(wait_s / HOLD_S)):  # stay available for calls between tests
                adoption.adopt(found, await hold())
                await sleep(HOLD_S)
            continue
        adoption.adopt(found)
        if router is not None and router.mapping is not None:
            await _until_lost(router, wait_s, sleep)
        else:
            await sleep(wait_s)


async def _until_lost(router: Router, wait_s: float, sleep: Sleep) -> None:
    async with task_scope() as tasks:
        keeping, waiting = tasks.create_task(router.keep()), tasks.create_task(sleep(wait_s))
        await asyncio.wait((keeping, waiting), return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            log.info("%s", keeping.result().reason)
        keeping.cancel()
        waiting.cancel()
