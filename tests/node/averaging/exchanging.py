"""Members of one exchange in one process, between whom pieces go from memory to memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from node.averaging.anchor.anchor import Anchor, initial_anchor
from node.averaging.anchor.layout import Layout, layout_of
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.anchor.shared_vector import SpareArrays, Vector, empty_part
from node.averaging.exchange.all_reduce import AllReduce, ExchangeMeans
from node.averaging.exchange.arrivals import Arrivals
from node.averaging.exchange.partition import Plan
from node.averaging.exchange.pseudo_gradient import Source
from node.concurrency.compute_thread import ComputeThread
from node.concurrency.task_groups import task_scope
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import LinkFigures, Question, Refusal
from swarm.averaging.round_events import Event
from swarm.compression.round_codecs import RoundCodecs
from swarm.vocabulary.averaging_messages import Contribution, Member, Reduced, Roster, RoundId
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.pipeline_messages import ControlMessage, TensorMessage
from swarm.vocabulary.types import Codec, ModuleId, PeerId

RULE = OuterRule(0.7, 0.9)


class NamedSignatures:
    """`protocol.identity.round_signatures.PieceSignatures` of peers that have names instead of keys; whoever signs by
    another's name is not believed."""

    def __init__(self, own: PeerId) -> None:
        self._own = own

    def sign(self, piece: Contribution, data_hash: bytes) -> bytes:
        return self._made_by(self._own, piece, data_hash)

    def holds(self, peer: PeerId, piece: Contribution, data_hash: bytes, signature: bytes) -> bool:
        return signature == self._made_by(peer, piece, data_hash)

    def _made_by(self, peer: PeerId, piece: Contribution, data_hash: bytes) -> bytes:
        return hashlib.sha512(
            repr((peer, piece.round, piece.first_chunk, piece.end_chunk, data_hash)).encode()
        ).digest()


LONG_S = 30.0

Tamper = Callable[[PeerId, PeerId, Contribution | Reduced, bytearray], None]
"""Sees, and may change, what goes from one member to another."""


def small_layout(elements: int = 600_001, fragments: int = 1) -> Layout:
    """Several blocks, so that fragments mean something, and a last chunk that is shorter."""
    shapes = {f"model.layers.{block}.weight": (elements // 4,) for block in range(4)}
    shapes["model.norm.weight"] = (elements - 4 * (elements // 4) or 1,)
    return layout_of(shapes, fragments)


def vector(elements: int, seed: int, scale: float = 1.0) -> Vector:
    return np.random.default_rng(seed).standard_normal(elements, np.float32) * np.float32(scale)


def roster_of(
    base: Anchor, members: Sequence[tuple[PeerId, float, float]], *, shares: Sequence[int] | None = None
) -> Roster:
    """Members as (peer, coefficient, norm); `shares` are the sizes of their shards to each other."""
    first, end = base.layout.fragments[base.version.fragment]
    weights = np.cumsum([0, *(shares or [1] * len(members))])
    borders = [first + round((end - first) * weight / weights[-1]) for weight in weights]
    listed = tuple(
        Member(peer, borders[i], borders[i + 1], coefficient, norm)
        for i, (peer, coefficient, norm) in enumerate(members)
    )
    number = RoundId(ModuleId(1), base.version.round + 1, 0, members[0][0])
    return Roster(number, base.version, listed, base.version.steps + 10, base.version.tokens + 1000)


@dataclass(eq=False)
class Party:
    """One member."""

    peer: PeerId
    base: Anchor
    snapshot: Vector
    thread: ComputeThread
    events: list[Event] = field(default_factory=list)
    rejections: list[tuple[PeerId, str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    anchor: Anchor | None = None
    arrivals: Arrivals = field(init=False)
    exchange: AllReduce = field(init=False)
    task: asyncio.Task[None] | None = None

    @property
    def gradient(self) -> Vector:
        return self.base.parameters - self.snapshot

    @property
    def norm(self) -> float:
        first, end = self.base.layout.fragments[self.base.version.fragment]
        part = self.base.layout.range_of(first, end)
        return float(np.linalg.norm(self.gradient[part].astype(np.float64)))


class Wire:
    """`protocol.interfaces.transport.Transport` of one party."""

    def __init__(self, own: PeerId, room: Room) -> None:
        self._own = own
        self._room = room

    async def send(self, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        assert isinstance(message, Contribution | Reduced)
        await asyncio.sleep(0)
        if {peer, self._own} & self._room.dead:
            raise Unreachable(f"{peer} is dead")
        self._room.sent += 1
        octets = bytearray(data)
        self._room.tamper(self._own, peer, message, octets)
        there = self._room.parties[peer]
        admitted = there.arrivals.admit(self._own, message, tensor)
        if isinstance(admitted, Refusal):
            there.refusals.append(admitted.detail)
            return
        admitted[:] = octets
        there.arrivals.received(self._own, message, admitted)

    async def tell(self, peer: PeerId, message: ControlMessage) -> None:
        raise Unreachable("nothing is told here")

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        raise Unreachable("nobody answers questions here")

    def announce(self, record: bytes) -> None:
        return

    def figures(self) -> dict[PeerId, LinkFigures]:
        return {}


class Room:
    """The parties of an exchange, which begins with `begin`."""

    def __init__(self, codec: Codec, tasks: asyncio.TaskGroup) -> None:
        self.codec = codec
        self.codecs: tuple[RoundCodecs, ...] = (RoundCodecs(codec),)
        self.parties: dict[PeerId, Party] = {}
        self.dead: set[PeerId] = set()
        self.tamper: Tamper = lambda sender, to, message, data: None
        self.sent = 0
        self._tasks = tasks

    def __getitem__(self, peer: str) -> Party:
        return self.parties[PeerId(peer)]

    def prepare(self, roster: Roster) -> None:
        roster = replace(roster, codec=self.codec)
        for party in self.parties.values():
            plan = Plan(party.peer, party.base.layout, roster)
            part = party.base.layout.range_of(*party.base.layout.fragments[party.base.version.fragment])
            arrays = SpareArrays(part.stop - part.start)
            vectors = empty_part(part, arrays), empty_part(part, arrays)
            for vector in vectors:
                vector.arrays[0].fill(np.nan)
            party.arrivals = Arrivals(
                roster.round, self.codecs, lambda p, why, it=party: it.rejections.append((p, why))
            )  # type: ignore[misc]
            party.exchange = AllReduce(
                plan,
                Source(party.base, party.snapshot),
                vectors,
                party.arrivals,
                ExchangeMeans(
                    self.codecs,
                    RULE,
                    party.thread,
                    Wire(party.peer, self),
                    SystemClock(),
                    NamedSignatures(party.peer),  # type: ignore[arg-type]
                    Random(1),
                ),
                party.events.append,
                lambda anchor, it=party: setattr(it, "anchor", anchor),  # type: ignore[misc]
            )

    def start(self, *peers: PeerId) -> None:
        for peer in peers or tuple(self.parties):
            party = self.parties[peer]
            party.task = self._tasks.create_task(party.exchange.run())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LONG_S):
            while not condition():
                await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Ends every exchange."""
        running = [party.task for party in self.parties.values() if party.task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LONG_S)

    async def exchange(self, roster: Roster) -> list[Anchor]:
        """A whole exchange; the new anchors, in the order of the parties."""
        self.prepare(roster)
        self.start()
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(*(party.task for party in self.parties.values() if party.task is not None))
        anchors = [party.anchor for party in self.parties.values()]
        assert None not in anchors
        return [anchor for anchor in anchors if anchor is not None]


@asynccontextmanager
async def room(base: Anchor, snapshots: dict[str, Vector], codec: Codec = Codec.NONE) -> AsyncIterator[Room]:
    """Parties that stand on `base`, each with an own copy of it and its snapshot."""
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(task_scope())
        here = Room(codec, tasks)
        for name, snapshot in snapshots.items():
            thread = stack.enter_context(ComputeThread(name="averaging"))
            own = replace(base, parameters=base.parameters.copy(), momentum=base.momentum.copy())
            here.parties[PeerId(name)] = Party(PeerId(name), own, snapshot, thread)
        try:
            yield here
        finally:
            await here.stop()


def base_anchor(layout: Layout, seed: int = 0) -> Anchor:
    return initial_anchor(layout, vector(layout.elements, seed))


def equal_weights(parties: Sequence[Party]) -> list[tuple[PeerId, float, float]]:
    return [(party.peer, 1 / len(parties), party.norm) for party in parties]


def outer_reference(base: Anchor, gradient: Vector, part: slice) -> tuple[Vector, Vector]:
    """torch's SGD with Nesterov momentum, which knows nothing of chunks and pieces."""
    import torch

    parameter = torch.from_numpy(base.parameters[part].copy()).requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=RULE.learning_rate, momentum=RULE.momentum, nesterov=True)
    optimizer.state[parameter]["momentum_buffer"] = torch.from_numpy(base.momentum[part].copy())
    parameter.grad = torch.from_numpy(gradient[part].copy())
    optimizer.step()
    return parameter.detach().numpy(), optimizer.state[parameter]["momentum_buffer"].numpy()
