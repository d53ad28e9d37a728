"""Measurements of a link: round trip, goodput (by pings behind tensors), bytes each way, and when its peer was last
heard."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import LinkFigures
from swarm.vocabulary.statistics import Ewma

ROUND_TRIP_WEIGHT: Final = 1 / 8  # RFC 6298, section 2

HORIZON_S: Final = 1.0  # Busy time after which a measurement counts 1/e, in seconds

MOST_ON_THE_WAY: Final = 1024  # Tensors in flight that are remembered


@dataclass(slots=True)
class Goodput:
    """Measures what one link carries, one way."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _round_trip_s: float = math.inf
    _busy_since: float = 0.0
    _on_the_way: dict[int, tuple[int, float]] = field(default_factory=dict)  # Size and start of sending, in order

    @property
    def bytes_per_s(self) -> float:
        """The goodput; 0 before the first answer that took any time."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def sent(self, transfer: int, size_bytes: int, now: float) -> None:
        while len(self._on_the_way) >= MOST_ON_THE_WAY:
            self.gave_up(next(iter(self._on_the_way)))
        if not self._on_the_way:
            self._busy_since = now
        self._on_the_way[transfer] = size_bytes, now

    def accepted(self, transfer: int, round_trip_s: float, now: float) -> None:
        """Notes that the receiver has all of a tensor; unknown and second answers do not count."""
        known = self._on_the_way.pop(transfer, None)
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

    def gave_up(self, transfer: int) -> None:
        """Forgets a tensor whose answer will not come or says nothing."""
        self._on_the_way.pop(transfer, None)


class Meter:
    """Measures one link."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._round_trip = Ewma(ROUND_TRIP_WEIGHT)
        self._goodput = Goodput()
        self._behind: dict[int, int] = {}  # The tensor behind which each open ping went
        self._sent_bytes = 0
        self._received_bytes = 0
        self._heard_at = clock.monotonic()
        self._pinged_at = 0.0
        self._open_token: int | None = None
        self._next_token = 0

    def wrote(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes

    def heard(self, size_bytes: int) -> None:
        self._received_bytes += size_bytes
        self._heard_at = self._clock.monotonic()

    def silence_s(self) -> float:
        return self._clock.monotonic() - self._heard_at

    def forgive(self, seconds: float) -> None:
        """Shifts the last sign of life by a time in which this process did not run."""
        self._heard_at = min(self._heard_at + seconds, self._clock.monotonic())

    def ping(self) -> int:
        """The token of a new ping; a pong to an earlier one does not count any more."""
        self._open_token = self._token()
        self._pinged_at = self._clock.monotonic()
        return self._open_token

    def pong(self, token: int) -> bool:
        """Takes a pong; whether it answers the last ping."""
        transfer = self._behind.pop(token, None)
        if transfer is not None:
            self._goodput.accepted(transfer, self._round_trip.mean, self._clock.monotonic())
        if token != self._open_token:
            return False
        self._open_token = None
        self._round_trip.add(self._clock.monotonic() - self._pinged_at)
        return True

    @property
    def ping_is_open(self) -> bool:
        return self._open_token is not None

    def sending(self, transfer: int, size_bytes: int) -> None:
        self._goodput.sent(transfer, size_bytes, self._clock.monotonic())

    def ping_after(self, transfer: int) -> int:
        """The token of the ping that follows the tensor's last byte: its pong says that the peer has all of it."""
        while len(self._behind) >= MOST_ON_THE_WAY:
            del self._behind[next(iter(self._behind))]
        token = self._token()
        self._behind[token] = transfer
        return token

    def gave_up(self, transfer: int) -> None:
        self._goodput.gave_up(transfer)

    def figures(self) -> LinkFigures:
        goodput = self._goodput.bytes_per_s
        return LinkFigures(self._round_trip.mean, self._sent_bytes, self._received_bytes, goodput)

    def _token(self) -> int:
        self._next_token += 1
        return self._next_token
