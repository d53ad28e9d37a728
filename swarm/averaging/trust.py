"""Trust between replicas: plausible results, audits, measured rates, usual lengths, and penalties."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.averaging.schedule import lower_median
from swarm.vocabulary.averaging_messages import MAX_MEASURED, MAX_RATE, Entry, LinkRate
from swarm.vocabulary.statistics import Exclusions, ExponentialBackoff
from swarm.vocabulary.types import AnchorVersion, Codec, PeerId

OPPOSED: Final = -0.25
"""A mean with a smaller cosine to our own pseudo-gradient points away from it. Honest ones were above 0.19."""
LONGEST: Final = 1.75
"""Largest length of a mean, as a share of what all norms allow in this piece. Honest ones were below 1.1."""
ALIGNED: Final = 1.25
"""Length of a mean whose updates all point the same way."""
LONGER_THAN_OURS: Final = 4.0
"""Largest ratio to the length in pieces that we reduce ourselves, beyond ALIGNED."""
SHORTEST: Final = 0.1
"""Smallest length of a mean, in lengths of our own part."""
AUDITED_BYTES: Final = 0.11
"""Share of a round's bytes that audits fetch, on average."""
SLACK: Final = 1.5
"""Factor on a reducer's expected share of norm in a piece."""
SMALLEST: Final = 4096
"""Elements of a small piece, for which `SLACK` is wider: shares there differ by up to 1.95 instead of 1.34."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A piece's result compared with our own pseudo-gradient there, in float64."""

    reducer: PeerId
    share: float
    own_squares: float
    result_squares: float
    product: float


def oddities(
    own: PeerId, pieces: Sequence[Beside], coefficient: float, norm: float, largest_norm: float
) -> dict[PeerId, str]:
    """The reducers whose results cannot be the mean, with reasons; none if our own results look odd, too."""
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
    """The result's length as a share of what all norms allow there. Where ours is tiny, norms count as even."""
    there = scale * math.sqrt(max(piece.own_squares, piece.share * norm * norm))
    return math.sqrt(piece.result_squares) / there if there > 0 else 0.0


RESULT_ERROR: Final[Mapping[Codec, float]] = {Codec.NONE: 1e-4, Codec.BF16: 0.005, Codec.INT8: 0.01, Codec.INT4: 0.2}
"""Largest error of a result's encoding, in lengths of the result."""


@dataclass(frozen=True, slots=True)
class Reckoning:
    """A piece that was summed again, without its reducer's own contribution."""

    elements: int
    rest: float
    """Length of the result minus the others' contributions."""
    result: float
    shares: tuple[float, ...]
    """Shares of the other contributors' norms in this piece, each from 0 to 1."""


def chance_of_audit(round_bytes: int, members: int, audit_bytes: int) -> float:
    """The probability with which a member audits a piece, so that audits fetch AUDITED_BYTES of the round."""
    return min(1.0, AUDITED_BYTES * round_bytes / (members * audit_bytes)) if audit_bytes else 1.0


def unexplained(reckoning: Reckoning, coefficient: float, norm: float, codec: Codec) -> str | None:
    """The reason why the rest of a result cannot be the reducer's own contribution; None if it can."""
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
"""An update this many times shorter per token than expected is a lie; equal replicas differ by less than two."""
FADING: Final = 0.9
"""Weight of the usual length at the next round: follows a falling learning rate, resists a liar."""

ASTRAY: Final = 8.0
"""Largest distance between anchors, in rounds of steps like ours: momentum and faster replicas lengthen it."""
FEWEST_APART: Final = 2.0
"""Rounds by which two anchors may differ however short the time."""
NEWS: Final = 0.1
"""Weight of the latest time between two rounds."""


def mark_of(peer: PeerId) -> int:
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:3], "big")


def measured_of(bytes_per_s: Mapping[PeerId, float], base: AnchorVersion) -> tuple[LinkRate, ...]:
    """Measured rates for an entry. The anchor draws MAX_MEASURED of them, others each round."""

    def drawn(peer: PeerId) -> bytes:
        return hashlib.sha256(base.digest + peer.encode()).digest()

    known = sorted((peer for peer, rate in bytes_per_s.items() if rate >= 1), key=drawn)[:MAX_MEASURED]
    return tuple(LinkRate(mark_of(peer), _rate(bytes_per_s[peer])) for peer in known)


def rates(entries: Mapping[PeerId, Entry]) -> dict[PeerId, int]:
    """The rate of each member that others have measured: lower median, so one accomplice lifts nobody."""
    said: dict[int, list[tuple[PeerId, int]]] = {}
    for by, entry in entries.items():
        for measured in entry.measured:
            said.setdefault(measured.mark, []).append((by, measured.rate))
    heard = {peer: [rate for by, rate in said.get(mark_of(peer), ()) if by != peer] for peer in entries}
    return {peer: lower_median(found) for peer, found in heard.items() if found}


def slowest_bytes_per_s(entries: Mapping[PeerId, Entry]) -> float:
    known = rates(entries)
    return 4.0 ** min(known.values()) if known else 0.0


def _rate(bytes_per_s: float) -> int:
    return max(1, min(MAX_RATE, round(math.log2(min(bytes_per_s, 2.0**64)) / 2)))


class UsualLength:
    """The usual norm per token of a module's pseudo-gradients, as one replica has seen it."""

    def __init__(self) -> None:
        self._usual = 0.0

    def too_short(self, entry: Entry, own: Entry) -> bool:
        if not (entry.tokens and own.tokens):
            return False
        expected = min(_norm_per_token(own), self._usual or math.inf)
        return TOO_SHORT * _norm_per_token(entry) < expected

    def committed(self, entries: Iterable[Entry]) -> None:
        lengths = [_norm_per_token(entry) for entry in entries if entry.tokens]
        if lengths:
            self._usual = max(lower_median(lengths), FADING * self._usual)


class AnchorDrift:
    """How far an honest anchor can be from ours, by the rounds that this replica was in."""

    def __init__(self) -> None:
        self._length = 0.0
        self._between_s = 0.0
        self._round_at: float | None = None
        self._shared_at: float | None = None

    def committed(self, norm: float, steps_share: float, mean_norm: float, shared: bool, at: float) -> None:
        """Notes a round: our norm and share of its steps, the norm of its clipped mean at most."""
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
"""Seconds after the end of the last exclusion."""
FOR_RUBBISH: Final = ExponentialBackoff(60.0, 3600.0, free=1)
"""The first offence costs only its attempt."""
FOR_FRAUD: Final = ExponentialBackoff(3600.0, 86_400.0)
"""An audit leaves no honest explanation."""
FOR_SILENCE: Final = ExponentialBackoff(300.0, 3600.0)
"""Unanswered audits or groundless accusations: that can happen to honest replicas."""
FOR_STRAYING: Final = ExponentialBackoff(60.0, 600.0)
"""Two honest parts of a module may be that far apart after a long time."""
FOR_WAITING: Final = ExponentialBackoff(30.0, 600.0, free=1)
"""Milder: a link between two honest peers may be at fault."""


class Penalties:
    """Offences that this replica has seen itself, by kind. They outlive attempts and anchors."""

    def __init__(self) -> None:
        self.rubbish = Exclusions(FOR_RUBBISH, FORGIVEN_AFTER_S)
        self.waiting = Exclusions(FOR_WAITING, FORGIVEN_AFTER_S)
        self.fraud = Exclusions(FOR_FRAUD, FORGIVEN_AFTER_S)
        self.silence = Exclusions(FOR_SILENCE, FORGIVEN_AFTER_S)
        self.straying = Exclusions(FOR_STRAYING, FORGIVEN_AFTER_S)

    def excluded(self, now: float) -> frozenset[PeerId]:
        """Replicas that get no invitation, and whose invitations are not answered."""
        return self.distrusted(now) | self.waiting.excluded(now) | self.silence.excluded(now)

    def distrusted(self, now: float) -> frozenset[PeerId]:
        """Those of them whose anchor must not be followed on their claim alone."""
        return self.rubbish.excluded(now) | self.fraud.excluded(now) | self.straying.excluded(now)
