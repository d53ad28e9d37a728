"""Who has not acknowledged how we stand, and when to tell them again; whose news we have not acknowledged yet."""

from __future__ import annotations

import math
from collections.abc import Iterable

from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.vocabulary.types import PeerId


class News:
    """Told until heard, ever more seldom; heard once for all that has come meanwhile. Bounded: two entries for each
    member."""

    def __init__(self, talk: TalkRules) -> None:
        self._talk = talk
        self._due: dict[PeerId, tuple[float, float]] = {}
        self._owed: dict[PeerId, float] = {}
        """Since when."""
        self._heard_at = -math.inf
        """The last news of anybody."""

    def spread(self, others: Iterable[PeerId], now: float) -> None:
        """These have just been told something new."""
        self._due = dict.fromkeys(others, (now + self._talk.repeat_s, self._talk.repeat_s))

    def clear(self) -> None:
        """All know how all stand."""
        self._due.clear()
        self._owed.clear()

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

    def owe(self, peer: PeerId, now: float) -> None:
        """Its news have come."""
        self._owed.setdefault(peer, now)
        self._heard_at = now

    def answered(self, peer: PeerId) -> None:
        """It was told up to where we know of it."""
        self._owed.pop(peer, None)

    def overdue(self, now: float) -> list[PeerId]:
        """Whose news to acknowledge now, by a message of its own."""
        return [peer for peer, since in self._owed.items() if self._until(since) <= now]

    def _until(self, since: float) -> float:
        return min(self._heard_at + self._talk.hear_s, since + self._talk.longest_hear_s)

    @property
    def wakes_at(self) -> float:
        return min((*(at for at, _ in self._due.values()), *map(self._until, self._owed.values())), default=math.inf)
