"""Virtual time and links: everything happens in an order that follows from a seed."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.vocabulary.pipeline_messages import MicrobatchTensor
from swarm.vocabulary.types import PeerId

if TYPE_CHECKING:
    from swarm.simulation.pipeline_peer import Peer

Thunk = Callable[[], None]
CONTROL_S = 0.3
"""One way for a small message, when not measured: over the longest way round the earth, on a loaded link."""


def never() -> bool:
    """Run to the end."""
    return False


class VirtualTime:
    """A queue of what happens when. Equal times happen in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Thunk]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, what: Thunk) -> None:
        """Has it happen so many seconds from now."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), what))

    def run_until(self, end: float, enough: Callable[[], bool] = never) -> None:
        """Lets time pass up to `end`, or until there is enough."""
        while self._queue and self._queue[0][0] <= end and not enough():
            self.now, _, what = heapq.heappop(self._queue)
            what()
        if not enough():
            self.now = end


@dataclass(slots=True, eq=False)
class Transfer:
    """A tensor whose header has been admitted and whose body is under way."""

    sender: Peer
    receiver: Peer
    message: MicrobatchTensor


class Links:
    """One stream for each pair of peers: first in, first out, until it is cut. Then what was under way is lost.

    Args:
        message_s: how long a small message takes from one peer to another.
    """

    def __init__(self, time: VirtualTime, message_s: Callable[[PeerId, PeerId], float]) -> None:
        self._time, self._message_s = time, message_s
        self._cuts: Counter[frozenset[PeerId]] = Counter()
        self._last_arrival: dict[tuple[PeerId, PeerId], float] = {}
        self.transfers: defaultdict[frozenset[PeerId], list[Transfer]] = defaultdict(list)

    def cuts(self, one: PeerId, other: PeerId) -> int:
        """How often this link has been cut: two equal answers mean that it stood all the time between."""
        return self._cuts[frozenset((one, other))]

    def deliver(self, sender: PeerId, to: PeerId, what: Thunk) -> None:
        """Has it happen when a message that is sent now arrives, if the link stands until then."""
        arrival = self._time.now + self._message_s(sender, to)
        arrival = max(arrival, self._last_arrival.get((sender, to), 0.0))
        self._last_arrival[sender, to] = arrival
        cuts = self.cuts(sender, to)
        self._time.after(arrival - self._time.now, lambda: what() if self.cuts(sender, to) == cuts else None)

    def cut(self, one: PeerId, other: PeerId) -> list[Transfer]:
        """Loses all that is under way; returns the tensors that were half received."""
        pair = frozenset((one, other))
        self._cuts[pair] += 1
        return self.transfers.pop(pair, [])
