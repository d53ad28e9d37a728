"""The TCP proxy in front of one node: whoever calls the node's advertised address gets through to it as the emulated
network lets them.

Its ports are open exactly while the node's own are, so a node that is not there refuses calls as it would without the
proxy. Both directions of a connection are shaped here, by the links of both ends: the caller is found by its socket
(`sockets`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lab.emulation.emulation import MAX_CHUNK_BYTES, Emulation, Member
from lab.emulation.pipe import ConnectionReset, Pipe
from lab.emulation.sockets import Endpoint, listening
from swarm.vocabulary.errors import ResourceExhausted

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Of one port; further ones are reset."""
LOOK_EVERY_S = 0.2
RECEIVE_BUFFER_BYTES = 256 * 1024
"""Of the kernel, for what is not read yet. Loopback's own would hide many seconds of a slow link."""
CONNECT_TIMEOUT_S = 5.0
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER that makes closing a reset."""

FindCaller = Callable[[Endpoint, Endpoint], Awaitable[Member]]


@dataclass(frozen=True, slots=True)
class Door:
    """A port of a node: where others call it, and where it listens."""

    member: int
    outside: Endpoint
    inside: Endpoint


class Proxy:
    """The proxy of one door of one node. `run` keeps it until cancelled.

    Args:
        find_caller: which member has opened a connection, given its two ends.
    """

    def __init__(self, door: Door, emulation: Emulation, find_caller: FindCaller) -> None:
        self._door = door
        self._emulation = emulation
        self._find_caller = find_caller
        self._open = 0

    async def run(self, watch: ListenWatch) -> None:
        """Listens whenever the node does and its link is not reset; carries every connection to its end."""
        async with asyncio.TaskGroup() as connections:
            while True:
                await self._until_wanted(watch, wanted=True)
                async with self._listening(connections):
                    await self._until_wanted(watch, wanted=False)

    async def _until_wanted(self, watch: ListenWatch, *, wanted: bool) -> None:
        while wanted != (watch.sees(self._door.inside) and not self._emulation.is_reset(self._door.member)):
            await _first_of(watch.look(), self._emulation.change())

    @asynccontextmanager
    async def _listening(self, connections: asyncio.TaskGroup) -> AsyncIterator[None]:
        """The port is open inside the block. Raises ResourceExhausted when somebody else has it."""

        is_open = True

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if is_open:
                connections.create_task(self._carry(reader, writer))
            else:  # it was on its way here when the port was closed
                _reset(writer)

        try:
            listener = socket.create_server(self._door.outside)
        except OSError as error:
            host, port = self._door.outside
            raise ResourceExhausted(f"the proxy cannot listen on {host}:{port}: {error.strerror or error}") from error
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        server = await asyncio.start_server(accept, sock=listener, limit=MAX_CHUNK_BYTES)
        try:
            yield
        finally:
            is_open = False
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= MAX_CONNECTIONS:
            _reset(writer)
            return
        self._open += 1
        ended_well = False
        try:
            await self._connect_and_pump(reader, writer)
            ended_well = True
        except* (ConnectionReset, OSError) as broken:
            log.debug("a connection to peer %d broke: %s", self._door.member, broken.exceptions[0])
        finally:
            self._open -= 1
            if not ended_well:
                _reset(writer)
            await _close(writer)

    async def _connect_and_pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, target = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        if source is None or target is None:  # the caller has broken it off already
            raise ConnectionReset
        member = self._door.member
        caller = await self._find_caller((source[0], source[1]), (target[0], target[1]))
        if self._emulation.is_reset(caller):
            raise ConnectionReset
        there, back = (caller, member), (member, caller)
        randomness = self._emulation.randomness(there)
        # What the kernel's own handshake over loopback did not take.
        await asyncio.sleep(self._emulation.one_way_s(there, randomness) + self._emulation.one_way_s(back, randomness))
        await self._emulation.passable(there)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            inner_reader, inner_writer = await asyncio.open_connection(*self._door.inside, limit=MAX_CHUNK_BYTES)
        try:
            now = asyncio.get_running_loop().time
            async with asyncio.TaskGroup() as pipes:
                breaking = pipes.create_task(self._break_when_reset(caller))
                first = pipes.create_task(Pipe(self._emulation, there, reader, inner_writer, now).run())
                second = pipes.create_task(Pipe(self._emulation, back, inner_reader, writer, now).run())
                await asyncio.wait((first, second))
                breaking.cancel()
        except BaseException:
            _reset(inner_writer)
            raise
        finally:
            await _close(inner_writer)

    async def _break_when_reset(self, caller: Member) -> None:
        while not (self._emulation.is_reset(caller) or self._emulation.is_reset(self._door.member)):
            await self._emulation.change()
        raise ConnectionReset


class ListenWatch:
    """Watches who listens on this machine. `run` must run all the while."""

    def __init__(self) -> None:
        self._seen: frozenset[Endpoint] = frozenset()
        self._looked = asyncio.Event()

    def sees(self, endpoint: Endpoint) -> bool:
        """Whether somebody listened there at the last look."""
        return endpoint in self._seen

    async def look(self) -> None:
        """Waits for the next look."""
        await self._looked.wait()

    async def run(self) -> None:
        """Looks periodically, until cancelled."""
        while True:
            self._seen = await asyncio.to_thread(listening)
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(LOOK_EVERY_S)


async def _first_of(*waits: Awaitable[None]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Breaks a connection off, so that its other end knows it was no end in good order."""
    end = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if end is not None and not writer.is_closing():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Waits until what was written is with the kernel, unless cancelled."""
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return
    finally:
        writer.transport.abort()
