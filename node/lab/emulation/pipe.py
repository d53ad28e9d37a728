"""One direction of an emulated connection: bytes in at one socket, held as long as the network would, out at
the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from node.lab.emulation.emulation import Emulation, Way
from node.lab.emulation.flow import DelayLine

MAX_HELD_BYTES = 4 * 2**20
"""On their way in one direction of a connection; while there are so many, no more are read. At 100 ms it bounds a
connection to 40 MB/s."""

Now = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class ConnectionReset(Exception):
    """Raised when one side has broken the connection off, and the other is to be told likewise."""


@dataclass(frozen=True, slots=True)
class _Held:
    due_at: float
    data: bytes
    reset: bool = False
    """With no data: whether the sender broke off, instead of ending its stream."""


class Pipe:
    """One direction of a connection; `run` carries it to its end.

    Args:
        now, sleep: the event loop's, unless a test has its own.
    """

    def __init__(
        self,
        emulation: Emulation,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        now: Now,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._emulation = emulation
        self._way = way
        self._reader = reader
        self._writer = writer
        self._now = now
        self._sleep = sleep
        self._line = DelayLine()
        self._randomness = emulation.randomness(way)
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Carries bytes until the sender's end of stream has been handed on, or the receiver takes nothing more.

        Raises:
            ExceptionGroup: of one ConnectionReset, when the sender's breaking off has come through, or the network
                resets the connection.
        """
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_in())
            tasks.create_task(self._hand_on(taking))

    async def _take_in(self) -> None:
        """Reads no faster than the link lets go, and never more than may be held."""
        while True:
            await self._emulation.passable(self._way)
            while self._held_bytes >= MAX_HELD_BYTES:
                await self._movement()
            try:
                data = await self._reader.read(self._emulation.chunk_bytes(self._way))
                reset = False
            except OSError:
                data, reset = b"", True
            left_at = self._emulation.leave(self._way, len(data), self._now())
            await self._until(left_at)
            due_at = self._line.arrival(left_at, self._emulation.one_way_s(self._way, self._randomness))
            self._held.append(_Held(due_at, data, reset))
            self._held_bytes += len(data)
            self._moved.set()
            if not data:
                return

    async def _hand_on(self, taking: asyncio.Task[None]) -> None:
        while True:
            while not self._held:
                await self._movement()
            held = self._held[0]
            await self._until(held.due_at)
            await self._emulation.passable(self._way)
            if not held.data:
                self._end(reset=held.reset)
                return
            await self._until(self._emulation.arrive(self._way, len(held.data), self._now()))
            whole = self._emulation.before_break(self._way, len(held.data))
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
        """False when the receiver is gone; that it is comes to the sender by the other direction."""
        if self._writer.is_closing():
            return False
        self._writer.write(data)
        try:
            await self._writer.drain()
        except OSError:
            return False
        return True

    def _end(self, *, reset: bool) -> None:
        if reset:
            raise ConnectionReset
        if not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()

    async def _movement(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _until(self, at: float) -> None:
        left_s = at - self._now()
        if left_s > 0:
            await self._sleep(left_s)
