"""Penalties of replicas that cost rounds, by sending what cannot be used or by keeping the others waiting. Only what
this replica has seen itself counts; what others accuse somebody of is not kept.

It stands alone because what is held against a replica outlives attempts and anchors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.averaging.schedule import lower_median
from swarm.vocabulary.averaging_messages import MAX_MEASURED, MAX_RATE, Entry, LinkRate
from swarm.vocabulary.backoff import Exclusions, ExponentialBackoff
from swarm.vocabulary.types import AnchorVersion, Codec, PeerId

OPPOSED: Final = -0.25
"""A mean whose cosine with our own pseudo-gradient is less points away from it."""
LONGEST: Final = 1.75
"""Times what all members' norms allow in this piece, if they lie like ours there."""
ALIGNED: Final = 1.25
"""Times the same: so long a mean can be where all members' updates point the same way, and in the same round the rows
of an embedding, where they have nothing in common, can be 1 / members as long as allowed. (0.2 and 0.8 after two inner
steps of four replicas of a tiny model.)"""
LONGER_THAN_OURS: Final = 4.0
"""Times the share of the allowed that the mean has in the pieces that we reduce ourselves, where that is more than
ALIGNED."""
SHORTEST: Final = 0.1
"""Times our own part of the mean: less is as good as nothing."""
AUDITED_BYTES: Final = 0.11
"""Of a round's bytes, on average: the most that audits fetch."""
SLACK: Final = 1.5
"""How much longer a reducer's own part of a mean may be than its norm and the others' distribution of theirs make
it."""
SMALLEST: Final = 4096
"""Elements of a piece: over so few the shares of two replicas' norms were seen to differ by 1.95, over 15,000 by 1.34.
`SLACK` is that much wider for them."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A piece's result compared with our own pseudo-gradient there, in float64."""

    reducer: PeerId
    share: float
    """Of the fragment's elements."""
    own_squares: float
    result_squares: float
    product: float
    """Of the two vectors."""


def oddities(
    own: PeerId, pieces: Sequence[Beside], coefficient: float, norm: float, largest_norm: float
) -> dict[PeerId, str]:
    """The reducers whose results cannot be the mean, with the reasons.

    What we reduce ourselves tells whether it is we who are odd: if our own means look like that to us, we have nothing
    to say about those of others.

    Args:
        coefficient, norm: ours in the roster.
        largest_norm: that the mean can have by all members' norms.
    """
    if coefficient * norm == 0:
        return {}
    scale = largest_norm / norm
    usual = max((_length(piece, norm, scale) for piece in pieces if piece.reducer == own), default=math.inf)
    longest = min(LONGEST, max(ALIGNED, LONGER_THAN_OURS * usual))
    found: dict[PeerId, str] = {}
    for piece in pieces:
        why = _oddity(piece, coefficient, norm, scale, longest)
        if why is not None:
            found.setdefault(piece.reducer, why)
    return {} if own in found else found


def _oddity(piece: Beside, coefficient: float, norm: float, scale: float, longest: float) -> str | None:
    ours, length = math.sqrt(piece.own_squares), math.sqrt(piece.result_squares)
    if length < SHORTEST * coefficient * ours:
        return f"a mean of length {length:.2g}, where our own part of it is {coefficient * ours:.2g}"
    if piece.product < OPPOSED * ours * length:
        cosine, part = piece.product / ours / length, coefficient * ours / length
        return f"a mean that points away from our own contribution (cosine {cosine:.2f}; our part of it {part:.2g})"
    relative = _length(piece, norm, scale)
    if relative > longest:
        return f"a mean {relative:.1f} times as long as the members' norms allow there, where {longest:.1f} can be"
    return None


def _length(piece: Beside, norm: float, scale: float) -> float:
    """Of the result, as a share of what all members' norms allow in this piece. Where ours is next to nothing (rows of
    an embedding whose tokens we have not seen), norms are taken to be spread evenly."""
    there = scale * math.sqrt(max(piece.own_squares, piece.share * norm * norm))
    return math.sqrt(piece.result_squares) / there if there > 0 else 0.0


# ---- after the commit ------------------------------------------------------------------------------------------------

RESULT_ERROR: Final[Mapping[Codec, float]] = {
    Codec.NONE: 1e-4,
    Codec.BF16: 0.005,
    Codec.INT8: 0.01,
    Codec.INT4: 0.2,
}
"""What a result's encoding may be off by, in lengths of the result; sums in another order are far less."""


@dataclass(frozen=True, slots=True)
class Reckoning:
    """A piece that was summed again, without its reducer's own contribution."""

    elements: int
    rest: float
    """Length of what is left of the result when the others' contributions are taken away."""
    result: float
    """Length of the result."""
    shares: tuple[float, ...]
    """Which part of their norm the other contributors have in this piece, each from 0 to 1."""


def chance_of_audit(round_bytes: int, members: int, audit_bytes: int) -> float:
    """The probability with which a member audits a piece, so that together they fetch at most AUDITED_BYTES of what the
    round sent.

    Args:
        round_bytes: that all members together have sent.
        audit_bytes: of one audit on average.
    """
    return min(1.0, AUDITED_BYTES * round_bytes / (members * audit_bytes)) if audit_bytes else 1.0


def unexplained(reckoning: Reckoning, coefficient: float, norm: float, codec: Codec) -> str | None:
    """The reason why what is left of a result cannot be the reducer's own contribution; None when it can.

    That it is within the norm which the reducer declared, spread as the others' norms are, is all that can be known:
    its own part is nowhere encoded. A reducer that stays within that has no more power over the mean than by
    contributing.

    Args:
        coefficient, norm: of the reducer, in the roster.
        codec: of results.
    """
    wider = (SLACK + 0.5 * math.sqrt(min(1.0, SMALLEST / reckoning.elements))) * max(reckoning.shares, default=1.0)
    own = coefficient * norm * min(1.0, wider)
    allowed = own + RESULT_ERROR[codec] * reckoning.result
    if reckoning.rest <= allowed:
        return None
    return (
        "the mean that it sent is not that of what it was sent: what is left for its own part is "
        f"{reckoning.rest:.3g} long,"
        f" where {allowed:.3g} can be"
    )


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
        expected = min(_norm_per_token(own), self._usual or math.inf)
        return TOO_SHORT * _norm_per_token(entry) < expected

    def committed(self, entries: Iterable[Entry]) -> None:
        """Notes the lengths in a committed round."""
        lengths = [_norm_per_token(entry) for entry in entries if entry.tokens]
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


def _norm_per_token(entry: Entry) -> float:
    return entry.norm / entry.tokens


FORGIVEN_AFTER_S: Final = 600.0
"""After the end of the last pause."""
FOR_RUBBISH: Final = ExponentialBackoff(60.0, 3600.0, free=1)
"""The first time costs only the attempt in which it happened."""
FOR_FRAUD: Final = ExponentialBackoff(3600.0, 86_400.0)
"""An audit leaves no honest explanation."""
FOR_SILENCE: Final = ExponentialBackoff(300.0, 3600.0)
"""No answers to audits, or groundless accusations, several times: that may happen to honest ones too."""
FOR_STRAYING: Final = ExponentialBackoff(60.0, 600.0)
"""Two honest parts of a module may be that far from each other after a long time."""
FOR_WAITING: Final = ExponentialBackoff(30.0, 600.0, free=1)
"""Milder: a link between two honest peers may be at fault."""


class Penalties:
    """This replica's record of the others' offences."""

    def __init__(self) -> None:
        self._rubbish = Exclusions(FOR_RUBBISH, FORGIVEN_AFTER_S)
        self._waiting = Exclusions(FOR_WAITING, FORGIVEN_AFTER_S)
        self._fraud = Exclusions(FOR_FRAUD, FORGIVEN_AFTER_S)
        self._silence = Exclusions(FOR_SILENCE, FORGIVEN_AFTER_S)
        self._straying = Exclusions(FOR_STRAYING, FORGIVEN_AFTER_S)

    def sent_rubbish(self, peer: PeerId, now: float) -> None:
        """Notes that a replica sent what cannot be used."""
        self._rubbish.add(peer, now)

    def was_caught(self, peer: PeerId, certain: bool, now: float) -> None:
        """Notes that an audit caught a replica; what is not certain costs less."""
        (self._fraud if certain else self._silence).add(peer, now)

    def strayed(self, peer: PeerId, now: float) -> None:
        """Notes that a replica stands on an anchor that is farther from ours than an honest one can be."""
        self._straying.add(peer, now)

    def kept_waiting(self, peer: PeerId, now: float) -> None:
        """Notes that an exchange ended while overdue pieces of a replica had not come."""
        self._waiting.add(peer, now)

    def delivered(self, peer: PeerId) -> None:
        """Notes that an exchange with a replica has succeeded: what kept us waiting before has passed."""
        self._waiting.forgive(peer)

    def excluded(self, now: float) -> frozenset[PeerId]:
        """The replicas that get no invitation, and whose invitations are not answered."""
        return self.distrusted(now).union(*(kind.excluded(now) for kind in (self._waiting, self._silence)))

    def distrusted(self, now: float) -> frozenset[PeerId]:
        """Those of them whose state nobody should take over because of their word alone."""
        kinds = (self._rubbish, self._fraud, self._straying)
        return frozenset[PeerId]().union(*(kind.excluded(now) for kind in kinds))
