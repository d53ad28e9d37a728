"""Bare gRPC streams with mutual TLS among all peers at once, as a reference: the bytes of a round and nothing else.

Each process sends every other what a round at the optimum would: its share of the contributions and its own shard's
result. The messages are zeros that nobody looks at; nothing is agreed, summed, checked or kept.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.raw_stream import END_OF_BATCH, LONGEST_MESSAGE, RUN
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.directory import Contact
from protocol.transport.grpc_streams import AcceptedStream, DialledStream, make_server, open_channel

MESSAGE_BYTES = 512 * 1024


async def _answer(_requests: object, context: Any) -> None:
    stream = AcceptedStream(context)
    while (message := await stream.read()) is not None:
        if message == END_OF_BATCH:
            await stream.write(END_OF_BATCH)


async def _send(stream: DialledStream, size_bytes: int) -> None:
    """Until the other has read it all."""
    message = bytes(MESSAGE_BYTES)
    for start in range(0, size_bytes, MESSAGE_BYTES):
        await stream.write(message[: size_bytes - start])
    await stream.write(END_OF_BATCH)
    await stream.read()


def bare_process(connection: Connection, count: int, size_bytes: int) -> None:
    """One of `count` processes; after the contacts, a round for each message; says when it began and ended.

    Args:
        size_bytes: of the whole vector, encoded.
    """
    identity = Identity.generate()
    credentials = make_credentials(identity, RUN)

    async def main() -> None:
        server, port = make_server(_answer, credentials, "127.0.0.1:0", count, max_frame_bytes=LONGEST_MESSAGE)
        await server.start()
        connection.send(Contact(identity.peer, (f"127.0.0.1:{port}",), credentials.certificate_der))
        contacts: list[Contact] = await asyncio.to_thread(connection.recv)
        streams = [
            DialledStream(open_channel(contact, contact.addresses[0], credentials, max_frame_bytes=LONGEST_MESSAGE))
            for contact in contacts
            if contact.peer != identity.peer
        ]
        for stream in streams:
            await _send(stream, 0)
        connection.send("ready")
        while await asyncio.to_thread(connection.recv):
            connection.send("prepared")
            await asyncio.to_thread(connection.recv)
            begun = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(_send(stream, 2 * size_bytes // count))
            connection.send((begun, time.monotonic()))

    uvloop.run(main())
