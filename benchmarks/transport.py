"""What the transport costs: tensors through it against the same bytes on bare gRPC streams, all with mutual TLS.

Two processes on loopback. `chunks` are the rates of raw messages on a stream with our transport's settings and on one
as gRPC comes, by message size. Then turns: raw messages of the best size, and tensors of 8.39 MB (4 x 512 x 1024
float32) through `GrpcTransport`, 4 in flight. MB are 10**6 bytes, figures are medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import RUN, hear, process, tell
from node.runtime.malloc import keep_freed_memory
from protocol.identity.certificates import TlsCredentials, make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Contact, Question
from protocol.transport import grpc_streams
from protocol.transport.grpc_streams import AcceptedStream, DialledStream, make_server, open_channel
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import Close, Forward, Purpose, TensorMessage
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, PeerId
from swarm.vocabulary.types import Path as Route

MIB: Final = 2**20
CHUNK_SIZES: Final = tuple(n * 1024 for n in (64, 128, 256, 512, 1024, 2048, 4096))
TENSOR: Final = TensorSpec((4, 512, 1024), DType.FLOAT32)
TENSORS_PER_BATCH: Final = 32
IN_FLIGHT: Final = 4
END_OF_BATCH: Final = b"."
LONGEST_MESSAGE: Final = 8 * MIB


# ---- bare streams ----------------------------------------------------------------------------------------------------


async def echo_batches(_requests: object, context: Any) -> None:
    """Reads and forgets; answers the end of each batch."""
    stream = AcceptedStream(context)
    while (message := await stream.read()) is not None:
        if message == END_OF_BATCH:
            await stream.write(END_OF_BATCH)


def prepare(plain: bool) -> None:
    """Leaves gRPC and the allocator as they come, or takes our settings."""
    if plain:
        grpc_streams._SERVER_OPTIONS = grpc_streams._CHANNEL_OPTIONS = ()  # type: ignore[misc, assignment]
    else:
        keep_freed_memory()


def receiving_process(connection: Connection, plain: bool) -> None:
    """Sends its contact and a sender's credentials, then receives batches until it is killed."""
    prepare(plain)
    identity = Identity.generate()
    own, sender = make_credentials(identity, RUN), make_credentials(Identity.generate(), RUN)

    async def main() -> None:
        server, port = make_server(echo_batches, own, "127.0.0.1:0", 4, max_frame_bytes=LONGEST_MESSAGE)
        await server.start()
        connection.send((Contact(identity.peer, (f"127.0.0.1:{port}",), own.certificate_der), sender))
        await server.wait_for_termination()

    uvloop.run(main())


def sending_process(
    connection: Connection, receiver: Contact, credentials: TlsCredentials, batch_bytes: int, plain: bool
) -> None:
    """Answers each message size with the MB/s of a batch of such messages."""
    prepare(plain)

    async def main() -> None:
        address = receiver.addresses[0]
        stream = DialledStream(open_channel(receiver, address, credentials, max_frame_bytes=LONGEST_MESSAGE))
        connection.send("ready")
        while size := connection.recv():
            message, started = bytes(size), time.perf_counter()
            for _ in range(batch_bytes // size):
                await stream.write(message)
            await stream.write(END_OF_BATCH)
            await stream.read()
            connection.send(batch_bytes / (time.perf_counter() - started) / 1e6)

    uvloop.run(main())


@contextmanager
def bare_stream(batch_bytes: int, plain: bool = False) -> Iterator[Callable[[int], float]]:
    """A function that measures the MB/s of one batch of messages of a size."""
    with (
        process(receiving_process, plain) as receiver,
        process(sending_process, *hear(receiver), batch_bytes, plain) as sender,
    ):
        hear(sender)

        def measured(size: int) -> float:
            sender.send(size)
            return float(hear(sender))

        yield measured


def raw_mb_per_s(rate: Callable[[int], float], size: int, repeats: int) -> float:
    """Median rate of a one-way stream of messages of this size; the first batch is not counted."""
    return statistics.median([rate(size) for _ in range(1 + repeats)][1:])


# ---- tensors through the transport -----------------------------------------------------------------------------------


class Book:
    """An address book with these contacts; receivers need none of their senders."""

    def __init__(self, *contacts: Contact) -> None:
        self.contacts = {contact.peer: contact for contact in contacts}

    def contact(self, peer: PeerId) -> Contact | None:
        return self.contacts.get(peer)


class TensorCounter:
    """A `LinkHandler` that receives tensors into a fixed set of buffers and counts whole batches."""

    announced = link_up = link_down = staticmethod(lambda *of: None)
    serves = minds = staticmethod(lambda *of: True)

    def __init__(self) -> None:
        self._free = [memoryview(bytearray(TENSOR.byte_length)) for _ in range(2 * IN_FLIGHT)]
        self._received = 0
        self.batches: asyncio.Queue[PeerId] = asyncio.Queue()  # senders of whole batches
        self.whole = asyncio.Event()  # the other side has confirmed a batch

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview:
        return self._free.pop()

    def received(self, sender: PeerId, message: Any, tensor: TensorSpec, buffer: memoryview) -> None:
        self._free.append(buffer)
        self._received += 1
        if self._received % TENSORS_PER_BATCH == 0:
            self.batches.put_nowait(message.microbatch.data_node)

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, *error: PeerError) -> None:
        self._free.append(buffer)

    def received_control(self, sender: PeerId, message: Any) -> None:
        self.whole.set()

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        return b""


async def send_batches(transport: Any, counter: TensorCounter, own: PeerId, peer: PeerId, batches: int) -> list[float]:
    """MB/s of each batch; the first (dial, TLS) is not counted."""
    route, rates = Route(own, (Hop(ModuleId(1), peer),)), []
    data = memoryview(bytearray(os.urandom(TENSOR.byte_length)))

    async def send(numbers: range) -> None:
        for number in numbers:
            message = Forward(MicrobatchId(own, number), route, 0, Purpose.TRAIN, 60.0)
            await transport.send(peer, message, TENSOR, data)

    for _ in range(batches + 1):
        counter.whole.clear()
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for first in range(IN_FLIGHT):
                tasks.create_task(send(range(first, TENSORS_PER_BATCH, IN_FLIGHT)))
        await counter.whole.wait()
        rates.append(TENSOR.byte_length * TENSORS_PER_BATCH / (time.perf_counter() - started) / 1e6)
    return rates[1:]


def transport_of(identity: Identity, handler: Any, book: Book) -> tuple[GrpcTransport, Contact]:
    """A transport, and its contact, which lacks the address."""
    credentials, clock = make_credentials(identity, RUN), SystemClock()
    transport = GrpcTransport(credentials, book, handler, clock, TransportSettings(), own_record=lambda: b"")
    return transport, Contact(identity.peer, (), credentials.certificate_der)


def tensor_process(connection: Connection, receiver: Contact | None, batches: int) -> None:
    """Sends its contact and receives tensors; with a receiver, sends tensors to it and reports the rates."""
    keep_freed_memory()
    identity = Identity.generate()

    async def main() -> None:
        counter = TensorCounter()
        transport, contact = transport_of(identity, counter, Book(*([receiver] if receiver else [])))
        async with transport:
            if receiver is not None:
                connection.send(await send_batches(transport, counter, identity.peer, receiver.peer, batches))
                return
            connection.send(replace(contact, addresses=(f"127.0.0.1:{transport.port}",)))
            while True:  # until the process is ended
                peer = await counter.batches.get()
                await transport.send_control(peer, Close(MicrobatchId(peer, 0), "whole"))

    uvloop.run(main())


def measure(options: Any) -> dict[str, Any]:
    batch_bytes = options.batch_mib * MIB
    chunks, raw, tensors = list[dict[str, float]](), list[float](), list[float]()
    with bare_stream(batch_bytes) as raw_rate, bare_stream(batch_bytes, plain=True) as plain_rate:
        for size in options.chunk_sizes:
            rate, without = (raw_mb_per_s(of, size, options.rounds) for of in (raw_rate, plain_rate))
            chunks.append({"chunk_bytes": size, "mb_per_s": round(rate, 1), "plain_mb_per_s": round(without, 1)})
            tell(f"raw messages of {size // 1024} KiB: {rate:.0f} MB/s, as gRPC comes {without:.0f} MB/s")
        best = max(chunks, key=lambda chunk: chunk["mb_per_s"])["chunk_bytes"]
        for _ in range(options.rounds):
            raw.append(raw_mb_per_s(raw_rate, int(best), 3))
            with process(tensor_process, None, 0) as receiver, process(tensor_process, hear(receiver), 3) as sender:
                tensors.append(statistics.median(hear(sender)))
            tell(f"raw {raw[-1]:.0f} MB/s, tensors {tensors[-1]:.0f} MB/s")
    rate, ratio = statistics.median(tensors), kit.median_ratio(tensors, raw)
    skipstone = {"tensor_bytes": TENSOR.byte_length, "mb_per_s": round(rate, 1), "ratio": round(ratio, 3)}
    return {"chunks": chunks, "best_mb_per_s": round(statistics.median(raw), 1), "skipstone": skipstone}


if __name__ == "__main__":
    quick = {"rounds": 1, "batch_mib": 16, "chunk_sizes": [2**19]}
    kit.run(__doc__, measure, quick, rounds=5, batch_mib=256, chunk_sizes=list(CHUNK_SIZES))
