"""Three peers with real DHT processes on loopback: one relays, one is attached to it, one opens tunnels."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.dht.directory import DhtDirectory, RelayTunnels
from protocol.identity.keys import Identity
from protocol.interfaces.directory import Contact
from tests.protocol.dht.running import directory, until

MIB = 2**20
PLENTY = 4 * 2**30

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Three:
    relaying: DhtDirectory
    far: DhtDirectory
    near: DhtDirectory
    relay: str
    contact: Contact
    tunnels: RelayTunnels
    far_tunnels: RelayTunnels


@asynccontextmanager
async def three(serve: Serve, bytes_per_hour: int = PLENTY) -> AsyncIterator[Three]:
    """Tunnels to the far one lead to `serve`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, three_at(server.sockets[0].getsockname()[1], bytes_per_hour) as peers:
        yield peers


@asynccontextmanager
async def three_at(port: int, bytes_per_hour: int = PLENTY, far: Identity | None = None) -> AsyncIterator[Three]:
    """Tunnels to the far one lead to that port."""
    far_id, relay_id, near_id = far or Identity.generate(), Identity.generate(), Identity.generate()
    async with (
        directory(relay_id, relay_bytes_per_hour=bytes_per_hour) as relaying,
        directory(far_id, relaying, client=True) as far_one,
        directory(near_id, relaying, client=True) as near,
    ):
        relay = relaying.multiaddrs()[0]
        contact = Contact(far_id.peer, (), b"", via=(relay_id.peer,))
        tunnels, far_tunnels = (RelayTunnels(each, {relay_id.peer: relay}.__getitem__) for each in (near, far_one))
        await far_tunnels.attach([relay], f"127.0.0.1:{port}")
        await until(lambda: relaying.situation.relay.attached == 1)
        yield Three(relaying, far_one, near, relay, contact, tunnels, far_tunnels)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back what comes."""
    try:
        while data := await reader.read(MIB):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # cut off, as some tests want it
    finally:
        writer.close()


async def digest_of(reader: asyncio.StreamReader, amount: int) -> str:
    """Of the next so many bytes."""
    found = hashlib.sha256()
    while amount:
        data = await reader.readexactly(min(amount, MIB))
        found.update(data)
        amount -= len(data)
    return found.hexdigest()


async def sent(writer: asyncio.StreamWriter, data: bytes) -> None:
    for start in range(0, len(data), MIB):
        writer.write(data[start : start + MIB])
        await writer.drain()
