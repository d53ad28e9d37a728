"""The runner of custody: admits and receives tensors, has them computed, sends them on.

Decisions are all in `swarm.pipeline.custody`; here are the buffers, the compute thread and the tasks that go with
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from node.concurrency.machine_runner import MachineRunner
from node.network.dispatcher import Dispatcher
from node.observability.failpoints import crash_point
from node.pipeline.admission import Admission
from node.pipeline.codec_selection import LinkCodecs
from node.pipeline.interfaces import Host, Job, Output, PathEnds
from node.pipeline.tensor_store import Load, TensorStore, place_of
from node.pipeline.worker_thread import WorkerThread
from protocol.codecs import Encoded
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal, Transport
from protocol.transport.buffer_pool import BufferPool
from swarm.compression.microbatch_codecs import Traffic
from swarm.pipeline.compute_queue import ArrivalForecast
from swarm.pipeline.custody import Custody
from swarm.pipeline.custody_events import (
    Action,
    Arrived,
    BrokenOff,
    Compute,
    Computed,
    ComputeFailed,
    Confirmed,
    Event,
    Finished,
    Forget,
    KeepGradient,
    Key,
    PeerBack,
    PeerLost,
    Place,
    Retract,
    SendOutput,
    Tell,
    TensorArrived,
    Tick,
    Work,
)
from swarm.vocabulary.errors import OutOfMemory, PeerError, ResourceExhausted, SkipstoneError
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Direction,
    MicrobatchControl,
    MicrobatchTensor,
    Purpose,
    Receipt,
    ReceiptStatus,
    Stranded,
)
from swarm.vocabulary.types import Codec, MicrobatchId, PeerId

log = logging.getLogger(__name__)

UsingTask = TypeVar("UsingTask", Compute, SendOutput, Retract)

BUSY_RETRY_S = 0.1
CHECKED_EVERY = 64
"""Encodings of which the error is measured: decoding costs less than encoding, so this is about one percent of it."""

MAX_WAITING_MESSAGES = 256
"""Messages on the way to one peer. What is more is dropped, as for a peer that cannot be reached."""
MOST_SHORT_OF_MEMORY = 32
"""Computations in a row that may fail for want of memory: each costs a microbatch, and so many of them say that the
module is too large here."""
BUFFERS_A_SLOT = 6
"""Two tensors come to a holding, the input and the gradient, and of every slot two more holdings may be unsettled."""


class MicrobatchRunner(MachineRunner[Event, Action]):
    """One node's microbatches between its links and its compute thread.

    Args:
        host: told what becomes of microbatches here.
    """

    def __init__(
        self,
        custody: Custody,
        admission: Admission,
        worker: WorkerThread,
        transport: Transport,
        codecs: LinkCodecs,
        host: Host,
        clock: Clock,
    ) -> None:
        super().__init__(custody, Tick(), transport, clock, MAX_WAITING_MESSAGES)
        self.custody = custody
        self.codecs = codecs
        self.wire_s = 0.0
        """Seconds spent sending tensors."""
        self._admission = admission
        self._worker = worker
        self._host = host
        self._ends = PathEnds()
        self._takes_new_work = True
        self._encoded = 0
        self._short_of_memory = 0
        """Computations in a row for which there was too little memory."""
        # A data node's own are held besides the slots.
        self._pool = BufferPool(worker.tensor.raw_bytes, BUFFERS_A_SLOT * custody.slots + 64, worker.allocate)
        self._loads = TensorStore()
        self._forecast = ArrivalForecast()

    # ---- running -------------------------------------------------------------------------------------------------

    def receiving(self, dispatcher: Dispatcher) -> AbstractContextManager[None]:
        """Registers for microbatches that arrive by the links, within the block."""
        return dispatcher.registered(
            tensors={MicrobatchTensor: self},
            messages={MicrobatchControl: self.receive},
            link_up=self.link_up,
            link_down=self.link_down,
        )

    @contextmanager
    def ending_at(self, ends: PathEnds) -> Iterator[None]:
        """Lets paths start and end here within the block: `ends` is the data node."""
        self._ends = ends
        try:
            yield
        finally:
            self._ends = PathEnds()

    def take_new_work(self, yes: bool) -> None:
        """Sets whether new microbatches are taken: not while the node leaves the module to its other replicas, to which
        new ones go and which stand in for lost hops.
        """
        self._takes_new_work = yes

    def abandon(self, microbatch: MicrobatchId, detail: str) -> None:
        """Abandons one of this data node's microbatches."""
        for action in self.custody.abandon(microbatch, detail):
            self._carry_out(action)

    async def nothing_owed(self, patience_s: float) -> None:
        """Waits until every message to others has been handed to the links and every inner step that is due has been
        taken, or `patience_s` seconds have passed.
        """
        await self._tasks.nothing_owed(patience_s)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held and nothing is owed (see `nothing_owed`)."""
        return len(self.custody) == 0 and not self._tasks.owed

    # ---- what comes in by the links ----------------------------------------------------------------------------------

    def admit(self, sender: PeerId, message: MicrobatchTensor, tensor: TensorSpec) -> memoryview | Refusal:
        self._admission.check(sender, message, tensor)
        refusal = self._refusal(message)
        if refusal is not None:
            return refusal
        try:
            buffer = self._pool.take()[: tensor.byte_length]
        except ResourceExhausted as error:
            self.handle(BrokenOff(message))
            return Refusal(True, str(error), BUSY_RETRY_S)
        self._forecast.announced(sender, place_of(message), tensor.byte_length, self.clock.monotonic())
        self._worker.expect(self._forecast.expected)
        return buffer

    def _refusal(self, message: MicrobatchTensor) -> Refusal | None:
        """Why it is not taken; None when a place for it has been reserved."""
        if self._pool.in_use >= self._pool.limit:
            return Refusal(True, "all receive buffers are in use", BUSY_RETRY_S)
        if not self._admission.hosts(message):
            return Refusal(False, "this module is not hosted here")
        if not self._takes_new_work and not self._is_ours_to_finish(message):
            return Refusal(False, "this peer is leaving the module")
        now = self.clock.monotonic()
        if isinstance(message, Backward):
            place = self.custody.admit_backward(message, now)
            return None if place.value is Place.FREE else _refused(place.reason, busy=place.value is Place.BUSY)
        if message.microbatch.data_node == self.custody.own and not self._ends.expects(message):
            return Refusal(False, "this microbatch is not under way")
        place = self.custody.admit_forward(message, now)
        return None if place.value is Place.FREE else _refused(place.reason, busy=place.value is Place.BUSY)

    def _is_ours_to_finish(self, message: MicrobatchTensor) -> bool:
        """Held here already; or our own, which nobody else can end. Standing in for a lost hop is new work."""
        held = self.custody.get(Key(message.microbatch, message.position)) is not None
        return held or message.microbatch.data_node == self.custody.own

    def received(self, sender: PeerId, message: MicrobatchTensor, tensor: TensorSpec, buffer: memoryview) -> None:
        crash_point("arrived")
        self._forecast.arrived(sender, place_of(message), self.clock.monotonic())
        self._worker.expect(self._forecast.expected)
        self._loads.arrived(message, Encoded(tensor, buffer))
        self.handle(TensorArrived(message))
        unused = self._loads.reject(message)
        if unused is not None:
            self._pool.give_back(unused.data)

    def broken_off(self, sender: PeerId, message: MicrobatchTensor, buffer: memoryview) -> None:
        self._pool.give_back(buffer)
        self._forecast.broken_off(sender, place_of(message))
        self._worker.expect(self._forecast.expected)
        self.handle(BrokenOff(message))

    def receive(self, sender: PeerId, message: MicrobatchControl) -> None:
        """Takes in a small message."""
        match message:
            case Receipt():
                if message.status is ReceiptStatus.PASSED_ON and self._is_of_ours(
                    sender, message, self._ends.may_have_held
                ):
                    self.custody.touch(Key(message.microbatch, -1), self.clock.monotonic())
                    self._ends.passed(sender, message)
                self.handle(Arrived(sender, message))
            case Stranded():
                if self._is_of_ours(sender, message, self._ends.may_hold) and self._was_given(sender, message):
                    self._stranded(message)
            case _:
                self.handle(Arrived(sender, message))

    def _is_of_ours(
        self, sender: PeerId, message: Receipt | Stranded, may_know: Callable[[PeerId, MicrobatchId], bool]
    ) -> bool:
        """Whether it is about a microbatch of ours, from ourselves or from somebody who may know about it."""
        if message.microbatch.data_node != self.custody.own:
            return False
        return sender == self.custody.own or may_know(sender, message.microbatch)

    def _was_given(self, sender: PeerId, message: Stranded) -> bool:
        """Whether the sender knows how the microbatch's route is signed. Of one that is only evaluated we keep nothing
        to compare with."""
        start = self.custody.get(Key(message.microbatch, -1))
        if sender == self.custody.own or start is None or start.path.route is None:
            return True
        return start.path.route.signature == message.signature

    def link_up(self, peer: PeerId) -> None:
        self.handle(PeerBack(peer))

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.codecs.lost(peer)
        self.handle(PeerLost(peer, str(error)))

    # ---- carrying out ----------------------------------------------------------------------------------------------

    def _stranded(self, message: Stranded) -> None:
        """A copy that lost against a repaired one may strand on the way out after the other has returned: no harm
        done."""
        returned = self.custody.get(Key(message.microbatch, -1)) is not None and any(
            holding.is_end and holding.key.microbatch == message.microbatch for holding in self.custody.entries()
        )
        if message.direction is Direction.FORWARD and returned and message.position > -1:
            return
        self._ends.lost(message.microbatch, message.detail)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Compute(key, Work.BACKWARD):
                self._begin_with(self._loads.take_gradient(key), self._computation, action)
            case Compute(key):
                self._begin_with(self._loads.take_input(key), self._computation, action)
            case SendOutput():
                self._begin_with(self._loads[action.key], self._sending, action)
            case Tell(to, message) if to == self.custody.own:
                asyncio.get_running_loop().call_soon(self.receive, to, message)
            case Tell(to, message):
                self.send(to, message)
            case KeepGradient(key):
                self._loads.take_gradient(key)
            case Confirmed(key):
                self._host.visited(key.microbatch)
            case Retract(key):
                self._begin_with(self._loads[key], self._retraction, action)
            case Forget(key, reason):
                log.debug("%s at %d: %s", key.microbatch, key.position, reason)
                self._forget(key)
            case Finished(microbatch, path):
                self._ends.finished(microbatch, path)

    def _begin_with(
        self, load: Load, work: Callable[[UsingTask, Load], Coroutine[Any, Any, None]], action: UsingTask
    ) -> None:
        """Starts a task that uses a load. From now on: what is forgotten before the task first runs is not given back
        under its hands."""
        load.users += 1

        async def use() -> None:
            try:
                with load.in_use():
                    await work(action, load)
            finally:
                if load.is_idle:
                    self._release(load)

        self.begin(use())

    async def _computation(self, action: Compute, load: Load) -> None:
        holding = self.custody.get(action.key)
        if load.forgotten or holding is None:
            return
        load.documents, load.labels = holding.path.documents, holding.path.labels
        traffic, codec = self._codec_for(action)
        self._encoded += codec is not Codec.NONE
        check = codec is not Codec.NONE and self._encoded % CHECKED_EVERY == 1
        job = Job(
            load.ticket,
            action.key,
            action.work,
            action.purpose,
            load.input,
            load.gradient,
            load.documents,
            codec,
            check,
            load.labels,
        )
        crash_point(f"before {action.work.name.lower()}")
        try:
            output, seconds = await self._worker.compute(job)
        except SkipstoneError as error:
            if not load.forgotten:
                self.handle(ComputeFailed(action.key, str(error)))
            self._short_of_memory += isinstance(error, OutOfMemory)
            if isinstance(error, OutOfMemory) and self._short_of_memory == MOST_SHORT_OF_MEMORY:
                raise  # the module is too large for this machine
            return
        self._short_of_memory = 0
        crash_point(f"after {action.work.name.lower()}")
        if output.error is not None:
            self.codecs.measured(traffic, codec, output.error)
        if output.step_due:
            self._tasks.owe(self._step())
            await asyncio.sleep(0)  # the step's place in the queue comes before whatever this result brings about
        if not load.forgotten:
            self._computed(action, load, output, seconds)

    def _codec_for(self, action: Compute) -> tuple[Traffic, Codec]:
        """For what comes of the computation. It is sent to the neighbour on the path, or, should that one fail, to
        another in its place."""
        forward = action.work is Work.FORWARD
        traffic = Traffic.ACTIVATIONS if forward else Traffic.GRADIENTS
        holding, position = self.custody.get(action.key), action.key.position + (1 if forward else -1)
        if holding is None or position < -1 or (action.work is Work.LOSS and action.purpose is Purpose.EVALUATE):
            return traffic, Codec.NONE  # nothing is sent
        return traffic, self.codecs.choose(holding.path.peer_at(position), traffic)

    def _computed(self, action: Compute, load: Load, output: Output, seconds: float) -> None:
        load.output = output.tensor
        holding = self.custody.get(action.key)
        if output.loss is not None and holding is not None:
            self._ends.loss_known(action.key.microbatch, holding.path, action.purpose, output.loss)
        self.handle(Computed(action.key, seconds))

    async def _retraction(self, action: Retract, load: Load) -> None:
        given, labels = (load.input, load.gradient, load.documents), load.labels
        job = Job(load.ticket, action.key, Work.BACKWARD, Purpose.TRAIN, *given, labels=labels)
        try:
            taken_back = await self._worker.retract(job)
        except SkipstoneError as error:
            log.warning("the gradient of %s could not be taken back: %s", action.key.microbatch, error)
            return
        if taken_back:
            self._host.retracted(action.key.microbatch)

    async def _step(self) -> None:
        figures = await self._worker.step()
        if figures is not None:
            self._host.stepped(figures)

    async def _sending(self, action: SendOutput, load: Load) -> None:
        assert load.output is not None
        begun, tensor = self.clock.monotonic(), load.output
        try:
            await self.transport.send(action.to, action.message, tensor.spec, tensor.data)
            crash_point("sent")
        except PeerError as error:
            self._host.not_reached(action.to, error)
            self.handle(PeerLost(action.to, str(error)))
        self.wire_s += self.clock.monotonic() - begun

    def _not_sent(self, to: PeerId, error: PeerError) -> None:
        self._host.not_reached(to, error)

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def _forget(self, key: Key) -> None:
        load = self._loads.forget(key)
        if load is not None and load.is_idle:
            self._release(load)

    def _release(self, load: Load) -> None:
        self.begin(self._freeing(load))

    async def _freeing(self, load: Load) -> None:
        """Only when the compute thread has let go of them may the buffers be written again."""
        await self._worker.forget(load.ticket)
        load.output = None
        for tensor in (load.input, load.gradient):
            if tensor is not None:
                self._pool.give_back(tensor.data)


def _refused(reason: str, *, busy: bool) -> Refusal:
    return Refusal(busy, reason, BUSY_RETRY_S if busy else 0.0)
