"""Links that take time."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarm.vocabulary.errors import ProtocolViolation

STAMP = struct.Struct("<d")


@dataclass(slots=True)
class LateFrames:
    """One node's end of one stream, of `bytes_per_s` at most."""

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _free_at: float = 0.0

    async def leave(self, frame: bytes) -> bytes:
        """The frame as it is to be sent, when the line has taken it."""
        if self.bytes_per_s is not None:
            self._free_at = max(self._free_at, self.clock()) + len(frame) / self.bytes_per_s
            await self.sleep(max(0.0, self._free_at - self.clock()))
        return STAMP.pack(self.clock()) + frame

    async def arrive(self, stamped: bytes) -> bytes:
        """The frame as it was, when it is due. Raises ProtocolViolation."""
        if len(stamped) < STAMP.size:
            raise ProtocolViolation("a frame without a stamp: the other node is not emulated")
        (sent,) = STAMP.unpack_from(stamped)
        wait = sent + self.delay_s - self.clock()
        if wait > 0:
            await self.sleep(wait)
        return stamped[STAMP.size :]
