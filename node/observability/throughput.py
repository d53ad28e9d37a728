"""Rate of events such as computed tokens, in units per second."""

from collections import deque

from protocol.interfaces.clock import Clock

WINDOW_S = 15.0
MAX_SAMPLES = 4096


class Rate:
    """Rate of added amounts, such as tokens: over the last `WINDOW_S` seconds, and on average since the start."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._total = clock, 0.0
        self._begun = self._last = clock.monotonic()
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, amount: float) -> None:
        now = self._clock.monotonic()
        self._samples.append((now, amount))
        self._total += amount
        self._last = now

    def mean(self) -> float:
        return self._total / max(1e-6, self._last - self._begun)

    def per_second(self) -> float:
        now = self._clock.monotonic()
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        if not self._samples:
            return 0.0
        # A full queue has dropped samples, so the window is as long as the queue.
        full = len(self._samples) == MAX_SAMPLES
        # A young rate divides by its age, not by the whole window.
        since = self._samples[0][0] if full else max(self._begun, now - WINDOW_S)
        return sum(amount for _, amount in self._samples) / max(1e-6, now - since)
