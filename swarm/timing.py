"""Times the peers of a path by the receipts that pass, on this machine's own clock.

Each hop says PASSED_ON to the data node when the next one has accepted, and with it how long the microbatch waited there, was computed, and was sent
(`swarm.messages.Receipt`). These are claims. What can be seen from here is the time between two neighbours' receipts, and an honest hop's claims cover it:
its receipt is late by the way from it to us, which by the triangle inequality is not longer than the way from the hop before it to us and that between
the two, and the latter is in what the hop before said of its sending. So whatever the claims leave open is laid at the later hop's door, as if it had computed all
that time: a peer that says that it is fast and is not looks as slow as it is. Waiting is believed up to what a full queue would take.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.estimates import Estimates
from swarm.messages import Direction, Receipt
from swarm.paths.measurements import ASSUMED_BACKWARD_FACTOR, Measurements
from swarm.vocabulary import MicrobatchId, Path, PeerId

MAX_JOURNEYS: Final = 4096
LOST_S: Final = 10.0
"""A microbatch that is lost counts as a visit of at least so long: failing at once must not look like speed."""
LOST_TIMES: Final = 3.0
"""But as no more than so many usual visits of a peer that was measured before: it may be somebody else's fault."""


@dataclass(slots=True)
class _Journey:
    path: Path
    begun: float
    last: float
    """When the latest receipt came."""
    queue: Mapping[PeerId, int]
    out_s: dict[int, float] = field(default_factory=dict)
    """Of each position, the time it took on the way out."""
    passed: set[tuple[Direction, int]] = field(default_factory=set)
    resting_s: float = 0.0
    """Waiting and computing, at all peers."""
    sent_s: float = 0.0


class PathTimes:
    """Turns receipts into samples.

    Args:
        own: the data node.
        tokens: of one microbatch.
        slots_of: how many slots a peer announces.
    """

    def __init__(
        self,
        own: PeerId,
        estimates: Estimates,
        measurements: Measurements,
        tokens: int,
        slots_of: Callable[[PeerId], int],
    ) -> None:
        self._own, self._slots_of = own, slots_of
        self._estimates, self._measurements = estimates, measurements
        self._tokens = tokens
        self._journeys: OrderedDict[MicrobatchId, _Journey] = OrderedDict()

    def launched(self, microbatch: MicrobatchId, path: Path, queue: Mapping[PeerId, int], now: float) -> None:
        """A microbatch sets out; `queue` says how many of ours were under way through each peer then."""
        self._journeys[microbatch] = _Journey(path, now, now, dict(queue))
        while len(self._journeys) > MAX_JOURNEYS:
            self._journeys.popitem(last=False)

    def turned(self, microbatch: MicrobatchId, now: float) -> None:
        """Its loss is known: the way back begins here."""
        journey = self._journeys.get(microbatch)
        if journey is not None:
            journey.resting_s += now - journey.last
            journey.last = now

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """`sender` has passed it on; it may be another than the one planned. Repeated receipts count once."""
        journey = self._journeys.get(receipt.microbatch)
        mark = (receipt.direction, receipt.position)
        if journey is None or mark in journey.passed or not -1 <= receipt.position <= len(journey.path.hops):
            return
        journey.passed.add(mark)
        taken, journey.last = now - journey.last, now
        if 0 <= receipt.position < len(journey.path.hops):
            journey.path = _as_repaired(journey.path, receipt.position, sender)
            self._note_total(journey, sender, receipt, taken)
            self._note_stay(journey, sender, receipt, taken)
        elif sender == self._own:
            self._note_own(journey, receipt, taken)

    def completed(self, microbatch: MicrobatchId, now: float) -> None:
        """It is back."""
        journey = self._journeys.pop(microbatch, None)
        if journey is not None and len(journey.passed) >= 2 * len(journey.path.hops):
            self._measurements.came_home(now - journey.begun - journey.resting_s, journey.sent_s)

    def lost(self, microbatch: MicrobatchId, now: float) -> None:
        """It will not come back. Who is to blame cannot be seen from here, so it counts against every hop of its path: honest ones make up
        for it on other paths, and one on which everything is lost does not.
        """
        journey = self._journeys.pop(microbatch, None)
        if journey is not None:
            for hop in journey.path.hops:
                known = self._estimates.measured(hop.peer)
                most = math.inf if known is None else LOST_TIMES * known.seconds_per_token * self._tokens
                self._estimates.penalize(hop.peer, min(max(LOST_S, now - journey.begun), most), self._tokens)

    # ---- samples -------------------------------------------------------------------------------------------------

    def _note_total(self, journey: _Journey, sender: PeerId, receipt: Receipt, taken: float) -> None:
        """All that a visit took, its queue and its sending included."""
        if receipt.direction is Direction.FORWARD:
            journey.out_s[receipt.position] = taken
        elif receipt.position in journey.out_s:
            both_ways = journey.out_s[receipt.position] + taken
            self._estimates.observe(sender, both_ways, self._tokens, journey.queue.get(sender, 0))

    def _note_stay(self, journey: _Journey, sender: PeerId, receipt: Receipt, taken: float) -> None:
        claimed_s = min(receipt.computed_s, taken)
        waited_s = min(receipt.waited_s, max(0, self._slots_of(sender) - 1) * (1 + ASSUMED_BACKWARD_FACTOR) * claimed_s)
        computed_s = claimed_s + max(0.0, taken - waited_s - claimed_s - receipt.sent_s)
        self._measurements.computed(sender, receipt.direction, computed_s)
        self._measurements.waited(sender, waited_s)
        journey.resting_s += waited_s + computed_s
        self._note_way(journey, sender, receipt)

    def _note_own(self, journey: _Journey, receipt: Receipt, taken: float) -> None:
        """We ourselves at either end. What we computed at the far end was over when the microbatch turned."""
        if receipt.position < 0 and receipt.direction is Direction.FORWARD:
            self._measurements.computed(self._own, Direction.FORWARD, min(receipt.computed_s, taken))
            journey.resting_s += receipt.waited_s + receipt.computed_s
        self._note_way(journey, self._own, receipt)

    def _note_way(self, journey: _Journey, here: PeerId, receipt: Receipt) -> None:
        position = receipt.position + (1 if receipt.direction is Direction.FORWARD else -1)
        if -1 <= position <= len(journey.path.hops):
            self._measurements.sent(here, journey.path.peer_at(position), receipt.sent_s)
            journey.sent_s += receipt.sent_s


def _as_repaired(path: Path, position: int, sender: PeerId) -> Path:
    """The path, of which `sender` turns out to be the hop at `position`: a stand-in, or the one after it, if that hop was skipped."""
    following = position + 1
    if path.hops[position].peer != sender and following < len(path.hops) and path.hops[following].peer == sender:
        return path.without(position)
    return path.with_peer(position, sender)
