"""State machine of one replica's averaging rounds: takes events, returns actions (`swarm.averaging.round_events`).

Invariants under any failure:

* Replicas follow the highest (number, attempt); if two are equal, the leader that is first in hash order. Members of a
  running exchange stay with a live leader. A silent leader is replaced, silent or rejected members are excluded.
* A replica keeps a prepared result until its anchor changes, and names it in every entry. While a majority of an
  earlier roster may have prepared a result, no new exchange starts: a peer may have committed it.
* A replica applies only a result prepared from its own anchor, after a Commit or when another replica has applied it.
* A replica leaves its anchor only for the module's agreed one (`schedule.standing`), and only for a higher round.
"""

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.averaging import round_events as events
from swarm.averaging.leader import Answer, GivenUp, Leader, TryAgain
from swarm.averaging.replica_view import ATTEMPTS_AT_ONCE, ReplicaView
from swarm.averaging.roster import GRACE_S, contributors, exchange_pace, leads_to, make_roster, objection, oddity
from swarm.averaging.round_events import Action, RoundRules, SendMessage, Signer
from swarm.averaging.schedule import INFORMED, leader_order, plausible_round, precedence
from swarm.averaging.trust import measured_of
from swarm.vocabulary import averaging_messages as messages
from swarm.vocabulary.averaging_messages import DeclineReason, RoundId
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, short

GAP_S = 0.5  # Pause between calls that counts as a stopped process, in seconds. Usual: 0.1
PIECE_SLACK = 4.0  # Factor on the expected time of a piece before its sender counts as late


class MemberPhase(enum.Enum):
    """Phase of a member in an attempt at a round. Until FINISHING it repeats its status, in case messages are lost."""

    PREPARING = "prepares"
    ENTERED = "waits for the roster"
    EXCHANGING = "exchanges"
    PREPARED = "has the result"
    FINISHING = "still lacks part of the committed result"


@dataclass(slots=True)
class Participation:
    """State of this replica as a member of one attempt at a round."""

    round: RoundId
    heard: float
    rules: events.RoundRules
    began: float = field(init=False)
    until: float = field(init=False)  # Time until which an honest leader has ended the attempt
    phase: MemberPhase = MemberPhase.PREPARING
    entry: messages.Entry | None = None
    bandwidth: float = 0.0  # To the leader; with a roster of the slowest, on whose pieces all others depend
    longest: float = math.inf
    roster: messages.Roster | None = None
    entries: tuple[messages.Entry, ...] = ()
    version: AnchorVersion | None = None
    prepared_at: float = 0.0
    prepared: dict[PeerId, AnchorVersion] = field(default_factory=dict)
    reported_at: float = 0.0
    link_lost: bool = False
    owing: dict[PeerId, float] = field(default_factory=dict)  # Time of the last piece, or since when we wait
    broken: set[PeerId] = field(default_factory=set)
    rejected: set[PeerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.began, self.until = self.heard, self.heard + self.rules.prepare_s + GRACE_S

    def silence(self, now: float) -> float:
        """Returns the seconds since the leader's last message; a broken link to the leader adds half of the timeout."""
        return now - self.heard + (self.patience_s() / 2 if self.link_lost else 0.0)

    def patience_s(self) -> float:
        """Returns the longest silence of a leader that is not lost. Its messages queue behind pieces."""
        return self.rules.silence_s + self.rules.piece_s(self.bandwidth)

    def overdue(self, now: float) -> bool:
        return self.phase is MemberPhase.PREPARED and now - self.prepared_at > self.rules.silence_s

    def waiting_for(self, now: float, share: float = 1.0) -> tuple[PeerId, ...]:
        """Returns the members whose link broke, or whose next piece took longer than `share` of the allowed time."""
        late = {peer for peer, since in self.owing.items() if now - since > share * self._gap_s(PIECE_SLACK)}
        return tuple(sorted(late | (self.broken & self.owing.keys())))

    def stalled(self, now: float) -> bool:
        if self.owing and self.owing.keys() <= self.broken:
            return True
        latest = max(self.owing.values(), default=self.heard)
        return now - max(latest, self.heard) > self._gap_s(PIECE_SLACK / 2)

    def _gap_s(self, slack: float) -> float:
        """Returns the longest time between two pieces of a member, which sends to all others in turn."""
        members = 1 if self.roster is None else len(self.roster.members)
        return self.rules.silence_s + slack * members * self.rules.piece_s(self.bandwidth)

    def status(self, now: float) -> messages.RoundControl | None:
        match self.phase:
            case MemberPhase.PREPARING:
                return messages.Accepting(self.round)
            case MemberPhase.ENTERED:
                return self.entry
            case MemberPhase.EXCHANGING:
                return messages.Pulse(self.round, self.waiting_for(now), tuple(sorted(self.rejected)))
            case MemberPhase.PREPARED:
                assert self.version is not None
                return messages.Prepared(self.round, self.version)
            case MemberPhase.FINISHING:
                return None


def _refusal_of(invitation: messages.Invitation, part: Participation | None, view: ReplicaView) -> DeclineReason | None:
    attempt = invitation.round
    if attempt.number <= view.version.round:
        return DeclineReason.PAST
    if invitation.base != view.version:
        return DeclineReason.OTHER_ANCHOR
    if view.catching is not None or attempt == view.attempt_log.ended:
        return DeclineReason.NOT_READY
    if attempt.convener != view.own and view.hasty:
        return DeclineReason.NOT_READY
    outdated = (attempt.number, attempt.attempt) < view.attempt_log.highest
    refused = outdated or attempt.convener in view.attempt_log.refused
    return DeclineReason.OTHER_CONVENER if refused or (part and not _prefers(attempt, part, view)) else None


def _prefers(other: RoundId, part: Participation, view: ReplicaView) -> bool:
    """Whether we should leave our current attempt at a round, `part`, for another leader's attempt, `other`."""
    current = part.round
    if (other.number, other.attempt) == (current.number, current.attempt):
        ours, theirs = (
            precedence(attempt.module, view.version, attempt.number, attempt.convener) for attempt in (current, other)
        )
        return part.roster is None and theirs < ours
    # Members of a running exchange stay with a live leader.
    loyal = part.roster is not None and part.silence(view.now) < part.patience_s() / 2
    return other.convener == current.convener or not (part.phase is MemberPhase.FINISHING or loyal)


Actions = list[Action]
PATIENCE = 2.0  # Factor on the time limit of an exchange after which members leave a live leader
FORGED_ENTRY = "its entry has a bad signature or impossible figures"
ToLeader = messages.Accepting | messages.Entry | messages.Declined | messages.Pulse | messages.Prepared


class RoundMachine:
    """State machine by which one replica leads and joins the averaging rounds of its module."""

    def __init__(
        self, own: PeerId, module: ModuleId, rules: RoundRules, version: AnchorVersion, signer: Signer
    ) -> None:
        self._view = ReplicaView(own, module, rules, version, signer)
        self._leading: Leader | None = None
        self._part: Participation | None = None
        self._staged: events.CommitStaged | None = None
        self._latest = ""
        self._last_call: float | None = None
        self._slept = 0.0
        self._seen = False
        self._is_leaving = False
        self._alone: bool | None = None
        self._alone_since: float | None = None

    @property
    def version(self) -> AnchorVersion:
        return self._view.version

    @property
    def current_attempt(self) -> RoundId | None:
        return None if self._part is None else self._part.round

    @property
    def settled(self) -> bool:
        """Whether this replica may serve: it knows the other replicas, and its anchor is the agreed one."""
        return self._seen and self._view.catching is None and self._view.standing().value == self.version

    @property
    def is_behind(self) -> bool:
        return self._view.catching is not None or self._view.standing().value.round > self.version.round

    @property
    def is_alone(self) -> bool:
        """Whether no other replica of the module has served for a while, so that the outer step needs no round."""
        return self._alone is True

    @property
    def accused(self) -> frozenset[PeerId]:
        return self._view.penalties.accused(self._view.now)

    @property
    def in_company(self) -> bool:
        return bool(self._view.others.serving)

    def describe(self) -> str:
        view, part = self._view, self._part
        where = f"round {self.version.round}"
        if view.catching is not None:
            return f"{where}, catching up to round {view.catching.round}"
        if part is not None:
            attempt = part.round
            leader = "we lead" if attempt.convener == view.own else f"{short(attempt.convener)} leads"
            return f"{where}; round {attempt.number} attempt {attempt.attempt}, {leader}: {part.phase.value}"
        if self._alone:
            return f"{where}, alone, {view.steps} inner steps since"
        latest = f"; {self._latest}" if self._latest else ""
        return f"{where}; {view.standing().reason}; {view.due().reason}{latest}"

    def handle(self, event: events.Event, now: float) -> Actions:
        """Updates the state by an event and returns the actions to take, in order. Ignores events of past attempts."""
        view = self._view
        # The clock stops while the process is suspended: a computer that wakes up must not count others as silent.
        gap = 0.0 if self._last_call is None else now - self._last_call
        slept = gap if gap > GAP_S else min(gap, 0.0)
        self._last_call, self._slept = now, self._slept + slept
        view.now = now - self._slept
        if view.anchored_at is None:
            view.anchored_at = view.now
        actions: Actions = []
        if slept >= view.rules.silence_s:
            actions += self._leave(f"this process did not run for {slept:.1f} s")
            view.attempt_log.pause(view.now, view.rules.answer_s)
        to_ourselves: deque[messages.RoundControl] = deque()
        produced = self._react(event)
        while produced or to_ourselves or (produced := self._follow_up()):
            for action in produced:
                if isinstance(action, SendMessage) and action.to == view.own:
                    to_ourselves.append(action.message)
                else:
                    actions.append(action)
            produced = self._about_attempt(view.own, to_ourselves.popleft()) if to_ourselves else []
        return actions

    def _react(self, event: events.Event) -> Actions:
        if isinstance(event, events.AttemptEvent):
            return self._attempt_event(event)
        match event:
            case events.MessageArrived(sender, message):
                return self._arrived(sender, message)
            case events.ReplicasChanged():
                return self._replicas_changed(event)
            case events.Worked(steps, tokens):
                return self._worked(steps, tokens)
            case events.LinkLost(peer):
                return self._link_lost(peer)
            case events.CaughtUp(version):
                return [*self._forget("we have another anchor"), *self._view.stand_on(version)]
            case events.Caught(peer):
                penalties = self._view.penalties
                (penalties.fraud if event.certain else penalties.silence).add(peer, self._view.now)
                return [event]
            case events.CatchUpFailed(wanted):
                self._view.catch_up_failed(wanted, event.implausible)
            case events.Tick():
                pass
        return []

    def _follow_up(self) -> Actions:
        """Returns the next actions of the round that are due by time or state. Called again until no action is due."""
        return (
            self._adopt_if_others_did()
            or self._notice_company()
            or self._advance()
            or self._upkeep()
            or self._catch_up_if_behind()
            or self._lead_if_due()
        )

    def _arrived(self, sender: PeerId, message: messages.RoundControl) -> Actions:
        view = self._view
        module = message.module if isinstance(message, messages.Progress) else message.round.module
        if sender not in view.others or module != view.module:
            return []
        match message:
            case messages.Progress(_, base, steps, _):
                view.others.reported(sender, base, view.now)
                view.others.worked(sender, base, steps)
            case messages.Invitation(_, base) | messages.SignedRoster(_, base):
                view.others.reported(sender, base, view.now)
            case messages.Declined(_, _, version):
                view.others.reported(sender, version, view.now)
            case messages.Commit(_, version, holders) if sender in holders:
                view.others.reported(sender, version, view.now)
            case _:
                pass
        return [*self._adopt_if_others_did(), *self._about_attempt(sender, message)]

    def _replicas_changed(self, event: events.ReplicasChanged) -> Actions:
        view = self._view
        self._seen = True
        self._is_leaving = event.leaving
        view.prove(event.tallies)
        gone = view.others.changed(replica for replica in event.others if replica.peer != view.own)
        return [action for peer in sorted(gone) for action in self._link_lost(peer)]

    def _worked(self, steps: int, tokens: int) -> Actions:
        view = self._view
        if steps == view.steps:  # after a commit: our report of the new anchor included these steps
            return []
        view.steps = steps
        report = messages.Progress(view.module, view.version, steps, tokens)
        return [SendMessage(peer, report) for peer in view.order()[:INFORMED] if peer != view.own]

    def _notice_company(self) -> Actions:
        view, alone = self._view, not self._view.others.serving
        if self._alone_since is None or not alone:
            self._alone_since = view.now
        # After a long sleep all announcements have expired, and new ones are in flight.
        lasts = self._alone is None or view.now - self._alone_since >= view.rules.answer_s
        if not self._seen or alone == self._alone or (alone and not lasts):
            return []
        self._alone = alone
        if not alone:
            return []
        # A peer that has left may have committed our complete result.
        return self._forget("no other replica is left") if self._staged is None else self._adopt(self._staged)

    def _catch_up_if_behind(self) -> Actions:
        view = self._view
        best = view.standing()
        certain = view.are_most(len(view.others.on(best.value, view.now)))
        wanted = view.catch_up_target(best.value, certain, self._part is not None)
        if wanted is None:
            return []
        view.catch_up_started(wanted)
        donors = view.others.donors(wanted, view.now)
        return [*self._forget("catching up"), events.CatchUp(wanted, donors, best.reason, certain)]

    def _lead_if_due(self) -> Actions:
        """Opens a round that is due: at once if we are first to lead, else when the leaders before us time out."""
        view = self._view
        attempt_log = view.attempt_log
        if not view.others.serving or self._part is not None or view.now < attempt_log.quiet_until or view.hasty:
            return []
        if self._is_leaving:  # the result of a round of its own would leave with it
            return []
        due = view.due()
        if not (due.value and view.may_lead()):
            attempt_log.due_since = None
            return []
        if attempt_log.due_since is None:
            attempt_log.due_since = view.now
        if view.now - attempt_log.due_since < view.order().index(view.own) * view.rules.answer_s:
            return []
        return self._open(due.reason)

    def _open(self, why: str) -> Actions:
        view = self._view
        attempt = view.attempt_log.next_attempt(view.module, view.own, view.next_number())
        view.attempt_log.follow(attempt)
        away = view.attempt_log.excluded | view.penalties.excluded(view.now)
        self._leading = Leader(view, attempt, {view.own, *(view.others.serving - away)})
        self._latest = f"opened round {attempt.number} attempt {attempt.attempt}: {why}"
        return [*self._leading.open()]

    def _invited(self, sender: PeerId, invitation: messages.Invitation) -> Actions:
        view, attempt = self._view, invitation.round
        plausible = plausible_round(view.version, attempt.number) and 0 <= attempt.attempt < messages.MAX_ATTEMPTS
        if attempt.convener != sender or not plausible or sender in view.penalties.excluded(view.now):
            return []
        if self._part is not None and self._part.round == attempt:
            return self._tell_leader(self._part)
        refusal = _refusal_of(invitation, self._part, view)
        if refusal is not None:
            return [SendMessage(sender, messages.Declined(attempt, refusal, view.version))]
        return self._follow(attempt)

    def _follow(self, attempt: RoundId) -> Actions:
        view = self._view
        actions: Actions = []
        if self._leading is not None and self._leading.round != attempt:
            actions += self._leading.dissolve("another leader takes precedence")
            self._leading = None
        elif self._part is not None and self._part.round.convener not in (view.own, attempt.convener):
            declined = messages.Declined(self._part.round, DeclineReason.OTHER_CONVENER, view.version)
            actions.append(SendMessage(self._part.round.convener, declined))
        self._remember_delays()
        self._part = Participation(attempt, view.now, view.rules)
        view.attempt_log.follow(attempt)
        return [*actions, *self._tell_leader(self._part), events.TakeSnapshot(attempt, view.version.fragment)]

    def _tell_leader(self, part: Participation) -> Actions:
        part.reported_at = self._view.now
        status = part.status(self._view.now)
        return [] if status is None else [SendMessage(part.round.convener, status)]

    def _leave(self, why: str) -> Actions:
        self._remember_delays()
        part, self._part, self._leading = self._part, None, None
        if part is None:
            return []
        self._latest = f"round {part.round.number} attempt {part.round.attempt} ended: {why}"
        attempt_log = self._view.attempt_log
        attempt_log.ended, attempt_log.due_since = part.round, None
        # Once an exchange has started from this anchor, later attempts reuse the pseudo-gradient. A prepared result is
        # kept, even of an earlier round.
        kept = part.round.number if attempt_log.rosters else part.round.number + 1
        if self._staged is not None:
            kept = min(kept, self._staged.version.round)
        return [events.Release(kept - 1, why)]

    def _remember_delays(self) -> None:
        if self._part is not None:
            # Other members may have given up slightly earlier, so half of the allowed time counts.
            for peer in self._part.waiting_for(self._view.now, 0.5):
                self._view.penalties.waiting.add(peer, self._view.now)

    def _forget(self, why: str) -> Actions:
        number = self._view.attempt_log.highest[0]
        self._part = self._leading = self._staged = None
        return [events.Release(number, why)] if number else []

    def _decline(self, part: Participation, reason: DeclineReason, why: str) -> Actions:
        declined = messages.Declined(part.round, reason, self._view.version)
        return [SendMessage(part.round.convener, declined), *self._leave(why)]

    def _about_attempt(self, sender: PeerId, message: messages.RoundControl) -> Actions:
        if isinstance(message, messages.Pulse) and message.round.convener == sender:
            self._hear_leader(sender, message.round)
        match message:
            case messages.Invitation():
                return self._invited(sender, message)
            case messages.SignedRoster():
                return self._roster_came(sender, message)
            case messages.Commit():
                return self._commit_came(sender, message)
            case messages.Dissolved(attempt, detail):
                if not self._hear_leader(sender, attempt) or sender == self._view.own:
                    return []
                self._view.attempt_log.dissolved(sender)
                self._view.attempt_log.pause(self._view.now, 2 * self._view.rules.answer_s)
                return self._leave(detail)
            case messages.Accepting() | messages.Entry() | messages.Declined() | messages.Pulse() | messages.Prepared():
                return self._for_leader(sender, message)
            case _:
                return []

    def _hear_leader(self, sender: PeerId, attempt: RoundId) -> bool:
        part = self._part
        if part is None or part.round != attempt or attempt.convener != sender:
            return False
        part.heard, part.link_lost = self._view.now, False
        return True

    def _for_leader(self, sender: PeerId, message: ToLeader) -> Actions:
        view, attempt = self._view, message.round
        if self._leading is not None and self._leading.round == attempt:
            tells = self._leading.hear(sender, message, view.now)
            forged = isinstance(message, messages.Entry) and sender in self._leading.forgers
            return [*tells, *(self._accuse(sender, attempt, FORGED_ENTRY) if forged else [])]
        part = self._part
        if isinstance(message, messages.Prepared) and part is not None and part.round == attempt:
            if part.roster is not None and sender in part.roster.peers:
                part.prepared[sender] = message.version
            return self._commit_without_leader(part)
        if isinstance(message, messages.Declined):
            past = message.reason is DeclineReason.PAST
            return self._leave("this round is over") if past and self._hear_leader(sender, attempt) else []
        if attempt.convener != view.own or (self._leading is not None and sender in self._leading.invitees):
            return []
        commit = view.attempt_log.commits.get(attempt)
        if commit is not None:
            return [SendMessage(sender, commit)]
        if attempt.number <= view.version.round:
            return [SendMessage(sender, messages.Declined(attempt, DeclineReason.PAST, view.version))]
        return [SendMessage(sender, messages.Dissolved(attempt, "this attempt is over"))]

    def _roster_came(self, sender: PeerId, signed: messages.SignedRoster) -> Actions:
        view, part = self._view, self._part
        if part is None or part.entry is None or not self._hear_leader(sender, signed.round):
            return []
        if part.phase is not MemberPhase.ENTERED:
            return []
        if view.now - part.began > 2 * view.rules.answer_s:
            view.waited_at = view.version.round
        if sender != view.own:
            here = view.others.on(view.version, view.now)
            strange = oddity(signed, view.own, view.others.all, here) or view.unproven(signed)
            wrong = strange or objection(view.rules, signed, part.entry, view.signer)
            if wrong is not None:
                return self._refuse(part, wrong, lie=strange is None)
            leader = next(entry for entry in signed.entries if entry.peer == sender)
            if view.usual.too_short(leader, part.entry):
                return self._refuse(part, "its update is far too small for its work", lie=True)
        roster = make_roster(view.rules, signed)
        if roster is None:
            return self._refuse(part, "no member of it has worked", lie=True)
        longest = max(part.longest, part.entry.norm)
        if roster.largest_norm > longest:
            why = f"its mean may have norm {roster.largest_norm:.3g}, and training explains {longest:.3g}"
            return self._refuse(part, why, lie=False)
        part.roster, part.phase, part.entries = roster, MemberPhase.EXCHANGING, signed.entries
        part.bandwidth, limit_s = exchange_pace(view.rules, signed, part.bandwidth)
        part.until = view.now + PATIENCE * limit_s
        view.attempt_log.began(roster)
        return [events.Exchange(roster)]

    def _refuse(self, part: Participation, why: str, lie: bool) -> Actions:
        """Leaves the attempt and ignores its leader for the round. `lie`: no honest leader sends such a roster."""
        view, leader = self._view, part.round.convener
        accused: Actions = []
        if lie:
            accused = self._accuse(leader, part.round, f"its roster is impossible: {why}")
            view.attempt_log.excluded.add(leader)
        view.attempt_log.refused.add(leader)
        return [*accused, *self._decline(part, DeclineReason.NOT_READY, f"we do not follow {short(leader)}: {why}")]

    def _accuse(self, peer: PeerId, attempt: RoundId, why: str) -> Actions:
        self._view.penalties.rubbish.add(peer, self._view.now)
        return [events.Caught(peer, attempt.number, why)]

    def _commit_came(self, sender: PeerId, commit: messages.Commit) -> Actions:
        if self._staged is not None and self._staged.version == commit.version:
            return self._adopt(self._staged)
        part = self._part
        if part is None or not self._hear_leader(sender, commit.round):
            return []
        exchanging = part.phase in (MemberPhase.EXCHANGING, MemberPhase.FINISHING) and part.roster is not None
        if exchanging and part.roster is not None and leads_to(self._view.rules, part.roster, commit.version):
            part.phase, part.version = MemberPhase.FINISHING, commit.version
            return []
        return self._leave("it committed a result that we lack")

    def _attempt_event(self, event: events.AttemptEvent) -> Actions:
        """Handles an event of the current attempt. Ignores events of other attempts."""
        part, now = self._part, self._view.now
        accused = self._accuse(event.sender, event.round, event.why) if isinstance(event, events.PieceRejected) else []
        if part is None or event.round != part.round:
            return self._not_wanted(event.version) if isinstance(event, events.Staged) else accused
        match event:
            case events.SnapshotTaken():
                return self._snapshot_taken(part, event)
            case events.SnapshotBroken():
                self._view.steps = 0
                return self._decline(part, DeclineReason.BROKEN, "our own update is not finite")
            case events.Staged(_, version):
                return self._staged_came(part, version)
            case events.PieceArrived(_, sender):
                part.broken.discard(sender)
                if sender in part.owing:
                    part.owing[sender] = now
                # On a slow link short messages queue behind pieces, so a piece is a sign of life, too.
                part.heard = now if sender == part.round.convener else part.heard
                if self._leading is not None and sender in self._leading.invitees:
                    self._leading.invitees[sender].heard = now
            case events.Owing(_, peers):
                part.owing = {peer: part.owing.get(peer, now) for peer in peers}
                part.broken &= peers
            case events.PieceRejected(_, sender, why):
                self._latest = f"a piece of {sender} was rejected: {why}"
                return [*accused, *self._piece_rejected(part, sender)]
        return []

    def _snapshot_taken(self, part: Participation, taken: events.SnapshotTaken) -> Actions:
        if part.phase is not MemberPhase.PREPARING:
            return []
        staged = None if self._staged is None else self._staged.version
        view = self._view
        measured = measured_of(taken.received, view.version)
        figures = (taken.steps, taken.tokens, taken.norm)
        entry = messages.Entry(view.own, taken.round, view.version, *figures, measured, staged)
        part.entry, part.phase = view.signer.sign(entry), MemberPhase.ENTERED
        part.bandwidth, part.longest = taken.slowest([part.round.convener]), taken.longest
        if self._leading is not None:
            self._leading.prepared(taken)
        return self._tell_leader(part)

    def _piece_rejected(self, part: Participation, sender: PeerId) -> Actions:
        part.rejected.add(sender)
        if sender == part.round.convener:
            self._view.attempt_log.excluded.add(sender)
            return self._decline(part, DeclineReason.NOT_READY, "the leader sent unusable data")
        return self._tell_leader(part)

    def _staged_came(self, part: Participation, version: AnchorVersion) -> Actions:
        roster = part.roster
        if roster is None or part.phase not in (MemberPhase.EXCHANGING, MemberPhase.FINISHING):
            return self._not_wanted(version)
        if not leads_to(self._view.rules, roster, version):
            declined = self._decline(part, DeclineReason.BROKEN, "our result does not match the roster")
            return [*declined, *self._not_wanted(version)]
        result = events.CommitStaged(roster, version)
        if part.phase is MemberPhase.FINISHING and version == part.version:
            return self._adopt(result)
        if part.phase is MemberPhase.FINISHING:
            return [*self._leave("our result differs from the committed one"), *self._not_wanted(version)]
        before, self._staged = self._staged, result
        part.phase, part.version, part.prepared_at = MemberPhase.PREPARED, version, self._view.now
        return [*([] if before is None else self._not_wanted(before.version)), *self._tell_leader(part)]

    def _not_wanted(self, version: AnchorVersion) -> Actions:
        return [] if self._staged is not None and self._staged.version == version else [events.DropStaged(version)]

    def _link_lost(self, peer: PeerId) -> Actions:
        """Shortens the timeouts of a peer whose link broke. Tells the leader at once if this peer owes us pieces."""
        if self._leading is not None:
            self._leading.lost(peer)
        part = self._part
        if part is None:
            return []
        part.link_lost = part.link_lost or peer == part.round.convener
        if peer not in part.owing or peer in part.broken:
            return []
        part.broken.add(peer)
        return [] if peer == part.round.convener else self._tell_leader(part)

    def _adopt_if_others_did(self) -> Actions:
        """Commits our prepared result if another replica has it as its anchor, which proves a commit."""
        staged, view = self._staged, self._view
        if staged is None or not view.others.on(staged.version, view.now):
            return []
        return self._adopt(staged)

    def _adopt(self, result: events.CommitStaged) -> Actions:
        view = self._view
        others: Sequence[Action] = () if self._leading is None else self._leading.dissolve("the result is complete")
        if self._part is not None and self._part.round == result.roster.round:
            view.usual.committed(self._part.entries)
        self._part = self._leading = self._staged = None
        attempt = result.roster.round
        self._latest = f"round {attempt.number} committed by {len(result.roster.peers)} at attempt {attempt.attempt}"
        for peer in contributors(result.roster):
            view.penalties.waiting.forgive(peer)
        view.others.presume(result.roster.peers, result.version, view.now)
        return [*others, result, *view.stand_on(result.version, by_round=True)]

    def _advance(self) -> Actions:
        leading, view = self._leading, self._view
        if leading is None:
            return []
        tells, verdict = leading.advance(view.now)
        if leading.roster is None and verdict is None and not view.may_lead():
            verdict = GivenUp(f"the module has a newer anchor: {view.standing().reason}")
        match verdict:
            case messages.Commit():
                return [*tells, *self._settle(leading, verdict)]
            case TryAgain(without, why, accuser):
                view.attempt_log.doubted |= set() if accuser is None else {accuser}
                return [*tells, *self._try_again(leading, without, why)]
            case GivenUp(why):
                view.attempt_log.failed(view.now)
                return [*tells, *leading.dissolve(why), *self._leave(why)]
            case None:
                return [*tells]

    def _settle(self, leading: Leader, commit: messages.Commit) -> Actions:
        view, version, holders = self._view, commit.version, commit.holders
        view.attempt_log.announced(commit)
        self._leading = None
        actions: Actions = [SendMessage(peer, commit) for peer in sorted({*leading.invitees, *view.others.serving})]
        if leading.roster is None and view.own not in holders:
            donors = tuple(peer for peer in holders if peer in view.others)
            actions += self._forget("an earlier attempt's result was found")
            view.catch_up_started(version)
            why = "an earlier attempt's result was found, and a peer may have committed it"
            actions.append(events.CatchUp(version, donors, why, view.are_most(len(donors))))
        return actions

    def _try_again(self, leading: Leader, without: frozenset[PeerId], why: str) -> Actions:
        view = self._view
        mute = {peer for peer, invitee in leading.invitees.items() if invitee.answer is Answer.NONE}
        view.attempt_log.excluded |= without | mute
        dissolved = messages.Dissolved(leading.round, f"you were excluded: {why}")
        left: Actions = [SendMessage(peer, dissolved) for peer in sorted(without) if peer != view.own]
        if leading.round.attempt % ATTEMPTS_AT_ONCE == ATTEMPTS_AT_ONCE - 1:
            view.attempt_log.failed(view.now)
            return [*left, *leading.dissolve(why), *self._leave(why)]
        return left + self._open(why)

    def _upkeep(self) -> Actions:
        part, view = self._part, self._view
        if part is None:
            return []
        if part.phase is MemberPhase.FINISHING:
            return self._leave("the rest of the committed result does not arrive") if part.stalled(view.now) else []
        if part.silence(view.now) > part.patience_s() and part.round.convener != view.own:
            return self._succeed(part)
        if view.now > part.until and part.round.convener != view.own:
            view.penalties.waiting.add(part.round.convener, view.now)
            return self._refuse(part, "its leader does not end it", lie=False)
        if view.now - part.reported_at >= view.rules.pulse_s:
            return [*self._tell_leader(part), *self._tell_members(part)]
        return []

    def _tell_members(self, part: Participation) -> Actions:
        # If the leader does not commit in time, tell the members directly.
        status, roster = part.status(self._view.now), part.roster
        if roster is None or not isinstance(status, messages.Prepared) or not part.overdue(self._view.now):
            return []
        apart = (self._view.own, part.round.convener)
        return [SendMessage(peer, status) for peer in roster.peers if peer not in apart]

    def _commit_without_leader(self, part: Participation) -> Actions:
        view, staged = self._view, self._staged
        if staged is None or staged.version != part.version or not part.overdue(view.now):
            return []
        holders = {view.own, *(peer for peer, version in part.prepared.items() if version == part.version)}
        if 2 * len(holders) <= len(staged.roster.members):
            return []
        # A majority has the same result, so it is committed even without the leader.
        commit = messages.Commit(part.round, staged.version, tuple(sorted(holders)))
        tells = [SendMessage(peer, commit) for peer in sorted(holders) if peer != view.own]
        adopted = self._adopt(staged)
        view.penalties.waiting.add(part.round.convener, view.now)
        return [*tells, *adopted]

    def _succeed(self, part: Participation) -> Actions:
        view = self._view
        if not view.may_lead():
            return self._leave("its leader is silent, and the module has a newer anchor")
        peers = view.others.on(view.version, view.now) if part.roster is None else frozenset(part.roster.peers)
        view.attempt_log.excluded.add(part.round.convener)
        candidates = {view.own, *(peers - view.attempt_log.excluded)}
        rank = leader_order(view.module, view.version, part.round.number, candidates).index(view.own)
        # The next leader in order opens at once, later ones after further timeouts.
        patience_s = part.patience_s() + rank * view.rules.answer_s
        return self._open("the leader is silent") if part.silence(view.now) > patience_s else []
