"""Three peers with real DHT processes on loopback: one relays, one is attached to it, one opens tunnels."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.directory import DhtDirectory
from protocol.identity import Identity
from protocol.seams import Contact
from protocol.tunnels import RelayTunnels
from tests.protocol.running import directory, until

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
    """Of the near one."""
    far_tunnels: RelayTunnels


@asynccontextmanager
async def three(serve: Serve, bytes_per_hour: int = PLENTY) -> AsyncIterator[Three]:
    """Tunnels to the far one lead to `serve`."""
    ids = [Identity.generate() for _ in range(3)]
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    local = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, directory(ids[0], relay_bytes_per_hour=bytes_per_hour) as relaying:
        async with directory(ids[1], relaying, client=True) as far, directory(ids[2], relaying, client=True) as near:
            relay = relaying.multiaddrs()[0]
            contact = Contact(ids[1].peer, (), b"", via=(ids[0].peer,))
            tunnels, far_tunnels = (RelayTunnels(each, {ids[0].peer: relay}.__getitem__) for each in (near, far))
            await far_tunnels.attach([relay], local)
            await until(lambda: relaying.situation.relay.attached == 1)
            yield Three(relaying, far, near, relay, contact, tunnels, far_tunnels)


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
