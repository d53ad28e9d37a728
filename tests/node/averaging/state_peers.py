"""Peers that give and fetch states over real links, with faults between a donor and its transport."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.anchor.shared_vector import Layout
from node.averaging.state_sync.download import Donor, FreshSpace, Space, StateDownloads
from node.concurrency.task_groups import task_scope
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.network.session import NetworkSession
from node.start.cut_model import CutModel
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Question
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.membership.membership import Membership
from swarm.vocabulary.averaging_messages import StateChunk, StateRefused
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import ControlMessage, TensorMessage
from swarm.vocabulary.types import Codec, ModuleId, PeerId
from tests.kit.links import NoLinks
from tests.node.averaging.small_rounds import Everybody
from tests.protocol.transport.link_peers import Persona, SystemClock

MODULE = ModuleId(1)
LONG_S = 60.0
SETTINGS = TransportSettings(chunk_bytes=16 * 1024, ping_period_s=0.1, stall_after_s=2.0)


@dataclass(eq=False)
class Faults:
    corrupt: bool = False
    garble: bool = False
    lies_about_hashes: bytes | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    freeze_after: int | None = None
    sent: list[int] = field(default_factory=list)
    codecs: Counter[Codec] = field(default_factory=Counter)
    refused: list[StateRefused] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    async def before_chunk(self) -> None:
        if self.freeze_after is not None and len(self.sent) >= self.freeze_after:
            self.freeze_after = None
            self.gate.clear()
        await self.gate.wait()


class FaultyTransport(NoLinks):
    """`protocol.interfaces.transport.Transport` over the real one."""

    def __init__(self, inner: GrpcTransport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    async def send(self, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        assert isinstance(message, StateChunk)
        await self._faults.before_chunk()
        if self._faults.corrupt:
            spoilt = bytearray(data)
            spoilt[-1] ^= 1
            data = memoryview(spoilt)
        if self._faults.garble:
            data = memoryview(bytes(byte ^ 0xA5 for byte in data))
        self._faults.sent.append(message.chunk)
        self._faults.codecs[tensor.codec] += 1
        await self._inner.send(peer, message, tensor, data)

    async def send_control(self, peer: PeerId, message: ControlMessage) -> None:
        if isinstance(message, StateRefused):
            self._faults.refused.append(message)
        await self._inner.send_control(peer, message)


class Handler(Dispatcher):
    """Of a peer whose links that end are noted, and that lies about hashes if it is to."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(cast(LocalPeer, SimpleNamespace(module=MODULE)), cast(Membership, Everybody()))
        self.downs: list[PeerError] = []
        self._faults = faults

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        if self._faults.lies_about_hashes is not None:
            return self._faults.lies_about_hashes
        return await super().answer(sender, question)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.downs.append(error)
        super().link_down(peer, error)


@dataclass(eq=False)
class StatePeer:
    persona: Persona
    transport: GrpcTransport
    handler: Handler
    downloads: StateDownloads
    faults: Faults
    store: AnchorStore | None
    donor: Donor | None
    progress: list[tuple[int, int]]
    liars: list[tuple[PeerId, str]]
    _stack: AsyncExitStack

    @property
    def peer(self) -> PeerId:
        return self.persona.peer

    async def vanish(self) -> None:
        await self._stack.aclose()


class StateSwarm:
    def __init__(self, stack: AsyncExitStack, layout: Layout, settings: TransportSettings) -> None:
        self._stack = stack
        self._layout = layout
        self._settings = settings
        self.peers: list[StatePeer] = []

    async def donor(
        self, anchor: Anchor, faults: Faults | None = None, module: ModuleId = MODULE, start: CutModel | None = None
    ) -> StatePeer:
        """A peer of the module that stands on this anchor, and has the model from which the run starts if given."""
        return await self._add(AnchorStore(anchor), faults or Faults(), None, module, start)

    async def joiner(self, space: Space | None = None) -> StatePeer:
        return await self._add(None, Faults(), space)

    async def _add(
        self,
        store: AnchorStore | None,
        faults: Faults,
        space: Space | None,
        module: ModuleId = MODULE,
        start: CutModel | None = None,
    ) -> StatePeer:
        persona, handler, clock = Persona(), Handler(faults), SystemClock()
        transport = GrpcTransport(
            persona.credentials, persona.book, handler, clock, self._settings, own_record=lambda: b""
        )
        progress: list[tuple[int, int]] = []
        liars: list[tuple[PeerId, str]] = []
        own = LocalPeer(persona.run, persona.peer, persona.credentials.certificate_der, clock)
        downloads = StateDownloads(
            cast(NetworkSession, SimpleNamespace(own=own, transport=transport, dispatcher=handler)),
            MODULE,
            space or FreshSpace(self._layout),
            lambda done, total: progress.append((done, total)),
            lambda peer, detail: liars.append((peer, detail)),
        )
        donor = None
        if store is not None:
            donor = Donor(module, store, clock, FaultyTransport(transport, faults), start)
        stack = await self._stack.enter_async_context(AsyncExitStack())
        await stack.enter_async_context(transport)
        if donor is not None:
            tasks = await stack.enter_async_context(task_scope())
            stack.callback(tasks.create_task(donor.run()).cancel)
            stack.enter_context(donor.receiving(handler))
            await asyncio.sleep(0)
        added = StatePeer(persona, transport, handler, downloads, faults, store, donor, progress, liars, stack)
        for other in self.peers:
            other.persona.knows(persona, transport.port)
            persona.knows(other.persona, other.transport.port)
        self.peers.append(added)
        return added


@asynccontextmanager
async def state_swarm(layout: Layout, settings: TransportSettings = SETTINGS) -> AsyncIterator[StateSwarm]:
    async with asyncio.timeout(LONG_S), AsyncExitStack() as stack:
        yield StateSwarm(stack, layout, settings)
