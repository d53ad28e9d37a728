"""One replica's view of its module: the other replicas, their anchors and work, and past attempts at rounds."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

from swarm.averaging.roster import MOST_STEPS
from swarm.averaging.round_events import OtherReplica, RoundRules, SendMessage, Signer
from swarm.averaging.schedule import due, fragments_of, leader_order, next_number, plausible_round, standing
from swarm.averaging.trust import FEWEST_ROUNDS, LATEST_INTERVALS, Penalties, UsualLength
from swarm.vocabulary import averaging_messages as messages
from swarm.vocabulary.statistics import ExponentialBackoff, Latest
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, Reasoned

ATTEMPTS_AT_ONCE = 4  # Attempts without a pause; then the leader backs off
ATTEMPTS = 16  # Attempts per round number. Then the leader takes the next number and invites all replicas again.
LONGEST_PAUSE_S = 30.0
_ROSTERS = 4
_COMMITS = 8

assert ATTEMPTS <= messages.MAX_ATTEMPTS


class AttemptLog:
    """Record of attempts at rounds since the latest anchor. Commits are kept longer, to answer late questions."""

    def __init__(self, rules: RoundRules) -> None:
        self._backoff = ExponentialBackoff(rules.answer_s, LONGEST_PAUSE_S)
        self.commits = Latest[messages.RoundId, messages.Commit](_COMMITS)
        self._failures = 0
        self.highest: tuple[int, int] = (0, 0)
        self.excluded: set[PeerId] = set()
        # Leaders whose roster we refused, or that dissolved attempts again; no longer followed in this round
        self.refused: set[PeerId] = set()
        self._dissolved: set[PeerId] = set()
        self.doubted: set[PeerId] = set()
        self.rosters: list[messages.Roster] = []
        self.quiet_until = 0.0
        self.due_since: float | None = None
        self.ended: messages.RoundId | None = None

    def next_attempt(self, module: ModuleId, own: PeerId, number: int) -> messages.RoundId:
        # Keep the number, and with it the pseudo-gradients, until a version with it exists or it had too many attempts.
        highest, attempt = self.highest
        if number <= highest and attempt + 1 < ATTEMPTS:
            return messages.RoundId(module, highest, attempt + 1, own)
        return messages.RoundId(module, max(number, highest + 1), 0, own)

    def follow(self, attempt: messages.RoundId) -> None:
        if attempt.number > self.highest[0]:
            self._forget_peers()
        self.highest = max(self.highest, (attempt.number, attempt.attempt))
        self.due_since = None

    def dissolved(self, leader: PeerId) -> None:
        (self.refused if leader in self._dissolved else self._dissolved).add(leader)

    def began(self, roster: messages.Roster) -> None:
        self.rosters = [*self.rosters, roster][-_ROSTERS:]

    def failed(self, now: float) -> None:
        self._failures += 1
        self.pause(now, self._backoff.seconds(self._failures))

    def pause(self, now: float, seconds: float) -> None:
        self.quiet_until = max(self.quiet_until, now + seconds)
        self.due_since = None

    def announced(self, commit: messages.Commit) -> None:
        self.commits[commit.round] = commit

    def new_anchor(self) -> None:
        self._failures = 0
        self.highest, self.quiet_until, self.due_since, self.ended = (0, 0), 0.0, None, None
        self.rosters = []
        self._forget_peers()

    def _forget_peers(self) -> None:
        self.excluded, self.refused, self.doubted, self._dissolved = set(), set(), set(), set()


# Time for which a replica's own message outranks its announcement, in seconds: announcements arrive late and reordered
REPORT_VALID_S = 30.0

PRESUMED_S = 5.0  # Time for which a member of our committed round is assumed to hold its result, in seconds

OVERTAKEN_S = 5.0  # Seconds in which a lower round is a reordered message; later, the replica restarted
NEW_TALLY_S = 30.0  # Time after which other replicas, too, must have the tallies of a data node
OLD_TALLY_S = 300.0  # Age, compared with ours, at which a roster's tallies are refused
PATIENCE_PULSES = 2  # Pulses for which versions must differ before we act: most differences are commits in flight
REMEMBERED = 16
HASTE = 0.5  # Share of the usual time between rounds
# Once in LATE_AGAIN rounds, a leader waits up to LATE_TIMES the usual time between rounds for replicas that catch up.
# Else a replica that downloads for longer than a round takes would follow the others forever.
LATE_TIMES: Final = 4
LATE_AGAIN: Final = 12


@dataclass(slots=True)
class _Known:
    serving: bool
    proven: bool
    announced: AnchorVersion
    reported: AnchorVersion | None = None
    reported_at: float = 0.0
    presumed: bool = False
    base: AnchorVersion | None = None
    steps: int = 0

    def version(self, now: float) -> AnchorVersion:
        return (
            self.reported if self.reported is not None and now - self.reported_at < REPORT_VALID_S else self.announced
        )


class OtherReplicas:
    """Anchors and work of the module's other live replicas, at most MAX_MEMBERS - 1."""

    def __init__(self) -> None:
        self._known: dict[PeerId, _Known] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._known

    def changed(self, others: Iterable[OtherReplica]) -> frozenset[PeerId]:
        before = self._known
        ordered = sorted(others, key=lambda replica: (not replica.proven, not replica.serving, replica.peer))
        # Names are free: those without proven work must not be most of a round.
        proven = sum(replica.proven for replica in ordered)
        listed = ordered[: min(2 * proven or messages.MAX_MEMBERS, messages.MAX_MEMBERS - 1)]
        self._known = {r.peer: before.get(r.peer) or _Known(r.serving, r.proven, r.version) for r in listed}
        for replica in listed:
            known = self._known[replica.peer]
            is_new = replica.version != known.announced
            if is_new and known.reported is not None and replica.version.round >= known.reported.round:
                known.reported = None
            known.serving, known.proven, known.announced = replica.serving, replica.proven, replica.version
        return frozenset(before) - frozenset(self._known)

    def reported(self, peer: PeerId, version: AnchorVersion, now: float) -> None:
        """Records the anchor version that a replica reports. Ignores unknown peers."""
        known = self._known.get(peer)
        if known is None:
            return
        recent = known.reported is not None and not known.presumed and now - known.reported_at < OVERTAKEN_S
        if not (recent and known.reported is not None and version.round < known.reported.round):
            known.reported, known.reported_at, known.presumed = version, now, False

    def presume(self, members: Iterable[PeerId], version: AnchorVersion, now: float) -> None:
        # Otherwise the first replica to commit is alone on its version for a moment, and finds the next round due.
        for peer in members:
            known = self._known.get(peer)
            if known is not None and known.version(now).round < version.round:
                known.reported, known.reported_at, known.presumed = version, now - REPORT_VALID_S + PRESUMED_S, True

    def worked(self, peer: PeerId, base: AnchorVersion, steps: int) -> None:
        known = self._known.get(peer)
        if known is not None and 0 <= steps <= MOST_STEPS:
            known.base, known.steps = base, steps

    @property
    def serving(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, known in self._known.items() if known.serving)

    @property
    def proven(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, known in self._known.items() if known.proven)

    @property
    def all(self) -> frozenset[PeerId]:
        return frozenset(self._known)

    def versions(self, now: float) -> dict[PeerId, AnchorVersion]:
        return {peer: known.version(now) for peer, known in self._known.items() if known.serving}

    def on(self, version: AnchorVersion, now: float) -> frozenset[PeerId]:
        return frozenset(peer for peer, stands in self.versions(now).items() if stands == version)

    def donors(self, version: AnchorVersion, now: float) -> tuple[PeerId, ...]:
        return tuple(sorted(peer for peer, known in self._known.items() if known.version(now) == version))

    def steps(self, base: AnchorVersion, now: float) -> list[int]:
        return [self._known[peer].steps for peer in self.on(base, now) if self._known[peer].base == base]


RETRY_S: Final = ExponentialBackoff(5.0, 60.0)


class ReplicaView:
    """Anchor, work and view of the other replicas, shared by `RoundMachine` and `Leader`. `RoundMachine` sets `now`."""

    def __init__(
        self, own: PeerId, module: ModuleId, rules: RoundRules, version: AnchorVersion, signer: Signer
    ) -> None:
        self.own = own
        self.signer = signer
        self.module = module
        self.rules = rules
        self.version = version
        self.now = 0.0
        self.steps = 0
        self.anchored_at: float | None = None
        self._intervals_s: deque[float] = deque(maxlen=LATEST_INTERVALS)
        self._by_round = False
        self._highest = 0
        self.others = OtherReplicas()
        self.tallies: tuple[messages.WorkTally, ...] = ()
        self._vouching_since: dict[PeerId, float] = {}
        self.attempt_log = AttemptLog(rules)
        self.penalties = Penalties()
        self.usual = UsualLength()
        self.catching: AnchorVersion | None = None
        self.waited_at = -math.inf  # Round after which a leader has waited for late replicas
        self._behind_since: float | None = None
        self._failures = Latest[AnchorVersion, tuple[float, int]](REMEMBERED)

    def prove(self, tallies: tuple[messages.WorkTally, ...]) -> None:
        self.tallies = tallies
        self._vouching_since = {t.data_node: self._vouching_since.get(t.data_node, self.now) for t in tallies}

    def unproven(self, signed: messages.SignedRoster) -> str | None:
        """Returns a reason not to follow a roster whose tallies are missing or old, compared with those we have."""
        theirs = {tally.data_node: tally.at for tally in signed.tallies}
        ours = {tally.data_node: tally.at for tally in self.tallies}
        if any(at < ours.get(data_node, at) - OLD_TALLY_S for data_node, at in theirs.items()):
            return "its tallies of work are old"
        long = {peer for peer, since in self._vouching_since.items() if self.now - since > NEW_TALLY_S}
        return "it lacks the tallies of work" if long and not long & theirs.keys() else None

    def _votes(self) -> dict[PeerId, AnchorVersion]:
        """Returns the anchors of replicas with proven work; all, if we have no state to lose or nothing is proven."""
        versions, proven = self.others.versions(self.now), self.others.proven
        if proven or (self.tallies and self.version.round > 0):
            return {peer: version for peer, version in versions.items() if peer in proven}
        return versions

    def standing(self) -> Reasoned[AnchorVersion]:
        """Returns the anchor version on which live replicas agree. Ignores versions whose download failed recently."""
        versions, distrusted = self._votes(), self.penalties.distrusted(self.now)
        held = Counter(versions.values())
        vain = {version for version, (until, _) in self._failures.items() if self.now < until}
        # A distrusted replica counts only if most replicas have its version.
        counted = {
            peer: version
            for peer, version in versions.items()
            if version not in vain and (peer not in distrusted or self.are_most(held[version]))
        }
        return standing(self.rules, self.version, counted)

    def are_most(self, others: int) -> bool:
        return 2 * others > len(self.others.serving) + 1

    def catch_up_failed(self, version: AnchorVersion, implausible: Iterable[PeerId]) -> None:
        self.catching = None
        count = self._failures.get(version, (0.0, 0))[1] + 1
        self._failures[version] = (self.now + RETRY_S.seconds(count), count)
        for peer in implausible:
            self.penalties.straying.add(peer, self.now)

    def may_lead(self) -> bool:
        """Whether we may lead a round: our anchor is the agreed one, or has differed from it for `longest_s`."""
        if not plausible_round(self.version, self.next_number()) or self.catching is not None:
            return False
        waited = self._behind_since is not None and self.now - self._behind_since > self.rules.longest_s
        return waited or self.standing().value == self.version

    def catch_up_target(self, best: AnchorVersion, certain: bool, busy: bool) -> AnchorVersion | None:
        """Returns `best` if it should replace our anchor now: not in a round (`busy`), at first only if `certain`."""
        if best == self.version or self.catching is not None:
            self._behind_since = None
            return None
        if self._behind_since is None:
            self._behind_since = self.now
        patient = not certain and self.now - self._behind_since < PATIENCE_PULSES * self.rules.pulse_s
        return None if busy or patient or best.round <= self.version.round else best

    def catch_up_started(self, version: AnchorVersion) -> None:
        self.catching, self._behind_since = version, None

    @property
    def anchored_s(self) -> float:
        return 0.0 if self.anchored_at is None else self.now - self.anchored_at

    def due(self) -> Reasoned[bool]:
        on = self.others.on(self.version, self.now)
        return due(self.rules, self.steps, self.others.steps(self.version, self.now), len(on) + 1, self.anchored_s)

    def patience_with_late_s(self) -> float:
        """Returns how long a leader may wait for replicas that catch up with our anchor."""
        whole = fragments_of(self.rules)
        if self.version.round - self.waited_at < LATE_AGAIN * whole:
            return self.rules.answer_s
        usual_s = median(self._intervals_s or (self.anchored_s,))
        return min(self.rules.prepare_s, max(self.rules.answer_s, LATE_TIMES * whole * usual_s))

    def next_number(self) -> int:
        """Returns the number of the next round, above all numbers seen, so that no number gets two results."""
        self._highest = max(self._highest, next_number(self.version, self._votes().values()))
        return max(self._highest, self.attempt_log.highest[0])

    def order(self) -> tuple[PeerId, ...]:
        shunned = self.penalties.excluded(self.now) | self.attempt_log.refused
        others = self.others.on(self.version, self.now) - shunned
        order = leader_order(self.module, self.version, self.next_number(), {self.own, *others})
        proven = self.others.proven
        # Replicas without proven work lead last.
        return tuple(sorted(order, key=lambda peer: bool(proven) and peer not in proven and peer != self.own))

    @property
    def hasty(self) -> bool:
        """Whether a round comes so early that we have no work for it, and perhaps only its leader has."""
        known = self._by_round and len(self._intervals_s) >= FEWEST_ROUNDS
        return known and not self.steps and self.anchored_s < HASTE * median(self._intervals_s)

    def stand_on(self, version: AnchorVersion, by_round: bool = False) -> list[SendMessage]:
        """Takes `version` as our anchor: the result of a round, or a downloaded one."""
        if self._by_round and by_round:
            self._intervals_s.append(self.anchored_s)
        self._by_round = by_round
        self.version, self.steps, self.anchored_at = version, 0, self.now
        self.attempt_log.new_anchor()
        self.catching = self._behind_since = None
        report = messages.Progress(self.module, version, 0, 0)
        return [SendMessage(peer, report) for peer in sorted(self.others.all)]
