"""What a link to a peer carries, told by when its answers come.

How fast a tensor can be handed to a stream says little: buffers of the system, of gRPC and of home routers take
megabytes at once. That the receiver has all of it is known when it says ACCEPTED. The bytes accepted, over the time in
which something was on its way, are what the link carries; one round trip of that time is not the link's fault. The
shortest one seen is taken, as a busy link makes round trips longer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

HORIZON_S: Final = 1.0
"""Of busy time: what was measured so long ago counts for 1/e. Bytes and seconds are summed apart, so that answers that
come all at once after a delay count right together."""

MOST_ON_THE_WAY: Final = 1024
"""Tensors; more than the slots of any receiver. The oldest is given up for the next: a peer that answers nothing must
not fill this memory."""


@dataclass(slots=True)
class Goodput:
    """Of one link, one way. Times are a monotonic clock's seconds."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _round_trip_s: float = math.inf
    _busy_since: float = 0.0
    _on_the_way: dict[Hashable, tuple[int, float]] = field(default_factory=dict)
    """Size, and when it began to be sent; in this order."""

    @property
    def bytes_per_s(self) -> float:
        """0 before the first answer that took any time."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def sent(self, tensor: Hashable, size_bytes: int, now: float) -> None:
        """It begins to be sent. `tensor` names it until its answer."""
        while len(self._on_the_way) >= MOST_ON_THE_WAY:
            self.gave_up(next(iter(self._on_the_way)))
        if not self._on_the_way:
            self._busy_since = now
        self._on_the_way[tensor] = size_bytes, now

    def accepted(self, tensor: Hashable, round_trip_s: float, now: float) -> None:
        """The receiver has all of it. Answers to what was not sent, and second ones, do not count.

        Args:
            round_trip_s: as measured of late; 0 when not known.
        """
        known = self._on_the_way.pop(tensor, None)
        if known is None:
            return
        if round_trip_s > 0:
            self._round_trip_s = min(self._round_trip_s, round_trip_s)
        trip_s = 0.0 if math.isinf(self._round_trip_s) else self._round_trip_s
        taken = max(0.0, now - self._busy_since - trip_s)
        remembered = math.exp(-taken / HORIZON_S)
        self._bytes = remembered * self._bytes + known[0]
        self._seconds = remembered * self._seconds + taken
        # What else is on its way has been so meanwhile: from when the line was free for it, or from when it was given
        # to it.
        _, given = next(iter(self._on_the_way.values()), (0, now))
        self._busy_since = max(self._busy_since, now - trip_s, given)

    def gave_up(self, tensor: Hashable) -> None:
        """There will be no answer, or it says nothing."""
        self._on_the_way.pop(tensor, None)
