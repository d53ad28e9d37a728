"""What one hop costs: forward and backward of a tensor through an identity stage in another process, on loopback.

Skipstone's node against `hivemind.moe`, and against a bare gRPC stream with mutual TLS that carries the same bytes one
way. They take turns, round after round, so that what else the machine does meets all of them alike. Forward and
backward move four tensors of 8.39 MB (4 x 512 x 1024 float32): hidden states out and back, gradients out and back.
Times are medians. All three run with the allocator set as in a node (`node.runtime.malloc`) and with half of the
machine's cores for each process's torch.

Prints one JSON object; what is under way goes to stderr. MB are 10**6 bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.hop_hivemind import CODECS, client_process, process_group, server_process
from benchmarks.samples import Sample
from node.runtime.malloc import keep_freed_memory
from swarm.vocabulary.types import Codec

# In every process: each imports this module. What brings gRPC with it is imported later, as hivemind's processes fork.
keep_freed_memory()

SHAPE = (4, 512, 1024)
TENSOR_BYTES = math.prod(SHAPE) * 4
MOVED_BYTES = 4 * TENSOR_BYTES
CHUNK_SIZES = [n * 1024 for n in (256, 512, 1024, 2048)]
WARM_UP_ROUNDS = 2
PATIENCE_S = 120
START_PATIENCE_S = 25
STARTS = 4


@contextmanager
def skipstone(
    shape: tuple[int, int, int] = SHAPE, codec: Codec | None = None, device: str = "cpu"
) -> Iterator[Callable[[], list[Sample]]]:
    """A function that measures one round. The node chooses the codec if none is given."""
    from benchmarks.hop_skipstone import data_node_process, stage_process
    from benchmarks.raw_stream import process

    arguments = (shape, codec, device)
    with process(stage_process, *arguments) as stage, process(data_node_process, *arguments) as data_node:
        at_stage, at_data_node = hear(stage), hear(data_node)
        stage.send(at_data_node)
        data_node.send(at_stage)
        hear(stage)
        hear(data_node)
        yield lambda: a_round(data_node)


@contextmanager
def hivemind(codec: str) -> Iterator[Callable[[], list[Sample]]]:
    """A function that measures one round. A server that hangs while it starts, as theirs does now and then, is started
    again."""
    for attempt in range(1, STARTS + 1):
        with ExitStack() as processes:
            try:
                client = start_hivemind(processes, codec)
            except TimeoutError:
                print(f"hivemind did not start, try {attempt} of {STARTS}", file=sys.stderr)
                continue
            yield partial(a_round, client)
            return
    raise SystemExit(f"hivemind did not start in {STARTS} tries")


def start_hivemind(processes: ExitStack, codec: str) -> Connection:
    """The connection to a client that has found its server. Raises TimeoutError when either is silent for too long."""
    server = processes.enter_context(process_group(server_process, SHAPE, codec))
    peers = hear(server, START_PATIENCE_S)
    client = processes.enter_context(process_group(client_process, SHAPE, peers))
    hear(client, START_PATIENCE_S)
    return client


@contextmanager
def bare_stream() -> Iterator[Callable[[int], float]]:
    """A function that measures the MB/s of messages of one size."""
    from benchmarks.hop_raw import receiving_process, sending_process
    from benchmarks.raw_stream import process

    with process(receiving_process) as receiver:
        contact, credentials = hear(receiver)
        port = hear(receiver)
        with process(sending_process, contact, credentials, port) as sender:
            hear(sender)

            def measure(message_bytes: int) -> float:
                sender.send(message_bytes)
                return float(hear(sender))

            yield measure


def hear(connection: Connection, patience_s: float = PATIENCE_S) -> Any:
    if not connection.poll(patience_s):
        raise TimeoutError(f"a measured process has said nothing for {patience_s:.0f} s")
    return connection.recv()


def a_round(connection: Connection) -> list[Sample]:
    """The counted samples of one round."""
    connection.send("go")
    samples: list[Sample] = hear(connection)
    return samples[1:]


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def summary(samples: list[Sample]) -> dict[str, float]:
    return {
        "forward_backward_ms": milliseconds([sample.forward_backward_s for sample in samples]),
        "forward_ms": milliseconds([sample.forward_s for sample in samples]),
    }


def measure(rounds: int, codec: str) -> dict[str, Any]:
    ours: list[Sample] = []
    theirs: list[Sample] = []
    raw: dict[int, list[float]] = {size: [] for size in CHUNK_SIZES}
    with skipstone() as our_round, hivemind(codec) as their_round, bare_stream() as raw_rate:
        for number in range(-WARM_UP_ROUNDS, rounds):
            our, their = our_round(), their_round()
            rates = {size: raw_rate(size) for size in CHUNK_SIZES}
            if number < 0:
                continue
            ours += our
            theirs += their
            for size, rate in rates.items():
                raw[size].append(rate)
            report(f"round {number + 1} of {rounds}", our, their, rates)
    return result(ours, theirs, raw, codec, rounds)


def report(title: str, ours: list[Sample], theirs: list[Sample], rates: dict[int, float]) -> None:
    times = [[round(sample.forward_backward_s * 1e3, 1) for sample in samples] for samples in (ours, theirs)]
    raw = ", ".join(f"{size // 1024}K {rate:.0f}" for size, rate in rates.items())
    print(f"{title}: skipstone {times[0]} ms, hivemind {times[1]} ms, raw MB/s {raw}", file=sys.stderr)


def result(
    ours: list[Sample], theirs: list[Sample], raw: dict[int, list[float]], codec: str, rounds: int
) -> dict[str, Any]:
    medians = {size: statistics.median(rates) for size, rates in raw.items()}
    best = max(medians, key=medians.__getitem__)
    our, their = summary(ours), summary(theirs)
    mb_per_s = MOVED_BYTES / 1e3 / our["forward_backward_ms"]
    return {
        "tensor_bytes": TENSOR_BYTES,
        "skipstone": {**our, "mb_per_s": round(mb_per_s, 1)},
        "hivemind": {"codec": codec, **their},
        "transport": {"mb_per_s": round(medians[best], 1), "chunk_bytes": best},
        "speedup_over_hivemind": round(their["forward_backward_ms"] / our["forward_backward_ms"], 2),
        "share_of_transport": round(mb_per_s / medians[best], 3),
        "rounds": rounds,
    }


def beside_plain_grpc(report: dict[str, Any]) -> dict[str, object]:
    """The same share of a stream without the settings of our transport: gRPC as it comes, measured right after."""
    command = [sys.executable, str(Path(__file__).parent / "plain_stream.py")]
    chunks = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["chunks"]
    best = max(chunks, key=lambda chunk: chunk["mb_per_s"])
    share = report["skipstone"]["mb_per_s"] / best["mb_per_s"]
    return {"plain_transport": best, "share_of_plain_transport": round(share, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Forward and backward through one hop, on loopback.")
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds, of 3 samples each (default 8)")
    parser.add_argument("--codec", choices=CODECS, default="NONE", help="hivemind's compression on the wire")
    options = parser.parse_args()
    report = measure(options.rounds, options.codec)
    print(json.dumps(report | beside_plain_grpc(report)))


if __name__ == "__main__":
    main()
