"""Checks on other replicas in rounds: results, audits, link rates, norms; and penalties for replicas that fail them."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import Final

from swarm.vocabulary.averaging_messages import MAX_MEASURED, MAX_MEMBERS, MAX_RATE, Entry, LinkRate
from swarm.vocabulary.statistics import Exclusions, ExponentialBackoff
from swarm.vocabulary.types import AnchorVersion, Codec, PeerId

LONGEST: Final = 1.75  # Largest norm of a mean, over what the members' norms allow. Honest means were below 1.1
ALIGNED: Final = 1.25  # The same ratio for updates that all point in one direction, with a margin
LONGER_THAN_OURS: Final = 4.0  # Largest factor over the ratio in pieces that we reduce ourselves, beyond ALIGNED
SHORTEST: Final = 0.1  # Smallest norm of a mean, relative to our own part
AUDITED_BYTES: Final = 0.11  # Mean bytes that audits fetch, as a share of a round's bytes
SLACK: Final = 1.5  # Factor on a reducer's expected share of norm in a piece
SMALLEST: Final = 4096  # Elements below which SLACK grows: shares of small pieces differ by up to 1.95, not 1.34


@dataclass(frozen=True, slots=True)
class Beside:
    """Norms and dot product of the mean sent by a member (reducer) and our pseudo-gradient, in one range of chunks."""

    reducer: PeerId
    share: float
    own_squares: float
    result_squares: float
    product: float


def oddities(
    own: PeerId, pieces: Sequence[Beside], coefficient: float, norm: float, largest_norm: float
) -> dict[PeerId, str]:
    """Returns the members that sent an impossible mean, with reasons. Empty if the mean we computed looks wrong too."""
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
        return f"a mean of norm {length:.2g}, while our own part of it has {coefficient * ours:.2g}"
    relative = _length(piece, norm, scale)
    if relative > longest:
        return f"a mean {relative:.1f} times as large as the members' norms allow; the limit is {longest:.1f}"
    return None


def _length(piece: Beside, norm: float, scale: float) -> float:
    """Returns the norm of the mean of a piece, relative to the largest norm that the members' declared norms allow."""
    # Each member's norm is assumed to be distributed over pieces as ours, or evenly if that allows more.
    there = scale * math.sqrt(max(piece.own_squares, piece.share * norm * norm))
    return math.sqrt(piece.result_squares) / there if there > 0 else 0.0


SUSPICIOUS: Final = -0.1  # Cosine of our contribution and the others' part of a mean below which we audit the piece
ROUNDS_BETWEEN: Final = 4  # Rounds between such audits: late in training honest contributions differ, too


def suspect(pieces: Sequence[Beside], own: PeerId, coefficient: float) -> PeerId | None:
    """Returns the reducer of the piece whose other contributions oppose ours most; None if none does."""
    found: list[tuple[float, PeerId]] = []
    for piece in pieces:
        ours = coefficient * math.sqrt(piece.own_squares)
        rest = piece.result_squares - 2 * coefficient * piece.product + ours * ours
        if piece.reducer != own and ours > 0 and rest > 0:
            cosine = (piece.product * coefficient - ours * ours) / (ours * math.sqrt(rest))
            found.append((cosine, piece.reducer))
    worst = min(found, default=(0.0, own))  # the reducer lies, or a contributor: an audit shows which
    return worst[1] if worst[0] < SUSPICIOUS else None


TIMES_OPPOSED: Final = 3  # Observations that name a contributor


class Opponents:
    """Contributors that point away from most others, observation after observation."""

    def __init__(self) -> None:
        self._times: dict[PeerId, int] = {}

    def observed(self, contributors: Iterable[PeerId], opposed: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Adds one observation of a piece's contributors. Returns the peers with TIMES_OPPOSED net oppositions."""
        for peer in contributors:
            times = self._times.pop(peer, 0) + (1 if peer in opposed else -1)
            if times > 0:
                self._times[peer] = times
        while len(self._times) > MAX_MEMBERS:
            del self._times[next(iter(self._times))]
        named = tuple(peer for peer, times in self._times.items() if times >= TIMES_OPPOSED)
        for peer in named:
            del self._times[peer]
        return named


# Largest encoding error of a result, relative to its norm
RESULT_ERROR: Final[Mapping[Codec, float]] = {Codec.NONE: 1e-4, Codec.BF16: 0.005, Codec.INT8: 0.01, Codec.INT4: 0.2}


@dataclass(frozen=True, slots=True)
class Reckoning:
    """Our repetition of the sum that a member computed for one piece, without this member's own contribution."""

    elements: int
    rest: float  # Norm of the result minus the other members' contributions
    result: float
    shares: tuple[float, ...]  # Share of each other contributor's norm in this piece, from 0 to 1


def chance_of_audit(round_bytes: int, members: int, audit_bytes: int) -> float:
    """Returns the probability of auditing a piece, so that audits add the share AUDITED_BYTES to a round's traffic."""
    return min(1.0, AUDITED_BYTES * round_bytes / (members * audit_bytes)) if audit_bytes else 1.0


def unexplained(reckoning: Reckoning, coefficient: float, norm: float, codec: Codec) -> str | None:
    """Returns a fault if a reducer's mean, less the other members' parts, is longer than its own part can be."""
    wider = (SLACK + 0.5 * math.sqrt(min(1.0, SMALLEST / reckoning.elements))) * max(reckoning.shares, default=1.0)
    own = coefficient * norm * min(1.0, wider)
    allowed = own + RESULT_ERROR[codec] * reckoning.result
    if reckoning.rest <= allowed:
        return None
    return (
        "the mean that it sent does not match the contributions: the rest, its own part, has norm "
        f"{reckoning.rest:.3g},"
        f" and the limit is {allowed:.3g}"
    )


TOO_SHORT: Final = 64.0  # An update this many times smaller per token is a lie; equal replicas differ by less than 2
FADING: Final = 0.9  # Decay of the usual norm per round, so that it follows a falling learning rate but resists a liar

DRIFT_LIMIT: Final = 8.0  # Largest distance between anchors, in rounds like ours; has a margin for momentum
FEWEST_APART: Final = 2.0  # Rounds by which two anchors may always differ
LATEST_INTERVALS: Final = 9  # Their median is the usual time between rounds: a cut network makes one of them long
SHORTEST_ROUND_S: Final = 1e-3
FEWEST_ROUNDS: Final = 3  # Rounds of ours that make a measure


def mark_of(peer: PeerId) -> int:
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:3], "big")


def measured_of(bytes_per_s: Mapping[PeerId, float], base: AnchorVersion) -> tuple[LinkRate, ...]:
    """Selects up to MAX_MEASURED measured link rates to send to the leader: rates of different peers in each round."""

    def drawn(peer: PeerId) -> bytes:
        return hashlib.sha256(base.digest + peer.encode()).digest()

    known = sorted((peer for peer, rate in bytes_per_s.items() if rate >= 1), key=drawn)[:MAX_MEASURED]
    return tuple(LinkRate(mark_of(peer), _rate(bytes_per_s[peer])) for peer in known)


def rates(entries: Mapping[PeerId, Entry], middle: Callable[[Sequence[int]], int] = median_low) -> dict[PeerId, int]:
    """Returns each member's link rate (log4 of bytes/s): by default the lower median of others' measurements."""
    said: dict[int, list[tuple[PeerId, int]]] = {}
    for by, entry in entries.items():
        for measured in entry.measured:
            said.setdefault(measured.mark, []).append((by, measured.rate))
    heard = {peer: [rate for by, rate in said.get(mark_of(peer), ()) if by != peer] for peer in entries}
    return {peer: middle(found) for peer, found in heard.items() if found}


def slowest_bytes_per_s(entries: Mapping[PeerId, Entry]) -> float:
    # One of three members must not make another one look slow.
    known = rates(entries, median_high)
    return 4.0 ** min(known.values()) if known else 0.0


def _rate(bytes_per_s: float) -> int:
    return max(1, min(MAX_RATE, round(math.log2(min(bytes_per_s, 2.0**64)) / 2)))


class UsualLength:
    """Usual norm per token of a module's pseudo-gradients, to detect members that claim work they did not do."""

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
            self._usual = max(median_low(lengths), FADING * self._usual)


class AnchorDrift:
    """Largest credible updates, and distances of other anchors from ours, estimated from our own past rounds."""

    def __init__(self, started_at: float) -> None:
        self._length = 0.0
        self._round_at = started_at
        self._between_s: deque[float] = deque(maxlen=LATEST_INTERVALS)
        self._shared_at: dict[PeerId, float] = {}
        self._latest_shared_at = started_at

    def committed(self, norm: float, steps_share: float, mean_norm: float, others: Iterable[PeerId], at: float) -> None:
        """Adds a round: our update's norm, our share of steps, the clipped mean's largest norm, the other members."""
        own = norm / min(1.0, steps_share) if steps_share > 0 else 0.0
        # Our norm is too small if we did little work, or early in the warm-up; the mean's norm, if the others did.
        self._length = max(own, mean_norm, FADING * self._length)
        self._between_s.append(max(0.0, at - self._round_at))
        self._round_at = at
        shared = dict.fromkeys(others, at)
        self._latest_shared_at = at if shared else self._latest_shared_at
        # The latest last, so that the replicas forgotten first are those met longest ago.
        kept = {peer: met for peer, met in self._shared_at.items() if peer not in shared}
        self._shared_at = dict([*kept.items(), *shared.items()][-MAX_MEMBERS:])

    def longest(self, at: float, scale: float) -> float:
        """Returns the largest credible norm of a round's mean update."""
        known = len(self._between_s) >= FEWEST_ROUNDS
        # In the warm-up updates grow tenfold per round, so one no longer than the anchor (`scale`) is always credible.
        return max(scale, DRIFT_LIMIT * self._length * self._intervals(at - self._round_at) if known else 0.0)

    def farthest(self, donors: Iterable[PeerId], at: float, scale: float, rounds: int, *, by_most: bool) -> float:
        """Returns the largest credible distance of donors' anchor, `rounds` later. `by_most`: most replicas have it."""
        if by_most or len(self._between_s) < FEWEST_ROUNDS:
            return DRIFT_LIMIT * scale * max(FEWEST_APART, rounds)  # refuses only an impossible one
        # A replica that we never met counts as the one met last: otherwise a new name could bring any anchor. The upper
        # median, so that one liar among many donors neither widens the limit nor keeps us apart from the others.
        met = sorted(self._shared_at.get(peer, self._latest_shared_at) for peer in donors) or [self._latest_shared_at]
        return DRIFT_LIMIT * self._length * max(FEWEST_APART, self._intervals(at - met[len(met) // 2]))

    def _intervals(self, seconds: float) -> float:
        return max(1.0, seconds / max(median(self._between_s), SHORTEST_ROUND_S))


def _norm_per_token(entry: Entry) -> float:
    return entry.norm / entry.tokens


FORGIVEN_AFTER_S: Final = 600.0  # Time after the end of the last exclusion, in seconds


class Penalties:
    """Temporary exclusions of replicas from rounds, by kind of offence. They outlast attempts and anchors."""

    def __init__(self) -> None:
        # Unusable data; the first offence costs only its attempt
        self.rubbish = Exclusions(ExponentialBackoff(60.0, 3600.0, free=1), FORGIVEN_AFTER_S)
        # Late data, perhaps by the fault of a link
        self.waiting = Exclusions(ExponentialBackoff(30.0, 600.0, free=1), FORGIVEN_AFTER_S)
        # Audits without an honest explanation
        self.fraud = Exclusions(ExponentialBackoff(3600.0, 86_400.0), FORGIVEN_AFTER_S)
        # Unanswered audits and groundless accusations, which also happen to honest replicas
        self.silence = Exclusions(ExponentialBackoff(300.0, 3600.0), FORGIVEN_AFTER_S)
        # Implausibly distant anchors, which honest replicas can have after a long partition
        self.straying = Exclusions(ExponentialBackoff(60.0, 600.0), FORGIVEN_AFTER_S)

    def excluded(self, now: float) -> frozenset[PeerId]:
        """Returns the replicas that we do not invite and whose invitations we ignore."""
        return self.accused(now) | self.straying.excluded(now) | self.waiting.excluded(now)

    def accused(self, now: float) -> frozenset[PeerId]:
        """Returns the replicas excluded for lies."""
        return self.rubbish.excluded(now) | self.fraud.excluded(now) | self.silence.excluded(now)

    def distrusted(self, now: float) -> frozenset[PeerId]:
        """Returns the replicas excluded for wrong results. Their anchor counts only if most replicas have the same."""
        return self.rubbish.excluded(now) | self.fraud.excluded(now) | self.straying.excluded(now)
