"""Time that stands still while the process does: a frozen computer does not take the others for silent when it thaws."""

from __future__ import annotations

GAP_S = 0.5
"""The machine is called ten times a second; a longer pause means that the process was stopped or held up."""


class WakingTime:
    """Turns a monotonic clock into seconds awake."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._slept = 0.0

    def advance(self, now: float) -> tuple[float, float]:
        """Seconds awake, and how long it slept since the last call (0 when it did not)."""
        gap = 0.0 if self._last is None else now - self._last
        self._last = now
        slept = gap if gap > GAP_S else min(gap, 0.0)
        self._slept += slept
        return now - self._slept, max(slept, 0.0)
