"""The times at which bytes leave and arrive: a shaper and a delay line, as arithmetic on given times. Nothing waits
here.

It stands alone because it knows no sockets and no clock, so that tests need not wait.
"""

from __future__ import annotations

import math

BURST_S = 0.005
"""What a shaper may be ahead: so much time's worth of bytes leaves at once after a pause. Timers are no finer than this
anyway."""


class Shaper:
    """Delays what exceeds a rate, for all who share it, first come, first served.

    The virtual scheduling form of a token bucket (ITU-T I.371, GCRA): instead of tokens it keeps the time by which all
    that was granted has left at the rate. A new rate holds for what is granted afterwards.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = -math.inf

    def grant(self, size_bytes: int, now: float) -> float:
        """The time, `now` or later, at which these bytes have left."""
        if math.isinf(self.bytes_per_s):
            return now
        self._free_at = max(self._free_at, now) + size_bytes / self.bytes_per_s
        return max(now, self._free_at - BURST_S)


class DelayLine:
    """Keeps the order of what is delayed by different times: nothing arrives before what was sent earlier."""

    def __init__(self) -> None:
        self._last = -math.inf

    def arrival(self, left_at: float, delay_s: float) -> float:
        """The time of arrival of what left then."""
        self._last = max(self._last, left_at + delay_s)
        return self._last
