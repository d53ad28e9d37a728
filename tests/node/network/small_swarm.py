"""Nodes of one small run in one process, as far as microbatches go."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import torch

from node.concurrency.compute_thread import ComputeThread
from node.concurrency.task_groups import task_scope
from node.data.packing import Microbatch
from node.model.optimizer import StepFigures
from node.pipeline.admission import Admission, hidden_tensor
from node.pipeline.runner import Job, LinkCodecs, MicrobatchRunner, Output, PathEnds, WorkerThread
from node.pipeline.worker import DataWorker, HopWorker, host_hop, host_stage_zero
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal
from protocol.manifest.manifest import Manifest
from swarm.compression.microbatch_codecs import Traffic
from swarm.pipeline.custody import Custody, Key, Phase, Started, Tick, Work
from swarm.vocabulary.errors import PeerError, Unreachable
from swarm.vocabulary.pipeline_messages import (
    Direction,
    Forward,
    MicrobatchControl,
    MicrobatchTensor,
    Purpose,
    Receipt,
    ReceiptStatus,
)
from swarm.vocabulary.types import MAX_HOPS, Codec, Hop, MicrobatchId, ModuleId, Path, PeerId, Reasoned
from tests.kit.links import NoLinks
from tests.kit.waiting import LONG_S, ManualClock, until
from tests.node.small_manifest import small_manifest

CPU = torch.device("cpu")
LIFETIME_S = 60.0
DATA, A, A2, B = PeerId("data"), PeerId("a"), PeerId("a2"), PeerId("b")
MODULES = {DATA: ModuleId(0), A: ModuleId(1), A2: ModuleId(1), B: ModuleId(2)}


def path_by(*peers: PeerId) -> Path:
    return Path(DATA, tuple(Hop(MODULES[peer], peer) for peer in peers))


def text_of(manifest: Manifest, seed: int) -> Microbatch:
    shape = (manifest.training.rows, manifest.model.sequence)
    numbers = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, manifest.model.vocabulary, shape, generator=numbers) for _ in range(2))
    return Microbatch(tokens, labels, 0.0)


@dataclass(eq=False)
class Gate:
    """A place where what comes by waits until the gate is opened, and then fails if there is an `error`."""

    error: PeerError | None = None
    reached: bool = False
    _opened: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        self.reached = True
        assert self._opened.wait(LONG_S)

    async def pass_through(self) -> None:
        self.reached = True
        await until(self._opened.is_set)
        if self.error is not None:
            raise self.error


Spot = tuple[PeerId, str | Work, type[MicrobatchTensor] | None]


class GatedWorker:
    def __init__(self, worker: HopWorker | DataWorker, gates: dict[Spot, Gate], own: PeerId) -> None:
        self.inner = worker
        self._gates = gates
        self._own = own

    @property
    def tensor(self) -> TensorSpec:
        return self.inner.tensor

    def compute(self, job: Job) -> Output:
        gate = self._gates.get((self._own, job.work, None))
        if gate is not None:
            gate.wait()
        return self.inner.compute(job)

    def retract(self, job: Job) -> bool:
        return self.inner.retract(job)

    def forget(self, ticket: int) -> None:
        self.inner.forget(ticket)

    def step(self) -> StepFigures | None:
        gate = self._gates.get((self._own, "step", None))
        if gate is not None:
            gate.wait()
        return self.inner.step()


class Ends(PathEnds):
    """The data node's account. It keeps no text of a microbatch that has ended, as the real one."""

    def __init__(self, worker: DataWorker) -> None:
        self.runner: MicrobatchRunner | None = None
        self.losses: dict[MicrobatchId, float] = {}
        self.done: list[MicrobatchId] = []
        self.paths: dict[MicrobatchId, Path] = {}
        self.given_up: dict[MicrobatchId, str] = {}
        self.reports: list[tuple[PeerId, Receipt]] = []
        self._texts = worker.texts

    def expects(self, message: Forward) -> bool:
        return message.microbatch in self._texts

    def loss_known(self, microbatch: MicrobatchId, path: Path, purpose: Purpose, loss: float) -> None:
        self.losses[microbatch] = loss
        if purpose is Purpose.EVALUATE:
            del self._texts[microbatch]

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        self.done.append(microbatch)
        self.paths[microbatch] = path
        del self._texts[microbatch]

    def lost(self, microbatch: MicrobatchId, detail: str) -> None:
        if self._texts.pop(microbatch, None) is not None:
            self.given_up[microbatch] = detail
            self.runner.abandon(microbatch, detail)

    def may_hold(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        return peer in MODULES and microbatch in self._texts

    def may_have_held(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        return peer in MODULES

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        self.reports.append((sender, receipt))


@dataclass(eq=False)
class CountedVisits:
    """`node.pipeline.runner.RunnerHost` that keeps whose gradients count, whose were taken back and inner steps."""

    steps: list[StepFigures] = field(default_factory=list)
    counted: list[MicrobatchId] = field(default_factory=list)
    taken_back: list[MicrobatchId] = field(default_factory=list)

    def visited(self, microbatch: MicrobatchId) -> None:
        self.counted.append(microbatch)

    def retracted(self, microbatch: MicrobatchId) -> None:
        self.taken_back.append(microbatch)

    def stepped(self, figures: StepFigures) -> None:
        self.steps.append(figures)

    def not_reached(self, peer: PeerId, error: PeerError) -> None:
        return


@dataclass(eq=False)
class Member:
    peer: PeerId
    worker: GatedWorker
    runner: MicrobatchRunner
    compute: ComputeThread
    visits: CountedVisits

    @property
    def is_clear(self) -> bool:
        """Whether it holds nothing any more: no microbatch, no tensor, no graph, no buffer."""
        inner = self.worker.inner
        kept = inner._visits if isinstance(inner, DataWorker) else inner._kept
        return self.runner.is_empty and not self.runner._tensors and not kept and self.runner._pool.in_use == 0

    def phase(self, microbatch: MicrobatchId, position: int) -> Phase | None:
        holding = self.runner.custody.get(Key(microbatch, position))
        return None if holding is None else holding.phase


class HardestCodec(LinkCodecs):
    """As if every link were too slow for anything else. Keeps the errors that were measured."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, hidden_tensor(manifest), lambda peer: 0.0, lambda peer: 0.0)
        limits = manifest.codecs.activations, manifest.codecs.gradients
        self._limits = dict(zip(Traffic, map(Codec.__getitem__, map(str.upper, limits)), strict=True))
        self.errors: list[tuple[Traffic, Codec, float]] = []

    def choose(self, to: PeerId, traffic: Traffic) -> Codec:
        return self._limits[traffic]

    def measured(self, traffic: Traffic, codec: Codec, error: float) -> None:
        self.errors.append((traffic, codec, error))


class SmallSwarm:
    """Made by `small_swarm`: one data node, and hops A and A2 of stage 1 and B of stage 2."""

    def __init__(self, manifest: Manifest, present: tuple[PeerId, ...]) -> None:
        self.manifest = manifest
        self.clock = ManualClock()
        self.gates: dict[Spot, Gate] = {}
        self.dead: set[PeerId] = set()
        self.refused: list[tuple[PeerId, Refusal]] = []
        self.sent: list[tuple[PeerId, int]] = []
        data_worker = host_stage_zero(manifest, CPU)
        self.ends = Ends(data_worker)
        self.members = {
            peer: self._member(peer, data_worker if peer == DATA else host_hop(manifest, MODULES[peer], CPU, 2**20))
            for peer in (DATA, *present)
        }
        self.ends.runner = self[DATA].runner
        self.texts = data_worker.texts

    def __getitem__(self, peer: PeerId) -> Member:
        return self.members[peer]

    def _member(self, own: PeerId, worker: HopWorker | DataWorker) -> Member:
        gated = GatedWorker(worker, self.gates, own)
        compute = ComputeThread()
        visits = CountedVisits()
        runner = MicrobatchRunner(
            Custody(own, 4, self),
            Admission(self.manifest, own, MODULES[own], *2 * (lambda message: None,)),
            WorkerThread(gated, compute, self.clock),
            MemoryTransport(own, self),
            HardestCodec(self.manifest),
            visits,
            self.clock,
        )
        return Member(own, gated, runner, compute, visits)

    fewest_hops = MAX_HOPS

    def choose(self, module: ModuleId, without: frozenset[PeerId], busy: PeerId | None) -> Reasoned[PeerId | None]:
        able = [p for p in self.members if MODULES[p] == module and p not in without | self.dead]
        return Reasoned(able[0] if able else None, "the first that is left")

    def link_took(self, peer: PeerId, since: float) -> None:
        """The first that is left is chosen, however long its link takes."""

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return MODULES.get(peer) == module

    def is_given_up(self, peer: PeerId) -> bool:
        return False

    def is_linked(self, peer: PeerId) -> bool:
        return True

    def goes_round(self, module: ModuleId) -> bool:
        return False

    def has_other_expert(self, module: ModuleId) -> bool:
        return False

    def close(
        self,
        peer: PeerId,
        where: str | Work,
        message: type[MicrobatchTensor] | None = None,
        error: PeerError | None = None,
    ) -> Gate:
        gate = self.gates[peer, where, message] = Gate(error)
        return gate

    def open(self, gate: Gate) -> None:
        for spot in [spot for spot, there in self.gates.items() if there is gate]:
            del self.gates[spot]
        gate.open()

    def launch(self, number: int, path: Path, purpose: Purpose = Purpose.TRAIN) -> MicrobatchId:
        microbatch = MicrobatchId(DATA, number)
        self.texts[microbatch] = text_of(self.manifest, number)
        self[DATA].runner.handle(Started(microbatch, path, purpose, LIFETIME_S))
        return microbatch

    def wait(self, seconds: float) -> None:
        """Lets the clock go on, as far as custody is concerned."""
        self.clock.now += seconds
        for member in self.members.values():
            member.runner.handle(Tick())

    async def all_clear(self) -> None:
        await until(lambda: all(member.is_clear for member in self.members.values()))


class MemoryTransport(NoLinks):
    """`protocol.interfaces.transport.Transport` that hands everything to the other runner."""

    def __init__(self, own: PeerId, swarm: SmallSwarm) -> None:
        self._own = own
        self._swarm = swarm

    async def send(self, peer: PeerId, message: MicrobatchTensor, tensor: TensorSpec, data: memoryview) -> None:
        await self._reach(peer)
        await self._at("before", message)
        self._swarm.sent.append((self._own, data.nbytes))
        there = self._swarm[peer].runner
        admitted = there.admit(self._own, message, tensor)
        if isinstance(admitted, Refusal):
            self._swarm.refused.append((peer, admitted))
            self._swarm[self._own].runner.receive(peer, _receipt_of(message, admitted))
            return
        try:
            await self._at("halfway", message)
        except BaseException:
            there.broken_off(self._own, message, admitted)
            raise
        admitted[:] = data
        there.received(self._own, message, tensor, admitted)

    async def send_control(self, peer: PeerId, message: MicrobatchControl) -> None:
        await self._reach(peer)
        self._swarm[peer].runner.receive(self._own, message)

    async def _reach(self, peer: PeerId) -> None:
        await asyncio.sleep(0)
        if self._swarm.dead & {peer, self._own}:
            raise Unreachable(f"{peer} is dead")

    async def _at(self, where: str, message: MicrobatchTensor) -> None:
        gate = self._swarm.gates.get((self._own, where, type(message)))
        if gate is not None:
            await gate.pass_through()


def _receipt_of(message: MicrobatchTensor, refusal: Refusal) -> Receipt:
    direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
    status = ReceiptStatus.BUSY if refusal.busy else ReceiptStatus.REFUSED
    return Receipt(message.microbatch, direction, message.position, status, refusal.retry_after_s, refusal.detail)


@asynccontextmanager
async def small_swarm(*present: PeerId, **changes: object) -> AsyncIterator[SmallSwarm]:
    """A running swarm of the data node and these hops. A runner that fails ends the block with its error."""
    swarm = SmallSwarm(small_manifest(stages__blocks=[1, 1, 1], **changes), present)
    async with AsyncExitStack() as stack:
        for member in swarm.members.values():
            stack.enter_context(member.compute)
        stack.enter_context(swarm[DATA].runner.ending_at(swarm.ends))
        tasks = await stack.enter_async_context(task_scope())
        running = [tasks.create_task(member.runner.run()) for member in swarm.members.values()]
        await asyncio.sleep(0)  # runners take work only when they run
        try:
            yield swarm
        finally:
            for gate in list(swarm.gates.values()):
                swarm.open(gate)
            for task in running:
                task.cancel()
