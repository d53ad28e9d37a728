"""What a link measures of itself. Times are the clock's monotonic seconds."""

from __future__ import annotations

from typing import Final

from protocol.seams import Clock, LinkFigures

_ROUND_TRIP_GAIN: Final = 1 / 8
"""Of RFC 6298, section 2."""
_GOODPUT_GAIN: Final = 1 / 4


class Meter:
    """Measures one link: round trip, goodput, bytes each way, and when it was last heard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._round_trip_s = 0.0
        self._goodput = 0.0
        self._sent_bytes = 0
        self._received_bytes = 0
        self._heard_at = clock.monotonic()
        self._pinged_at = 0.0
        self._open_token: int | None = None
        self._next_token = 1

    def wrote(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes

    def heard(self, size_bytes: int) -> None:
        self._received_bytes += size_bytes
        self._heard_at = self._clock.monotonic()

    def silence_s(self) -> float:
        return self._clock.monotonic() - self._heard_at

    def forgive(self, seconds: float) -> None:
        """This process itself did not run for a while, so it could not hear anything."""
        self._heard_at = min(self._heard_at + seconds, self._clock.monotonic())

    def ping(self) -> int:
        """A token for a new ping; a pong to an earlier one does not count any more."""
        self._open_token, self._next_token = self._next_token, self._next_token + 1
        self._pinged_at = self._clock.monotonic()
        return self._open_token

    def pong(self, token: int) -> bool:
        """Whether it answers the last ping."""
        if token != self._open_token:
            return False
        self._open_token = None
        sample = self._clock.monotonic() - self._pinged_at
        self._round_trip_s += (sample - self._round_trip_s) * (_ROUND_TRIP_GAIN if self._round_trip_s else 1)
        return True

    @property
    def ping_is_open(self) -> bool:
        return self._open_token is not None

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """A whole tensor was handed to the stream in so long."""
        if seconds > 0:
            self._goodput += (size_bytes / seconds - self._goodput) * (_GOODPUT_GAIN if self._goodput else 1)

    def figures(self) -> LinkFigures:
        return LinkFigures(self._round_trip_s, self._sent_bytes, self._received_bytes, self._goodput, self.silence_s())
