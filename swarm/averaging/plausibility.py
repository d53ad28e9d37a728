"""The plausibility of what entries say: the senders' rates as their receivers measured them, and the usual length of
pseudo-gradients.

A replica's own word counts nothing, because who claims more reduces more. Entries tell of others' links; the lower
median of what is said of a member is believed of it, so that one accomplice lifts nobody above what an honest receiver
saw.

A pseudo-gradient is compared with the usual length for so much work, and an anchor that few replicas hold with how far
the module comes in that time.

Updates are clipped to a multiple of the median of the declared norms. Where half of the replicas lie, one of two, that
median is theirs, and a declared norm of next to nothing divides the others' work by any number. No arithmetic on the
entries alone can tell who of two is right: taking the larger one's side would let a liar lengthen the step instead.
Each replica can, because it knows its own update and the rounds before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Final

from swarm.averaging.schedule import lower_median
from swarm.vocabulary.averaging_messages import MAX_MEASURED, MAX_RATE, Entry, LinkRate
from swarm.vocabulary.types import AnchorVersion, PeerId

TOO_SHORT: Final = 64.0
"""Times shorter for each token than it should be: equal replicas differ by less than two, and one that did less work
has more for each token."""
FADING: Final = 0.9
"""Of what was usual counts at the next round, so that a learning rate that falls is followed and a liar cannot lead it
down quickly."""

ASTRAY: Final = 8.0
"""Times what a round of steps like ours comes to: outer momentum lengthens a row of updates in one direction, and
other replicas are faster than we are."""
FEWEST_APART: Final = 2.0
"""Rounds by which two anchors may differ however short the time."""
NEWS: Final = 0.1
"""The weight of the latest time between two rounds."""


def mark_of(peer: PeerId) -> int:
    """A peer's 24-bit mark, of its name's hash: names are long, and a roster tells of many links. Who shares another's
    mark shares what is measured of it.
    """
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:3], "big")


def measured_of(bytes_per_s: Mapping[PeerId, float], base: AnchorVersion) -> tuple[LinkRate, ...]:
    """The measured rates of others' links for an entry. Of more than MAX_MEASURED links the anchor draws some, other
    ones each round.
    """

    def drawn(peer: PeerId) -> bytes:
        return hashlib.sha256(base.digest + peer.encode()).digest()

    known = sorted((peer for peer, rate in bytes_per_s.items() if rate >= 1), key=drawn)[:MAX_MEASURED]
    return tuple(LinkRate(mark_of(peer), _rate(bytes_per_s[peer])) for peer in known)


def rates(entries: Mapping[PeerId, Entry]) -> dict[PeerId, int]:
    """The rate of each member that another one has measured."""
    said: dict[int, list[tuple[PeerId, int]]] = {}
    for by, entry in entries.items():
        for measured in entry.measured:
            said.setdefault(measured.mark, []).append((by, measured.rate))
    heard = {peer: [rate for by, rate in said.get(mark_of(peer), ()) if by != peer] for peer in entries}
    return {peer: lower_median(found) for peer, found in heard.items() if found}


def slowest_bytes_per_s(entries: Mapping[PeerId, Entry]) -> float:
    """The slowest rate of the members' links; 0 when nobody has measured any."""
    known = rates(entries)
    return 4.0 ** min(known.values()) if known else 0.0


def _rate(bytes_per_s: float) -> int:
    return max(1, min(MAX_RATE, round(math.log2(min(bytes_per_s, 2.0**64)) / 2)))


class UsualLength:
    """The usual length of a module's pseudo-gradients, as norm a token, as one replica has seen it."""

    def __init__(self) -> None:
        self._usual = 0.0
        """Norm for each token; 0 before the first round."""

    def too_short(self, entry: Entry, own: Entry) -> bool:
        """Whether an entry's pseudo-gradient is so short that it can only be meant to make the others' count nothing.
        The shorter of our own and of what was usual is compared: should our own have become too long, it is not the
        others' fault.
        """
        if not (entry.tokens and own.tokens):
            return False
        expected = min(_length(own), self._usual or math.inf)
        return TOO_SHORT * _length(entry) < expected

    def committed(self, entries: Iterable[Entry]) -> None:
        """Notes the lengths in a committed round."""
        lengths = [_length(entry) for entry in entries if entry.tokens]
        if lengths:
            self._usual = max(lower_median(lengths), FADING * self._usual)


class AnchorDrift:
    """The drift of a module's anchor: how far an honest anchor can be from ours.

    Only rounds that this replica was in count: how long its own pseudo-gradient would have been with all steps of the
    round, how far the round can have moved it at most, and the time from round to round. Replicas that have lost sight
    of each other move apart from the last anchor that they had in common, each by steps like ours; but one that gets
    all the work takes all steps of a round, where we take one or none. So one replica alone, whom we would follow where
    as many stand here as there, can set the module back by some rounds, and cannot put something else in its place.
    """

    def __init__(self) -> None:
        self._length = 0.0
        """Of the update of a round; 0 before the first."""
        self._between_s = 0.0
        """The mean time from one round to the next, later ones counting more; 0 before there are two."""
        self._round_at: float | None = None
        self._shared_at: float | None = None

    def committed(self, norm: float, steps_share: float, mean_norm: float, shared: bool, at: float) -> None:
        """Notes a round.

        Args:
            norm: of our own pseudo-gradient in it; 0 when there was none.
            steps_share: our inner steps in it, of those of all in it.
            mean_norm: of what was agreed on, at most, clipped as it was.
            shared: whether another replica was in it.
            at: seconds of a clock that goes on while the computer sleeps.
        """
        own = norm / min(1.0, steps_share) if steps_share > 0 else 0.0
        # Ours says little where we do next to nothing (or did at the beginning of the warm-up); the agreed one is
        # clipped to what is usual, so it says little where others do next to nothing.
        self._length = max(own, mean_norm, FADING * self._length)
        if self._round_at is not None:
            between_s = max(0.0, at - self._round_at)
            self._between_s += (between_s - self._between_s) * (NEWS if self._between_s else 1.0)
        self._round_at = at
        if shared or self._shared_at is None:
            self._shared_at = at

    def farthest(self, at: float) -> float:
        """The largest distance from our anchor, over parameters and momentum; infinite before two rounds."""
        if not self._between_s or self._shared_at is None:
            return math.inf
        rounds = max(FEWEST_APART, (at - self._shared_at) / self._between_s)
        return ASTRAY * self._length * rounds


def _length(entry: Entry) -> float:
    return entry.norm / entry.tokens
