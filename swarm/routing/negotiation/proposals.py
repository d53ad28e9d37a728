"""Whether it is our turn to ask for a trade, and which one: the worst placed speaks first, the next worst when nothing
has happened for a while."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from swarm.routing.lane_book import LaneId, Trade
from swarm.routing.negotiation.lane_view import View, place_of
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.vocabulary.types import PeerId

PARTNERS = 8
"""Lanes that are weighed as partners, those with the most slack first."""
WORST = 3
"""Of so many worst placed lanes the data nodes ask; what the others have to gain does not make the last microbatch come
home sooner."""
BUSY_TRIES = 4
"""Answers that the partner is busy, or none at all, before it is left alone until something changes."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A trade to ask for, and the round trip that it is to shorten."""

    trade: Trade
    need_s: float


class Search:
    """Our turns of one epoch. Searches once for each state of the view, and remembers who refused."""

    def __init__(self, view: View, talk: TalkRules) -> None:
        self._view, self._talk = view, talk
        self._refused: set[tuple[LaneId, int, int]] = set()
        self._busy = 0
        self._quiet_since, self._at = 0.0, math.inf
        self.renew()

    def renew(self) -> None:
        """The swarm has changed: as many trades again."""
        self._left = self._talk.trades_each
        self._offers_left = (BUSY_TRIES + 1) * self._left
        self._refused.clear()

    @property
    def wakes_at(self) -> float:
        return self._at

    # ---- what befalls us -----------------------------------------------------------------------------------------

    def noticed(self, now: float) -> None:
        """The view has changed, or the way is free again."""
        self._quiet_since, self._at = now, now + self._talk.quiet_s
        self._busy = 0

    def refused(self, asked: LaneId, now: float) -> None:
        """Not this trade, as things stand."""
        self._refused.add(self._as_things_stand(asked))
        self.noticed(now)

    def put_off(self, asked: LaneId, number: int, now: float) -> None:
        """The partner is busy or silent; later, each at another time, so that the same two do not meet again and
        again."""
        self._busy += 1
        if self._busy > BUSY_TRIES:
            self.refused(asked, now)
        else:
            spread = 0.5 + _share(self._view.own, number)
            self._at = now + self._talk.patience_s * self._busy * spread

    def agreed(self) -> None:
        """A trade that we asked for was made."""
        self._left -= 1

    # ---- our turn ------------------------------------------------------------------------------------------------

    def wish(self, now: float) -> Wish | None:
        """What to ask for now; None when it is not our turn, or nothing helps."""
        if now < self._at:
            return None
        self._at = math.inf
        if self._left <= 0 or self._offers_left <= 0:
            return None
        times = self._view.times()
        before, lanes = place_of(self._view.own, times, WORST)
        if not lanes:
            return None
        turn = self._quiet_since + self._talk.quiet_s + before * self._talk.patience_s
        if now < turn:
            self._at = turn
            return None
        by_slack = list(reversed(times))
        for lane in lanes:
            partners = [other for other in by_slack if other[0] != lane[0] and self._may_ask(other)][:PARTNERS]
            trade = self._view.book.best_trade(lane, partners, times) if self._view.tradable(lane) else None
            if trade is not None:
                self._offers_left -= 1
                return Wish(trade, times[lane])
        return None

    def _may_ask(self, lane: LaneId) -> bool:
        return self._as_things_stand(lane) not in self._refused and self._view.tradable(lane)

    def _as_things_stand(self, asked: LaneId) -> tuple[LaneId, int, int]:
        return asked, self._view.versions.get(asked[0], -1), self._view.version


def _share(own: PeerId, number: int) -> float:
    """A share of 1 that differs from peer to peer and from time to time."""
    return (zlib.crc32(f"{own} {number}".encode()) % 1024) / 1024
