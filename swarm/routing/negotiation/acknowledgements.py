"""Who has not acknowledged how we stand, and when to tell them again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.vocabulary.types import PeerId


class News:
    """Told until heard, ever more seldom. Bounded: one entry for each member."""

    def __init__(self, talk: TalkRules) -> None:
        self._talk = talk
        self._due: dict[PeerId, tuple[float, float]] = {}

    def spread(self, others: Iterable[PeerId], now: float) -> None:
        """These have just been told something new."""
        self._due = dict.fromkeys(others, (now + self._talk.repeat_s, self._talk.repeat_s))

    def heard(self, peer: PeerId) -> None:
        """It has acknowledged the latest."""
        self._due.pop(peer, None)

    def again(self, now: float) -> list[PeerId]:
        """Whom to tell again now."""
        late = [peer for peer, (at, _) in self._due.items() if at <= now]
        for peer in late:
            wait = min(2 * self._due[peer][1], self._talk.longest_repeat_s)
            self._due[peer] = (now + wait, wait)
        return late

    @property
    def wakes_at(self) -> float:
        return min((at for at, _ in self._due.values()), default=math.inf)
