"""Rate limits: token buckets, budgets for small frames, and a node's caps. Reading over a limit is delayed."""

import math
from typing import Final

from protocol.interfaces.clock import Clock
from swarm.vocabulary.statistics import Latest

MAX_REMEMBERED: Final = 1024
FRAMES_A_TENSOR: Final = 16.0  # Budget per tensor exchanged; a tensor needs about two frames
BYTES_A_FRAME: Final = 256.0  # Bytes that cost one more frame: reading 60 KiB takes as long as some 200 pings
STRANGERS: Final = 2.0  # Factor on the cost of frames from peers not known to serve
FRAMES_A_SECOND: Final = 50.0  # Refill of a link's budget
IN_ADVANCE: Final = 200.0  # Budget of a new link
MOST_SAVED: Final = 2000.0
COMMON_A_SECOND: Final = 500.0  # Refill of the common budget, which links use after their own
COMMON_A_TENSOR: Final = 8.0  # For the receipts that a data node gets from peers of a path
COMMON_SAVED: Final = 1000.0
PAUSE_AFTER: Final = 2.0  # Frames read over budget before a pause, for fewer and longer pauses
LONGEST_PAUSE_S: Final = 5.0  # Shorter than the timeout of a silent link
BURST_S: Final = 0.1  # Unused time of a cap that later bytes may use


class TokenBucket:
    """A bucket of `most` tokens, with one more every `refill_s` seconds. Times are monotonic."""

    def __init__(self, most: float, refill_s: float, now: float, left: float | None = None) -> None:
        self._most, self._refill_s, self._at = most, refill_s, now
        self._left = most if left is None else left

    def earn(self, amount: float) -> None:
        self._left = min(self._most, self._left + amount)

    def left(self, now: float) -> float:
        """Returns the tokens in the bucket; negative if `borrow` has taken too many."""
        return min(self._most, self._left + max(0.0, now - self._at) / self._refill_s)

    def take(self, now: float, amount: float = 1) -> bool:
        """Takes `amount` tokens if available. Returns whether it did."""
        self._refill(now)
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def borrow(self, now: float, amount: float = 1) -> float:
        """Takes `amount` tokens, even if too few are left. Returns the tokens in the bucket, which may be negative."""
        self._refill(now)
        self._left -= amount
        return self._left

    def _refill(self, now: float) -> None:
        self._left, self._at = self.left(now), max(self._at, now)


class TokenBuckets:
    """Token buckets by name: `burst` tokens, one more per `refill_s` seconds. Evicts the longest unused name."""

    def __init__(self, burst: int, refill_s: float) -> None:
        self._burst, self._refill_s = burst, refill_s
        self._buckets = Latest[str, TokenBucket](MAX_REMEMBERED)

    def take(self, name: str, now: float, amount: int = 1) -> bool:
        """Takes `amount` tokens of `name` at `now` (monotonic seconds) if available. Returns whether it did."""
        bucket = self._buckets.get(name) or TokenBucket(self._burst, self._refill_s, now)
        self._buckets[name] = bucket
        return bucket.take(now, amount)

    def left(self, name: str, now: float) -> int:
        bucket = self._buckets.get(name)
        return self._burst if bucket is None else int(bucket.left(now))


class CommonPatience(TokenBucket):
    """Token bucket shared by all links of a transport, for small frames beyond a link's own budget."""

    def __init__(self, now: float) -> None:
        super().__init__(COMMON_SAVED, 1 / COMMON_A_SECOND, now)


class Patience:
    """Token bucket for the small frames that a peer may send on one link. Times are monotonic seconds."""

    def __init__(self, common: CommonPatience, now: float) -> None:
        self._common = common
        self._own = TokenBucket(MOST_SAVED, 1 / FRAMES_A_SECOND, now, left=IN_ADVANCE)

    def exchanged(self, hops: int = 0) -> None:
        """Adds tokens to both buckets for the small frames that one tensor causes; more for a path with more `hops`."""
        self._own.earn(FRAMES_A_TENSOR + hops)
        self._common.earn(COMMON_A_TENSOR + hops)

    def heard(self, now: float, octets: int = 0, *, serves: bool = True) -> float:
        """Charges the peer for one small frame of `octets` bytes. Returns the seconds to wait before the next read."""
        weight = (1.0 + octets / BYTES_A_FRAME) * (1.0 if serves else STRANGERS)
        if self._own.take(now, weight) or (serves and self._common.take(now, weight)):
            return 0.0
        left = self._own.borrow(now, weight)
        return 0.0 if left > -PAUSE_AFTER else min(LONGEST_PAUSE_S, -left / FRAMES_A_SECOND)


class Flow:
    """Bytes in one direction over all links of a node, and the cap on their rate."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paid_at = -math.inf  # When all bytes so far are within the cap
        self.bytes = 0
        self.bytes_per_s = math.inf  # The cap

    def moved(self, size_bytes: int) -> None:
        self.bytes += size_bytes
        earliest = self._clock.monotonic() - BURST_S
        self._paid_at = max(self._paid_at, earliest) + size_bytes / self.bytes_per_s

    def pause_s(self) -> float:
        """Returns the seconds to wait before the next chunk. Small frames do not wait, but count."""
        return min(LONGEST_PAUSE_S, max(0.0, self._paid_at - self._clock.monotonic()))


class Traffic:
    """The bytes of a node on all its links, which its owner may cap."""

    def __init__(self, clock: Clock) -> None:
        self.sent, self.received = Flow(clock), Flow(clock)
