"""What one hop costs: forward and backward of a tensor through an identity stage in another process, on loopback.

The node's own transport, admission, custody, runner, compute thread and hop worker, without a directory and without a
model: the data node sends a fixed tensor and returns the stage's output as the loss's gradient. Beside it, in turns:
`hivemind.moe`, and bare gRPC streams with mutual TLS that carry the same bytes one way, with our transport's settings
and as gRPC comes. Forward and backward move four tensors of 8.39 MB (4 x 512 x 1024 float32). Times are medians. All
run with the node's allocator settings and half of the cores for each process's torch. MB are 10**6 bytes.
"""

import asyncio
import itertools
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import RUN, hear, introduce, process, run_of, started, tell, threads_of_each_peer
from benchmarks.transport import bare_stream
from node.concurrency.compute_thread import ComputeThread
from node.model.moments import DEFAULT_SLOTS
from node.model.optimizer import Accumulator, InnerOptimizer, StepFigures
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer, OwnRecord
from node.network.session import KnownPeers
from node.pipeline.admission import Admission, hidden_tensor
from node.pipeline.runner import Job, LinkCodecs, MicrobatchRunner, Output, PathEnds, RunnerHost, Worker, WorkerThread
from node.pipeline.worker import HopWorker, Wire, receive_buffers
from node.runtime.malloc import keep_freed_memory
from node.runtime.role import PlannedReplicas
from protocol.identity.certificates import make_credentials
from protocol.identity.invitations import Guests
from protocol.identity.keys import Identity
from protocol.identity.signatures import Routes
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.membership.membership import Membership
from swarm.pipeline.custody import Custody, Started, Work
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import Planner
from swarm.vocabulary.errors import SkipstoneError
from swarm.vocabulary.pipeline_messages import Forward, Purpose
from swarm.vocabulary.types import Codec, Hop, MicrobatchId, ModuleId, PeerId, PeerState
from swarm.vocabulary.types import Path as Route

keep_freed_memory()  # in every process: each imports this module

Shape = tuple[int, int, int]
SHAPE: Final = (4, 512, 1024)
TENSOR_BYTES: Final = math.prod(SHAPE) * 4
MOVED_BYTES: Final = 4 * TENSOR_BYTES
CHUNK_SIZES: Final = tuple(n * 1024 for n in (256, 512, 1024, 2048))
STREAM_BATCH_BYTES: Final = 128 * 2**20
WARM_UP_ROUNDS: Final = 2
SAMPLES_PER_ROUND: Final = 4  # the first finds cold caches after the others' turns and is not counted
STAGE: Final = ModuleId(1)
LIFETIME_S: Final = 60.0
EXPERT: Final = "identity.0"
HANDLERS: Final = 4  # processes that answer requests: hivemind's recommendation for each expert


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds until the output is there, and until the input's gradient is."""

    forward_s: float
    forward_backward_s: float


@contextmanager
def skipstone(
    shape: Shape = SHAPE, codec: Codec | None = None, device: str = "cpu"
) -> Iterator[Callable[[], list[Sample]]]:
    """A function that measures one round. The node chooses the codec if none is given."""
    run = (shape, codec, device)
    with process(stage_process, *run) as stage, process(data_node_process, *run) as data_node:
        introduce([stage, data_node])
        yield partial(a_round, data_node)


def a_round(connection: Connection) -> list[Sample]:
    connection.send("go")
    return list(hear(connection)[1:])


def manifest_for(shape: Shape, codec: Codec | None) -> Manifest:
    """A run with one hop whose hidden states have this shape, and whose inner step is never due."""
    allowed = "none" if codec is None else codec.name.lower()
    rows, tokens, hidden = shape
    size = {"hidden": hidden, "sequence": tokens, "rows": rows, "heads": 8, "feed_forward": hidden}
    sections = {"codecs": {"activations": allowed, "gradients": allowed}}
    return run_of("hop", [0, 1], microbatches=10**9, sections=sections, **size)


class FixedData:
    """A data node's worker without a model. `returned` is the last gradient of its output."""

    def __init__(self, tensor: TensorSpec, device: torch.device) -> None:
        self.hidden = torch.randn(tensor.shape, device=device)
        self.returned = torch.empty(0)
        self.wire = Wire(device, tensor.token_bytes, vocabulary=0)
        self.tensor = tensor

    def compute(self, job: Job) -> Output:
        if job.work is Work.FORWARD:
            return self.wire.output(self.hidden, job)
        if job.work is Work.LOSS:
            return self.wire.output(self.wire.received(job.input), job, 0.0)
        self.returned = self.wire.received(job.gradient)
        return Output()

    def retract(self, job: Job) -> bool:
        raise SkipstoneError("a data node takes no gradient back")

    def forget(self, ticket: int) -> None:
        return

    def step(self) -> StepFigures:
        raise SkipstoneError("a data node without a model has no inner step")


class OneFlight(PathEnds):
    """Times of one microbatch at a time."""

    def __init__(self) -> None:
        self.output_at = 0.0
        self.landed: asyncio.Future[float] = asyncio.Future()

    def expects(self, message: Forward) -> bool:
        return True

    def loss_known(self, microbatch: MicrobatchId, path: Route, purpose: Purpose, loss: float) -> None:
        self.output_at = time.perf_counter()

    def finished(self, microbatch: MicrobatchId, path: Route) -> None:
        self.landed.set_result(time.perf_counter())

    def lost(self, microbatch: MicrobatchId, detail: str) -> None:
        self.landed.set_exception(SkipstoneError(detail))

    def may_hold(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        return True

    may_have_held = may_hold


class Uncounted(RunnerHost):
    """A host that counts nothing."""


class IdentityPart(torch.nn.Module):
    """A part of a model that returns its input."""

    def forward(self, source: torch.Tensor, documents: tuple[int, ...]) -> torch.Tensor:
        return source


@asynccontextmanager
async def peer_of_two(
    connection: Connection, manifest: Manifest, module: ModuleId, worker: Worker, ends: PathEnds, codec: Codec | None
) -> AsyncIterator[tuple[MicrobatchRunner, PeerId, Routes]]:
    """A runner of microbatches at work, the other process's peer, and the signer of routes."""
    identity, clock = Identity.generate(), SystemClock()
    credentials = make_credentials(identity, RUN)
    own = LocalPeer(RUN, identity.peer, credentials.certificate_der, clock, state=PeerState.SERVING, module=module)
    membership, record = Membership(RUN, identity.peer), OwnRecord(own, identity)
    book = KnownPeers(membership)
    dispatcher, settings = Dispatcher(own, membership), TransportSettings()
    transport = GrpcTransport(credentials, book, dispatcher, clock, settings, own_record=record.fresh)
    torch.set_num_threads(threads_of_each_peer())
    with ComputeThread() as compute:
        times = MeasuredTimes(identity.peer, manifest.microbatch_tokens)
        planner = Planner(PathRules(2, 1), membership, times)
        replicas = PlannedReplicas(planner, membership, clock, transport.is_linked)
        custody = Custody(identity.peer, DEFAULT_SLOTS, replicas)
        routes = Routes(identity, RUN, Guests(RUN, identity.peer, is_open=True))
        admission = Admission(manifest, identity.peer, module, routes.fault, routes.uninvited)
        codecs = LinkCodecs(manifest, worker.tensor, lambda peer: 0.0, transport.goodput_bytes_per_s)
        if codec is not None:
            codecs.choose = lambda to, traffic: codec  # type: ignore[method-assign]
        on_thread = WorkerThread(worker, compute, clock, allocate=receive_buffers(worker.wire.device))
        runner = MicrobatchRunner(custody, admission, on_thread, transport, codecs, Uncounted(), clock)
        async with transport, asyncio.TaskGroup() as tasks:
            own.addresses = (f"127.0.0.1:{transport.port}",)
            connection.send(own.announcement())
            (other,) = [one for one in await asyncio.to_thread(connection.recv) if one.peer != identity.peer]
            membership.observe(other, now=clock.monotonic(), wall=clock.wall())
            connection.send("ready")
            running = tasks.create_task(runner.run())
            with runner.receiving(dispatcher), runner.ending_at(ends):
                yield runner, other.peer, routes
            running.cancel()


def stage_process(connection: Connection, shape: Shape, codec: Codec | None, device: str) -> None:
    """Serves the identity stage until it is killed."""
    manifest, part = manifest_for(shape, codec), IdentityPart()
    total = Accumulator(part)
    optimizer = InnerOptimizer(manifest, ModuleId(0), [total])
    worker = HopWorker(part, total, optimizer, hidden_tensor(manifest), torch.device(device), 2**30)

    async def main() -> None:
        async with peer_of_two(connection, manifest, STAGE, worker, PathEnds(), codec):
            await asyncio.Event().wait()

    uvloop.run(main())


def data_node_process(connection: Connection, shape: Shape, codec: Codec | None, device: str) -> None:
    """Sends microbatches, one at a time: a round of them for each message on the connection."""
    manifest = manifest_for(shape, codec)
    worker = FixedData(hidden_tensor(manifest), torch.device(device))

    async def main() -> None:
        flight, number = OneFlight(), 0
        async with peer_of_two(connection, manifest, ModuleId(0), worker, flight, codec) as (runner, stage, routes):
            while await asyncio.to_thread(connection.recv):
                samples = []
                for _ in range(SAMPLES_PER_ROUND):
                    number += 1
                    samples.append(await fly(runner, routes, flight, stage, number))
                connection.send(samples)
                if codec in (None, Codec.NONE) and not torch.equal(worker.returned, worker.hidden):
                    raise SkipstoneError("what came back is not what was sent")

    uvloop.run(main())


async def fly(runner: MicrobatchRunner, routes: Routes, flight: OneFlight, stage: PeerId, number: int) -> Sample:
    own = runner.custody.own
    flight.landed = asyncio.get_running_loop().create_future()
    microbatch, path = MicrobatchId(own, number), Route(own, (Hop(STAGE, stage),))
    begun = time.perf_counter()
    path = routes.signed(microbatch, path, Purpose.TRAIN, LIFETIME_S)
    runner.handle(Started(microbatch, path, Purpose.TRAIN, LIFETIME_S))
    ended = await flight.landed
    return Sample(flight.output_at - begun, ended - begun)


@contextmanager
def hivemind(codec: str) -> Iterator[Callable[[], list[Sample]]]:
    """A function that measures one round."""

    def start(processes: ExitStack) -> Connection:
        server = processes.enter_context(process(server_process, codec, grace_s=10.0))
        client = processes.enter_context(process(client_process, hear(server, kit.START_S), grace_s=10.0))
        hear(client, kit.START_S)
        return client

    with started(start) as client:
        if client is None:
            raise SystemExit("hivemind did not start")
        yield partial(a_round, client)


def server_process(connection: Connection, codec: str) -> None:
    """Serves the expert until its connection ends; first sends the addresses of its DHT."""
    from hivemind.dht import DHT
    from hivemind.moe import ModuleBackend, Server
    from hivemind.proto.runtime_pb2 import CompressionType
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

    torch.set_num_threads(threads_of_each_peer())
    rows, *row = SHAPE
    schema = BatchTensorDescriptor(*row, compression=CompressionType.Value(codec))
    module = torch.nn.Identity()
    expert = ModuleBackend(EXPERT, module, args_schema=(schema,), outputs_schema=schema, max_batch_size=rows)
    dht = DHT(start=True)
    server = Server(dht, {EXPERT: expert}, num_connection_handlers=HANDLERS, device="cpu")
    server.run_in_background(await_ready=True)
    connection.send([str(address) for address in dht.get_visible_maddrs()])
    try:
        connection.recv()
    finally:
        server.shutdown()


def client_process(connection: Connection, peers: list[str]) -> None:
    """Sends tensors, one at a time: a round of them for each message on the connection."""
    from hivemind.dht import DHT
    from hivemind.moe import get_experts

    torch.set_num_threads(threads_of_each_peer())
    dht = DHT(initial_peers=peers, start=True)
    expert = None
    while expert is None:
        [expert] = get_experts(dht, [EXPERT])
    hidden, gradient = torch.randn(SHAPE), torch.randn(SHAPE)
    connection.send("ready")
    try:
        while connection.recv():
            samples = [visit(expert, hidden, gradient) for _ in range(SAMPLES_PER_ROUND)]
            connection.send([sample for sample in samples if sample is not None])
    finally:
        dht.shutdown()


def visit(expert: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> Sample | None:
    """None when the answer was cut off: hivemind sometimes takes a broken stream for a finished one."""
    source = hidden.clone().requires_grad_()
    begun = time.perf_counter()
    try:
        output = expert(source)
        forward_s = time.perf_counter() - begun
        output.backward(gradient)
    except (RuntimeError, ValueError, StopIteration) as error:
        tell(f"hivemind: a visit failed: {error!r:.200}")
        return None
    return Sample(forward_s, time.perf_counter() - begun)


def measure(options: Any) -> dict[str, Any]:
    samples: dict[str, list[Sample]] = {"skipstone": [], "hivemind": []}
    streams: dict[bool, dict[int, list[float]]] = {plain: {size: [] for size in CHUNK_SIZES} for plain in (False, True)}
    with ExitStack() as stack:
        contenders = {"skipstone": stack.enter_context(skipstone())}
        if not options.without_hivemind:
            contenders["hivemind"] = stack.enter_context(hivemind(options.codec))
        rate_of = {plain: stack.enter_context(bare_stream(STREAM_BATCH_BYTES, plain)) for plain in streams}
        for number in range(-WARM_UP_ROUNDS, options.rounds):
            found = {name: hold() for name, hold in contenders.items()}
            rates = {plain: {size: rate_of[plain](size) for size in CHUNK_SIZES} for plain in streams}
            if number < 0:
                continue
            for name, of in found.items():
                samples[name] += of
            for plain, size in itertools.product(streams, CHUNK_SIZES):
                streams[plain][size].append(rates[plain][size])
            times = {name: [round(1e3 * one.forward_backward_s, 1) for one in of] for name, of in found.items()}
            tell(f"round {number + 1} of {options.rounds}: {times} ms, raw MB/s {rates[False]}")
    raw, plain_rates = ({size: statistics.median(of) for size, of in streams[plain].items()} for plain in streams)
    best, plain_best = max(raw, key=raw.__getitem__), max(plain_rates.values())
    ours = summary(samples["skipstone"])
    mb_per_s = MOVED_BYTES / 1e3 / ours["forward_backward_ms"]
    figures: dict[str, Any] = {
        "tensor_bytes": TENSOR_BYTES,
        "rounds": options.rounds,
        "skipstone": {**ours, "mb_per_s": round(mb_per_s, 1)},
        "transport": {"mb_per_s": round(raw[best], 1), "chunk_bytes": best},
        "share_of_transport": round(mb_per_s / raw[best], 3),
        "plain_transport_mb_per_s": round(plain_best, 1),
        "share_of_plain_transport": round(mb_per_s / plain_best, 3),
    }
    if samples["hivemind"]:
        theirs = summary(samples["hivemind"])
        figures["hivemind"] = {"codec": options.codec, **theirs}
        figures["speedup_over_hivemind"] = round(theirs["forward_backward_ms"] / ours["forward_backward_ms"], 2)
    return figures


def summary(samples: list[Sample]) -> dict[str, float]:
    return {
        "forward_backward_ms": round(1e3 * statistics.median(one.forward_backward_s for one in samples), 2),
        "forward_ms": round(1e3 * statistics.median(one.forward_s for one in samples), 2),
    }


if __name__ == "__main__":
    kit.run(__doc__, measure, {"rounds": 1}, rounds=8, codec="NONE", without_hivemind=False)
