"""How much may be done in a time: a token bucket, and one for each of many askers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_REMEMBERED: Final = 1024


class TokenBucket:
    """Holds `most` at most, full unless `left` says otherwise, and gets one more in `refill_s` seconds. Times are monotonic seconds."""

    def __init__(self, most: float, refill_s: float, now: float, left: float | None = None) -> None:
        self._most = most
        self._refill_s = refill_s
        self._left = most if left is None else left
        self._at = now

    def earn(self, amount: float) -> None:
        """That much more, besides what time brings."""
        self._left = min(self._most, self._left + amount)

    def left(self, now: float) -> float:
        """How much there is; less than nothing after `borrow`."""
        return min(self._most, self._left + max(0.0, now - self._at) / self._refill_s)

    def take(self, now: float, amount: float = 1) -> bool:
        """Whether so much is there; then it is gone."""
        self._refill(now)
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def borrow(self, now: float, amount: float = 1) -> float:
        """Takes it whether it is there or not; returns what is left."""
        self._refill(now)
        self._left -= amount
        return self._left

    def _refill(self, now: float) -> None:
        self._left, self._at = self.left(now), max(self._at, now)


class Allowance:
    """A token bucket for each name: `burst` at once, then one more in `refill_s` seconds. Forgets the longest unseen name."""

    def __init__(self, burst: int, refill_s: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, name: str, now: float, amount: int = 1) -> bool:
        """Whether so much may be done for `name` at `now` (monotonic seconds); then it counts as done."""
        bucket = self._buckets.setdefault(name, TokenBucket(self._burst, self._refill_s, now))
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_REMEMBERED:
            self._buckets.popitem(last=False)
        return bucket.take(now, amount)

    def left(self, name: str, now: float) -> int:
        """How much may be done for `name` at `now`."""
        bucket = self._buckets.get(name)
        return self._burst if bucket is None else int(bucket.left(now))
