"""Who may have what dialled, and who is asked: with the dialling in a test's hands, and over real links."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from node.network.local_peer import LocalPeer
from node.network.reach_status import ReachStep, Standing
from node.network.session import Whereabouts
from node.reachability.monitor import RelayPart, without_tunnels
from node.reachability.reach_test import (
    BURST,
    MAX_ASKED,
    MAX_AT_ONCE,
    REFILL_S,
    WITNESSES,
    Witness,
    network_of,
    scattered,
    witnesses_of,
)
from node.reachability.reverse_calls import AVOIDED_S, CONNECT_S, MAX_TRIED, WANTED, Attachments
from protocol.identity.keys import Identity
from protocol.interfaces.transport import FarEnd, Question, QuestionAbout
from protocol.nat.dial_back import DialBackOutcome, DialBackResult, decode_dial_back, encode_dial_back
from protocol.transport.rate_limits import MAX_REMEMBERED, Allowance
from swarm.membership.membership import Membership, relays_first
from swarm.vocabulary.errors import Busy, Rejected, Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId
from tests.node.network.small_swarm import LONG_S, ManualClock
from tests.protocol.dht.running import MODULE, RUN, announced
from tests.protocol.transport.link_peers import Persona, Recorder, introduce, node

PORT = Question(QuestionAbout.DIAL_BACK, port=4002)


@dataclass
class Dialled:
    """Notes what is dialled, and waits until it may answer."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[tuple[str, int, bytes]] = field(default_factory=list)

    async def __call__(self, host: str, port: int, certificate: bytes) -> DialBackResult:
        self.seen.append((host, port, certificate))
        await self.gate.wait()
        return DialBackResult(host, DialBackOutcome.REACHED)


class Bench:
    """A witness with links to a few askers, each at an address of its own unless told otherwise."""

    def __init__(self) -> None:
        self.clock, self.dialled = ManualClock(), Dialled()
        self.ends: dict[PeerId, FarEnd] = {}
        self.witness = Witness(self.ends.get, self.clock, self.dialled)

    def asker(self, name: str, host: str) -> PeerId:
        self.ends[PeerId(name)] = FarEnd(host, name.encode())
        return PeerId(name)


async def test_what_is_dialled_is_where_the_askers_link_leads() -> None:
    bench = Bench()
    bench.dialled.gate.set()
    answer = decode_dial_back(await bench.witness.answer(bench.asker("a", "25.0.0.1"), PORT))
    assert answer == DialBackResult("25.0.0.1", DialBackOutcome.REACHED)
    assert bench.dialled.seen == [("25.0.0.1", 4002, b"a")]
    gone = decode_dial_back(await bench.witness.answer(PeerId("nobody"), PORT))
    assert gone.outcome is DialBackOutcome.NOT_TRIED
    assert len(bench.dialled.seen) == 1


async def test_one_at_a_time_for_each_asker_and_few_for_all() -> None:
    bench = Bench()
    askers = [bench.asker(f"p{n}", f"25.0.0.{n}") for n in range(MAX_AT_ONCE + 1)]
    async with asyncio.TaskGroup() as tasks:
        for asker in askers[:MAX_AT_ONCE]:
            tasks.create_task(bench.witness.answer(asker, PORT))
        while len(bench.dialled.seen) < MAX_AT_ONCE:
            await asyncio.sleep(0)
        for asker in (askers[0], askers[-1]):
            with pytest.raises(Busy):
                await bench.witness.answer(asker, PORT)
        bench.dialled.gate.set()
    await bench.witness.answer(askers[0], PORT)
    assert len(bench.dialled.seen) == MAX_AT_ONCE + 1


async def test_an_address_cannot_be_searched_for_open_ports_by_however_many_identities() -> None:
    bench = Bench()
    bench.dialled.gate.set()
    refused = 0
    for n in range(1000):
        try:
            await bench.witness.answer(bench.asker(f"p{n}", "25.0.0.1"), replace(PORT, port=1 + n))
        except Busy:
            refused += 1
    assert len(bench.dialled.seen) == BURST
    assert refused == 1000 - BURST
    await bench.witness.answer(bench.asker("elsewhere", "25.0.0.2"), PORT)
    bench.clock.now += REFILL_S
    await bench.witness.answer(bench.asker("p0", "25.0.0.1"), PORT)
    with pytest.raises(Busy):
        await bench.witness.answer(bench.asker("p0", "25.0.0.1"), PORT)


async def test_a_dial_back_that_is_cut_short_leaves_room() -> None:
    bench = Bench()
    asker = bench.asker("a", "25.0.0.1")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.witness.answer(asker, PORT), 0.01)


def test_an_allowance_remembers_no_more_than_its_bound() -> None:
    allowance = Allowance(1, 60.0)
    for n in range(MAX_REMEMBERED + 1):
        assert allowance.take(str(n), 0.0)
    assert not allowance.take(str(MAX_REMEMBERED), 1.0)
    assert allowance.take("0", 1.0), "the longest unseen is forgotten"


@dataclass
class Links:
    """Answers of peers, by the host that they announce."""

    answers: dict[PeerId, DialBackResult | Exception | bytes]
    asked: list[PeerId] = field(default_factory=list)

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        assert question == PORT
        self.asked.append(peer)
        answer = self.answers.get(peer, Unreachable("nobody is there"))
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else encode_dial_back(answer)

    def far_end(self, peer: PeerId) -> FarEnd | None:
        return FarEnd("127.0.0.1", b"") if peer in self.answers else None


def membership_of(*hosts: str, state: PeerState = PeerState.SERVING) -> tuple[Membership, list[PeerId]]:
    membership = Membership(RUN, Identity.generate().peer)
    peers = []
    for host in hosts:
        announcement = announced(Identity.generate(), addresses=(f"{host}:4000",) if host else (), state=state)
        if state is PeerState.VISITING:
            announcement = replace(announcement, module=None)
        membership.observe(announcement, now=0.0, wall=announcement.expires_at - 60)
        peers.append(announcement.peer)
    return membership, peers


REACHED = DialBackResult("25.0.0.1", DialBackOutcome.REACHED)


async def test_three_are_asked_and_who_does_not_answer_is_replaced() -> None:
    membership, peers = membership_of(*(f"25.0.{n}.1" for n in range(6)))
    by_name = lambda found: found.sort(key=lambda a: peers.index(a.peer))  # noqa: E731
    links = Links(dict.fromkeys(peers, REACHED))
    links.answers |= {peers[0]: Rejected("not now"), peers[1]: b"\xff garbage"}
    found = await witnesses_of(membership, links, by_name)(4002)
    assert links.asked == peers[:5]
    assert [t.witness for t in found] == peers[2:5]
    assert {(t.result, t.local_host) for t in found} == {(REACHED, "127.0.0.1")}
    assert len(found) == WITNESSES


async def test_not_everybody_is_asked_when_nobody_answers() -> None:
    membership, _ = membership_of(*(f"25.0.{n}.1" for n in range(MAX_ASKED + 5)))
    links = Links({})
    assert await witnesses_of(membership, links)(4002) == []
    assert len(links.asked) == MAX_ASKED


async def test_visitors_and_peers_without_an_address_are_not_asked() -> None:
    for membership, _ in (membership_of("25.0.0.1", state=PeerState.VISITING), membership_of("")):
        links = Links({})
        assert await witnesses_of(membership, links)(4002) == []
        assert links.asked == []


async def test_peers_that_have_to_be_called_are_asked_last() -> None:
    membership, peers = membership_of("25.0.0.1", "25.0.0.2")
    called = announced(Identity.generate(), addresses=(), via=(peers[0],))
    membership.observe(called, now=0.0, wall=called.expires_at - 60)
    links = Links(dict.fromkeys([*peers, called.peer], REACHED))
    found = await witnesses_of(membership, links, list.reverse)(4002)
    assert [t.witness for t in found][-1] == called.peer
    assert len(found) == WITNESSES


def test_different_networks_come_first() -> None:
    hosts = ["25.0.0.1", "25.0.0.2", "25.0.1.1", "[2001:db8::1]", "[2001:db8::2]", "name.example"]
    found = scattered([announced(Identity.generate(), addresses=(f"{host}:1",)) for host in hosts])
    order = [a.addresses[0].rpartition(":")[0] for a in found]
    assert order == ["25.0.0.1", "25.0.1.1", "[2001:db8::1]", "name.example", "25.0.0.2", "[2001:db8::2]"]
    assert network_of("25.0.7.9:1") == "25.0.7.0/24"


@dataclass
class Bearing(Recorder):
    witness: Witness | None = None

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        assert self.witness is not None
        return await self.witness.answer(sender, question)


@pytest.mark.e2e
@pytest.mark.parametrize("dialled_by_asker", [True, False])
async def test_peers_find_each_other_reachable_and_another_port_not(dialled_by_asker: bool) -> None:
    asker, bearer = Persona(), Persona()
    handler = Bearing()
    async with node(asker) as asking, node(bearer, handler=handler) as bearing, node() as third:
        handler.witness = Witness(bearing.transport.far_end, ManualClock())
        introduce(asking, bearing)
        if not dialled_by_asker:
            await bearing.transport.ask(asking.peer, Question(QuestionAbout.STATUS), 10)
        outcomes = []
        for port in (asking.port, third.port, _closed()):
            question = Question(QuestionAbout.DIAL_BACK, port=port)
            outcomes.append(decode_dial_back(await asking.transport.ask(bearing.peer, question, 10)).outcome)
        assert outcomes == [DialBackOutcome.REACHED, DialBackOutcome.ANOTHER, DialBackOutcome.CLOSED]
        assert asking.handler.ups == [bearing.peer], "whoever dials back opens no link"


def _closed() -> int:
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@dataclass
class HeldLinks:
    broken: set[PeerId] = field(default_factory=set)
    asked: list[PeerId] = field(default_factory=list)

    async def connect(self, peer: PeerId) -> None:
        self.asked.append(peer)
        if peer in self.broken:
            raise Unreachable("nobody is there")


class HoldingBench:
    def __init__(self, count: int, connect_s: float = CONNECT_S) -> None:
        own = Identity.generate().peer
        self.membership, self.links, self.clock = Membership(RUN, own), HeldLinks(), ManualClock()
        state = LocalPeer(RUN, own, b"", self.clock, state=PeerState.SERVING, module=MODULE)
        self.attachments = Attachments(state, self.membership, self.links, connect_s)
        for _ in range(count):
            announcement = announced(Identity.generate())
            self.membership.observe(announcement, now=0.0, wall=announcement.expires_at - 60)


async def test_three_are_held_and_kept() -> None:
    bench = HoldingBench(12)
    held = await bench.attachments.hold()
    assert len(held) == WANTED
    assert bench.links.asked == list(held)
    assert await bench.attachments.hold() == held


async def test_who_is_lost_is_replaced_and_the_others_stay() -> None:
    bench = HoldingBench(12)
    held = await bench.attachments.hold()
    bench.links.broken.add(held[1])
    now = await bench.attachments.hold()
    assert len(now) == WANTED
    assert {held[0], held[2]} < set(now)
    assert held[1] not in now


async def test_who_could_not_be_had_is_tried_last_for_a_minute() -> None:
    bench = HoldingBench(WANTED + 2)
    best = (await bench.attachments.hold())[0]
    bench.links.broken = {best}
    held = await bench.attachments.hold()
    assert best not in held
    bench.links.broken = {held[0]}
    bench.links.asked.clear()
    held = await bench.attachments.hold()
    assert len(held) == WANTED
    assert best not in bench.links.asked, "there was another one"
    bench.clock.now += AVOIDED_S + 1
    bench.links.broken = {held[-1]}
    assert best in await bench.attachments.hold()


async def test_who_was_given_up_is_not_tried() -> None:
    bench = HoldingBench(12)
    held = await bench.attachments.hold()
    bench.membership.give_up(held[0], bench.clock.now)
    bench.links.asked.clear()
    assert held[0] not in await bench.attachments.hold()
    assert held[0] not in bench.links.asked


async def test_not_everybody_is_tried() -> None:
    bench = HoldingBench(12)
    bench.links.broken = {announcement.peer for announcement in bench.membership.peers()}
    assert await bench.attachments.hold() == ()
    assert len(bench.links.asked) == MAX_TRIED


async def test_where_nobody_is_there_is_nobody_to_hold() -> None:
    assert await HoldingBench(0).attachments.hold() == ()


async def test_a_peer_that_does_not_answer_holds_nothing_up_for_ever() -> None:
    bench = HoldingBench(1, connect_s=0.01)
    asked = asyncio.Event()

    async def hang(peer: PeerId) -> None:
        asked.set()
        await asyncio.Event().wait()

    bench.links.connect = hang  # type: ignore[method-assign]
    holding = asyncio.create_task(bench.attachments.hold())
    await asked.wait()
    async with asyncio.timeout(LONG_S):
        assert await holding == ()


ME, ONE, TWO, THREE = (PeerId(name) for name in ("me", "one", "two", "three"))
RELAYS = {ONE: "/ip4/25.0.0.1/tcp/1/p2p/one", THREE: "/ip4/25.0.0.3/tcp/3/p2p/three"}


@dataclass
class Noted:
    """Stands in for the DHT and the tunnels, and notes what it is told."""

    serves_tunnels: bool = False
    port: int = 4001
    away: bool = False
    attached: list[tuple[Sequence[str], str]] = field(default_factory=list)
    client: list[bool] = field(default_factory=list)
    announced: int = 0

    def take_part(self, *, client: bool) -> None:
        if not self.client or self.client[-1] is not client:
            self.client.append(client)

    async def attach(self, relays: Sequence[str], local: str) -> None:
        self.attached.append((relays, local))
        if self.away:
            raise Unreachable("restarted")

    def announce(self) -> None:
        self.announced += 1


def part(noted: Noted, step: ReachStep, *addresses: str, via: tuple[PeerId, ...] = ()) -> RelayPart:
    own = LocalPeer(RunId("7" * 64), ME, b"", ManualClock(), addresses)
    own.reach, own.via = Standing(step, "so it is"), via
    return RelayPart(own, noted, noted, lambda peer: RELAYS.get(peer, ""), noted.announce, "127.0.0.1:4002")


@pytest.mark.parametrize("away", [False, True])
async def test_a_hidden_node_is_attached_to_the_relays_among_those_it_is_called_through(away: bool) -> None:
    noted = Noted(away=away)
    hidden = part(noted, ReachStep.REVERSE, via=(ONE, TWO))
    await hidden.follow()
    await hidden.follow()
    assert noted.attached == [([RELAYS[ONE]], "127.0.0.1:4002")], "told once"
    hidden.own.via = (TWO, THREE)
    await hidden.follow()
    hidden.own.reach, hidden.own.addresses = Standing(ReachStep.DIRECT, "opened"), ("25.0.0.9:4002",)
    await hidden.follow()
    assert [relays for relays, _ in noted.attached[1:]] == [[RELAYS[THREE]], []]
    assert noted.client == [True, False]
    assert noted.announced == 0


@pytest.mark.parametrize(
    ("step", "addresses", "relay"),
    [
        (ReachStep.DIRECT, ("25.0.0.9:4002",), "/ip4/25.0.0.9/tcp/4001/p2p/me"),
        (ReachStep.UNKNOWN, ("[2a00::9]:4002",), "/ip6/2a00::9/tcp/4001/p2p/me"),
        (ReachStep.MAPPED, ("25.0.0.9:4002",), ""),
        (ReachStep.DIRECT, (f"{'a' * 100}.example:4002",), ""),
        (ReachStep.REVERSE, (), ""),
    ],
)
async def test_a_relay_is_announced_where_tunnels_can_come_in(
    step: ReachStep, addresses: tuple[str, ...], relay: str
) -> None:
    noted = Noted(serves_tunnels=True)
    offering = part(noted, step, *addresses)
    for _ in range(2):
        await offering.follow()
    assert offering.own.announcement().relay == relay
    assert noted.announced == bool(relay)
    assert part(Noted(), step, *addresses).own.relay == ""


async def test_who_cannot_be_dialled_dials_nobody_back_at_a_tunnels_end() -> None:
    own = LocalPeer(RunId("7" * 64), ME, b"", ManualClock(), ())
    witness = Witness(without_tunnels(own, lambda _: FarEnd("127.0.0.1", b"der")), ManualClock())
    answer = decode_dial_back(await witness.answer(ONE, Question(QuestionAbout.DIAL_BACK, port=22)))
    assert (answer.host, answer.outcome) == ("", DialBackOutcome.NOT_TRIED)
    own.addresses = ("25.0.0.9:4002",)
    end = without_tunnels(own, lambda _: FarEnd("25.0.0.1", b"der"))(ONE)
    assert end == FarEnd("25.0.0.1", b"der")
    assert without_tunnels(own, lambda _: None)(ONE) is None


def test_two_relays_come_before_the_others() -> None:
    order = [PeerId(name) for name in "abcdef"]
    assert relays_first(order, {"c", "e", "f"}) == ["c", "e", "a", "b", "d", "f"]
    assert relays_first(order, set()) == order


class Anybody:
    async def connect(self, peer: PeerId) -> None:
        return


async def test_a_node_holds_on_to_relays_even_where_others_are_nearer() -> None:
    own = LocalPeer(RUN, ME, b"", ManualClock(), state=PeerState.SERVING, module=MODULE)
    membership = Membership(RUN, ME)
    relaying = Identity.generate()
    relay = f"/ip4/25.0.0.1/tcp/4001/p2p/{relaying.peer}"
    far = announced(relaying, module=ModuleId(4), relay=relay)
    for announcement in (*(announced(Identity.generate()) for _ in range(5)), far):
        membership.observe(announcement, now=0.0, wall=announcement.expires_at - 60)
    held = await Attachments(own, membership, Anybody()).hold()
    assert held[0] == relaying.peer
    assert len(held) == 3


def test_tunnels_lead_to_where_the_node_listens() -> None:
    assert Whereabouts("0.0.0.0").local(4002) == "127.0.0.1:4002"
    assert Whereabouts("25.0.0.9").local(4002) == "25.0.0.9:4002"
