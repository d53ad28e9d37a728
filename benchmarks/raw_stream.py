"""How fast a bare gRPC stream with mutual TLS carries messages one way between two processes, without our protocol.

The channel, its options and its certificates are those of the transport; the messages are zeros that nobody looks at.
So it is the ceiling for whatever the transport adds. Other benchmarks import `raw_mb_per_s`.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from node.runtime.malloc import keep_freed_memory
from protocol.identity.certificates import TlsCredentials, make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.directory import Contact
from protocol.transport.grpc_streams import AcceptedStream, DialledStream, make_server, open_channel
from swarm.vocabulary.types import RunId

# As a node does at its start; here and, because each process imports this module, in the other process too.
keep_freed_memory()

RUN = RunId("0" * 64)
END_OF_BATCH = b"."
LONGEST_MESSAGE = 8 * 1024 * 1024


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Connection]:
    """Runs `target(connection, *arguments)` in a fresh Python process for as long as the block runs."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(there, *arguments), daemon=True)
    child.start()
    there.close()  # so that a child that fails ends the connection
    try:
        yield here
    finally:
        child.kill()
        child.join()


def receive(connection: Connection, credentials: TlsCredentials) -> None:
    """The receiving process: reads and forgets; answers each end of a batch."""

    async def serve(_requests: object, context: Any) -> None:
        stream = AcceptedStream(context)
        while (message := await stream.read()) is not None:
            if message == END_OF_BATCH:
                await stream.write(END_OF_BATCH)

    async def main() -> None:
        server, port = make_server(serve, credentials, "127.0.0.1:0", 4, max_frame_bytes=LONGEST_MESSAGE)
        await server.start()
        connection.send(port)
        await server.wait_for_termination()

    uvloop.run(main())


async def send_batches(stream: DialledStream, message_bytes: int, batch_bytes: int, repeats: int) -> list[float]:
    """MB/s of each batch, from the first write to the receiver's word that it has read everything."""
    message = bytes(message_bytes)
    rates = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for _ in range(batch_bytes // message_bytes):
            await stream.write(message)
        await stream.write(END_OF_BATCH)
        await stream.read()
        rates.append(batch_bytes / (time.perf_counter() - started) / 1e6)
    return rates[1:]


def raw_mb_per_s(message_bytes: int, *, batch_bytes: int = 256 * 1024 * 1024, repeats: int = 5) -> float:
    """Median rate in MB/s (10**6 bytes) of a one-way stream of messages of this size; the first batch is not
    counted."""
    server_identity = Identity.generate()
    server, client = make_credentials(server_identity, RUN), make_credentials(Identity.generate(), RUN)

    async def main(port: int) -> list[float]:
        contact = Contact(server_identity.peer, (f"127.0.0.1:{port}",), server.certificate_der)
        stream = DialledStream(open_channel(contact, contact.addresses[0], client, max_frame_bytes=LONGEST_MESSAGE))
        rates = await send_batches(stream, message_bytes, batch_bytes, repeats)
        await stream.half_close()
        await stream.read()
        await stream.close()
        return rates

    with process(receive, server) as connection:
        return statistics.median(uvloop.run(main(connection.recv())))
