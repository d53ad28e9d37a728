"""One direction of an emulated connection: bytes in at one socket, held as long as the network would, out at
the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lab.emulation.emulation import Emulation, Way
from lab.emulation.flow import DelayLine

MAX_HELD_BYTES = 4 * 2**20
"""On their way in one direction of a connection; while there are so many, no more are read. At 100 ms it bounds a
connection to 40 MB/s."""

AT_ONCE_S = 0.0002
"""A read that took less did not wait."""

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
        self._late_s = 0.0
        """How late this process was when it last went on."""

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
            data, reset, ready_at = await self._read()
            left_at = self._emulation.leave(self._way, len(data), ready_at)
            slept = await self._until(left_at)
            late_s = max(0.0, self._now() - left_at)
            self._late_s = late_s if slept else min(self._late_s, late_s)
            due_at = self._line.arrival(left_at, self._emulation.one_way_s(self._way, self._randomness))
            self._held.append(_Held(due_at, data, reset))
            self._held_bytes += len(data)
            self._moved.set()
            if not data:
                return

    async def _read(self) -> tuple[bytes, bool, float]:
        """The next bytes, whether the sender broke off instead, and when the link could have taken them."""
        now = self._now()
        await self._emulation.passable(self._way)
        while self._held_bytes >= MAX_HELD_BYTES:
            await self._movement()
        data, reset = b"", False
        try:
            data = await self._reader.read(self._emulation.chunk_bytes(self._way))
        except OSError:
            reset = True
        read_at = self._now()
        # Bytes that were here already did not wait for the network but for this process, which a busy machine wakes
        # late: they go on as if it had not overslept, else a link would be the narrower the busier the machine is.
        return data, reset, read_at - self._late_s if read_at - now < AT_ONCE_S else read_at

    async def _hand_on(self, taking: asyncio.Task[None]) -> None:
        while True:
            while not self._held:
                await self._movement()
            held = self._held[0]
            await self._until(held.due_at)
            blocked = not self._emulation.passes(self._way)
            await self._emulation.passable(self._way)
            if not held.data:
                self._end(reset=held.reset)
                return
            # It came when it was due, not when this process got round to it.
            came_at = self._now() if blocked else held.due_at
            await self._until(self._emulation.arrive(self._way, len(held.data), came_at))
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

    async def _until(self, at: float) -> bool:
        """Whether that was in the future."""
        left_s = at - self._now()
        if left_s > 0:
            await self._sleep(left_s)
        return left_s > 0
