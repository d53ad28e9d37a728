"""How long an update for so much work usually is, as one replica has seen it.

Updates are clipped to a multiple of the median of the declared norms. Where half of the replicas lie, one of two, that median is theirs, and a
declared norm of next to nothing divides the others' work by any number. No arithmetic on the entries alone can tell who of two is right: taking the larger one's
side would let a liar lengthen the step instead. Each replica can, because it knows its own update and the rounds before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from swarm.round_messages import Entry
from swarm.rounds.rules import lower_median

TOO_SHORT: Final = 64.0
"""Times shorter for each token than it should be: equal replicas differ by less than two, and one that did less work has more for each token."""
FADING: Final = 0.9
"""Of what was usual counts at the next round, so that a learning rate that falls is followed and a liar cannot lead it down quickly."""


class UsualLength:
    """One replica's."""

    def __init__(self) -> None:
        self._usual = 0.0
        """Norm for each token; 0 before the first round."""

    def too_short(self, entry: Entry, own: Entry) -> bool:
        """Whether somebody's entry can only be meant to make the others' count nothing. The shorter of our own and of what was usual is compared:
        should our own have become too long, it is not the others' fault."""
        if not (entry.tokens and own.tokens):
            return False
        expected = min(_length(own), self._usual or math.inf)
        return TOO_SHORT * _length(entry) < expected

    def committed(self, entries: Iterable[Entry]) -> None:
        """A round has been held with these."""
        lengths = [_length(entry) for entry in entries if entry.tokens]
        if lengths:
            self._usual = max(lower_median(lengths), FADING * self._usual)


def _length(entry: Entry) -> float:
    return entry.norm / entry.tokens
