"""The clock's interface, and the system clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic and wall time."""

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary moment, never decreasing, for durations and deadlines."""

    def wall(self) -> float:
        """Returns Unix time in seconds, only for values that other machines read, such as a record's expiry."""


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
