"""The bare stream of `benchmarks.raw_stream`, kept open between two processes so that it can be measured again and
again."""

from __future__ import annotations

from multiprocessing.connection import Connection

import uvloop

from benchmarks.raw_stream import LONGEST_MESSAGE, RUN, receive, send_batches
from protocol.identity.certificates import TlsCredentials, make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.directory import Contact
from protocol.transport.grpc_streams import DialledStream, open_channel

BATCH_BYTES = 128 * 1024 * 1024


def receiving_process(connection: Connection) -> None:
    """Says what a sender needs, then reads and forgets until it is killed."""
    identity = Identity.generate()
    server, client = make_credentials(identity, RUN), make_credentials(Identity.generate(), RUN)
    connection.send((Contact(identity.peer, (), server.certificate_der), client))
    receive(connection, server)


def sending_process(connection: Connection, receiver: Contact, credentials: TlsCredentials, port: int) -> None:
    """For each message size that it is sent, answers with the MB/s of a batch of such messages."""

    async def main() -> None:
        stream = DialledStream(
            open_channel(receiver, f"127.0.0.1:{port}", credentials, max_frame_bytes=LONGEST_MESSAGE)
        )
        connection.send("ready")
        while message_bytes := connection.recv():
            connection.send((await send_batches(stream, message_bytes, BATCH_BYTES, 1))[0])

    uvloop.run(main())
