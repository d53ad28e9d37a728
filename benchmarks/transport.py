"""Bare gRPC streams with mutual TLS between two processes on loopback: with our transport's settings, and by default.

`chunks` are the rates by message size. MB are 10**6 bytes, figures are medians. `hop.py` compares tensors with them.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from protocol.interfaces.transport import Contact
from protocol.transport import grpc_streams
from protocol.transport.grpc_streams import AcceptedStream, DialledStream, make_server, open_channel
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.types import PeerId

MIB: Final = 2**20
CHUNK_SIZES: Final = tuple(n * 1024 for n in (64, 128, 256, 512, 1024, 2048, 4096))
END_OF_BATCH: Final = b"."
LONGEST_MESSAGE: Final = 8 * MIB


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


class Book:
    """An address book with these contacts; receivers need none of their senders."""

    def __init__(self, *contacts: Contact) -> None:
        self.contacts = {contact.peer: contact for contact in contacts}

    def contact(self, peer: PeerId) -> Contact | None:
        return self.contacts.get(peer)


def transport_of(identity: Identity, handler: Any, book: Book) -> tuple[GrpcTransport, Contact]:
    """A transport, and its contact, which lacks the address."""
    credentials, clock = make_credentials(identity, RUN), SystemClock()
    transport = GrpcTransport(credentials, book, handler, clock, TransportSettings(), own_record=lambda: b"")
    return transport, Contact(identity.peer, (), credentials.certificate_der)


def measure(options: Any) -> dict[str, Any]:
    batch_bytes, chunks = options.batch_mib * MIB, list[dict[str, float]]()
    with bare_stream(batch_bytes) as raw_rate, bare_stream(batch_bytes, plain=True) as plain_rate:
        for size in options.chunk_sizes:
            rate, without = (raw_mb_per_s(of, size, options.rounds) for of in (raw_rate, plain_rate))
            chunks.append({"chunk_bytes": size, "mb_per_s": round(rate, 1), "plain_mb_per_s": round(without, 1)})
            tell(f"raw messages of {size // 1024} KiB: {rate:.0f} MB/s, as gRPC comes {without:.0f} MB/s")
    return {"chunks": chunks, "best_mb_per_s": max(chunk["mb_per_s"] for chunk in chunks)}


if __name__ == "__main__":
    quick = {"rounds": 1, "batch_mib": 16, "chunk_sizes": [2**19]}
    kit.run(__doc__, measure, quick, rounds=5, batch_mib=256, chunk_sizes=list(CHUNK_SIZES))
