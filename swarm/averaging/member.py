"""The member's side of one attempt at a round, the convener's own included.

Whether an invitation is followed: the rule that makes competing conveners come down to one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from swarm.averaging.replica_view import ReplicaView
from swarm.averaging.roster import ASSUMED_BANDWIDTH, GRACE_S
from swarm.averaging.round_events import RoundRules
from swarm.averaging.schedule import plausible_round, precedence
from swarm.vocabulary.averaging_messages import (
    MAX_ATTEMPTS,
    Accepting,
    DeclineReason,
    Entry,
    Invitation,
    Prepared,
    Pulse,
    Roster,
    RoundControl,
    RoundId,
)
from swarm.vocabulary.types import AnchorVersion, PeerId

PIECE_SLACK = 4.0
"""A piece may take so many times what it should before its sender is said to be waited for."""


class Phase(enum.Enum):
    """A member's progress. Until FINISHING it keeps telling the convener, so that no lost message stops a round."""

    PREPARING = "prepares"
    ENTERED = "waits for the roster"
    EXCHANGING = "exchanges"
    PREPARED = "has the result"
    FINISHING = "still lacks a part of the committed result"


@dataclass(frozen=True, slots=True)
class StagedResult:
    """The complete result of an exchange, not committed yet."""

    roster: Roster
    version: AnchorVersion


@dataclass(slots=True)
class Participation:
    """One replica's part in one attempt."""

    round: RoundId
    heard: float
    """When the convener last said anything."""
    rules: RoundRules
    until: float = field(init=False)
    """No honest convener lets it last longer."""
    phase: Phase = Phase.PREPARING
    entry: Entry | None = None
    bandwidth: float = 0.0
    """Of our own best link, bytes per second; 0 when not known."""
    roster: Roster | None = None
    entries: tuple[Entry, ...] = ()
    """From which the roster follows."""
    version: AnchorVersion | None = None
    """What it prepared, or finishes."""
    prepared_at: float = 0.0
    """Since when it has the result."""
    prepared: dict[PeerId, AnchorVersion] = field(default_factory=dict)
    """What other members have told us, and not only the convener, that they have."""
    told: float = 0.0
    link_lost: bool = False
    """To the convener, and nothing has come since."""
    owing: dict[PeerId, float] = field(default_factory=dict)
    """Since when each member owes us pieces, or when the last one came."""
    broken: set[PeerId] = field(default_factory=set)
    """Members to which the link broke since their last piece."""
    rejected: set[PeerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.until = self.heard + self.rules.prepare_s + GRACE_S

    def hear_convener(self, now: float) -> None:
        self.heard, self.link_lost = now, False

    def silence(self, now: float) -> float:
        """The seconds for which the convener has been silent; a broken link counts for half of the patience."""
        return now - self.heard + (self.rules.silence_s / 2 if self.link_lost else 0.0)

    def loyal(self, now: float) -> bool:
        """Whether the member stays with its convener when another one calls: the exchange has begun and the convener
        was heard lately.
        """
        return self.roster is not None and self.silence(now) < self.rules.silence_s / 2

    def begin(self, roster: Roster, until: float) -> None:
        self.roster, self.phase, self.until = roster, Phase.EXCHANGING, until

    def owed(self, peers: frozenset[PeerId], now: float) -> None:
        self.owing = {peer: self.owing.get(peer, now) for peer in peers}
        self.broken &= peers

    def has_result(self, version: AnchorVersion, now: float) -> None:
        self.phase, self.version, self.prepared_at = Phase.PREPARED, version, now

    def overdue(self, now: float) -> bool:
        """Whether an honest convener would have committed by now, if most members have the result."""
        return self.phase is Phase.PREPARED and now - self.prepared_at > self.rules.silence_s

    def holders(self) -> frozenset[PeerId]:
        """The members that have said that they have our result, besides us."""
        return frozenset(peer for peer, version in self.prepared.items() if version == self.version)

    def piece_came(self, sender: PeerId, now: float) -> None:
        self.broken.discard(sender)
        if sender in self.owing:
            self.owing[sender] = now

    def waiting_for(self, now: float) -> tuple[PeerId, ...]:
        """The members that owe us pieces when none has come for longer than one should take."""
        return tuple(sorted(self._late(now, self._patience_s())))

    def was_waiting_for(self, now: float) -> frozenset[PeerId]:
        """As `waiting_for` with half the patience, for an attempt that ends in vain: others may have lost patience a
        little before us.
        """
        return self._late(now, self._patience_s() / 2)

    def _late(self, now: float, patience_s: float) -> frozenset[PeerId]:
        late = {peer for peer, since in self.owing.items() if now - since > patience_s}
        return frozenset(late | (self.broken & self.owing.keys()))

    def stalled(self, now: float) -> bool:
        """Whether the result will hardly become complete here any more: nothing has come since the commit for longer
        than a piece takes. Less patient than `waiting_for`, because the result can be had elsewhere by now."""
        latest = max(self.owing.values(), default=self.heard)
        if self.owing and self.owing.keys() <= self.broken:
            return True
        return now - max(latest, self.heard) > self.rules.silence_s + self._piece_s() * PIECE_SLACK / 2

    def _patience_s(self) -> float:
        members = 1 if self.roster is None else len(self.roster.members)
        return self.rules.silence_s + PIECE_SLACK * members * self._piece_s()

    def _piece_s(self) -> float:
        return self.rules.chunk_bytes / (self.bandwidth or ASSUMED_BANDWIDTH)

    def status(self, now: float) -> RoundControl | None:
        """The member's repeated report to the convener."""
        match self.phase:
            case Phase.PREPARING:
                return Accepting(self.round)
            case Phase.ENTERED:
                return self.entry
            case Phase.EXCHANGING:
                return Pulse(self.round, self.waiting_for(now), tuple(sorted(self.rejected)))
            case Phase.PREPARED:
                assert self.version is not None
                return Prepared(self.round, self.version)
            case Phase.FINISHING:
                return None


def can_be_meant(sender: PeerId, attempt: RoundId, view: ReplicaView) -> bool:
    """Whether an invitation deserves an answer: from the convener itself, with numbers that can be, and not from a
    repeated offender.
    """
    plausible = plausible_round(view.version, attempt.number) and 0 <= attempt.attempt < MAX_ATTEMPTS
    return attempt.convener == sender and plausible and sender not in view.penalties.excluded(view.now)


def refusal_of(invitation: Invitation, part: Participation | None, view: ReplicaView) -> DeclineReason | None:
    """The reason not to follow an invitation; None when we do.

    Args:
        part: what we take part in now.
    """
    attempt = invitation.round
    if attempt.number <= view.version.round:
        return DeclineReason.PAST
    if invitation.base != view.version:
        return DeclineReason.OTHER_ANCHOR
    if view.lag.catching is not None or attempt == view.attempt_log.ended:
        return DeclineReason.NOT_READY
    if (
        attempt.number,
        attempt.attempt,
    ) < view.attempt_log.highest or attempt.convener in view.attempt_log.refused:
        return DeclineReason.OTHER_CONVENER
    if part is not None and not _prefers(attempt, part, view):
        return DeclineReason.OTHER_CONVENER
    return None


def _prefers(other: RoundId, part: Participation, view: ReplicaView) -> bool:
    """Whether an attempt takes precedence over the one we are in."""
    current = part.round
    if (other.number, other.attempt) == (current.number, current.attempt):
        return part.roster is None and _precedence(other, view.version) < _precedence(current, view.version)
    if other.convener == current.convener:
        return True
    return part.phase is not Phase.FINISHING and not part.loyal(view.now)


def _precedence(attempt: RoundId, base: AnchorVersion) -> bytes:
    return precedence(attempt.module, base, attempt.number, attempt.convener)
