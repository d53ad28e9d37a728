"""A clock that tests turn, and waiting for what has to come."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

# Seconds; reached only when a test fails.
LONG_S = 30.0


@dataclass
class ManualClock:
    """A clock that stands until somebody turns it, and whose wall clock somebody may set."""

    now: float = 100.0
    set_by_s: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_000_000.0 + self.now + self.set_by_s


async def until(condition: Callable[[], object], patience_s: float = LONG_S) -> None:
    """Waits for what has to come; raises TimeoutError if it does not."""
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.002)
