"""Rate limits: token buckets, and the price of small frames. A peer beyond its share is read later."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_REMEMBERED: Final = 1024
FRAMES_A_TENSOR: Final = 16.0  # A tensor's header, receipts and the rest are two
BYTES_A_FRAME: Final = 256.0  # 60 KiB take as long to read as some 200 pings
STRANGERS: Final = 2.0  # Weight of frames of peers not known to serve
FRAMES_A_SECOND: Final = 50.0  # Due to each link
IN_ADVANCE: Final = 200.0  # Due to a new link
MOST_SAVED: Final = 2000.0
COMMON_A_SECOND: Final = 500.0  # Beyond what is due to each link, for all together
COMMON_A_TENSOR: Final = 8.0  # Peers in mid-path report to a data node
COMMON_SAVED: Final = 1000.0
PAUSE_AFTER: Final = 2.0  # Frames read beyond that before a pause: half as many pauses, twice as long
LONGEST_PAUSE_S: Final = 5.0  # Less than the timeout of a silent link


class TokenBucket:
    """A token bucket of `most` tokens that gets one more in `refill_s` seconds. Times are monotonic."""

    def __init__(self, most: float, refill_s: float, now: float, left: float | None = None) -> None:
        self._most = most
        self._refill_s = refill_s
        self._left = most if left is None else left
        self._at = now

    def earn(self, amount: float) -> None:
        self._left = min(self._most, self._left + amount)

    def left(self, now: float) -> float:
        """The content; less than nothing after `borrow`."""
        return min(self._most, self._left + max(0.0, now - self._at) / self._refill_s)

    def take(self, now: float, amount: float = 1) -> bool:
        """Takes so much if it is there; says whether."""
        self._refill(now)
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def borrow(self, now: float, amount: float = 1) -> float:
        """Takes so much whether it is there or not; returns what is left."""
        self._refill(now)
        self._left -= amount
        return self._left

    def _refill(self, now: float) -> None:
        self._left, self._at = self.left(now), max(self._at, now)


class Allowance:
    """Token buckets by name: `burst` at once, then one more in `refill_s` seconds. Forgets the longest unseen name."""

    def __init__(self, burst: int, refill_s: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, name: str, now: float, amount: int = 1) -> bool:
        """Takes so much for `name` at `now` (monotonic seconds) if it is there; says whether."""
        bucket = self._buckets.setdefault(name, TokenBucket(self._burst, self._refill_s, now))
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_REMEMBERED:
            self._buckets.popitem(last=False)
        return bucket.take(now, amount)

    def left(self, name: str, now: float) -> int:
        bucket = self._buckets.get(name)
        return self._burst if bucket is None else int(bucket.left(now))


class CommonPatience(TokenBucket):
    """The transport-wide budget for small frames, drawn on by links that have used up their own."""

    def __init__(self, now: float) -> None:
        super().__init__(COMMON_SAVED, 1 / COMMON_A_SECOND, now)

    def exchanged(self, hops: int) -> None:
        """Adds the allowance of a whole tensor. A path makes a frame longer by a third of a frame a hop."""
        self.earn(COMMON_A_TENSOR + hops)


class Patience:
    """The budget of one link for small frames. Times are monotonic seconds."""

    def __init__(self, common: CommonPatience, now: float) -> None:
        self._common = common
        self._own = TokenBucket(MOST_SAVED, 1 / FRAMES_A_SECOND, now, left=IN_ADVANCE)

    def exchanged(self, hops: int = 0) -> None:
        """Adds what a whole tensor allows. A hop of its path lengthens frames by a third of a frame."""
        self._own.earn(FRAMES_A_TENSOR + hops)
        self._common.exchanged(hops)

    def heard(self, now: float, octets: int = 0, *, serves: bool = True) -> float:
        """Charges one small frame; returns the seconds to wait before the next one is read."""
        weight = (1.0 + octets / BYTES_A_FRAME) * (1.0 if serves else STRANGERS)
        if self._own.take(now, weight) or (serves and self._common.take(now, weight)):
            return 0.0
        left = self._own.borrow(now, weight)
        return 0.0 if left > -PAUSE_AFTER else min(LONGEST_PAUSE_S, -left / FRAMES_A_SECOND)
