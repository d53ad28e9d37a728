"""The view of the other replicas of our module: who is there, on which version each stands, how far each has worked.

Whether this replica is behind its module, and whom it follows when it is.

What a replica knows at this moment: where it stands, how far it is, who the others are and where they stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from swarm.averaging.roster import MOST_STEPS
from swarm.averaging.round_events import OtherReplica, RoundRules, Seal, Tell
from swarm.averaging.schedule import convener_order, due, next_number, plausible_round, standing
from swarm.averaging.trust import Penalties, UsualLength
from swarm.vocabulary.averaging_messages import MAX_ATTEMPTS, MAX_MEMBERS, Commit, Progress, Roster, RoundId
from swarm.vocabulary.backoff import ExponentialBackoff
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, Reasoned

ATTEMPTS_AT_ONCE = 4
"""So many without a pause; then the convener gives up for a while."""
ATTEMPTS = 16
"""For one round number. Then the next number is taken, and everybody is asked again."""
LONGEST_PAUSE_S = 30.0
_ROSTERS = 4
_COMMITS = 8

assert ATTEMPTS <= MAX_ATTEMPTS


class AttemptLog:
    """The attempts at the next round. Kept from one anchor to the next; the commits we announced are kept longer, for
    those who ask late.
    """

    def __init__(self, rules: RoundRules) -> None:
        self._backoff = ExponentialBackoff(rules.answer_s, LONGEST_PAUSE_S)
        self._commits: dict[RoundId, Commit] = {}
        self._failures = 0
        self.highest: tuple[int, int] = (0, 0)
        """(number, attempt) that we followed from this anchor."""
        self.left_out: set[PeerId] = set()
        self.refused: set[PeerId] = set()
        """Conveners whose roster we did not accept: they are not followed again at this round."""
        self.doubted: set[PeerId] = set()
        """Who alone had something against another member."""
        self.rosters: list[Roster] = []
        """Of the exchanges we began from this anchor, the latest few."""
        self.quiet_until = 0.0
        self.due_since: float | None = None
        self.ended: RoundId | None = None
        """The latest attempt that ended without a commit here."""

    def next_attempt(self, module: ModuleId, own: PeerId, number: int) -> RoundId:
        """Names the next attempt. The number stays the same from attempt to attempt, so that the pseudo-gradients do,
        unless a version of that number has turned up meanwhile, or the attempts have been too many."""
        highest, attempt = self.highest
        if number > highest:
            return RoundId(module, number, 0, own)
        return (
            RoundId(module, highest, attempt + 1, own)
            if attempt + 1 < ATTEMPTS
            else RoundId(module, highest + 1, 0, own)
        )

    def follow(self, attempt: RoundId) -> None:
        if attempt.number > self.highest[0]:
            self._forgive()
        self.highest = max(self.highest, (attempt.number, attempt.attempt))
        self.due_since = None

    def began(self, roster: Roster) -> None:
        self.rosters = [*self.rosters, roster][-_ROSTERS:]

    def failed(self, now: float) -> None:
        """Notes a failed attempt; a convener that gives up makes a longer and longer pause."""
        self._failures += 1
        self.pause(now, self._backoff.seconds(self._failures))

    def pause(self, now: float, seconds: float) -> None:
        self.quiet_until = max(self.quiet_until, now + seconds)
        self.due_since = None

    def announced(self, commit: Commit) -> None:
        self._commits[commit.round] = commit
        while len(self._commits) > _COMMITS:
            del self._commits[next(iter(self._commits))]

    def commit_of(self, attempt: RoundId) -> Commit | None:
        return self._commits.get(attempt)

    def new_anchor(self) -> None:
        self._failures = 0
        self.highest, self.quiet_until, self.due_since, self.ended = (0, 0), 0.0, None, None
        self._forgive()
        self.rosters = []

    def _forgive(self) -> None:
        self.left_out.clear()
        self.refused.clear()
        self.doubted.clear()


WORD_HOLDS_S = 30.0
"""What another replica told us itself is worth more than an announcement for so long: announcements come late and out
of order."""

PRESUMED_S = 5.0
"""A member of a round that we have committed is taken to stand on its result for so long without having said so: it is
about to."""

OVERTAKEN_S = 5.0
"""For so long after a replica has named a round, lower ones come from messages that were overtaken on the way. Later,
it has started anew."""
PATIENCE_PULSES = 2
"""So long a difference lasts before a replica acts on it: most are a commit's messages under way."""
REMEMBERED = 16


@dataclass(slots=True)
class _Known:
    serving: bool
    announced: AnchorVersion
    said: AnchorVersion | None = None
    said_at: float = 0.0
    presumed: bool = False
    """Nobody has said it."""
    base: AnchorVersion | None = None
    """Of the work below."""
    steps: int = 0

    def version(self, now: float) -> AnchorVersion:
        return self.said if self.said is not None and now - self.said_at < WORD_HOLDS_S else self.announced


class OtherReplicas:
    """The live replicas besides us, at most one less than a roster can hold."""

    def __init__(self) -> None:
        self._known: dict[PeerId, _Known] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._known

    def changed(self, others: Iterable[OtherReplica], now: float) -> frozenset[PeerId]:
        """Takes over a new membership view; returns who is gone."""
        before = self._known
        listed = sorted(others, key=lambda replica: (not replica.serving, replica.peer))[: MAX_MEMBERS - 1]
        self._known = {replica.peer: _renewed(before.get(replica.peer), replica, now) for replica in listed}
        return frozenset(before) - frozenset(self._known)

    def said(self, peer: PeerId, version: AnchorVersion, now: float) -> None:
        """Notes the version on which another replica says it stands. What strangers say is not kept."""
        known = self._known.get(peer)
        if known is None:
            return
        recent = known.said is not None and not known.presumed and now - known.said_at < OVERTAKEN_S
        if not (recent and known.said is not None and version.round < known.said.round):
            known.said, known.said_at, known.presumed = version, now, False

    def presume(self, members: Iterable[PeerId], version: AnchorVersion, now: float) -> None:
        """Presumes the members of a round that we have committed on its version. Whoever commits first would otherwise
        be alone on it for a moment, and could find the next round due for itself.
        """
        for peer in members:
            known = self._known.get(peer)
            if known is not None and known.version(now).round < version.round:
                known.said, known.said_at, known.presumed = version, now - WORD_HOLDS_S + PRESUMED_S, True

    def worked(self, peer: PeerId, base: AnchorVersion, steps: int) -> None:
        known = self._known.get(peer)
        if known is not None and 0 <= steps <= MOST_STEPS:
            known.base, known.steps = base, steps

    @property
    def serving(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, known in self._known.items() if known.serving)

    @property
    def all(self) -> frozenset[PeerId]:
        return frozenset(self._known)

    def versions(self, now: float) -> dict[PeerId, AnchorVersion]:
        """The versions on which the serving replicas stand."""
        return {peer: known.version(now) for peer, known in self._known.items() if known.serving}

    def on(self, version: AnchorVersion, now: float) -> frozenset[PeerId]:
        """The serving replicas that stand on the version."""
        return frozenset(peer for peer, stands in self.versions(now).items() if stands == version)

    def donors(self, version: AnchorVersion, now: float) -> tuple[PeerId, ...]:
        """All replicas that have the version, whether they serve or not."""
        return tuple(sorted(peer for peer, known in self._known.items() if known.version(now) == version))

    def steps(self, base: AnchorVersion, now: float) -> list[int]:
        """The work that those on `base` have reported, in inner steps."""
        return [self._known[peer].steps for peer in self.on(base, now) if self._known[peer].base == base]


def _renewed(known: _Known | None, replica: OtherReplica, now: float) -> _Known:
    if known is None:
        return _Known(replica.serving, replica.version)
    news = replica.version != known.announced
    known.serving, known.announced = replica.serving, replica.version
    if news and known.said is not None and replica.version.round >= known.said.round:
        known.said = None
    return known


RETRY_S: Final = ExponentialBackoff(5.0, 60.0)


@dataclass(slots=True)
class _Failure:
    until: float
    count: int


class Lag:
    """How far our anchor is behind the others', with patience: most differences are gone in a moment.

    Versions never go back: a module that stands on a lower or equal round, but on another anchor, is not followed
    before its next round, which gets a number above all that are seen.
    """

    def __init__(self, rules: RoundRules) -> None:
        self._rules = rules
        self._failures: dict[AnchorVersion, _Failure] = {}
        self._since: float | None = None
        self.catching: AnchorVersion | None = None
        """What we are getting now."""

    def standing(
        self, own: AnchorVersion, others: Mapping[PeerId, AnchorVersion], now: float
    ) -> Reasoned[AnchorVersion]:
        """The version that the module stands on, but for what could not be had lately."""
        vain = {version for version, failure in self._failures.items() if now < failure.until}
        return standing(self._rules, own, {peer: version for peer, version in others.items() if version not in vain})

    def may_convene(self, own: AnchorVersion, best: AnchorVersion, now: float) -> bool:
        """Whether a round may start from our anchor: not when the module has left it. If nothing comes of waiting, it
        goes on after `longest_s`.
        """
        if self.catching is not None:
            return False
        return best == own or (self._since is not None and now - self._since > self._rules.longest_s)

    def target(
        self, own: AnchorVersion, best: AnchorVersion, now: float, certain: bool, busy: bool
    ) -> AnchorVersion | None:
        """The version to catch up to now; None when there is no need, no way, or when it may settle by itself.

        Args:
            certain: more than half of all replicas stand there.
            busy: a round is under way here; it comes first.
        """
        if best == own or self.catching is not None:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        patient = not certain and now - self._since < PATIENCE_PULSES * self._rules.pulse_s
        return None if busy or patient or best.round <= own.round else best

    def started(self, version: AnchorVersion) -> None:
        self.catching, self._since = version, None

    def failed(self, version: AnchorVersion, now: float) -> None:
        """Notes that a version could not be had. It is tried again later and later; of the versions that failed the
        latest few are remembered.
        """
        self.catching = None
        before = self._failures.pop(version, None)
        count = 1 if before is None else before.count + 1
        self._failures[version] = _Failure(now + RETRY_S.seconds(count), count)
        while len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def moved(self) -> None:
        """Notes that we stand on another anchor."""
        self.catching = self._since = None


class ReplicaView:
    """This replica's view of its module. Shared by the parts of one `RoundMachine`, which keeps `now` up to date."""

    def __init__(self, own: PeerId, module: ModuleId, rules: RoundRules, version: AnchorVersion, seal: Seal) -> None:
        self.own = own
        self.seal = seal
        self.module = module
        self.rules = rules
        self.version = version
        self.now = 0.0
        self.steps = 0
        """Our own since our anchor."""
        self.anchored_at: float | None = None
        """Since when we stand on our anchor; None before the first event."""
        self._highest = 0
        self.others = OtherReplicas()
        self.attempt_log = AttemptLog(rules)
        self.penalties = Penalties()
        self.lag = Lag(rules)
        self.usual = UsualLength()

    def standing(self) -> Reasoned[AnchorVersion]:
        """The version that the module stands on, as we see it. Whom we distrust is followed where most replicas stand,
        and nowhere else."""
        versions, distrusted = self.others.versions(self.now), self.penalties.distrusted(self.now)
        held = Counter(versions.values())
        counted = {
            peer: version
            for peer, version in versions.items()
            if peer not in distrusted or self.are_most(held[version])
        }
        return self.lag.standing(self.version, counted, self.now)

    def are_most(self, others: int) -> bool:
        """Whether so many others are more than half of all serving replicas, we included."""
        return 2 * others > len(self.others.serving) + 1

    def catch_up_failed(self, version: AnchorVersion, astray: Iterable[PeerId]) -> None:
        """Notes that a version could not be had, and who is not to be followed for a while because it stands there."""
        self.lag.failed(version, self.now)
        for peer in astray:
            self.penalties.strayed(peer, self.now)

    def may_convene(self) -> bool:
        """Whether a round from our anchor is what the module needs, and there is a number left for it."""
        possible = plausible_round(self.version, self.next_number())
        return possible and self.lag.may_convene(self.version, self.standing().value, self.now)

    @property
    def anchored_s(self) -> float:
        """The seconds for which we have stood on our anchor."""
        return 0.0 if self.anchored_at is None else self.now - self.anchored_at

    def due(self) -> Reasoned[bool]:
        on = self.others.on(self.version, self.now)
        return due(self.rules, self.steps, self.others.steps(self.version, self.now), len(on) + 1, self.anchored_s)

    def next_number(self) -> int:
        """The number of the next round: above every version we have ever seen, also of replicas that are gone now, so
        that no number gets two results only because somebody was away.
        """
        self._highest = max(self._highest, next_number(self.version, self.others.versions(self.now).values()))
        return max(self._highest, self.attempt_log.highest[0])

    def order(self) -> tuple[PeerId, ...]:
        """The order of conveners of the next round: the serving replicas on our anchor, we included."""
        others = self.others.on(self.version, self.now) - self.penalties.excluded(self.now)
        return convener_order(self.module, self.version, self.next_number(), {self.own, *others})

    def stand_on(self, version: AnchorVersion) -> list[Tell]:
        """Takes our new anchor; all others learn it from ourselves."""
        self.version, self.steps, self.anchored_at = version, 0, self.now
        self.attempt_log.new_anchor()
        self.lag.moved()
        report = Progress(self.module, version, 0, 0)
        return [Tell(peer, report) for peer in sorted(self.others.all)]
