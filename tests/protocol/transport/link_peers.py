"""Peers for the transport's tests: real transports, with a handler that notes everything and can be waited for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from protocol.dht.directory import DhtDirectory, RelayTunnels
from protocol.frames.frames import Farewell, Frame, Hello, decode, encode
from protocol.identity.certificates import TlsCredentials, make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Contact, Question, Refusal, Topic
from protocol.transport.dialer import Ways
from protocol.transport.grpc_streams import DialledStream, open_channel
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.link import Outbox
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.errors import PeerError, Rejected
from swarm.vocabulary.pipeline_messages import ControlMessage, Forward, Purpose, TensorMessage
from swarm.vocabulary.types import PROTOCOL_VERSIONS, Hop, MicrobatchId, ModuleId, Path, PeerId, RunId
from tests.kit.waiting import until
from tests.protocol.dht.running import directory
from tests.protocol.identity.minting import RUN

SETTINGS = TransportSettings(chunk_bytes=16 * 1024, ping_period_s=0.1, stall_after_s=5.0)
LONG = 20.0


@dataclass
class Book:
    contacts: dict[PeerId, Contact] = field(default_factory=dict)

    def contact(self, peer: PeerId) -> Contact | None:
        return self.contacts.get(peer)


@dataclass
class Recorder:
    """A handler that notes what happens."""

    refusal: Refusal | None = None
    admit_error: PeerError | None = None
    answering: Callable[[Question], bytes] = lambda question: question.about.value.encode()
    answer_gate: asyncio.Event | None = None
    is_served: bool = True
    minded: tuple[Topic, ...] = tuple(Topic)
    admitted: list[TensorMessage] = field(default_factory=list)
    tensors: list[tuple[PeerId, TensorMessage, TensorSpec, bytes]] = field(default_factory=list)
    broken: list[tuple[TensorMessage, PeerError]] = field(default_factory=list)
    messages: list[tuple[PeerId, ControlMessage]] = field(default_factory=list)
    records: list[tuple[PeerId, bytes]] = field(default_factory=list)
    ups: list[PeerId] = field(default_factory=list)
    downs: list[tuple[PeerId, PeerError]] = field(default_factory=list)
    until = staticmethod(until)

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview | Refusal:
        if self.admit_error is not None:
            raise self.admit_error
        if self.refusal is not None:
            return self.refusal
        self.admitted.append(message)
        return memoryview(bytearray(tensor.byte_length))

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        self.tensors.append((sender, message, tensor, bytes(buffer)))

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        self.broken.append((message, error))

    def received_control(self, sender: PeerId, message: ControlMessage) -> None:
        self.messages.append((sender, message))

    def announced(self, sender: PeerId, record: bytes) -> None:
        self.records.append((sender, record))

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        if self.answer_gate is not None:
            await self.answer_gate.wait()
        return self.answering(question)

    def serves(self, sender: PeerId) -> bool:
        return self.is_served

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        return topic in self.minded

    def link_up(self, peer: PeerId) -> None:
        self.ups.append(peer)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.downs.append((peer, error))


def refuse_to_answer(question: Question) -> bytes:
    raise Rejected(f"no {question.about.value} for you")


@dataclass
class Persona:
    """Who a peer is, apart from any process or port. Another of the same identity is the peer after a restart."""

    identity: Identity = field(default_factory=Identity.generate)
    book: Book = field(default_factory=Book)
    run: RunId = RUN

    def __post_init__(self) -> None:
        self.credentials: TlsCredentials = make_credentials(self.identity, self.run)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    def contact(self, *ports: int) -> Contact:
        return Contact(self.peer, tuple(f"127.0.0.1:{port}" for port in ports), self.credentials.certificate_der)

    def knows(self, other: Persona, *ports: int) -> None:
        self.book.contacts[other.peer] = other.contact(*ports)


@dataclass
class Node:
    persona: Persona
    handler: Recorder
    transport: GrpcTransport

    @property
    def peer(self) -> PeerId:
        return self.persona.peer

    @property
    def port(self) -> int:
        return self.transport.port


@asynccontextmanager
async def node(
    persona: Persona | None = None,
    *,
    settings: TransportSettings = SETTINGS,
    handler: Recorder | None = None,
    record: bytes = b"",
    ways: Ways | None = None,
) -> AsyncIterator[Node]:
    persona = persona or Persona()
    handler = handler or Recorder()
    needs = (persona.credentials, persona.book, handler, SystemClock(), settings)
    transport = GrpcTransport(*needs, own_record=lambda: record, ways=ways or Ways())
    async with transport:
        yield Node(persona, handler, transport)


@asynccontextmanager
async def two_nodes(settings: TransportSettings = SETTINGS) -> AsyncIterator[tuple[Node, Node]]:
    """Two peers that know each other; neither has dialled yet."""
    async with node(settings=settings) as left, node(settings=settings) as right:
        introduce(left, right)
        yield left, right


def committed_bytes(box: Outbox) -> int:
    return sum(budget.used_bytes for budget in box._budgets.values())


def introduce(left: Node, right: Node) -> None:
    left.persona.knows(right.persona, right.port)
    right.persona.knows(left.persona, left.port)


@asynccontextmanager
async def bare_stream(
    own: Persona, server: Node, *, hello: Hello | None = None, introduced: bool = True
) -> AsyncIterator[BareStream]:
    """A stream to a node on which a test says what it likes, after a Hello unless not `introduced`."""
    contact = server.persona.contact(server.port)
    stream = BareStream(DialledStream(open_channel(contact, contact.addresses[0], own.credentials)))
    try:
        if introduced:
            await stream.say(hello or hello_of(own))
            answer = await stream.hear()
            assert isinstance(answer, Hello), answer
        yield stream
    finally:
        await stream.stream.close()


def hello_of(persona: Persona) -> Hello:
    return Hello(persona.peer, persona.run, PROTOCOL_VERSIONS.lowest, PROTOCOL_VERSIONS.highest, b"")


@dataclass
class BareStream:
    stream: DialledStream

    async def say(self, frame: Frame | bytes) -> None:
        await self.stream.write(frame if isinstance(frame, bytes) else encode(frame))  # type: ignore[arg-type]

    async def hear(self) -> Frame | None:
        async with asyncio.timeout(LONG):
            data = await self.stream.read()
        return None if data is None else decode(data)

    async def farewell(self) -> Farewell:
        """Reads until the node says farewell; fails when it does not."""
        while (frame := await self.hear()) is not None:
            if isinstance(frame, Farewell):
                return frame
        raise AssertionError("the stream ended without a farewell")


FLOATS = TensorSpec((2, 32, 512), DType.FLOAT32)


def forward(sender: PeerId, receiver: PeerId, number: int = 0) -> Forward:
    return Forward(MicrobatchId(sender, number), Path(sender, (Hop(ModuleId(1), receiver),)), 0, Purpose.TRAIN, 60.0)


def pattern(tensor: TensorSpec, seed: int) -> bytes:
    return b"".join(((seed << 24) + i).to_bytes(4, "little") for i in range(tensor.byte_length // 4))


def with_settings(**changes: object) -> TransportSettings:
    return replace(SETTINGS, **changes)  # type: ignore[arg-type]


MIB = 2**20
PLENTY = 4 * 2**30

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Three:
    relaying: DhtDirectory
    far: DhtDirectory
    near: DhtDirectory
    contact: Contact
    tunnels: RelayTunnels
    far_tunnels: RelayTunnels


@asynccontextmanager
async def three(serve: Serve, bytes_per_hour: int = PLENTY) -> AsyncIterator[Three]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, three_at(server.sockets[0].getsockname()[1], bytes_per_hour) as peers:
        yield peers


@asynccontextmanager
async def three_at(port: int, bytes_per_hour: int = PLENTY, far: Identity | None = None) -> AsyncIterator[Three]:
    far_id, relay_id, near_id = far or Identity.generate(), Identity.generate(), Identity.generate()
    async with (
        directory(relay_id, relay_bytes_per_hour=bytes_per_hour) as relaying,
        directory(far_id, relaying, client=True) as far_one,
        directory(near_id, relaying, client=True) as near,
    ):
        relay = relaying.multiaddrs()[0]
        contact = Contact(far_id.peer, (), b"", via=(relay_id.peer,))
        tunnels, far_tunnels = (RelayTunnels(each, {relay_id.peer: relay}.__getitem__) for each in (near, far_one))
        await far_tunnels.attach([relay], f"127.0.0.1:{port}")
        await until(lambda: relaying.situation.relay.attached == 1)
        yield Three(relaying, far_one, near, contact, tunnels, far_tunnels)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(MIB):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # cut off, as some tests want it
    finally:
        writer.close()


async def digest_of(reader: asyncio.StreamReader, amount: int) -> str:
    found = hashlib.sha256()
    while amount:
        data = await reader.readexactly(min(amount, MIB))
        found.update(data)
        amount -= len(data)
    return found.hexdigest()


async def sent(writer: asyncio.StreamWriter, data: bytes) -> None:
    for start in range(0, len(data), MIB):
        writer.write(data[start : start + MIB])
        await writer.drain()
