"""How much may be done for each of many askers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MAX_REMEMBERED: Final = 1024


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Allowance:
    """A token bucket for each name: `burst` at once, then one more in `refill_s` seconds. Forgets the longest unseen name."""

    def __init__(self, burst: int, refill_s: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, name: str, now: float, amount: int = 1) -> bool:
        """Whether so much may be done for `name` at `now` (monotonic seconds); then it counts as done."""
        bucket = self._buckets.setdefault(name, _Bucket(self._burst, now))
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_REMEMBERED:
            self._buckets.popitem(last=False)
        bucket.left = self._refilled(bucket, now)
        bucket.at = now
        if bucket.left < amount:
            return False
        bucket.left -= amount
        return True

    def left(self, name: str, now: float) -> int:
        """How much may be done for `name` at `now`."""
        bucket = self._buckets.get(name)
        return self._burst if bucket is None else int(self._refilled(bucket, now))

    def _refilled(self, bucket: _Bucket, now: float) -> float:
        return min(self._burst, bucket.left + max(0.0, now - bucket.at) / self._refill_s)
