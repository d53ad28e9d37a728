"""The limits of what a relaying peer gives to others, and the account of what it has given.

What a relaying peer has carried, for its owner to see.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol.generated import dht_process_pb2
from protocol.transport.rate_limits import Allowance
from swarm.vocabulary.types import PeerId

HOUR_S: Final = 3600.0
MIN_OPEN_BYTES: Final = 64 * 1024
"""With less than this left no tunnel is opened: a TLS handshake alone takes some thousand bytes."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """The most that a relaying peer gives. The bytes are the volunteer's figure; the rest bounds memory, files and
    time.
    """

    bytes_per_hour: int
    """Carried for all tunnels and both ways together. Each byte comes in once and goes out once."""
    pair_share: float = 0.25
    """Of the bytes, to any two peers."""
    tunnels: int = 16
    tunnels_of_a_peer: int = 4
    """Opened by one peer and not ended."""
    opens: int = 16
    open_refill_s: float = 2.0
    """Tunnels that one peer may open at once, and after how long one more: each costs its far end a handshake."""
    attached: int = 64
    greeting: int = 32
    """Streams that have not said what they want."""
    greeting_of_a_peer: int = 4
    handshake_s: float = 8.0
    """For the first message, and for the far end to accept a tunnel."""
    idle_s: float = 60.0
    """A tunnel or an attachment in which nothing moves ends after so long."""


class RelayBudget:
    """The byte budget of the hour. In no hour are more than `bytes_per_hour` carried: half may go at once, the other
    half comes back in its course.
    """

    def __init__(self, limits: RelayLimits, now: Callable[[], float] = time.monotonic, left: int | None = None) -> None:
        """`left`: of the burst, when somebody before us has used up some of it."""
        self._now = now
        self._all = _hourly(limits.bytes_per_hour)
        self._pairs = _hourly(limits.bytes_per_hour * limits.pair_share)
        if left is not None:
            self._all.take("", now(), max(0, self._all.left("", now()) - left))

    def left(self) -> int:
        return self._all.left("", self._now())

    def pair_left(self, one: PeerId, other: PeerId) -> int:
        return self._pairs.left(_pair(one, other), self._now())

    def spend(self, one: PeerId, other: PeerId, amount: int) -> str:
        """Takes so many bytes for these two peers; returns the reason if they are not to be had."""
        now = self._now()
        if not self._pairs.take(_pair(one, other), now, amount):
            return "these two peers have had their share of the relay's bytes for now"
        if not self._all.take("", now, amount):
            return "the relay's bytes are used up for now"
        return ""


def _hourly(amount: float) -> Allowance:
    half = max(1, int(amount / 2))
    return Allowance(burst=half, refill_s=HOUR_S / half)


def _pair(one: PeerId, other: PeerId) -> str:
    return "|".join(sorted((one, other)))


@dataclasses.dataclass(frozen=True, slots=True)
class RelayFigures:
    """The relay's account: what was given, and what is left. The names are those of `DhtRelayFigures`
    (proto/dht_process.proto).
    """

    carried_bytes: int = 0
    left_bytes: int = 0
    attached: int = 0
    tunnels: int = 0
    opened: int = 0
    refused: int = 0
    cut_off: int = 0


def write_figures(figures: RelayFigures) -> dht_process_pb2.DhtRelayFigures:
    return dht_process_pb2.DhtRelayFigures(**dataclasses.asdict(figures))


def read_figures(message: dht_process_pb2.DhtRelayFigures) -> RelayFigures:
    return RelayFigures(**{field.name: getattr(message, field.name) for field in dataclasses.fields(RelayFigures)})
