"""Who may have what dialled, and who is asked: with the dialling in a test's hands, and over real links."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

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
from protocol.identity.keys import Identity
from protocol.interfaces.transport import FarEnd, Question, QuestionAbout
from protocol.nat.dial_back import DialBackOutcome, DialBackResult, decode_dial_back, encode_dial_back
from protocol.transport.rate_limits import MAX_REMEMBERED, Allowance
from swarm.membership.membership import Membership
from swarm.vocabulary.errors import Busy, Rejected, Unreachable
from swarm.vocabulary.types import PeerId, PeerState
from tests.node.network.small_swarm import ManualClock
from tests.protocol.dht.running import RUN, announced
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


# ---- asking --------------------------------------------------------------------------------------------------------


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


# ---- over real links -----------------------------------------------------------------------------------------------


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
