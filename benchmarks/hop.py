"""What one hop costs: forward and backward of a tensor through an identity stage in another process, on loopback.

Skipstone's node (`benchmarks.hop_peer`) against `hivemind.moe` and against bare gRPC streams with mutual TLS that carry
the same bytes one way, with our transport's settings and as gRPC comes. They take turns, so that other load meets all
alike. Forward and backward move four tensors of 8.39 MB (4 x 512 x 1024 float32). Times are medians. All run with the
node's allocator settings and half of the cores for each process's torch. MB are 10**6 bytes.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import hear, process, tell
from node.runtime.malloc import keep_freed_memory
from swarm.vocabulary.types import Codec

# In every process: each imports this module. gRPC is imported in functions only, because hivemind's processes fork.
keep_freed_memory()

SHAPE: Final = (4, 512, 1024)
TENSOR_BYTES: Final = math.prod(SHAPE) * 4
MOVED_BYTES: Final = 4 * TENSOR_BYTES
CHUNK_SIZES: Final = tuple(n * 1024 for n in (256, 512, 1024, 2048))
STREAM_BATCH_BYTES: Final = 128 * 2**20
WARM_UP_ROUNDS: Final = 2
SAMPLES_PER_ROUND: Final = 4
"""The first finds cold caches after the others' turns and is not counted."""
START_PATIENCE_S: Final = 25.0
STARTS: Final = 4
CODECS: Final = ("NONE", "FLOAT16", "UNIFORM_8BIT", "BLOCKWISE_8BIT")
EXPERT: Final = "identity.0"
HANDLERS: Final = 4
"""Processes that answer requests; what hivemind recommends for each expert."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds from handing over the input until the output is there, and until the input's gradient is."""

    forward_s: float
    forward_backward_s: float


@contextmanager
def skipstone(
    shape: tuple[int, int, int] = SHAPE, codec: Codec | None = None, device: str = "cpu"
) -> Iterator[Callable[[], list[Sample]]]:
    """A function that measures one round. The node chooses the codec if none is given."""
    from benchmarks.hop_peer import data_node_process, stage_process

    run = (shape, codec, device)
    with process(stage_process, *run) as stage, process(data_node_process, *run, SAMPLES_PER_ROUND) as data_node:
        at_stage, at_data_node = hear(stage), hear(data_node)
        stage.send(at_data_node)
        data_node.send(at_stage)
        hear(stage)
        hear(data_node)
        yield lambda: [Sample(*times) for times in a_round(data_node)]


def a_round(connection: Connection) -> Any:
    connection.send("go")
    return hear(connection)[1:]


# ---- hivemind --------------------------------------------------------------------------------------------------------


@contextmanager
def hivemind(codec: str) -> Iterator[Callable[[], list[Sample]]]:
    """A function that measures one round. A server that hangs while it starts, as hivemind's do, is started again."""
    for attempt in range(1, STARTS + 1):
        with ExitStack() as processes:
            try:
                server = processes.enter_context(process(server_process, SHAPE, codec, grace_s=10.0))
                peers = hear(server, START_PATIENCE_S)
                client = processes.enter_context(process(client_process, SHAPE, peers, grace_s=10.0))
                hear(client, START_PATIENCE_S)
            except TimeoutError:
                tell(f"hivemind did not start, try {attempt} of {STARTS}")
                continue
            yield partial(a_round, client)
            return
    raise SystemExit(f"hivemind did not start in {STARTS} tries")


def server_process(connection: Connection, shape: tuple[int, int, int], codec: str) -> None:
    """Serves the expert until its connection ends; says first where its DHT can be reached."""
    from hivemind.dht import DHT
    from hivemind.moe import ModuleBackend, Server
    from hivemind.proto.runtime_pb2 import CompressionType
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

    torch.set_num_threads(kit.threads_of_each_peer())
    rows, *row = shape
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


def client_process(connection: Connection, shape: tuple[int, int, int], peers: list[str]) -> None:
    """Sends tensors, one at a time: a round of them for each message on the connection."""
    from hivemind.dht import DHT
    from hivemind.moe import get_experts

    torch.set_num_threads(kit.threads_of_each_peer())
    dht = DHT(initial_peers=peers, start=True)
    expert = None
    while expert is None:
        [expert] = get_experts(dht, [EXPERT])
    hidden, gradient = torch.randn(shape), torch.randn(shape)
    connection.send("ready")
    try:
        while connection.recv():
            samples = [visit(expert, hidden, gradient) for _ in range(SAMPLES_PER_ROUND)]
            connection.send([sample for sample in samples if sample is not None])
    finally:
        dht.shutdown()


def visit(expert: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> Sample | None:
    """None when the answer was cut off: hivemind takes a broken stream for a finished one now and then."""
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


# ---- all -------------------------------------------------------------------------------------------------------------


def measure(options: Any) -> dict[str, Any]:
    from benchmarks.transport import bare_stream

    samples: dict[str, list[Sample]] = {"skipstone": [], "hivemind": []}
    raw: dict[int, list[float]] = {size: [] for size in CHUNK_SIZES}
    with ExitStack() as stack:
        contenders = {"skipstone": stack.enter_context(skipstone())}
        if not options.without_hivemind:
            contenders["hivemind"] = stack.enter_context(hivemind(options.codec))
        raw_rate = stack.enter_context(bare_stream(STREAM_BATCH_BYTES))
        for number in range(-WARM_UP_ROUNDS, options.rounds):
            found = {name: hold() for name, hold in contenders.items()}
            rates = {size: raw_rate(size) for size in CHUNK_SIZES}
            if number < 0:
                continue
            for name, of in found.items():
                samples[name] += of
            for size, rate in rates.items():
                raw[size].append(rate)
            times = {name: [round(1e3 * one.forward_backward_s, 1) for one in of] for name, of in found.items()}
            tell(f"round {number + 1} of {options.rounds}: {times} ms, raw MB/s {rates}")
    return figures(samples, raw, options)


def figures(samples: dict[str, list[Sample]], raw: dict[int, list[float]], options: Any) -> dict[str, Any]:
    from benchmarks.transport import plain_rates

    streams = {size: statistics.median(rates) for size, rates in raw.items()}
    best = max(streams, key=streams.__getitem__)
    plain = max(plain_rates(list(CHUNK_SIZES), repeats=2 if options.quick else 5))
    ours = summary(samples["skipstone"])
    mb_per_s = MOVED_BYTES / 1e3 / ours["forward_backward_ms"]
    found: dict[str, Any] = {
        "tensor_bytes": TENSOR_BYTES,
        "rounds": options.rounds,
        "skipstone": {**ours, "mb_per_s": round(mb_per_s, 1)},
        "transport": {"mb_per_s": round(streams[best], 1), "chunk_bytes": best},
        "share_of_transport": round(mb_per_s / streams[best], 3),
        "plain_transport_mb_per_s": round(plain, 1),
        "share_of_plain_transport": round(mb_per_s / plain, 3),
    }
    if samples["hivemind"]:
        theirs = summary(samples["hivemind"])
        found["hivemind"] = {"codec": options.codec, **theirs}
        found["speedup_over_hivemind"] = round(theirs["forward_backward_ms"] / ours["forward_backward_ms"], 2)
    return found


def summary(samples: list[Sample]) -> dict[str, float]:
    return {
        "forward_backward_ms": round(1e3 * statistics.median(one.forward_backward_s for one in samples), 2),
        "forward_ms": round(1e3 * statistics.median(one.forward_s for one in samples), 2),
    }


def main() -> None:
    kit.run(__doc__, measure, {"rounds": 1}, rounds=8, codec="NONE", without_hivemind=False)


if __name__ == "__main__":
    main()
