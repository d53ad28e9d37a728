"""The round machine: the state machine of one replica's rounds, from events to actions
(`swarm.averaging.round_events`).

The story. A replica works from its anchor and tells the three who would convene the next round how far it is. When the
work of all is enough, the first in hash order invites everybody (Convening); who accepts fixes its pseudo-gradient and
enters (Participation); the convener fixes the roster, the members exchange, and each says when it has the whole result,
and which. When more than half of the roster has the same, the convener says Commit, and it holds.

What is kept whatever happens:

* One attempt at a time. The highest (number, attempt) is followed, of equals the one whose convener is first in hash
  order; but who exchanges stays with a convener that it hears. A silent convener is replaced by the next in order, a
  silent or rejected member is left out of the next attempt.
* Who has prepared a result keeps it until it stands on another anchor, and says so in every entry. A convener does not
  start a new exchange while a majority of an earlier roster may have prepared one: somebody may have committed it.
* Nobody is believed because it convenes: entries are signed, travel in the roster, and every member works out weights,
  shards, steps and tokens from them for itself. A convener that sends anything else is left out.
* A replica applies only what it has prepared itself from the anchor it stands on, after a Commit or when another stands
  on it.
* A replica leaves its anchor for another only when the module stands there (`rules.standing`), and only for a higher
  round: versions never go back. Nobody's word but that of the replicas that stand there counts for it, with one
  exception: a convener takes over a result that it found as above.
* Time during which the process did not run is no time: nobody is taken for silent because we slept. After a long sleep
  the attempt is dropped.

Nothing here does IO or draws random numbers. Messages to ourselves (the convener is a member too) never leave.

Time that stands still while the process does: a frozen computer does not take the others for silent when it thaws.
"""

from __future__ import annotations

from collections import deque

from swarm.averaging.attempts import Attempts
from swarm.averaging.replica_view import ReplicaView
from swarm.averaging.round_events import (
    Accuse,
    Action,
    Arrived,
    CatchUp,
    CatchUpFailed,
    Caught,
    CaughtUp,
    Event,
    LinkLost,
    Owing,
    PieceCame,
    PieceRejected,
    ReplicasChanged,
    RoundRules,
    Seal,
    SnapshotBroken,
    SnapshotTaken,
    Staged,
    Tell,
    Tick,
    Worked,
)
from swarm.averaging.schedule import INFORMED
from swarm.vocabulary.averaging_messages import (
    Commit,
    Declined,
    Invitation,
    Progress,
    RoundControl,
    RoundId,
    SignedRoster,
)
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, short

GAP_S = 0.5
"""The machine is called ten times a second; a longer pause means that the process was stopped or held up."""


class WakingTime:
    """A clock of seconds awake, over a monotonic clock that goes on in sleep."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._slept = 0.0

    def advance(self, now: float) -> tuple[float, float]:
        """The seconds awake, and how long it slept since the last call (0 when it did not)."""
        gap = 0.0 if self._last is None else now - self._last
        self._last = now
        slept = gap if gap > GAP_S else min(gap, 0.0)
        self._slept += slept
        return now - self._slept, max(slept, 0.0)


Actions = list[Action]


class RoundMachine:
    """One replica's part in the rounds of its module.

    Args:
        own: this peer.
        version: the anchor it stands on at the start.
        seal: signs our entries and checks the others'.
    """

    def __init__(self, own: PeerId, module: ModuleId, rules: RoundRules, version: AnchorVersion, seal: Seal) -> None:
        self._view = ReplicaView(own, module, rules, version, seal)
        self._attempts = Attempts(self._view)
        self._time = WakingTime()
        self._seen = False
        """Whether there was a view of the others yet."""
        self._alone: bool | None = None
        """Whether no other replica serves; None before the first view."""
        self._alone_since: float | None = None
        """When another serving replica was there last, or when we began to look."""

    # ---- looking -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> AnchorVersion:
        """The version of our anchor."""
        return self._view.version

    @property
    def under_way(self) -> RoundId | None:
        """The attempt in which we take part."""
        part = self._attempts.part
        return None if part is None else part.round

    @property
    def settled(self) -> bool:
        """Whether we have seen the others and stand where the module stands. Until then a replica should not announce
        that it serves."""
        return self._seen and self._view.lag.catching is None and self._view.standing().value == self.version

    @property
    def is_alone(self) -> bool:
        """Whether no other replica has served the module for a while: then the outer step needs no round."""
        return self._alone is True

    @property
    def in_company(self) -> bool:
        """Whether another replica serves the module."""
        return bool(self._view.others.serving)

    def describe(self) -> str:
        """The machine's state in one line for people."""
        view, part = self._view, self._attempts.part
        where = f"round {self.version.round}"
        if view.lag.catching is not None:
            return f"{where}, catching up to round {view.lag.catching.round}"
        if part is not None:
            attempt = part.round
            convener = "we convene" if attempt.convener == view.own else f"{short(attempt.convener)} convenes"
            return f"{where}; round {attempt.number} attempt {attempt.attempt}, {convener}: {part.phase.value}"
        if self._alone:
            return f"{where}, alone, {view.steps} inner steps since"
        latest = f"; {self._attempts.latest}" if self._attempts.latest else ""
        return f"{where}; {view.standing().reason}; {view.due().reason}{latest}"

    # ---- the machine -------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Actions:
        """The actions that follow from an event, in order. Events of attempts that are over are ignored, never an
        error.

        Args:
            now: seconds of a monotonic clock.
        """
        view = self._view
        view.now, slept = self._time.advance(now)
        if view.anchored_at is None:
            view.anchored_at = view.now
        actions: Actions = []
        if slept >= view.rules.silence_s:
            actions += self._attempts.leave(f"this process did not run for {slept:.1f} s")
            view.attempt_log.pause(view.now, view.rules.answer_s)
        to_ourselves: deque[RoundControl] = deque()
        produced = self._react(event)
        while produced or to_ourselves or (produced := self._follow_up()):
            for action in produced:
                if isinstance(action, Tell) and action.to == view.own:
                    to_ourselves.append(action.message)
                else:
                    actions.append(action)
            produced = self._attempts.arrived(view.own, to_ourselves.popleft()) if to_ourselves else []
        return actions

    def _react(self, event: Event) -> Actions:
        attempts = self._attempts
        match event:
            case Arrived(sender, message):
                return self._arrived(sender, message)
            case ReplicasChanged():
                return self._replicas_changed(event)
            case Worked(steps, tokens):
                return self._worked(steps, tokens)
            case SnapshotTaken() | SnapshotBroken() | PieceCame() | Owing() | PieceRejected() | Staged():
                return attempts.befell(event)
            case LinkLost(peer):
                return attempts.link_lost(peer)
            case CaughtUp(version):
                return [*attempts.forget("we stand on another anchor"), *self._view.stand_on(version)]
            case Caught(peer):
                self._view.penalties.was_caught(peer, event.certain, self._view.now)
                return [Accuse(event)]
            case CatchUpFailed(wanted):
                self._view.catch_up_failed(wanted, event.astray)
            case Tick():
                pass
        return []

    def _follow_up(self) -> Actions:
        """The first thing that time and the new state make due; asked again until nothing is."""
        attempts = self._attempts
        return (
            attempts.adopt_if_others_did()
            or self._notice_company()
            or attempts.advance()
            or attempts.upkeep()
            or self._catch_up_if_behind()
            or self._convene_if_due()
        )

    # ---- ourselves and the others ------------------------------------------------------------------------------------

    def _arrived(self, sender: PeerId, message: RoundControl) -> Actions:
        """Only live replicas of our module are heard. What they say of themselves tells where they stand."""
        view = self._view
        module = message.module if isinstance(message, Progress) else message.round.module
        if sender not in view.others or module != view.module:
            return []
        match message:
            case Progress(_, base, steps, _):
                view.others.said(sender, base, view.now)
                view.others.worked(sender, base, steps)
            case Invitation(_, base) | SignedRoster(_, base):
                view.others.said(sender, base, view.now)
            case Declined(_, _, version):
                view.others.said(sender, version, view.now)
            case Commit(_, version, holders) if sender in holders:
                view.others.said(sender, version, view.now)
            case _:
                pass
        return [*self._attempts.adopt_if_others_did(), *self._attempts.arrived(sender, message)]

    def _replicas_changed(self, event: ReplicasChanged) -> Actions:
        view = self._view
        self._seen = True
        gone = view.others.changed((replica for replica in event.others if replica.peer != view.own), view.now)
        return [action for peer in sorted(gone) for action in self._attempts.link_lost(peer)]

    def _worked(self, steps: int, tokens: int) -> Actions:
        view = self._view
        if steps == view.steps:  # as after a commit: that we stand on it has been told with the number
            return []
        view.steps = steps
        report = Progress(view.module, view.version, steps, tokens)
        return [Tell(peer, report) for peer in view.order()[:INFORMED] if peer != view.own]

    def _notice_company(self) -> Actions:
        view, alone = self._view, not self._view.others.serving
        if self._alone_since is None or not alone:
            self._alone_since = view.now
        # After a long sleep all announcements have run out, and the new ones are on their way.
        lasts = self._alone is None or view.now - self._alone_since >= view.rules.answer_s
        if not self._seen or alone == self._alone or (alone and not lasts):
            return []
        self._alone = alone
        return self._attempts.finish_alone() if alone else []

    # ---- what time brings -------------------------------------------------------------------------------------------

    def _catch_up_if_behind(self) -> Actions:
        view = self._view
        best = view.standing()
        certain = view.are_most(len(view.others.on(best.value, view.now)))
        busy = self._attempts.part is not None
        wanted = view.lag.target(view.version, best.value, view.now, certain, busy)
        if wanted is None:
            return []
        view.lag.started(wanted)
        donors = view.others.donors(wanted, view.now)
        return [*self._attempts.forget("catching up"), CatchUp(wanted, donors, best.reason, certain)]

    def _convene_if_due(self) -> Actions:
        """The first in order opens a due round at once, the next one when nothing has come from those before."""
        view = self._view
        attempt_log = view.attempt_log
        if not view.others.serving or self._attempts.part is not None or view.now < attempt_log.quiet_until:
            return []
        due = view.due()
        if not (due.value and view.may_convene()):
            attempt_log.due_since = None
            return []
        if attempt_log.due_since is None:
            attempt_log.due_since = view.now
        rank = view.order().index(view.own)
        if view.now - attempt_log.due_since < rank * view.rules.answer_s:
            return []
        return self._attempts.open(due.reason)
