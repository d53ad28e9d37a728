"""Replicas with real round machines in one process, joined by memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import nn

from node.averaging.anchor.anchor import Anchor, AnchorStore, initial_anchor
from node.averaging.anchor.outer_step import LocalReplica, OuterRule, anchor_of
from node.averaging.anchor.shared_vector import Layout, SpareArrays, Vector, empty_part, layout_of
from node.averaging.exchange.all_reduce import AllReduce, ExchangeMeans
from node.averaging.exchange.pieces import Arrivals, Plan
from node.averaging.exchange.reduction import UpdateSource
from node.averaging.round_runner import ReplicaSync, RoundRunner
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import task_scope
from node.model.optimizer import StepFigures
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.observability.events import RoundCommitted
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal, Transport
from swarm.averaging.round_events import Caught, Event, OtherReplica, ReplicasChanged, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.compression.round_codecs import codec_levels
from swarm.membership.membership import Membership
from swarm.vocabulary.averaging_messages import Contribution, Member, Reduced, Roster, RoundId
from swarm.vocabulary.errors import StateError, Unreachable
from swarm.vocabulary.pipeline_messages import TensorMessage
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId
from tests.kit.links import NoLinks
from tests.kit.waiting import LONG_S, until
from tests.swarm.averaging.round_world import VirtualSigner

RULE = OuterRule(0.7, 0.9)


class NamedSignatures:
    """`PieceSignatures` of peers that have names instead of keys."""

    def __init__(self, own: PeerId) -> None:
        self._own = own

    def sign(self, piece: Contribution, data_hash: bytes) -> bytes:
        return self._made_by(self._own, piece, data_hash)

    def holds(self, peer: PeerId, piece: Contribution, data_hash: bytes, signature: bytes) -> bool:
        return signature == self._made_by(peer, piece, data_hash)

    def _made_by(self, peer: PeerId, piece: Contribution, data_hash: bytes) -> bytes:
        signed = (peer, piece.round, piece.first_chunk, piece.end_chunk, data_hash)
        return hashlib.sha512(repr(signed).encode()).digest()


def means_of(
    own: PeerId, codecs: tuple[Codec, ...], averaging: ComputeThread, transport: Transport, seed: int
) -> ExchangeMeans:
    signatures = NamedSignatures(own)
    return ExchangeMeans(codecs, RULE, averaging, transport, SystemClock(), signatures, Random(seed))  # type: ignore[arg-type]


Tamper = Callable[[PeerId, PeerId, Contribution | Reduced, bytearray], None]


def small_layout(elements: int = 600_001, fragments: int = 1) -> Layout:
    """Several blocks, so that fragments mean something, and a last chunk that is shorter."""
    shapes = {f"model.layers.{block}.weight": (elements // 4,) for block in range(4)}
    shapes["model.norm.weight"] = (elements - 4 * (elements // 4) or 1,)
    return layout_of(shapes, fragments)


def vector(elements: int, seed: int, scale: float = 1.0) -> Vector:
    return np.random.default_rng(seed).standard_normal(elements, np.float32) * np.float32(scale)


def roster_of(base: Anchor, members: Sequence[tuple[PeerId, float, float]], *, shares: Sequence[int] = ()) -> Roster:
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
        return float(np.linalg.norm(self.gradient[self.base.layout.range_of(first, end)].astype(np.float64)))


class Wire(NoLinks):
    def __init__(self, own: PeerId, room: Room) -> None:
        self._own, self._room = own, room

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


class Room:
    """The parties of an exchange."""

    def __init__(self, base: Anchor, codec: Codec, tasks: asyncio.TaskGroup) -> None:
        self.base, self.codec = base, codec
        self.codecs: tuple[Codec, ...] = (codec,)
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
                UpdateSource(party.base, party.snapshot),
                vectors,
                party.arrivals,
                means_of(party.peer, self.codecs, party.thread, Wire(party.peer, self), seed=1),
                party.events.append,
                lambda anchor, it=party: setattr(it, "anchor", anchor),  # type: ignore[misc]
            )

    def start(self, *peers: PeerId) -> None:
        for peer in peers or tuple(self.parties):
            party = self.parties[peer]
            party.task = self._tasks.create_task(party.exchange.run())

    async def stop(self) -> None:
        running = [party.task for party in self.parties.values() if party.task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LONG_S)

    async def exchange(self, roster: Roster) -> list[Anchor]:
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
        here = Room(base, codec, await stack.enter_async_context(task_scope()))
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
    parameter = torch.from_numpy(base.parameters[part].copy()).requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=RULE.learning_rate, momentum=RULE.momentum, nesterov=True)
    optimizer.state[parameter]["momentum_buffer"] = torch.from_numpy(base.momentum[part].copy())
    parameter.grad = torch.from_numpy(gradient[part].copy())
    optimizer.step()
    return parameter.detach().numpy(), optimizer.state[parameter]["momentum_buffer"].numpy()


MODULE = ModuleId(1)
TOKENS = 64


class MadeUpOptimizer:
    def __init__(self, part: nn.Module) -> None:
        self.steps = self.tokens = 0
        self.replicas = 1
        self.before_step = self.before_change = lambda: None
        self._parameters = list(part.parameters())

    def start_anew(self, steps: int, tokens: int) -> None:
        self.steps, self.tokens = steps, tokens

    @torch.no_grad()
    def step(self, seed: int) -> StepFigures:
        self.before_step()
        numbers = torch.Generator().manual_seed(seed)
        for parameter in self._parameters:
            parameter.sub_(torch.randn(parameter.shape, generator=numbers) * 0.01)
        self.steps += 1
        return StepFigures(self.steps, (1,), TOKENS, 1.0, 0.01)


class Blocks(nn.Module):
    """Named as a real module, so that fragments take every other block."""

    def __init__(self, elements: int, blocks: int = 4) -> None:
        super().__init__()
        self.model = nn.Module()
        numbers = torch.Generator().manual_seed(7)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(blocks))
        for layer in self.model.layers:
            layer.weight = nn.Parameter(torch.randn(elements // blocks, generator=numbers))


@dataclass(eq=False)
class Replica:
    peer: PeerId
    runner: RoundRunner
    dispatcher: Dispatcher
    optimizer: MadeUpOptimizer
    local: LocalReplica
    compute: ComputeThread
    settled: list[RoundCommitted] = field(default_factory=list)
    codec_reasons: list[str] = field(default_factory=list)
    history: dict[int, bytes] = field(default_factory=dict)
    accused: list[Caught] = field(default_factory=list)
    left: list[AnchorVersion] = field(default_factory=list)
    caught_up: int = 0

    @property
    def anchor(self) -> Anchor:
        return self.runner.anchor

    async def step(self, seed: int) -> None:
        def job() -> None:
            self.runner.after_inner_step(self.optimizer.step(seed))

        await self.compute.run(Priority.UPKEEP, job)
        self.runner.stepped()

    def vector(self) -> Vector:
        out = np.empty(self.local.layout.elements, np.float32)
        self.local.read(slice(0, len(out)), out)
        return out


class Everybody:
    """Stands for `swarm.membership.membership.Membership` where all are replicas of one module."""

    def get(self, peer: PeerId) -> SimpleNamespace:
        return SimpleNamespace(module=MODULE)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return module == MODULE


@dataclass(eq=False)
class Host:
    own: PeerId
    hall: Hall

    def others(self) -> ReplicasChanged:
        here = (OtherReplica(r.peer, r.anchor.version, True) for r in self.hall.living if r.peer != self.own)
        return ReplicasChanged(tuple(here))

    async def catch_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
        """A copy from memory: how states travel is not tested here."""
        await asyncio.sleep(0)
        for donor in donors:
            anchor = self.hall.replicas[donor].anchor
            if anchor.version == version and donor not in self.hall.dead:
                self.hall.replicas[self.own].caught_up += 1
                return Anchor(anchor.layout, version, anchor.parameters.copy(), anchor.momentum.copy(), anchor.hashes)
        raise StateError("nobody has it")

    async def left(self, version: AnchorVersion, followed: AnchorVersion) -> None:
        self.hall.replicas[self.own].left.append(version)

    def anchored(self, anchor: Anchor) -> None:
        self.hall.replicas[self.own].history[anchor.version.round] = anchor.version.digest

    def settled(self, version: AnchorVersion, event: RoundCommitted, reason: str = "", clipping: float = 1.0) -> None:
        replica = self.hall.replicas[self.own]
        replica.settled.append(event)
        replica.codec_reasons.append(reason)

    def accused(self, caught: Caught) -> None:
        self.hall.replicas[self.own].accused.append(caught)


class Hall:
    """All replicas. `dead` ones neither send nor receive."""

    def __init__(self, elements: int, inner_steps: int, fragments: int, levels: tuple[Codec, ...]) -> None:
        self.replicas: dict[PeerId, Replica] = {}
        self.dead: set[PeerId] = set()
        self.pieces = 0
        self.on_piece: Callable[[PeerId, PeerId, object, bytearray], None] = lambda sender, to, message, data: None
        self.piece_s = 0.0
        self._elements, self._inner_steps, self._fragments, self._levels = elements, inner_steps, fragments, levels

    def __getitem__(self, number: int) -> Replica:
        return list(self.replicas.values())[number]

    @property
    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.peer not in self.dead]

    def add(self, peer: PeerId, compute: ComputeThread, averaging: ComputeThread) -> Replica:
        part = Blocks(self._elements)
        optimizer = MadeUpOptimizer(part)
        local = LocalReplica([part], self._fragments, optimizer)
        store = AnchorStore(anchor_of(local))
        how = {"codecs": self._levels, "answer_s": 1.0, "prepare_s": 5.0, "silence_s": 1.0, "pulse_s": 0.2}
        rules = RoundRules(self._inner_steps, self._fragments, local.layout.chunks, 1e9, **how)
        machine = RoundMachine(peer, MODULE, rules, store.current.version, VirtualSigner())
        means = means_of(peer, rules.codecs, averaging, MemoryWire(peer, self), seed=len(self.replicas))
        replica_sync = ReplicaSync(local, store, compute, averaging, rules, RULE, SystemClock())
        runner = RoundRunner(peer, MODULE, machine, store, replica_sync, means, Host(peer, self))
        dispatcher = Dispatcher(cast(LocalPeer, SimpleNamespace(module=MODULE)), cast(Membership, Everybody()))
        self.replicas[peer] = replica = Replica(peer, runner, dispatcher, optimizer, local, compute)
        return replica

    def agree(self) -> bool:
        """Whether no two living replicas had different anchors of one round. (A dead one may go on by itself.)"""
        for number in {number for replica in self.living for number in replica.history}:
            if len({r.history[number] for r in self.living if number in r.history}) > 1:
                return False
        return True

    async def a_round(self, number: int, inner_steps: int, seed: int = 0) -> None:
        """Every living replica takes its steps; returns when all stand on the anchor of this round."""
        for step in range(inner_steps):
            for index, replica in enumerate(self.replicas.values()):
                if replica.peer not in self.dead:
                    await replica.step(seed + 1000 * number + 10 * step + index)
        await until(lambda: all(r.settled and r.settled[-1].round >= number for r in self.living))


class MemoryWire(NoLinks):
    def __init__(self, own: PeerId, hall: Hall) -> None:
        self._own, self._hall = own, hall

    async def send(self, peer: PeerId, message: object, tensor: TensorSpec, data: memoryview) -> None:
        await self._reach(peer)
        octets = bytearray(data)
        self._hall.pieces += 1
        self._hall.on_piece(self._own, peer, message, octets)
        await self._reach(peer)
        there = self._hall.replicas[peer].dispatcher
        admitted = there.admit(self._own, message, tensor)  # type: ignore[arg-type]
        if not isinstance(admitted, Refusal):
            await asyncio.sleep(self._hall.piece_s)
            admitted[:] = octets
            there.received(self._own, message, tensor, admitted)  # type: ignore[arg-type]

    async def send_control(self, peer: PeerId, message: object) -> None:
        await self._reach(peer)
        self._hall.replicas[peer].dispatcher.received_control(self._own, message)  # type: ignore[arg-type]

    async def _reach(self, peer: PeerId) -> None:
        await asyncio.sleep(0)
        if {peer, self._own} & self._hall.dead:
            raise Unreachable(f"{peer} is dead")


@asynccontextmanager
async def hall(
    count: int,
    *,
    elements: int = 200_000,
    codec: Codec = Codec.NONE,
    limit: Codec | None = None,
    inner_steps: int = 2,
    fragments: int = 1,
) -> AsyncIterator[Hall]:
    """Replicas that reach each other in memory. Rounds use `codec`, or what is chosen up to `limit`."""
    levels = (codec,) if limit is None else codec_levels(limit)
    async with AsyncExitStack() as stack:
        here = Hall(elements, inner_steps, fragments, levels)
        for number in range(count):
            threads = ComputeThread(), ComputeThread(name="averaging")
            replica = here.add(PeerId(f"peer-{number}"), *map(stack.enter_context, threads))
            stack.enter_context(replica.runner.receiving(replica.dispatcher))
        tasks = await stack.enter_async_context(task_scope())
        running = [tasks.create_task(replica.runner.run()) for replica in here.replicas.values()]
        await asyncio.sleep(0)
        try:
            yield here
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=LONG_S)
