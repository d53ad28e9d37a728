"""How fast gRPC carries messages one way between two processes as it comes: mutual TLS, and nothing set.

    python benchmarks/plain_stream.py

No channel options but the message size, the C library's own memory settings, no code of ours but the certificates.
`raw_stream` is the same with the settings of our transport. Prints one JSON object; MB are 10**6 bytes, medians of 5
batches.
"""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import statistics
import sys
import time
from multiprocessing.connection import Connection

import grpc
import uvloop

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from protocol.identity.certificates import TlsCredentials, make_credentials
from protocol.identity.keys import Identity
from swarm.vocabulary.types import RunId

RUN = RunId("0" * 64)
MESSAGE_SIZES = [n * 1024 for n in (64, 128, 256, 512, 1024, 2048, 4096)]
BATCH_BYTES = 256 * 1024 * 1024
BATCHES = 5
END_OF_BATCH = b"."
OPTIONS = [("grpc.max_receive_message_length", 8 * 1024 * 1024)]


def receive(connection: Connection, credentials: TlsCredentials) -> None:
    """The receiving process: reads and forgets, and answers each end of a batch."""

    async def serve(requests: object, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if message == END_OF_BATCH:
                await context.write(END_OF_BATCH)

    async def main() -> None:
        server = grpc.aio.server(options=OPTIONS)
        handler = grpc.method_handlers_generic_handler(
            "Plain", {"Stream": grpc.stream_stream_rpc_method_handler(serve)}
        )
        server.add_generic_rpc_handlers((handler,))
        secured = grpc.ssl_server_credentials(
            [(credentials.private_key_pem, credentials.certificate_pem)], credentials.authority_pem, True
        )
        port = server.add_secure_port("127.0.0.1:0", secured)
        await server.start()
        connection.send(port)
        await server.wait_for_termination()

    uvloop.run(main())


async def send(port: int, server: TlsCredentials, own: TlsCredentials, name: str) -> list[dict[str, float]]:
    """MB/s for each message size."""
    secured = grpc.ssl_channel_credentials(server.certificate_pem, own.private_key_pem, own.certificate_pem)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", secured, options=options) as channel:
        stream = channel.stream_stream("/Plain/Stream")()
        results = [{"chunk_bytes": size, "mb_per_s": round(await _rate(stream, size), 1)} for size in MESSAGE_SIZES]
        await stream.done_writing()
        await stream.read()
    return results


async def _rate(stream: grpc.aio.StreamStreamCall, size: int) -> float:
    message, rates = bytes(size), []
    for _ in range(BATCHES + 1):
        began = time.perf_counter()
        for _ in range(BATCH_BYTES // size):
            await stream.write(message)
        await stream.write(END_OF_BATCH)
        await stream.read()
        rates.append(BATCH_BYTES / (time.perf_counter() - began) / 1e6)
    return statistics.median(rates[1:])


def main() -> None:
    """Two processes: this one sends."""
    identity = Identity.generate()
    server, own = make_credentials(identity, RUN), make_credentials(Identity.generate(), RUN)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    receiver = context.Process(target=receive, args=(there, server), daemon=True)
    receiver.start()
    there.close()
    try:
        chunks = uvloop.run(send(here.recv(), server, own, identity.peer))
    finally:
        receiver.kill()
    print(json.dumps({"chunks": chunks, "best_mb_per_s": max(c["mb_per_s"] for c in chunks)}))


if __name__ == "__main__":
    main()
