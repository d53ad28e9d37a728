"""Times the peers of a path by the receipts that pass, on this machine's own clock.

Each hop says PASSED_ON to the data node when the next one has accepted, and with it how long the microbatch waited
there, was computed, and was sent (`swarm.vocabulary.pipeline_messages.Receipt`). These are claims. What can be seen
from here is the time between two neighbours' receipts, and an honest hop's claims cover it: its receipt is late by the
way from it to us, which by the triangle inequality is not longer than the way from the hop before it to us and that
between the two, and the latter is in what the hop before said of its sending. So whatever the claims leave open is laid
at the later hop's door, as if it had computed all that time: a peer that says that it is fast and is not looks as slow
as it is. Waiting is believed up to what a full queue would take.

Receipts come over different links, so in any order, and the last of a microbatch when it is home already: the first
hop's come a round trip after its gradient. Whatever comes when, a visit is the time between its receipt and that of the
hop before it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.routing.measured_times import ASSUMED_BACKWARD_FACTOR, MeasuredTimes
from swarm.vocabulary.pipeline_messages import Direction, Receipt
from swarm.vocabulary.types import MicrobatchId, Path, PeerId
from swarm.workload.microbatch_sizes import MicrobatchSizes

MAX_JOURNEYS: Final = 4096
LOST_S: Final = 10.0
"""A microbatch that is lost counts as a visit of at least so long: failing at once must not look like speed."""
LOST_ADDS: Final = 0.2
"""But it makes what was measured of a peer before longer by no more than this part: it may be somebody else's fault."""

_Mark = tuple[Direction, int]
"""Which way, and the position of who passed it on."""


@dataclass(frozen=True, slots=True)
class _Word:
    sender: PeerId
    receipt: Receipt
    at: float


@dataclass(slots=True)
class _Journey:
    path: Path
    begun: float
    queue: Mapping[PeerId, int]
    size: float
    """Its cost in usual microbatches: all that is measured of it is divided by this."""
    turned: float | None = None
    """When its loss was known."""
    home: float | None = None
    words: dict[_Mark, _Word] = field(default_factory=dict)
    taken_s: dict[_Mark, float] = field(default_factory=dict)
    """Each hop's time, each way, as far as it can be told."""
    resting_s: float = 0.0
    """Waiting and computing, at all peers."""
    sent_s: float = 0.0

    def is_hop(self, position: int) -> bool:
        return 0 <= position < len(self.path.hops)

    def since(self, mark: _Mark) -> float | None:
        """When the hop of this mark began to have it: when the one before it passed it on. At the ends what we know
        ourselves does as well."""
        direction, position = mark
        before = self.words.get((direction, position - _STEP[direction]))
        if before is not None:
            return before.at
        if direction is Direction.FORWARD:
            return self.begun if position == 0 else None
        return self.turned if position == len(self.path.hops) - 1 else None


_STEP: Final = {Direction.FORWARD: 1, Direction.BACKWARD: -1}


def _after(mark: _Mark) -> int:
    """The position to which it was passed on."""
    return mark[1] + _STEP[mark[0]]


class PathTimes:
    """Turns receipts into samples.

    Args:
        own: the data node.
        times: where they are kept.
        slots_of: how many slots a peer announces.
    """

    def __init__(self, own: PeerId, times: MeasuredTimes, slots_of: Callable[[PeerId], int]) -> None:
        self._own, self._times, self._slots_of = own, times, slots_of
        self._journeys: OrderedDict[MicrobatchId, _Journey] = OrderedDict()

    def launched(
        self, microbatch: MicrobatchId, path: Path, queue: Mapping[PeerId, int], now: float, size: float = 1.0
    ) -> None:
        """A microbatch sets out; `queue` says how many of ours were under way through each peer then, `size` what it
        costs, in usual microbatches: a peer must not be taken for slow because it got longer documents.
        """
        self._journeys[microbatch] = _Journey(path, now, dict(queue), size)
        while len(self._journeys) > MAX_JOURNEYS:
            self._journeys.popitem(last=False)

    @property
    def sizes(self) -> MicrobatchSizes:
        """Of the microbatches that have set out."""
        return self._times.sizes

    def path_of(self, microbatch: MicrobatchId) -> Path | None:
        """The path of one that is under way, or of which receipts are still to come."""
        journey = self._journeys.get(microbatch)
        return None if journey is None else journey.path

    def turned(self, microbatch: MicrobatchId, now: float) -> None:
        """Its loss is known: the way back begins here."""
        journey = self._journeys.get(microbatch)
        if journey is not None:
            journey.turned = now

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """`sender` has passed it on; it may be another than the one planned. Repeated receipts count once."""
        journey = self._journeys.get(receipt.microbatch)
        direction, position = mark = receipt.direction, receipt.position
        if journey is None or mark in journey.words or not -1 <= position <= len(journey.path.hops):
            return
        if journey.is_hop(position):
            journey.path = _as_repaired(journey.path, position, sender)
        elif sender != self._own:
            return
        journey.words[mark] = _Word(sender, receipt, now)
        self._note_ends(journey, sender, receipt)
        for known in (mark, (direction, _after(mark))):
            self._note_visit(journey, known)
        self._note_home(receipt.microbatch, journey)

    def completed(self, microbatch: MicrobatchId, now: float) -> None:
        """It is back. Its last receipts may be still to come."""
        journey = self._journeys.get(microbatch)
        if journey is not None:
            journey.home = now
            self._note_home(microbatch, journey)

    def lost(self, microbatch: MicrobatchId, now: float) -> None:
        """It will not come back. Who is to blame cannot be seen from here, so it counts against every hop of its path:
        honest ones make up for it on other paths, and one on which everything is lost does not.
        """
        journey = self._journeys.pop(microbatch, None)
        if journey is not None:
            for hop in journey.path.hops:
                known = self._times.visit(hop.peer)
                most = math.inf if known is None else known.mean * (1 + LOST_ADDS / known.gain)
                self._times.lost(hop.peer, min(max(LOST_S, now - journey.begun), most))

    # ---- samples -------------------------------------------------------------------------------------------------

    def _note_ends(self, journey: _Journey, sender: PeerId, receipt: Receipt) -> None:
        """What a word tells by itself: of sending, and of what we did ourselves at either end."""
        self._note_way(journey, sender, receipt)
        if not journey.is_hop(receipt.position):
            journey.resting_s += receipt.waited_s + receipt.computed_s
            if receipt.direction is Direction.FORWARD:
                self._times.computed(sender, Direction.FORWARD, receipt.computed_s / journey.size)

    def _note_visit(self, journey: _Journey, mark: _Mark) -> None:
        """As soon as it is known when a hop passed it on and when the one before it did."""
        word, since = journey.words.get(mark), journey.since(mark)
        if word is None or since is None or mark in journey.taken_s or not journey.is_hop(mark[1]):
            return
        journey.taken_s[mark] = max(0.0, word.at - since)
        self._note_total(journey, word)
        self._note_stay(journey, word)

    def _note_total(self, journey: _Journey, word: _Word) -> None:
        """All that a visit took out and back, its queue and its sending included."""
        marks = [(direction, word.receipt.position) for direction in Direction]
        taken_s = [journey.taken_s[mark] for mark in marks if mark in journey.taken_s]
        if len(taken_s) == len(marks) and all(journey.words[mark].sender == word.sender for mark in marks):
            self._times.visited(word.sender, sum(taken_s) / journey.size, journey.queue.get(word.sender, 0))

    def _note_stay(self, journey: _Journey, word: _Word) -> None:
        receipt, sender = word.receipt, word.sender
        taken = journey.taken_s[receipt.direction, receipt.position]
        claimed_s = min(receipt.computed_s, taken)
        waited_s = min(receipt.waited_s, max(0, self._slots_of(sender) - 1) * (1 + ASSUMED_BACKWARD_FACTOR) * claimed_s)
        computed_s = claimed_s + max(0.0, taken - waited_s - claimed_s - receipt.sent_s)
        self._times.computed(sender, receipt.direction, computed_s / journey.size)
        self._times.waited(sender, waited_s)
        journey.resting_s += waited_s + computed_s

    def _note_home(self, microbatch: MicrobatchId, journey: _Journey) -> None:
        """Once it is home and everything about it has been said."""
        if journey.home is not None and len(journey.taken_s) >= len(Direction) * len(journey.path.hops):
            del self._journeys[microbatch]
            self._times.came_home(journey.home - journey.begun - journey.resting_s, journey.sent_s)

    def _note_way(self, journey: _Journey, here: PeerId, receipt: Receipt) -> None:
        position = _after((receipt.direction, receipt.position))
        if -1 <= position <= len(journey.path.hops):
            self._times.sent(here, journey.path.peer_at(position), receipt.sent_s / journey.size)
            journey.sent_s += receipt.sent_s


def _as_repaired(path: Path, position: int, sender: PeerId) -> Path:
    """The path, of which `sender` turns out to be the hop at `position`: a stand-in, or the one after it, if that hop
    was skipped."""
    following = position + 1
    if path.hops[position].peer != sender and following < len(path.hops) and path.hops[following].peer == sender:
        return path.without(position)
    return path.with_peer(position, sender)
