"""The TCP proxy in front of one node: delays, limits and cuts connections like the emulated network.

Callers reach a node only at its advertised address, where its proxy listens. A caller is identified by the process that
holds its socket (Linux's /proc, proc(5)), so both ends' links shape both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import random
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.emulation.emulation import MAX_CHUNK_BYTES, Emulation, Member, Way
from swarm.vocabulary.errors import ConfigError, ResourceExhausted

Endpoint = tuple[str, int]
# State LISTEN in the kernel's table.
_LISTENS = 0x0A
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


@dataclass(frozen=True, slots=True)
class Socket:
    """A TCP socket as listed in /proc/net. IPv4 addresses in IPv6 form become IPv4."""

    local: Endpoint
    remote: Endpoint
    listens: bool
    inode: int


def require_proc() -> None:
    """Raises ConfigError unless the kernel reveals which process holds a socket."""
    if sys.platform != "linux" or not Path(_TABLES[0]).is_file():
        raise ConfigError(
            "the WAN emulation needs Linux, because it identifies nodes by /proc",
            hint="Run it in a Linux container or virtual machine.",
        )


def read_sockets() -> list[Socket]:
    found: list[Socket] = []
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        found += map(parse_socket, lines)
    return found


def parse_socket(line: str) -> Socket:
    fields = line.split()
    return Socket(_endpoint(fields[1]), _endpoint(fields[2]), int(fields[3], 16) == _LISTENS, int(fields[9]))


def listening() -> frozenset[Endpoint]:
    return frozenset(socket.local for socket in read_sockets() if socket.listens)


class Callers:
    """Lookup of the member that opened a connection. `roots` returns the process id of each member's node, by index."""

    def __init__(self, roots: Callable[[], Mapping[int, int]]) -> None:
        self._roots = roots

    def caller(self, source: Endpoint, target: Endpoint) -> int | None:
        """Returns the member that opened a connection; None for callers outside the swarm. Slow, so run in a thread."""
        inode = next((s.inode for s in read_sockets() if s.local == source and s.remote == target and s.inode), None)
        if inode is None:
            return None
        roots = {pid: member for member, pid in self._roots().items()}
        return next((roots[root] for root, pid in descendants(set(roots)) if _holds(pid, inode)), None)


def descendants(roots: set[int]) -> Iterator[tuple[int, int]]:
    """Yields (root, process) for each process id in `roots` and each living descendant."""
    processes = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    parents = {pid: parent for pid in processes if (parent := _parent(pid)) is not None}
    for pid in parents:
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in roots:
            ancestor = parents.get(ancestor)
        if ancestor is not None:
            yield ancestor, pid


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process has ended
        return None
    # The second field, the program's name, may contain spaces and parentheses. A process that is ending has no fields.
    fields = stat.rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else None


def _holds(pid: int, inode: int) -> bool:
    wanted = f"socket:[{inode}]"
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                if os.readlink(f"/proc/{pid}/fd/{name}") == wanted:
                    return True
            except OSError:  # closed in the meantime
                continue
    except OSError:  # ended, or owned by another user
        return False
    return False


def _endpoint(text: str) -> Endpoint:
    """Parses an endpoint of /proc/net/tcp, such as `0100007F:96A9`: address in host byte order, then port."""
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    parsed = ipaddress.ip_address(raw)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed), int(port, 16)


log = logging.getLogger(__name__)

MAX_HELD_BYTES = 4 * 2**20
"""Most bytes in flight in one direction of a connection; beyond this, reading pauses."""
RECEIVE_BUFFER_BYTES = 256 * 1024
LOOK_EVERY_S = 0.2
CONNECT_TIMEOUT_S = 5.0
# A read that returns within this time found its bytes waiting.
AT_ONCE_S = 0.0002
# SO_LINGER with timeout 0: closing sends a reset.
_LINGER_RESET = struct.pack("ii", 1, 0)

Now = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
FindCaller = Callable[[Endpoint, Endpoint], Awaitable[Member]]


class ConnectionReset(Exception):
    """Raised if one side resets the connection, so that the other side is reset too."""


@dataclass(frozen=True, slots=True)
class _Held:
    due_at: float
    data: bytes
    reset: bool = False


@dataclass(slots=True, eq=False)
class Pipe:
    """One direction of a proxied connection: forwards bytes with the emulated network's delays and limits."""

    emulation: Emulation
    way: Way
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    now: Now
    sleep: Sleep = asyncio.sleep
    _randomness: random.Random = field(init=False)
    _arrives_at: float = -math.inf
    _held: deque[_Held] = field(default_factory=deque)
    _held_bytes: int = 0
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _late_s: float = 0.0

    def __post_init__(self) -> None:
        self._randomness = self.emulation.randomness(self.way)

    async def run(self) -> None:
        """Forwards bytes until the stream ends. Raises an ExceptionGroup of one ConnectionReset if it is reset."""
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_in())
            tasks.create_task(self._hand_on(taking))

    async def _take_in(self) -> None:
        while True:
            data, reset, ready_at = await self._read()
            left_at = self.emulation.leave(self.way, len(data), ready_at)
            slept = await self._until(left_at)
            late_s = max(0.0, self.now() - left_at)
            # Only a sleep can oversleep. If there was no sleep, the lateness can only shrink.
            self._late_s = late_s if slept else min(self._late_s, late_s)
            delay_s = self.emulation.one_way_s(self.way, self._randomness)
            self._arrives_at = max(self._arrives_at, left_at + delay_s)  # jitter must not reorder bytes
            self._held.append(_Held(self._arrives_at, data, reset))
            self._held_bytes += len(data)
            self._moved.set()
            if not data:
                return

    async def _read(self) -> tuple[bytes, bool, float]:
        """Returns the sender's next bytes, whether it has reset the stream, and when the link could take the bytes."""
        now = self.now()
        await self.emulation.passable(self.way)
        while self._held_bytes >= MAX_HELD_BYTES:
            await self._movement()
        data, reset = b"", False
        try:
            data = await self.reader.read(self.emulation.chunk_bytes(self.way))
        except OSError:
            reset = True
        read_at = self.now()
        # Waiting bytes were delayed by this process, which a busy machine wakes late. Subtract the oversleep, or a busy
        # machine would narrow the link.
        return data, reset, read_at - self._late_s if read_at - now < AT_ONCE_S else read_at

    async def _hand_on(self, taking: asyncio.Task[None]) -> None:
        while True:
            while not self._held:
                await self._movement()
            held = self._held[0]
            await self._until(held.due_at)
            blocked = not self.emulation.passes(self.way)
            await self.emulation.passable(self.way)
            if not held.data:
                self._end(reset=held.reset)
                return
            # The piece arrived when it was due, not when this process woke.
            came_at = self.now() if blocked else held.due_at
            await self._until(self.emulation.arrive(self.way, len(held.data), came_at))
            whole = self.emulation.before_break(self.way, len(held.data))
            if whole is not None:
                await self._write(held.data[:whole])
                raise ConnectionReset
            if not await self._write(held.data):
                taking.cancel()
                return
            self._held.popleft()
            self._held_bytes -= len(held.data)
            self._moved.set()

    async def _write(self, data: bytes) -> bool:
        """Writes data to the receiver. Returns False if it is gone, which the `Pipe` of the other direction handles."""
        if self.writer.is_closing():
            return False
        self.writer.write(data)
        try:
            await self.writer.drain()
        except OSError:
            return False
        return True

    def _end(self, *, reset: bool) -> None:
        if reset:
            raise ConnectionReset
        if not self.writer.is_closing():
            with contextlib.suppress(OSError):
                self.writer.write_eof()

    async def _movement(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _until(self, at: float) -> bool:
        """Sleeps until the time `at`. Returns False if `at` has passed already."""
        left_s = at - self.now()
        if left_s > 0:
            await self.sleep(left_s)
        return left_s > 0


@dataclass(frozen=True, slots=True)
class ProxiedPort:
    """A port behind a proxy. `outside`: address that peers call; `inside`: address where the node listens."""

    member: int
    outside: Endpoint
    inside: Endpoint


@dataclass(frozen=True, slots=True)
class Proxy:
    """TCP proxy of one port of a node. It listens only while the node does, so that a dead node refuses calls."""

    _port: ProxiedPort
    _emulation: Emulation
    _find_caller: FindCaller

    async def run(self, watch: ListenWatch) -> None:
        """Listens while the node listens, and forwards its connections, until cancelled."""
        async with asyncio.TaskGroup() as connections:
            while True:
                await self._until_wanted(watch, wanted=True)
                async with self._listening(connections):
                    await self._until_wanted(watch, wanted=False)

    async def _until_wanted(self, watch: ListenWatch, *, wanted: bool) -> None:
        while wanted != (watch.sees(self._port.inside) and not self._emulation.is_reset(self._port.member)):
            await _first_of(watch.look(), self._emulation.change())

    @asynccontextmanager
    async def _listening(self, connections: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Listens on the outside address within the block. Raises ResourceExhausted if the address is in use."""
        is_open = True

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if is_open:
                connections.create_task(self._carry(reader, writer))
            else:  # the kernel accepted it before the port was closed
                _reset(writer)

        try:
            listener = socket.create_server(self._port.outside)
        except OSError as error:
            host, port = self._port.outside
            raise ResourceExhausted(f"the proxy cannot listen on {host}:{port}: {error.strerror or error}") from error
        # A small buffer, so that the sender feels the emulated link.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        server = await asyncio.start_server(accept, sock=listener, limit=MAX_CHUNK_BYTES)
        try:
            yield
        finally:
            is_open = False
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended_well = False
        try:
            await self._connect_and_pump(reader, writer)
            ended_well = True
        except* (ConnectionReset, OSError) as broken:
            log.debug("a connection to peer %d broke: %s", self._port.member, broken.exceptions[0])
        finally:
            if not ended_well:
                _reset(writer)
            await _close(writer)

    async def _connect_and_pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, target = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        if source is None or target is None:  # the caller is gone
            raise ConnectionReset
        member = self._port.member
        caller = await self._find_caller((source[0], source[1]), (target[0], target[1]))
        if self._emulation.is_reset(caller):
            raise ConnectionReset
        there, back = (caller, member), (member, caller)
        randomness = self._emulation.randomness(there)
        # The kernel's handshake over loopback took no time, so wait one round trip here.
        await asyncio.sleep(self._emulation.one_way_s(there, randomness) + self._emulation.one_way_s(back, randomness))
        await self._emulation.passable(there)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            inner_reader, inner_writer = await asyncio.open_connection(*self._port.inside, limit=MAX_CHUNK_BYTES)
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
        while not (self._emulation.is_reset(caller) or self._emulation.is_reset(self._port.member)):
            await self._emulation.change()
        raise ConnectionReset


class ListenWatch:
    """Addresses on which processes of this machine listen, polled while `run` runs."""

    def __init__(self) -> None:
        self._seen: frozenset[Endpoint] = frozenset()
        self._looked = asyncio.Event()

    def sees(self, endpoint: Endpoint) -> bool:
        return endpoint in self._seen

    async def look(self) -> None:
        await self._looked.wait()

    async def run(self) -> None:
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
    end = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if end is not None and not writer.is_closing():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Closes a connection once the kernel has taken the written bytes, or at once if cancelled."""
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return
    finally:
        writer.transport.abort()
