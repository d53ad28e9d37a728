"""Times the peers of a path by the receipts that pass: what each took, out and back, on this machine's own clock.

Each peer says PASSED_ON to the data node when the next one has accepted. The time between two neighbours' receipts is what the later one took,
its queue and its sending included. So a peer is known by what it does, not by what it announces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.estimates import Estimates
from swarm.messages import Direction, Receipt
from swarm.vocabulary import MicrobatchId, Path, PeerId


@dataclass(slots=True)
class _Journey:
    path: Path
    last: float
    queue: Mapping[PeerId, int]
    out_s: dict[int, float] = field(default_factory=dict)
    """Of each position, the time it took on the way out."""
    passed: set[tuple[Direction, int]] = field(default_factory=set)


class PathTimes:
    """Turns receipts into samples for `Estimates`.

    Args:
        tokens: of one microbatch.
    """

    def __init__(self, estimates: Estimates, tokens: int) -> None:
        self._estimates = estimates
        self._tokens = tokens
        self._journeys: dict[MicrobatchId, _Journey] = {}

    def launched(self, microbatch: MicrobatchId, path: Path, queue: Mapping[PeerId, int], now: float) -> None:
        """A microbatch sets out; `queue` says how many of ours were under way through each peer then."""
        self._journeys[microbatch] = _Journey(path, now, dict(queue))

    def turned(self, microbatch: MicrobatchId, now: float) -> None:
        """Its loss is known: the way back begins here."""
        journey = self._journeys.get(microbatch)
        if journey is not None:
            journey.last = now

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """`sender` has passed it on; it may be another than the one planned. Repeated receipts count once."""
        journey = self._journeys.get(receipt.microbatch)
        mark = (receipt.direction, receipt.position)
        if journey is None or mark in journey.passed or not -1 <= receipt.position <= len(journey.path.hops):
            return
        journey.passed.add(mark)
        taken, journey.last = now - journey.last, now
        if not 0 <= receipt.position < len(journey.path.hops):
            return
        if receipt.direction is Direction.FORWARD:
            journey.out_s[receipt.position] = taken
        elif receipt.position in journey.out_s:
            both_ways = journey.out_s[receipt.position] + taken
            self._estimates.observe(sender, both_ways, self._tokens, journey.queue.get(sender, 0))

    def forget(self, microbatch: MicrobatchId) -> None:
        self._journeys.pop(microbatch, None)
