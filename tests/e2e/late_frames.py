"""Links that take time: every frame of a stream between two emulated nodes arrives so much later, as if they were far
apart.

The sender puts the time of sending in front of each frame, and the receiver holds the frame back until its delay is
over. So frames under way share the delay as on a real line, their order stays, nothing is kept anywhere but in the
stream itself, and pings see what tensors see. Both nodes must be emulated and on one machine: the time is that of its
monotonic clock.
"""

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
    """One node's end of one stream.

    Args:
        bytes_per_s: what the line takes; None for no limit.
    """

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    """One way. Known, and set, when the peer at the other end is."""
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
        """The frame as it was, when it is due.

        Raises:
            ProtocolViolation: it comes from a node that is not emulated.
        """
        if len(stamped) < STAMP.size:
            raise ProtocolViolation("a frame without a stamp: the other node is not emulated")
        (sent,) = STAMP.unpack_from(stamped)
        wait = sent + self.delay_s - self.clock()
        if wait > 0:
            await self.sleep(wait)
        return stamped[STAMP.size :]
