"""What the transport costs: tensors through it, against the same bytes on a bare gRPC stream, both with mutual TLS.

Prints one JSON object: MB/s (10**6 bytes) of raw messages of several sizes between two processes (`chunks`, medians of
5 batches), then, of 5 rounds that alternate between the two so that other load on the machine meets both, the medians
of raw messages of the best size (`best_mb_per_s`) and of tensors of 8.39 MB (4 x 512 x 1024 float32) through
`GrpcTransport` (`skipstone`), with their ratio.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.raw_stream import RUN, process, raw_mb_per_s
from protocol.identity.certificates import TlsCredentials, make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.directory import Contact
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, Topic
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import Close, Forward, Purpose, TensorMessage
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId

CHUNK_SIZES = [n * 1024 for n in (64, 128, 256, 512, 1024, 2048, 4096)]
TENSOR = TensorSpec((4, 512, 1024), DType.FLOAT32)
TENSORS_PER_BATCH = 32
IN_FLIGHT = 4
ROUNDS = 5
BATCHES_PER_ROUND = 3


class MonotonicClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Book:
    """An address book with the receiver in it, or with nobody: the receiver need not know who sends."""

    def __init__(self, *contacts: Contact) -> None:
        self._contacts = {contact.peer: contact for contact in contacts}

    def contact(self, peer: PeerId) -> Contact | None:
        return self._contacts.get(peer)


class Counter:
    """Receives tensors into a fixed set of buffers and wakes whoever waits when a batch is whole."""

    def __init__(self) -> None:
        self._free = [memoryview(bytearray(TENSOR.byte_length)) for _ in range(2 * IN_FLIGHT)]
        self._received = 0
        self.batches: asyncio.Queue[PeerId] = asyncio.Queue()
        self.closed = asyncio.Event()

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview:
        return self._free.pop()

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        self._free.append(buffer)
        self._received += 1
        if self._received % TENSORS_PER_BATCH == 0:
            self.batches.put_nowait(sender)

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        self._free.append(buffer)

    def told(self, sender: PeerId, message: Any) -> None:
        self.closed.set()

    def announced(self, sender: PeerId, record: bytes) -> None:
        return

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        return b""

    def serves(self, sender: PeerId) -> bool:
        return True

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        return True

    def link_up(self, peer: PeerId) -> None:
        return

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        return


def make_transport(identity: Identity, credentials: TlsCredentials, handler: Counter, book: Book) -> GrpcTransport:
    return GrpcTransport(
        credentials,
        book,
        handler,
        MonotonicClock(),
        TransportSettings(),
        own_record=lambda: b"",
    )


def receive_tensors(connection: Connection) -> None:
    """The receiving process: says after each batch that it is whole."""
    identity = Identity.generate()
    credentials = make_credentials(identity, RUN)

    async def main() -> None:
        counter = Counter()
        async with make_transport(identity, credentials, counter, Book()) as transport:
            address = f"127.0.0.1:{transport.port}"
            connection.send(Contact(identity.peer, (address,), credentials.certificate_der))
            while True:
                peer = await counter.batches.get()
                await transport.tell(peer, Close(MicrobatchId(peer, 0), "whole"))

    uvloop.run(main())


async def send_tensors(transport: GrpcTransport, counter: Counter, own: PeerId, peer: PeerId) -> list[float]:
    path = Path(own, (Hop(ModuleId(1), peer),))
    data = memoryview(bytearray(os.urandom(TENSOR.byte_length)))
    rates = []

    async def send(numbers: range) -> None:
        for number in numbers:
            await transport.send(peer, Forward(MicrobatchId(own, number), path, 0, Purpose.TRAIN, 60), TENSOR, data)

    for _ in range(BATCHES_PER_ROUND + 1):
        counter.closed.clear()
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for first in range(IN_FLIGHT):
                tasks.create_task(send(range(first, TENSORS_PER_BATCH, IN_FLIGHT)))
        await counter.closed.wait()
        rates.append(TENSOR.byte_length * TENSORS_PER_BATCH / (time.perf_counter() - started) / 1e6)
    return rates[1:]


def skipstone_mb_per_s() -> float:
    """Median rate in MB/s of tensors through the transport; the first batch (dial, TLS) is not counted."""
    identity = Identity.generate()
    credentials = make_credentials(identity, RUN)

    async def main(receiver: Contact) -> list[float]:
        counter = Counter()
        async with make_transport(identity, credentials, counter, Book(receiver)) as transport:
            return await send_tensors(transport, counter, identity.peer, receiver.peer)

    with process(receive_tensors) as connection:
        return statistics.median(uvloop.run(main(connection.recv())))


def sweep() -> list[dict[str, float]]:
    chunks = []
    for size in CHUNK_SIZES:
        rate = raw_mb_per_s(size)
        chunks.append({"chunk_bytes": size, "mb_per_s": round(rate, 1)})
        print(f"raw messages of {size // 1024} KiB: {rate:.0f} MB/s", file=sys.stderr)
    return chunks


def compare(raw_bytes: int) -> tuple[float, float]:
    """Medians of raw messages of this size and of tensors."""
    raw, tensors = [], []
    for _ in range(ROUNDS):
        raw.append(raw_mb_per_s(raw_bytes, repeats=BATCHES_PER_ROUND))
        tensors.append(skipstone_mb_per_s())
        print(f"raw {raw[-1]:.0f} MB/s, tensors {tensors[-1]:.0f} MB/s", file=sys.stderr)
    return statistics.median(raw), statistics.median(tensors)


def main() -> None:
    chunks = sweep()
    best_size = max(chunks, key=lambda chunk: chunk["mb_per_s"])["chunk_bytes"]
    raw, tensors = compare(int(best_size))
    skipstone = {
        "tensor_bytes": TENSOR.byte_length,
        "mb_per_s": round(tensors, 1),
        "ratio": round(tensors / raw, 3),
    }
    print(json.dumps({"chunks": chunks, "best_mb_per_s": round(raw, 1), "skipstone": skipstone}))


if __name__ == "__main__":
    main()
