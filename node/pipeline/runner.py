"""Runs a node's microbatches: receives tensors, computes them, and sends the results.

A microbatch passes `MicrobatchRunner`'s admit, received, _compute, _send (until the next peer accepts it) and _forget.
`swarm.pipeline.custody` decides each next step, and `_carry_out` starts it.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.machine_runner import MachineRunner
from node.model.optimizer import StepFigures
from node.network.dispatcher import Dispatcher
from node.observability.failpoints import crash_point
from node.observability.status import CodecChoice, CodecStatus, LinkStatus
from node.pipeline.admission import Admission, allowed_codecs
from protocol.codecs import Encoded
from protocol.codecs.memory import BufferPool
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal, Transport
from protocol.manifest.manifest import Manifest
from swarm.compression.microbatch_codecs import MOST_ERROR, Traffic, choose
from swarm.pipeline.custody import (
    RECEIVED_PER_SLOT,
    Action,
    BrokenOff,
    Compute,
    Computed,
    ComputeFailed,
    Confirmed,
    ControlArrived,
    Custody,
    Event,
    Finished,
    Forget,
    KeepGradient,
    Key,
    PeerBack,
    PeerLost,
    Retract,
    SendControl,
    SendOutput,
    SlotState,
    TensorArrived,
    Tick,
    Work,
)
from swarm.vocabulary.errors import OutOfMemory, PeerError, ResourceExhausted, SkipstoneError
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Direction,
    Forward,
    MicrobatchControl,
    MicrobatchTensor,
    Purpose,
    Receipt,
    ReceiptStatus,
    Stranded,
)
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import Codec, MicrobatchId, Path, PeerId, Reasoned, short

log = logging.getLogger(__name__)

BUSY_RETRY_S = 0.1
CHECKED_EVERY = 64  # Encodings per measured error. Decoding is cheaper than encoding, so measuring costs about 1 %.
MAX_WAITING_MESSAGES = 256  # Unsent messages per peer. Further ones are dropped, as if the peer were unreachable.
MOST_SHORT_OF_MEMORY = 32  # Consecutive computations that may run out of memory before the module counts as too large
MAX_LINKS: Final = 1024  # Links whose codecs are remembered. The transport keeps fewer open.


@dataclass(frozen=True, slots=True)
class Job:
    """Computation for one microbatch. `ticket` tells copies of a microbatch apart: each has its own custody entry."""

    ticket: int
    key: Key
    work: Work
    purpose: Purpose
    input: Encoded | None = None  # Received hidden states. None at the start of a path.
    gradient: Encoded | None = None  # Received gradient of the output
    documents: tuple[int, ...] = ()  # Tokens per document. Empty for rows of one stream.
    codec: Codec = Codec.NONE
    check_codec: bool = False  # Whether to measure the output's encoding error
    labels: int = 0  # Tokens with a label; 0 for all


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a `Job`: a tensor to send, a loss, or both. `step_due` requests an inner step before other work."""

    tensor: Encoded | None = None
    loss: float | None = None
    step_due: bool = False
    error: float | None = None


class Worker(Protocol):
    """Passes and inner steps of one replica. All methods but `tensor` run on the compute thread."""

    @property
    def tensor(self) -> TensorSpec:
        """Shape and type of the tensors on the wire: hidden states and their gradients."""

    def compute(self, job: Job) -> Output:
        """Runs a job. The caller keeps the tensors of job and output unchanged until `forget`."""

    def retract(self, job: Job) -> bool:
        """Subtracts a microbatch's gradient, even after a step. Returns whether the gradient had been added."""

    def forget(self, ticket: int) -> None:
        """Frees the state of one custody entry. Afterwards the caller may overwrite the memory of its tensors."""

    def step(self) -> StepFigures | None:
        """Takes an inner step and returns its figures; None if no step is due."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerThread:
    """Asynchronous access to a `Worker` on its compute thread. Raises errors of both."""

    worker: Worker
    thread: ComputeThread
    clock: Clock
    after_step: Callable[[StepFigures], None] = lambda figures: None
    allocate: Callable[[int], memoryview] | None = None

    async def compute(self, job: Job) -> tuple[Output, float]:
        """Runs a job on the compute thread. Returns the output and the seconds that the job took there."""

        def timed() -> tuple[Output, float]:
            begun = self.clock.monotonic()
            return self.worker.compute(job), self.clock.monotonic() - begun

        return await self.thread.run(Priority.EVALUATE if job.purpose is Purpose.EVALUATE else Priority.TRAIN, timed)

    async def retract(self, job: Job) -> bool:
        return await self.thread.run(Priority.TRAIN, lambda: self.worker.retract(job))

    async def forget(self, ticket: int) -> None:
        await self.thread.run(Priority.UPKEEP, lambda: self.worker.forget(ticket))

    async def step(self) -> StepFigures | None:
        def step() -> StepFigures | None:
            figures = self.worker.step()
            if figures is not None:
                self.after_step(figures)
            return figures

        return await self.thread.run(Priority.UPKEEP, step)


class LinkCodecs:
    """Choice of a codec for each of this node's links, by the link's throughput and measured encoding errors."""

    def __init__(
        self,
        manifest: Manifest,
        tensor: TensorSpec,
        visit_s: Callable[[PeerId], float],  # Compute time of a microbatch at the link's slower end; 0 if unknown
        rate: Callable[[PeerId], float],  # Throughput of the link to a peer in bytes per second; 0 if unknown
    ) -> None:
        self._levels = allowed_codecs(manifest)
        self._sizes = {codec: replace(tensor, codec=codec).byte_length for codec in MOST_ERROR}
        self._sizes[Codec.NONE] = tensor.raw_bytes
        self._visit_s, self._rate = visit_s, rate
        self._chosen = Latest[PeerId, dict[Traffic, Reasoned[Codec]]](MAX_LINKS)
        self._too_coarse: set[tuple[Traffic, Codec]] = set()

    def choose(self, to: PeerId, traffic: Traffic) -> Codec:
        levels = self._levels[traffic]
        while len(levels) > 1 and (traffic, levels[-1]) in self._too_coarse:  # measured to be too inaccurate
            levels = levels[:-1]
        choices = self._chosen.setdefault(to, {})
        current = choices[traffic].value if traffic in choices else None
        choices[traffic] = choose(levels, self._sizes, current, self._rate(to), self._visit_s(to))
        return choices[traffic].value

    def measured(self, traffic: Traffic, codec: Codec, error: float) -> None:
        """Records the relative error of one encoding. An error above the codec's limit disables the codec."""
        if error > MOST_ERROR.get(codec, float("inf")):
            self._too_coarse.add((traffic, codec))

    def lost(self, peer: PeerId) -> None:
        self._chosen.pop(peer, None)

    def describe(self) -> CodecStatus:
        """Returns the codecs for the node's status: allowed, disabled, and chosen for each link with reasons."""
        links = {}
        for peer, chosen in itertools.islice(self._chosen.items(), 64):
            codecs = {t.value: CodecChoice(c.value.name.lower(), c.reason) for t, c in chosen.items()}
            if math.isfinite(rate := self._rate(peer)):  # else a peer of this process
                links[short(peer)] = LinkStatus(round(rate), **codecs)
        return CodecStatus(
            {traffic.value: tuple(codec.name.lower() for codec in levels) for traffic, levels in self._levels.items()},
            tuple(sorted(f"{traffic.value}: {codec.name.lower()}" for traffic, codec in self._too_coarse)),
            links,
        )


class PathEnds:
    """Callbacks of the runner about a data node's own microbatches. This base class, for other nodes, does nothing."""

    def expects(self, message: Forward) -> bool:
        """Tells whether the microbatch of an arriving Forward is one of ours that is in flight."""
        return False

    def loss_known(self, microbatch: MicrobatchId, path: Path, purpose: Purpose, loss: float) -> None:
        """Called when the loss of one of our microbatches is computed, in nats per token."""

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        """Called when a microbatch completes, so that the gradients of all hops on `path` are confirmed."""

    def lost(self, microbatch: MicrobatchId, detail: str) -> None:
        """Called when a microbatch cannot be completed, with the reason in `detail`."""

    def may_hold(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        """Whether the peer may hold the microbatch. Any replica of a module on its path may, because of repairs."""
        return False

    def may_have_held(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        """Like `may_hold`, also for microbatches completed shortly before, whose receipts may still arrive."""
        return False

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        """Called when a hop reports that it passed one of our microbatches on; possibly after its completion."""


class RunnerHost(Protocol):
    """Callbacks of the runner about gradients and inner steps of this node's replica, and about failed sends."""

    def visited(self, microbatch: MicrobatchId) -> None:
        """Called when the data node confirms a microbatch whose gradient this replica added."""

    def retracted(self, microbatch: MicrobatchId) -> None:
        """Called after the gradient of an unconfirmed microbatch was subtracted again."""

    def stepped(self, figures: StepFigures) -> None:
        """Called after an inner step of this node's replica."""

    def not_reached(self, peer: PeerId, error: PeerError) -> None:
        """Called when a message or tensor could not be sent to `peer`."""


Slot = tuple[Key, type[MicrobatchTensor]]  # The entry of a tensor, and whether it is the entry's input or gradient


@dataclass(slots=True, eq=False)
class Tensors:
    """Tensors of one custody entry. Buffers are released once the entry is forgotten and no task uses the tensors."""

    ticket: int
    input: Encoded | None = None
    gradient: Encoded | None = None
    output: Encoded | None = None
    documents: tuple[int, ...] = ()
    labels: int = 0  # Tokens with a label. Kept, like `documents`, while the gradient may have to be subtracted.
    users: int = 0
    forgotten: bool = False

    def job(
        self, key: Key, work: Work, purpose: Purpose, codec: Codec = Codec.NONE, *, check_codec: bool = False
    ) -> Job:
        return Job(
            self.ticket, key, work, purpose, self.input, self.gradient, self.documents, codec, check_codec, self.labels
        )


def slot_of(message: MicrobatchTensor) -> Slot:
    return Key(message.microbatch, message.position), type(message)


class MicrobatchRunner(MachineRunner[Event, Action]):
    """Event loop of one node's microbatches: carries their tensors between its links and its compute thread."""

    def __init__(
        self,
        custody: Custody,
        admission: Admission,
        worker: WorkerThread,
        transport: Transport,
        codecs: LinkCodecs,
        host: RunnerHost,
        clock: Clock,
    ) -> None:
        super().__init__(custody.handle, Tick(), transport, clock, MAX_WAITING_MESSAGES)
        self.custody = custody
        self.codecs = codecs
        self.wire_s = 0.0  # Seconds spent sending tensors
        self._admission = admission
        self._worker = worker
        self._host = host
        self._ends = PathEnds()
        self._takes_new_work = True
        self._encoded = 0
        self._short_of_memory = 0  # Consecutive computations that ran out of memory
        self._pool = BufferPool(worker.worker.tensor.raw_bytes, RECEIVED_PER_SLOT * custody.slots, worker.allocate)
        self._tensors: dict[Key, Tensors] = {}
        self._arrived: dict[Slot, Encoded] = {}  # Tensors that await a decision by custody
        self._tickets = itertools.count()
        self._forecast = worker.thread.forecast

    def receiving(self, dispatcher: Dispatcher) -> AbstractContextManager[None]:
        """Receives the dispatcher's microbatch tensors, microbatch messages and link changes within the block."""
        return dispatcher.registered(
            tensors={MicrobatchTensor: self},
            messages={MicrobatchControl: self.receive},
            link_up=self.link_up,
            link_down=self.link_down,
        )

    @contextmanager
    def ending_at(self, ends: PathEnds) -> Iterator[None]:
        """Makes `ends` the receiver of callbacks about this node's own microbatches, within the block."""
        self._ends = ends
        try:
            yield
        finally:
            self._ends = PathEnds()

    def take_new_work(self, yes: bool) -> None:
        """Sets whether microbatches that are not held yet are accepted; False before the node leaves its module."""
        self._takes_new_work = yes

    def abandon(self, microbatch: MicrobatchId, detail: str) -> None:
        for action in self.custody.abandon(microbatch, detail):
            self._carry_out(action)

    async def nothing_owed(self, patience_s: float) -> None:
        """Waits up to `patience_s` seconds until all messages are sent and all due inner steps are done."""
        await self._tasks.nothing_owed(patience_s)

    @property
    def is_empty(self) -> bool:
        return len(self.custody) == 0 and not self._tasks.owed

    def admit(self, sender: PeerId, message: MicrobatchTensor, tensor: TensorSpec) -> memoryview | Refusal:
        """Checks a tensor's header. Returns a buffer to receive the tensor, or a refusal."""
        if (uninvited := self._admission.uninvited(message)) is not None:
            return Refusal(False, uninvited)
        self._admission.check(sender, message, tensor)
        if self._pool.in_use >= self._pool.limit:
            return Refusal(True, "all receive buffers are in use", BUSY_RETRY_S)
        if not self._admission.hosts(message):
            return Refusal(False, "this module is not hosted here")
        is_ours = message.microbatch.data_node == self.custody.own
        # A leaving peer finishes its entries and, as a data node, its microbatches. It replaces no other peer.
        is_held = self.custody.get(Key(message.microbatch, message.position)) is not None
        if not (self._takes_new_work or is_held or is_ours):
            return Refusal(False, "this peer is leaving the module")
        if is_ours and isinstance(message, Forward) and not self._ends.expects(message):
            return Refusal(False, "this microbatch is not in flight")
        now = self.clock.monotonic()
        if isinstance(message, Forward):
            place = self.custody.admit_forward(message, now)
        else:
            place = self.custody.admit_backward(message, now)
        if place.value is not SlotState.FREE:
            is_busy = place.value is SlotState.BUSY
            return Refusal(is_busy, place.reason, BUSY_RETRY_S if is_busy else 0.0)
        try:
            buffer = self._pool.take()[: tensor.byte_length]
        except ResourceExhausted as error:
            self.handle(BrokenOff(message))
            return Refusal(True, str(error), BUSY_RETRY_S)
        self._forecast.announced(sender, slot_of(message), tensor.byte_length, now)
        self._worker.thread.expect(self._forecast.expected)
        return buffer

    def received(self, sender: PeerId, message: MicrobatchTensor, tensor: TensorSpec, buffer: memoryview) -> None:
        crash_point("arrived")
        self._forecast.arrived(sender, slot_of(message), self.clock.monotonic())
        self._worker.thread.expect(self._forecast.expected)
        self._arrived[slot_of(message)] = Encoded(tensor, buffer)
        self.handle(TensorArrived(message))
        # Custody did not use the tensor if it is a second copy or its entry no longer exists.
        unused = self._arrived.pop(slot_of(message), None)
        if unused is not None:
            self._pool.give_back(unused.data)

    def broken_off(self, sender: PeerId, message: MicrobatchTensor, buffer: memoryview) -> None:
        self._pool.give_back(buffer)
        self._forecast.broken_off(sender, slot_of(message))
        self._worker.thread.expect(self._forecast.expected)
        self.handle(BrokenOff(message))

    def receive(self, sender: PeerId, message: MicrobatchControl) -> None:
        if isinstance(message, Stranded):
            if self._is_of_ours(sender, message, self._ends.may_hold) and self._knows_route(sender, message):
                self._stranded(message)
            return
        if isinstance(message, Receipt) and message.status is ReceiptStatus.PASSED_ON:
            self._passed_on(sender, message)
        self.handle(ControlArrived(sender, message))

    def _passed_on(self, sender: PeerId, receipt: Receipt) -> None:
        """Records the receipt of a hop that passed one of our microbatches on."""
        if self._is_of_ours(sender, receipt, self._ends.may_have_held):
            self.custody.touch(Key(receipt.microbatch, -1), self.clock.monotonic())
            self._ends.passed(sender, receipt)

    def _is_of_ours(
        self, sender: PeerId, message: Receipt | Stranded, may_know: Callable[[PeerId, MicrobatchId], bool]
    ) -> bool:
        """Tells whether a message is about a microbatch of this data node, and from a peer of its path."""
        if message.microbatch.data_node != self.custody.own:
            return False
        return sender == self.custody.own or may_know(sender, message.microbatch)

    def _knows_route(self, sender: PeerId, message: Stranded) -> bool:
        """Tells whether the message has the route's signature, which only receivers of the microbatch know."""
        start = self.custody.get(Key(message.microbatch, -1))
        # Evaluated microbatches have no entry to compare with.
        if sender == self.custody.own or start is None or start.path.route is None:
            return True
        return start.path.route.signature == message.signature

    def _stranded(self, message: Stranded) -> None:
        entries = [entry for entry in self.custody.entries() if entry.key.microbatch == message.microbatch]
        has_turned = any(entry.is_start for entry in entries) and any(entry.is_end for entry in entries)
        if message.direction is Direction.FORWARD and has_turned and message.position > -1:
            return  # this copy lost against a repaired one, which already completed forward
        self._ends.lost(message.microbatch, message.detail)

    def link_up(self, peer: PeerId) -> None:
        self.handle(PeerBack(peer))

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.codecs.lost(peer)
        self.handle(PeerLost(peer, str(error)))

    def _not_sent(self, to: PeerId, error: PeerError) -> None:
        self._host.not_reached(to, error)

    def _carry_out(self, action: Action) -> None:
        match action:
            case KeepGradient(key):  # Hidden states arrived. A substitute receives the gradient before the input
                self._take(key, Backward)
            case Compute(key, work):
                tensors = self._take(key, Backward if work is Work.BACKWARD else Forward)
                self._begin_with(tensors, partial(self._compute, action))
            case SendOutput(key):  # the output may be sent again, so it is kept until the next peer has passed it on
                self._begin_with(self._tensors[key], partial(self._send_output, action))
            case SendControl(to, message):
                self.send(to, message)
            case Confirmed(key):  # a hop's gradient is confirmed, or must be subtracted
                self._host.visited(key.microbatch)
            case Retract(key):
                self._begin_with(self._tensors[key], partial(self._retract, key))
            case Forget(key, reason):
                log.debug("%s at %d: %s", key.microbatch, key.position, reason)
                self._forget(key)
            case Finished(microbatch, path):  # the data node's microbatch completed
                self._ends.finished(microbatch, path)

    async def _compute(self, action: Compute, tensors: Tensors) -> None:
        key, work = action.key, action.work
        entry = self.custody.get(key)
        if tensors.forgotten or entry is None:
            return
        tensors.documents, tensors.labels = entry.path.documents, entry.path.labels
        # The output goes to the neighbour on the path, or to its substitute.
        traffic = Traffic.ACTIVATIONS if work is Work.FORWARD else Traffic.GRADIENTS
        position, codec = key.position + (1 if work is Work.FORWARD else -1), Codec.NONE
        is_sent = position >= -1 and not (work is Work.LOSS and action.purpose is Purpose.EVALUATE)
        if is_sent:
            codec = self.codecs.choose(entry.path.peer_at(position), traffic)
        self._encoded += codec is not Codec.NONE
        check = codec is not Codec.NONE and self._encoded % CHECKED_EVERY == 1
        crash_point(f"before {action.work.name.lower()}")
        try:
            job = tensors.job(key, work, action.purpose, codec, check_codec=check)
            output, seconds = await self._worker.compute(job)
        except SkipstoneError as error:
            if not tensors.forgotten:
                self.handle(ComputeFailed(key, str(error)))
            self._short_of_memory += isinstance(error, OutOfMemory)
            if isinstance(error, OutOfMemory) and self._short_of_memory == MOST_SHORT_OF_MEMORY:
                raise  # ends the node: the module is too large for this machine
            return
        self._short_of_memory = 0
        crash_point(f"after {action.work.name.lower()}")
        if output.error is not None:
            self.codecs.measured(traffic, codec, output.error)
        if output.step_due:
            self._tasks.owe(self._step())
            await asyncio.sleep(0)  # queues the step before any work that the result causes
        if tensors.forgotten:
            return
        tensors.output = output.tensor
        entry = self.custody.get(key)
        if output.loss is not None and entry is not None:
            self._ends.loss_known(key.microbatch, entry.path, action.purpose, output.loss)
        self.handle(Computed(key, seconds))

    async def _step(self) -> None:
        figures = await self._worker.step()
        if figures is not None:
            self._host.stepped(figures)

    async def _send_output(self, action: SendOutput, tensors: Tensors) -> None:
        assert tensors.output is not None
        begun, output = self.clock.monotonic(), tensors.output
        try:
            await self.transport.send(action.to, action.message, output.spec, output.data)
            crash_point("sent")
        except PeerError as error:
            self._host.not_reached(action.to, error)
            self.handle(PeerLost(action.to, str(error)))
        self.wire_s += self.clock.monotonic() - begun

    async def _retract(self, key: Key, tensors: Tensors) -> None:
        try:
            taken_back = await self._worker.retract(tensors.job(key, Work.BACKWARD, Purpose.TRAIN))
        except SkipstoneError as error:
            log.warning("cannot subtract the gradient of %s: %s", key.microbatch, error)
            return
        if taken_back:
            self._host.retracted(key.microbatch)

    def _take(self, key: Key, kind: type[MicrobatchTensor]) -> Tensors:
        tensors = self._tensors.get(key)
        if tensors is None:
            tensors = self._tensors[key] = Tensors(next(self._tickets))
        arrived = self._arrived.pop((key, kind), None)
        if arrived is not None and kind is Forward:
            tensors.input = arrived
        elif arrived is not None:
            tensors.gradient = arrived
        return tensors

    def _begin_with(self, tensors: Tensors, work: Callable[[Tensors], Coroutine[Any, Any, None]]) -> None:
        tensors.users += 1  # counts from here, so that a Forget before the task starts cannot free the buffers

        async def use() -> None:
            try:
                await work(tensors)
            finally:
                tensors.users -= 1
                self._free_unused(tensors)

        self.begin(use())

    def _forget(self, key: Key) -> None:
        tensors = self._tensors.pop(key, None)
        if tensors is not None:
            tensors.forgotten = True
            self._free_unused(tensors)

    def _free_unused(self, tensors: Tensors) -> None:
        if tensors.forgotten and not tensors.users:
            self.begin(self._free(tensors))

    async def _free(self, tensors: Tensors) -> None:
        await self._worker.forget(tensors.ticket)  # the compute thread must release the buffers before they are reused
        tensors.output = None
        for tensor in (tensors.input, tensors.gradient):
            if tensor is not None:
                self._pool.give_back(tensor.data)
