"""The clock's interface, and the machine's own clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time: steady for durations, wall time for what other machines see."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back. For durations and deadlines."""

    def wall(self) -> float:
        """Unix time in seconds. Only for what other machines see: record expiry and sequence."""


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
