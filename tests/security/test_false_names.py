"""Between two honest peers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from protocol.frames.frames import FarewellReason, Hello, decode
from protocol.transport.grpc_streams import AcceptedStream, make_server
from swarm.vocabulary.errors import PeerError, Rejected
from swarm.vocabulary.pipeline_messages import Close
from swarm.vocabulary.types import MicrobatchId
from tests.protocol.transport.link_peers import FLOATS, Node, Persona, forward, node, pattern, with_settings
from tests.security.adversary import hostile_stream

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def overheard(own: Persona) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server with the persona's certificate that keeps all it hears; its port, and what it has heard."""
    heard: list[bytes] = []

    async def serve(_requests: object, context: Any) -> None:
        stream = AcceptedStream(context)
        with suppress(PeerError):
            while (frame := await stream.read()) is not None:
                heard.append(frame)

    server, port = make_server(serve, own.credentials, "127.0.0.1:0", 4)
    await server.start()
    try:
        yield port, heard
    finally:
        await server.stop(0)


@asynccontextmanager
async def relay(to_port: int, *, damage_after: int | None = None) -> AsyncIterator[int]:
    """Hands on every byte both ways; after so many from the caller it changes one. Its port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, damage: int | None) -> None:
        seen = 0
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                seen += len(data)
                if damage is not None and seen >= damage:
                    data, damage = bytes((data[0] ^ 1,)) + data[1:], None
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", to_port)
        await asyncio.gather(pump(reader, onward_writer, damage_after), pump(onward_reader, writer, None))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        server.close()


def send_to(server: Node, caller: Node, number: int) -> Any:
    data = memoryview(pattern(FLOATS, number))
    return caller.transport.send(server.peer, forward(caller.peer, server.peer, number), FLOATS, data)


async def test_a_man_in_the_middle_with_his_own_certificate_hears_nothing() -> None:
    middle = Persona()
    async with node() as server, node() as caller, overheard(middle) as (port, heard):
        caller.persona.knows(server.persona, port)
        with pytest.raises(Rejected, match="another peer"):
            await send_to(server, caller, 1)
        assert heard == []
        caller.persona.knows(server.persona, server.port)
        await send_to(server, caller, 2)
        await server.handler.until(lambda: server.handler.tensors)


async def test_who_only_relays_can_break_a_link_and_change_nothing() -> None:
    async with node() as server, node() as caller:
        async with relay(server.port, damage_after=4 * FLOATS.byte_length) as port:
            caller.persona.knows(server.persona, port)
            with suppress(PeerError):
                for number in range(20):
                    await send_to(server, caller, number)
            await server.handler.until(lambda: server.handler.downs)
        whole = [message.microbatch.number for _, message, _, _ in server.handler.tensors]  # type: ignore[union-attr]
        assert 2 <= len(whole) < 20
        assert [data for *_, data in server.handler.tensors] == [pattern(FLOATS, number) for number in whole]
        caller.persona.knows(server.persona, server.port)
        await send_to(server, caller, 99)
        await server.handler.until(lambda: len(server.handler.tensors) > len(whole))


async def test_a_hello_is_worth_nothing_to_who_has_heard_it() -> None:
    """The victim has said it to him himself; said again to another peer it is not that of the certificate."""
    listener = Persona()
    async with (
        node(settings=with_settings(dial_timeout_s=1.0)) as victim,
        node() as server,
        overheard(listener) as (port, heard),
    ):
        victim.persona.knows(listener, port)
        with pytest.raises(PeerError):
            await victim.transport.send_control(listener.peer, Close(MicrobatchId(victim.peer, 0), ""))
        assert isinstance(decode(heard[0]), Hello)
        contact = server.persona.contact(server.port)
        async with hostile_stream(contact, listener, introduced=False) as stream:
            await stream.say(heard[0])
            assert (await stream.farewell()).reason is FarewellReason.NOT_YOU
        assert server.handler.ups == []


@pytest.mark.parametrize("detail", ["\x1b[2J\x1b]0;owned\x07", "two\nlines\r\x85", "\u202ereversed"])
async def test_what_a_dialled_peer_says_through_grpc_cannot_draw(detail: str) -> None:
    """The text of a gRPC status is a peer's too, and ends in errors, events and logs."""
    persona = Persona()

    async def serve(_requests: object, context: Any) -> None:
        await context.read()  # grpc.aio loses the status of a call that ends while its first frame is being written
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, detail)

    server, port = make_server(serve, persona.credentials, "127.0.0.1:0", 4)
    await server.start()
    try:
        async with node() as caller:
            caller.persona.knows(persona, port)
            with pytest.raises(Rejected) as raised:
                await caller.transport.send_control(persona.peer, Close(MicrobatchId(caller.peer, 0), ""))
            assert str(raised.value).isprintable()
    finally:
        await server.stop(0)
