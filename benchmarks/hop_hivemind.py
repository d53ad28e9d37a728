"""The same hop with hivemind.moe: a Server with an identity expert in one process, a RemoteExpert in another."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.samples import SAMPLES_PER_ROUND, Sample, threads_of_each_peer

CODECS = ("NONE", "FLOAT16", "UNIFORM_8BIT", "BLOCKWISE_8BIT")
EXPERT = "identity.0"
HANDLERS = 4
"""Processes that answer requests; what hivemind recommends for each expert."""
GRACE_S = 10.0


@contextmanager
def process_group(target: Any, *arguments: Any) -> Iterator[Connection]:
    """Runs `target(connection, *arguments)` in a fresh Python process that may start others; all of them end with the
    block.

    The process is to end in good order when its connection does; whoever is left after that is killed.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    leader = context.Process(target=_lead_group, args=(target, there, *arguments))
    leader.start()
    assert leader.pid is not None
    there.close()
    try:
        yield here
    finally:
        here.close()
        leader.join(timeout=GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.join()


def _lead_group(target: Any, *arguments: Any) -> None:
    os.setsid()
    with suppress(EOFError):
        target(*arguments)


def server_process(connection: Connection, shape: tuple[int, int, int], codec: str) -> None:
    """Serves the expert until it is killed; says first where its DHT can be reached."""
    from hivemind.dht import DHT
    from hivemind.moe import ModuleBackend, Server
    from hivemind.proto.runtime_pb2 import CompressionType
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

    torch.set_num_threads(threads_of_each_peer())
    rows, *row = shape
    schema = BatchTensorDescriptor(*row, compression=CompressionType.Value(codec))
    expert = ModuleBackend(
        EXPERT, torch.nn.Identity(), args_schema=(schema,), outputs_schema=schema, max_batch_size=rows
    )
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

    torch.set_num_threads(threads_of_each_peer())
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
    """None when the answer came short: hivemind takes a broken stream for a finished one now and then."""
    source = hidden.clone().requires_grad_()
    begun = time.perf_counter()
    try:
        output = expert(source)
        forward_s = time.perf_counter() - begun
        output.backward(gradient)
    except (RuntimeError, ValueError, StopIteration) as error:
        print(f"hivemind: a visit failed: {error!r:.200}", file=sys.stderr)
        return None
    return Sample(forward_s, time.perf_counter() - begun)
