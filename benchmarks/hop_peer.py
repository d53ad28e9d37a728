"""One hop through the node's own parts, in two processes: a peer of stage 1 whose module is the identity, a data node.

Transport, admission, custody, runner, compute thread and hop worker are the real ones. Left out are the directory (the
processes exchange announcements by a pipe) and the model: the data node sends a fixed tensor and returns the stage's
output as the loss's gradient.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from benchmarks.kit import RUN, run_of, threads_of_each_peer
from node.concurrency.compute_thread import ComputeThread
from node.model.optimizer import Accumulator, InnerOptimizer, StepFigures
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer, OwnRecord
from node.network.session import KnownPeers
from node.pipeline.admission import Admission, hidden_tensor
from node.pipeline.runner import Job, LinkCodecs, MicrobatchRunner, Output, PathEnds, Worker, WorkerThread
from node.pipeline.tensor_io import Wire, receive_buffers
from node.pipeline.worker import HopWorker
from node.runtime.role import PlannedReplicas
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signatures import Routes
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.compression.microbatch_codecs import Traffic
from swarm.membership.membership import Membership
from swarm.pipeline.custody import DEFAULT_SLOTS, Custody
from swarm.pipeline.custody_events import Started, Work
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import Planner
from swarm.vocabulary.errors import PeerError, SkipstoneError
from swarm.vocabulary.pipeline_messages import Forward, Purpose, Receipt
from swarm.vocabulary.types import Codec, Hop, MicrobatchId, ModuleId, Path, PeerId, PeerState

STAGE = ModuleId(1)
CPU = torch.device("cpu")
LIFETIME_S = 60.0


def manifest_for(shape: tuple[int, int, int], codec: Codec | None) -> Manifest:
    """A run with one hop whose hidden states have this shape, and whose inner step is never due."""
    allowed = "none" if codec is None else codec.name.lower()
    rows, tokens, hidden = shape
    size = {"hidden": hidden, "sequence": tokens, "rows": rows, "heads": 8, "feed_forward": hidden}
    sections = {"codecs": {"activations": allowed, "gradients": allowed}}
    return run_of("hop", [0, 1], microbatches=10**9, sections=sections, **size)


class FixedData:
    """A data node's worker without a model. `returned` is the last gradient that came back to the start."""

    def __init__(self, tensor: TensorSpec, device: torch.device) -> None:
        self.hidden = torch.randn(tensor.shape, device=device)
        self.returned = torch.empty(0)
        self.wire = Wire(device)
        self._tensor = tensor

    @property
    def tensor(self) -> TensorSpec:
        return self._tensor

    def compute(self, job: Job) -> Output:
        if job.work is Work.FORWARD:
            return self.wire.output(self.hidden, job)
        received = job.input if job.work is Work.LOSS else job.gradient
        incoming = self.wire.received(received)
        if job.work is Work.LOSS:
            return self.wire.output(incoming, job, 0.0)
        self.returned = incoming
        return Output()

    def retract(self, job: Job) -> bool:
        raise SkipstoneError("a data node takes no gradient back")

    def forget(self, ticket: int) -> None:
        return

    def step(self) -> StepFigures:
        raise SkipstoneError("a data node without a model has no inner step")


class OneFlight(PathEnds):
    """`PathEnds` for one microbatch at a time: when its output came, and when its gradient did."""

    def __init__(self) -> None:
        self.output_at = 0.0
        self.landed: asyncio.Future[float] | None = None

    def expects(self, message: Forward) -> bool:
        return True

    def loss_known(self, microbatch: MicrobatchId, path: Path, purpose: Purpose, loss: float) -> None:
        self.output_at = time.perf_counter()

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        assert self.landed is not None
        self.landed.set_result(time.perf_counter())

    def lost(self, microbatch: MicrobatchId, detail: str) -> None:
        assert self.landed is not None
        self.landed.set_exception(SkipstoneError(detail))

    def may_hold(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        return True

    def may_have_held(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        return True

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        return


class Uncounted:
    """A `node.pipeline.interfaces.Host` that counts nothing."""

    def visited(self, microbatch: MicrobatchId) -> None:
        return

    def retracted(self, microbatch: MicrobatchId) -> None:
        return

    def stepped(self, figures: StepFigures) -> None:
        return

    def not_reached(self, peer: PeerId, error: PeerError) -> None:
        return


class IdentityPart(torch.nn.Module):
    """A part of a model that returns its input."""

    def forward(self, source: torch.Tensor, documents: tuple[int, ...]) -> torch.Tensor:
        return source


class OneCodec:
    """Uses the same codec on every link, in place of `LinkCodecs`."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def choose(self, to: PeerId, traffic: Traffic) -> Codec:
        return self._codec

    def measured(self, traffic: Traffic, codec: Codec, error: float) -> None:
        return

    def lost(self, peer: PeerId) -> None:
        return


def identity_worker(manifest: Manifest, device: torch.device) -> HopWorker:
    part = IdentityPart()
    total = Accumulator(part)
    optimizer = InnerOptimizer(manifest.training, [total])
    return HopWorker(part, total, optimizer, hidden_tensor(manifest), device, 2**30)


@asynccontextmanager
async def peer_of_two(
    connection: Connection,
    manifest: Manifest,
    module: ModuleId,
    worker: Worker,
    ends: PathEnds | None,
    codec: Codec | None,
) -> AsyncIterator[tuple[MicrobatchRunner, PeerId, Routes]]:
    """A runner of microbatches at work, the other process's peer, and what signs routes."""
    identity, clock = Identity.generate(), SystemClock()
    credentials = make_credentials(identity, RUN)
    own = LocalPeer(RUN, identity.peer, credentials.certificate_der, clock, state=PeerState.SERVING, module=module)
    book = KnownPeers()
    membership, record = Membership(RUN, identity.peer), OwnRecord(own, identity)
    dispatcher, settings = Dispatcher(own, membership), TransportSettings()
    transport = GrpcTransport(credentials, book, dispatcher, clock, settings, own_record=record.fresh)
    torch.set_num_threads(threads_of_each_peer())
    with ComputeThread() as compute:
        times = MeasuredTimes(identity.peer, manifest.microbatch_tokens)
        planner = Planner(PathRules(2, 1), membership, times)
        replicas = PlannedReplicas(planner, membership, clock, transport.is_linked)
        custody = Custody(identity.peer, DEFAULT_SLOTS, replicas)
        routes = Routes(identity, RUN)
        admission = Admission(manifest, identity.peer, module, routes.fault)
        codecs: Any = None if codec is None else OneCodec(codec)
        codecs = codecs or LinkCodecs(manifest, worker.tensor, lambda peer: 0.0, transport.goodput_bytes_per_s)
        on_thread = WorkerThread(worker, compute, clock, allocate=receive_buffers(worker.wire.device))
        runner = MicrobatchRunner(custody, admission, on_thread, transport, codecs, Uncounted(), clock)
        async with transport, asyncio.TaskGroup() as tasks:
            own.addresses = (f"127.0.0.1:{transport.port}",)
            connection.send(own.announcement())
            other = await asyncio.to_thread(connection.recv)
            book.replace_all([other])
            membership.observe(other, now=clock.monotonic(), wall=clock.wall())
            connection.send("ready")
            running = tasks.create_task(runner.run())
            with runner.receiving(dispatcher), runner.ending_at(ends or PathEnds()):
                yield runner, other.peer, routes
            running.cancel()


def stage_process(connection: Connection, shape: tuple[int, int, int], codec: Codec | None, device: str) -> None:
    """Serves the identity stage until it is killed."""
    manifest = manifest_for(shape, codec)
    worker = identity_worker(manifest, torch.device(device))

    async def main() -> None:
        async with peer_of_two(connection, manifest, STAGE, worker, None, codec):
            await asyncio.Event().wait()

    uvloop.run(main())


def data_node_process(
    connection: Connection, shape: tuple[int, int, int], codec: Codec | None, device: str, samples: int
) -> None:
    """Sends microbatches, one at a time: a round of them for each message on the connection."""
    manifest = manifest_for(shape, codec)
    worker, flight = FixedData(hidden_tensor(manifest), torch.device(device)), OneFlight()

    async def main() -> None:
        async with peer_of_two(connection, manifest, ModuleId(0), worker, flight, codec) as (runner, stage, routes):
            first = 0
            while await asyncio.to_thread(connection.recv):
                numbers = range(first, first + samples)
                first = numbers.stop
                connection.send([await fly(runner, routes, flight, stage, number) for number in numbers])
                if codec in (None, Codec.NONE) and not torch.equal(worker.returned, worker.hidden):
                    raise SkipstoneError("what came back is not what was sent")

    uvloop.run(main())


async def fly(
    runner: MicrobatchRunner, routes: Routes, flight: OneFlight, stage: PeerId, number: int
) -> tuple[float, float]:
    """Seconds until the output is there, and until the input's gradient is."""
    own = runner.custody.own
    flight.landed = asyncio.get_running_loop().create_future()
    microbatch, path = MicrobatchId(own, number), Path(own, (Hop(STAGE, stage),))
    begun = time.perf_counter()
    path = routes.signed(microbatch, path, Purpose.TRAIN, LIFETIME_S)
    runner.handle(Started(microbatch, path, Purpose.TRAIN, LIFETIME_S))
    ended = await flight.landed
    return flight.output_at - begun, ended - begun
