"""How often a peer is listened to: small frames are in proportion to the tensors that are exchanged with it.

Each frame costs its reader the same few dozen microseconds of the event loop, however little it says, and the sender less. Who says more
than its due is not cut off and loses nothing: the next frame is read later. Its stream's window fills up meanwhile, and the sender waits,
as it does for any peer that reads slowly.
"""

from __future__ import annotations

from typing import Final

from protocol.allowance import TokenBucket

FRAMES_A_TENSOR: Final = 16.0
"""Due for each tensor that has been exchanged, either way. Its header, receipts and the rest are two (measured with `skipstone up`)."""
FRAMES_A_SECOND: Final = 50.0
"""Due to each link besides."""
IN_ADVANCE: Final = 200.0
"""Due to a new link: nobody gains much by coming again."""
MOST_SAVED: Final = 2000.0
"""What a link may have saved up, to say at once."""
COMMON_A_SECOND: Final = 500.0
"""What all links together may say beyond what is due to each."""
COMMON_A_TENSOR: Final = 8.0
"""Likewise for each tensor that has been exchanged with anybody. In the middle of a path are peers that exchange none with the data node and
report to it, two frames for each microbatch; talk about paths and rounds goes with the work, too."""
COMMON_SAVED: Final = 1000.0
PAUSE_AFTER: Final = 2.0
"""Frames that are read beyond all that before there is a pause: half as many pauses, twice as long."""


class CommonPatience:
    """What all links of a transport draw on when they have used up their own."""

    def __init__(self, now: float) -> None:
        self._bucket = TokenBucket(COMMON_SAVED, 1 / COMMON_A_SECOND, now)

    def exchanged(self) -> None:
        """A whole tensor has arrived or has been sent."""
        self._bucket.earn(COMMON_A_TENSOR)

    def take(self, now: float) -> bool:
        """Whether there is one frame left; then it is taken."""
        return self._bucket.take(now)


class Patience:
    """One link's. Times are monotonic seconds."""

    def __init__(self, common: CommonPatience, now: float) -> None:
        self._common = common
        self._own = TokenBucket(MOST_SAVED, 1 / FRAMES_A_SECOND, now, left=IN_ADVANCE)

    def exchanged(self) -> None:
        """A whole tensor has arrived or has been sent."""
        self._own.earn(FRAMES_A_TENSOR)
        self._common.exchanged()

    def heard(self, now: float) -> float:
        """Counts one small frame; returns how many seconds to wait before the next one is read."""
        if self._own.take(now) or self._common.take(now):
            return 0.0
        left = self._own.borrow(now)
        return 0.0 if left > -PAUSE_AFTER else -left / FRAMES_A_SECOND
