"""SWARM's own choice of peers, for comparison (Ryabinin et al. 2023, section 3.2, and their code). Pure.

For every stage a data node keeps a queue of peers by virtual time. A microbatch takes the first, whose virtual time
then grows by the time that it is expected to take: what it has got to do, over the exponential average (weight 0.1,
corrected for its start at zero) of what was measured. Who is new begins at the smallest virtual time there. Ties are
broken by chance.

Three things are theirs and may surprise: a time is measured from the end of the peer's last task if that is later than
the beginning of this one, so that tasks side by side count as throughput; the way back counts as 2.5 times the way out;
and queues are not known, only times. One thing is not theirs: a peer that has not been measured counts as fast as it
announces, where their code assumes one sample a second of everybody.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.vocabulary.pipeline_messages import Direction, Receipt
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId

NEW_SAMPLE_WEIGHT = 0.1
WORK = {Direction.FORWARD: 1.0, Direction.BACKWARD: 2.5}
"""Of a microbatch at one peer, in ways out."""
WHOLE_VISIT = sum(WORK.values())
MAX_JOURNEYS = 1024
"""Those that have ended are kept too, until there are so many."""


@dataclass(slots=True)
class Pace:
    """Seconds that one peer takes for one unit of work."""

    last: float = 0.0
    """When its last task ended."""
    _average: float = 0.0
    _weight: float = 0.0
    """Of all samples so far in the average; the rest is still the zero it began with."""

    def ended(self, began: float, now: float, work: float) -> None:
        """It has done a task that was given to it at `began`."""
        seconds = max(0.0, now - max(began, self.last))
        self._average += NEW_SAMPLE_WEIGHT * (seconds / work - self._average)
        self._weight += NEW_SAMPLE_WEIGHT * (1.0 - self._weight)
        self.last = now

    @property
    def seconds(self) -> float | None:
        """None before the first sample."""
        return self._average / self._weight if self._weight else None


@dataclass(slots=True)
class _Journey:
    path: Path
    last: float
    """When the peer before was done with it."""
    passed: set[tuple[Direction, int]] = field(default_factory=set)


class SwarmRule:
    """One data node's choices.

    Args:
        chance: breaks ties.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._queues: dict[ModuleId, dict[PeerId, tuple[float, float]]] = {}
        self._paces: dict[PeerId, Pace] = {}
        self._announced_s: dict[PeerId, float] = {}
        self._journeys: OrderedDict[MicrobatchId, _Journey] = OrderedDict()
        self.samples = 0
        """Ways, out or back, that were measured so far."""

    def choose(self, module: ModuleId, announced_s: Mapping[PeerId, float]) -> PeerId | None:
        """The peer whose turn it is; None if there is none. Nothing is charged until the microbatch is `launched`.

        Args:
            announced_s: seconds of a whole visit by each peer that serves the module now, as it says itself.
        """
        queue = {peer: turn for peer, turn in self._queues.get(module, {}).items() if peer in announced_s}
        start = min((time for time, _ in queue.values()), default=0.0)
        for peer in announced_s:
            queue.setdefault(peer, (start, self._chance.random()))
        self._queues[module] = queue
        self._announced_s.update(announced_s)
        return min(queue, key=lambda peer: queue[peer], default=None)

    def expected_s(self, peer: PeerId) -> float:
        """Of a whole visit."""
        pace = self._paces.get(peer)
        if pace is None or pace.seconds is None:
            return self._announced_s.get(peer, 0.0)
        return WHOLE_VISIT * pace.seconds

    def launched(self, microbatch: MicrobatchId, path: Path, now: float) -> None:
        """A microbatch sets out: its peers' next turns come later."""
        self._journeys[microbatch] = _Journey(path, now)
        while len(self._journeys) > MAX_JOURNEYS:
            self._journeys.popitem(last=False)
        for hop in path.hops:
            queue = self._queues.get(hop.module, {})
            if hop.peer in queue:
                time, _ = queue[hop.peer]
                queue[hop.peer] = (time + self.expected_s(hop.peer), self._chance.random())

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """`sender` has passed a microbatch on. Repeated receipts count once."""
        journey = self._journeys.get(receipt.microbatch)
        mark = (receipt.direction, receipt.position)
        if journey is None or mark in journey.passed or not -1 <= receipt.position <= len(journey.path.hops):
            return
        journey.passed.add(mark)
        began, journey.last = journey.last, now
        if 0 <= receipt.position < len(journey.path.hops):
            self._paces.setdefault(sender, Pace()).ended(began, now, WORK[receipt.direction])
            self.samples += 1

    def visits(self) -> int:
        """How many visits were measured so far."""
        return self.samples // len(WORK)

    def ended(self, microbatch: MicrobatchId, path: Path | None) -> None:
        """It has come home, or never will (`path` is None). One that is home is kept for a while: the last receipts of
        the way back come a link's delay later."""
        if path is None:
            self._journeys.pop(microbatch, None)
