"""Measured rates of other members' pieces. What is said of a member's link is what its receivers measured
(`swarm.averaging.plausibility`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from protocol.interfaces.clock import Clock
from swarm.vocabulary.averaging_messages import MAX_MEMBERS
from swarm.vocabulary.types import PeerId

KEPT: Final = 0.5
"""Of what was measured before, each time a sender falls silent."""


@dataclass(slots=True)
class _Sender:
    size_bytes: float = 0.0
    seconds: float = 0.0
    under_way: int = 0
    """Pieces that have begun to come."""
    since: float = 0.0
    came: int = 0
    """Bytes since then."""


class Incoming:
    """The arrival rates of the senders to one replica. A sender's pieces overlap, so bytes are counted over the time in
    which any of them is under way.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._senders: dict[PeerId, _Sender] = {}

    def began(self, sender: PeerId) -> None:
        known = self._senders.pop(sender, None) or _Sender()
        self._senders[sender] = known
        while len(self._senders) > MAX_MEMBERS:
            del self._senders[next(iter(self._senders))]
        if not known.under_way:
            known.since, known.came = self._clock.monotonic(), 0
        known.under_way += 1

    def ended(self, sender: PeerId, size_bytes: int) -> None:
        """Notes that a piece is complete; or has broken off, with 0 bytes."""
        known = self._senders.get(sender)
        if known is None or not known.under_way:
            return
        known.came += size_bytes
        known.under_way -= 1
        seconds = self._clock.monotonic() - known.since
        if not known.under_way and known.came and seconds > 0:
            known.size_bytes = KEPT * known.size_bytes + known.came
            known.seconds = KEPT * known.seconds + seconds

    def bytes_per_s(self) -> Mapping[PeerId, float]:
        """The rates of all senders that were measured."""
        return {peer: known.size_bytes / known.seconds for peer, known in self._senders.items() if known.seconds}
