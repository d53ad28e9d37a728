"""Calls that are passed on and followed: with the links in a test's hands, and over real ones."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from node.reachability import witnesses
from protocol.identity.keys import Identity
from protocol.identity.signed_records import decode_announced, encode_record
from protocol.interfaces.transport import Contact, FarEnd, Question, QuestionAbout
from protocol.transport.dialer import Calls, Ways
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.errors import Busy, PeerError, ProtocolViolation, Rejected, Unreachable
from swarm.vocabulary.types import PeerId
from tests.kit.waiting import ManualClock, until
from tests.protocol.dht.running import OTHER_RUN, announced
from tests.protocol.transport.link_peers import (
    LONG,
    RUN,
    Node,
    Persona,
    Recorder,
    SystemClock,
    introduce,
    node,
    with_settings,
)


def record_of(identity: Identity, **changes: object) -> bytes:
    return encode_record(announced(identity, **{"run": RUN, **changes}), identity)


class WallClock(ManualClock):
    """Records are signed by this machine's clock; everything else goes by a test's."""

    def wall(self) -> float:
        return time.time()


@dataclass
class Lines:
    """Notes who is asked and connected to. `gate` holds both up while it is not set."""

    linked: set[PeerId] = field(default_factory=set)
    hosts: dict[PeerId, str] = field(default_factory=dict)
    asked: list[tuple[PeerId, Question]] = field(default_factory=list)
    connected: list[PeerId] = field(default_factory=list)
    error: PeerError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        self.asked.append((peer, question))
        await self.gate.wait()
        return b""

    async def connect(self, peer: PeerId) -> None:
        self.connected.append(peer)
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    def is_linked(self, peer: PeerId) -> bool:
        return peer in self.linked

    def far_end(self, peer: PeerId) -> FarEnd | None:
        return FarEnd(self.hosts[peer], b"") if peer in self.hosts else None


class Bench:
    """A switchboard with a caller and a peer that it has links to; the lines are open unless a test closes them."""

    def __init__(self) -> None:
        self.own, self.caller, self.called = (Identity.generate() for _ in range(3))
        self.clock, self.lines = WallClock(), Lines()
        self.lines.gate.set()
        self.learnt: list[tuple[PeerId, bytes]] = []
        self.lines.linked |= {self.called.peer}
        self.lines.hosts[self.caller.peer] = "25.0.0.1"
        self.board = witnesses.Switchboard(
            RUN, self.own.peer, self.lines, lambda peer, record: self.learnt.append((peer, record)), self.clock
        )

    def call(self, **changes: object) -> Question:
        return Question(QuestionAbout.CALL, peer=self.called.peer, record=record_of(self.caller, **changes))

    async def pass_on(self, question: Question | None = None) -> bytes:
        return await self.board.pass_on(self.caller.peer, question or self.call())

    async def follow(self, caller: Identity, **changes: object) -> bytes:
        question = Question(QuestionAbout.CALLED, record=record_of(caller, **changes))
        return await self.board.follow(PeerId("whoever"), question)


async def test_a_call_is_passed_on_to_linked_peers_only_with_the_record_of_who_calls() -> None:
    bench = Bench()
    for stranger in (Identity.generate().peer, bench.own.peer, None):
        with pytest.raises(Rejected, match="no link"):
            await bench.pass_on(replace(bench.call(), peer=stranger))
    assert bench.lines.asked == []
    question = bench.call()
    assert await bench.pass_on(question) == b""
    assert bench.lines.asked == [(bench.called.peer, Question(QuestionAbout.CALLED, record=question.record))]


async def test_nobody_calls_in_the_name_of_another() -> None:
    bench = Bench()
    with pytest.raises(Rejected, match="another peer"):
        await bench.pass_on(replace(bench.call(), record=record_of(Identity.generate())))
    with pytest.raises(Rejected, match="must be reachable itself"):
        await bench.pass_on(bench.call(addresses=()))
    with pytest.raises(ProtocolViolation, match="belongs to run"):
        await bench.pass_on(bench.call(run=OTHER_RUN))
    damaged = bytearray(bench.call().record)
    damaged[60] ^= 1
    with pytest.raises(ProtocolViolation):
        await bench.pass_on(replace(bench.call(), record=bytes(damaged)))
    assert bench.lines.asked == []


async def test_an_address_gets_so_many_calls_by_however_many_identities() -> None:
    bench = Bench()
    for _ in range(witnesses.PASSED_ON_BURST):
        await bench.pass_on()
    with pytest.raises(Busy):
        await bench.pass_on()
    other = Identity.generate()
    bench.lines.hosts[other.peer] = "25.0.0.1"
    question = replace(bench.call(), record=record_of(other))
    with pytest.raises(Busy):
        await bench.board.pass_on(other.peer, question)
    bench.lines.hosts[other.peer] = "25.0.0.2"
    await bench.board.pass_on(other.peer, question)
    bench.clock.now += witnesses.PASSED_ON_REFILL_S
    await bench.pass_on()
    with pytest.raises(Busy):
        await bench.pass_on()


async def test_few_calls_at_once_go_to_one_peer() -> None:
    bench = Bench()
    bench.lines.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(witnesses.MAX_AT_ONCE_TO_ONE):
            tasks.create_task(bench.pass_on())
        await until(lambda: len(bench.lines.asked) == witnesses.MAX_AT_ONCE_TO_ONE)
        with pytest.raises(Busy, match="busy with other calls"):
            await bench.pass_on()
        bench.lines.gate.set()
    await bench.pass_on()


async def test_who_is_called_learns_the_caller_and_connects_but_follows_no_call_that_leads_nowhere() -> None:
    bench = Bench()
    with pytest.raises(Rejected, match="call itself"):
        await bench.follow(bench.own)
    with pytest.raises(Rejected, match="must be reachable itself"):
        await bench.follow(bench.caller, addresses=())
    with pytest.raises(ProtocolViolation):
        await bench.board.follow(bench.caller.peer, Question(QuestionAbout.CALLED, record=b"r"))
    with pytest.raises(ProtocolViolation, match="expires in"):
        await bench.follow(bench.caller, sequence=int(time.time() * 1000) - 90_000, expires_at=time.time() - 60)
    assert bench.learnt == []
    assert bench.lines.connected == []
    bench = Bench()
    assert await bench.follow(bench.caller) == b""
    assert [peer for peer, _ in bench.learnt] == bench.lines.connected == [bench.caller.peer]
    bench.lines.linked.add(bench.caller.peer)
    assert await bench.follow(bench.caller) == b""
    assert bench.lines.connected == [bench.caller.peer], "it is linked already"


async def test_one_caller_is_dialled_now_and_then_and_few_at_once() -> None:
    bench = Bench()
    bench.lines.error = Unreachable("nobody is there")
    for _ in range(witnesses.FOLLOWED_BURST):
        with pytest.raises(Unreachable):
            await bench.follow(bench.caller)
    with pytest.raises(Busy, match="too many calls"):
        await bench.follow(bench.caller)
    assert len(bench.lines.connected) == witnesses.FOLLOWED_BURST
    bench.clock.now += witnesses.FOLLOWED_REFILL_S
    bench.lines.error = None
    bench.lines.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        for caller in (bench.caller, *(Identity.generate() for _ in range(witnesses.MAX_FOLLOWED_AT_ONCE - 1))):
            tasks.create_task(bench.follow(caller))
        await until(lambda: len(bench.lines.connected) == witnesses.FOLLOWED_BURST + witnesses.MAX_FOLLOWED_AT_ONCE)
        for caller in (bench.caller, Identity.generate()):
            with pytest.raises(Busy, match="already in progress"):
                await bench.follow(caller)
        bench.lines.gate.set()


@dataclass
class Subscriber(Recorder):
    board: witnesses.Switchboard | None = None

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        if question.about is QuestionAbout.CALL:
            return await self.board.pass_on(sender, question)
        if question.about is QuestionAbout.CALLED:
            return await self.board.follow(sender, question)
        return await super().answer(sender, question)


@dataclass
class Telephone:
    """What makes a node a caller: its record, with its address once it has one, and whether it counts as dialable."""

    persona: Persona
    addresses: tuple[str, ...] = ()
    dialable: bool = True

    def record(self) -> bytes:
        certificate = self.persona.credentials.certificate_der
        return record_of(self.persona.identity, addresses=self.addresses, certificate=certificate)

    def ways(self) -> Ways:
        return Ways(Calls(self.persona.book, SystemClock(), self.record, lambda: self.dialable))


@asynccontextmanager
async def subscriber(
    persona: Persona | None = None, settings: TransportSettings | None = None
) -> AsyncIterator[tuple[Node, Telephone]]:
    persona = persona or Persona()
    phone, handler = Telephone(persona), Subscriber()
    async with node(persona, settings=settings or SETTINGS, handler=handler, ways=phone.ways()) as made:
        phone.addresses = (f"127.0.0.1:{made.port}",)

        def learn(peer: PeerId, record: bytes) -> None:
            news = decode_announced(record, run=RUN, now=time.time())
            persona.book.contacts[peer] = Contact(news.peer, news.addresses, news.certificate, news.via, news.relay)

        handler.board = witnesses.Switchboard(RUN, made.peer, made.transport, learn, SystemClock())
        yield made, phone


SETTINGS = with_settings(dial_timeout_s=2 * LONG)
IMPATIENT = with_settings(dial_timeout_s=0.5)
STATUS = Question(QuestionAbout.STATUS)


def hide(hidden: Node, others: tuple[Node, ...], *via: PeerId) -> None:
    """The others know its name and who can ask it to dial them, and it knows them not at all."""
    for other in others:
        other.persona.book.contacts[hidden.peer] = Contact(hidden.peer, (), b"", via)


@pytest.mark.parametrize("caller_is_smaller", [True, False])
async def test_a_hidden_peer_is_called_and_opens_one_link(caller_is_smaller: bool) -> None:
    smaller, larger = sorted((Persona(), Persona()), key=lambda persona: persona.peer)
    first, second = (smaller, larger) if caller_is_smaller else (larger, smaller)
    async with subscriber(first) as (caller, _), subscriber(second) as (hidden, _), subscriber() as (through, _):
        introduce(caller, through)
        hidden.persona.knows(through.persona, through.port)
        hide(hidden, (caller, through), through.peer)
        await hidden.transport.connect(through.peer)
        async with asyncio.timeout(LONG):  # to let the caller's own attempt go first would take as long
            answers = await asyncio.gather(*(caller.transport.ask(hidden.peer, STATUS, LONG) for _ in range(3)))
        assert answers == [b"status"] * 3
        assert hidden.handler.ups == [through.peer, caller.peer]
        assert caller.handler.ups == [through.peer, hidden.peer]
        assert hidden.transport.far_end(caller.peer) is not None


async def test_the_next_one_is_asked_when_the_first_cannot_pass_it_on() -> None:
    async with (
        subscriber() as (caller, _),
        subscriber() as (hidden, _),
        subscriber() as (useless, _),
        subscriber() as (through, _),
    ):
        introduce(caller, useless)
        introduce(caller, through)
        hidden.persona.knows(through.persona, through.port)
        stranger = Identity.generate().peer
        hide(hidden, (caller, useless, through), stranger, useless.peer, through.peer)
        await hidden.transport.connect(through.peer)
        assert await caller.transport.ask(hidden.peer, STATUS, LONG) == b"status"
        assert hidden.handler.ups == [through.peer, caller.peer]


async def test_a_call_in_vain_says_why() -> None:
    async with subscriber() as (caller, phone), subscriber() as (hidden, _), subscriber() as (through, _):
        hide(hidden, (caller,), through.peer)
        with pytest.raises(Unreachable, match="all peers that could forward the call are unknown"):
            await caller.transport.ask(hidden.peer, STATUS, LONG)
        introduce(caller, through)
        with pytest.raises(Unreachable, match="no link to this one"):
            await caller.transport.ask(hidden.peer, STATUS, LONG)
        hidden.persona.knows(through.persona, through.port)
        await hidden.transport.connect(through.peer)
        phone.addresses = ("127.0.0.1:1",)
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            await caller.transport.ask(hidden.peer, STATUS, LONG)
        phone.dialable = False
        with pytest.raises(Unreachable, match="both are behind address translation and no relay is available"):
            await caller.transport.ask(hidden.peer, STATUS, LONG)
        assert hidden.handler.ups == [through.peer]
        assert not caller.transport.is_linked(hidden.peer)


async def test_a_peer_that_does_not_come_is_given_up_after_the_dial_timeout() -> None:
    async with subscriber(settings=IMPATIENT) as (caller, _), subscriber() as (through, _):
        introduce(caller, through)
        lines = Lines(linked={(absent := Persona()).peer}, hosts={caller.peer: "127.0.0.1"})
        lines.gate.set()
        through.handler.board = witnesses.Switchboard(RUN, through.peer, lines, lambda *_: None, SystemClock())
        caller.persona.book.contacts[absent.peer] = replace(absent.contact(), via=(through.peer,))
        with pytest.raises(Unreachable, match=r"was called, but opened no link within 0\.5 s"):
            await caller.transport.ask(absent.peer, STATUS, LONG)


@dataclass
class Tunnel:
    """Leads to a port of this machine, as a tunnel's near end does."""

    port: int
    asked: list[Contact] = field(default_factory=list)

    async def way_to(self, contact: Contact) -> str:
        self.asked.append(contact)
        return f"127.0.0.1:{self.port}"


async def test_through_a_tunnel_it_is_the_peer_itself_that_answers() -> None:
    async with subscriber() as (hidden, _), subscriber() as (impostor, _):
        persona = Persona()
        phone, tunnel = Telephone(persona, dialable=False), Tunnel(impostor.port)
        async with node(persona, settings=SETTINGS, ways=replace(phone.ways(), tunnels=tunnel)) as caller:
            caller.persona.book.contacts[hidden.peer] = replace(hidden.persona.contact(), via=())
            with pytest.raises(PeerError):
                await caller.transport.ask(hidden.peer, STATUS, LONG)
            tunnel.port = hidden.port
            assert await caller.transport.ask(hidden.peer, STATUS, LONG) == b"status"
            assert {contact.peer for contact in tunnel.asked} == {hidden.peer}
