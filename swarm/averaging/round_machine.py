"""The state machine of one replica's rounds: events in, actions out (`swarm.averaging.round_events`).

What holds under any failure:

* The highest (number, attempt) is followed, of equals that of the first leader in hash order; members of a running
  exchange stay with a live leader. A silent leader is replaced, silent or rejected members are excluded.
* A prepared result is kept until the anchor changes, and named in every entry. While a majority of an earlier roster
  may have prepared one, no new exchange begins: somebody may have committed it.
* A replica applies only what it prepared itself from its own anchor, after a Commit or when another replica holds it.
* It leaves its anchor only for that of the module (`schedule.standing`), and only for a higher round.
"""

from __future__ import annotations

from collections import deque

from swarm.averaging import round_events as events
from swarm.averaging.attempts import Attempts
from swarm.averaging.replica_view import ReplicaView
from swarm.averaging.round_events import Action, RoundRules, Seal, Tell
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
"""Pause between two calls, in seconds, after which the process counts as stopped. Usual are 0.1 s."""


Actions = list[Action]


class RoundMachine:
    """One replica's part in the rounds of its module."""

    def __init__(self, own: PeerId, module: ModuleId, rules: RoundRules, version: AnchorVersion, seal: Seal) -> None:
        self._view = ReplicaView(own, module, rules, version, seal)
        self._attempts = Attempts(self._view)
        self._last_call: float | None = None
        self._slept = 0.0
        self._seen = False
        self._alone: bool | None = None
        """Whether no other replica serves; None before the first view."""
        self._alone_since: float | None = None

    @property
    def version(self) -> AnchorVersion:
        return self._view.version

    @property
    def under_way(self) -> RoundId | None:
        part = self._attempts.part
        return None if part is None else part.round

    @property
    def settled(self) -> bool:
        """Whether we have seen the others and hold what the module holds: only then a replica should serve."""
        return self._seen and self._view.catching is None and self._view.standing().value == self.version

    @property
    def is_alone(self) -> bool:
        """Whether no other replica has served for a while: then the outer step needs no round."""
        return self._alone is True

    @property
    def in_company(self) -> bool:
        return bool(self._view.others.serving)

    def describe(self) -> str:
        view, part = self._view, self._attempts.part
        where = f"round {self.version.round}"
        if view.catching is not None:
            return f"{where}, catching up to round {view.catching.round}"
        if part is not None:
            attempt = part.round
            leader = "we lead" if attempt.convener == view.own else f"{short(attempt.convener)} leads"
            return f"{where}; round {attempt.number} attempt {attempt.attempt}, {leader}: {part.phase.value}"
        if self._alone:
            return f"{where}, alone, {view.steps} inner steps since"
        latest = f"; {self._attempts.latest}" if self._attempts.latest else ""
        return f"{where}; {view.standing().reason}; {view.due().reason}{latest}"

    def handle(self, event: events.Event, now: float) -> Actions:
        """The actions that follow from an event, in order. Events of past attempts are ignored."""
        view = self._view
        # The clock stops while the process does: a frozen computer does not count others as silent when it thaws.
        gap = 0.0 if self._last_call is None else now - self._last_call
        slept = gap if gap > GAP_S else min(gap, 0.0)
        self._last_call, self._slept = now, self._slept + slept
        view.now = now - self._slept
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

    def _react(self, event: events.Event) -> Actions:
        attempts = self._attempts
        if isinstance(event, events.AttemptEvent):
            return attempts.befell(event)
        match event:
            case events.Arrived(sender, message):
                return self._arrived(sender, message)
            case events.ReplicasChanged():
                return self._replicas_changed(event)
            case events.Worked(steps, tokens):
                return self._worked(steps, tokens)
            case events.LinkLost(peer):
                return attempts.link_lost(peer)
            case events.CaughtUp(version):
                return [*attempts.forget("we stand on another anchor"), *self._view.stand_on(version)]
            case events.Caught(peer):
                penalties = self._view.penalties
                (penalties.fraud if event.certain else penalties.silence).add(peer, self._view.now)
                return [event]
            case events.CatchUpFailed(wanted):
                self._view.catch_up_failed(wanted, event.astray)
            case events.Tick():
                pass
        return []

    def _follow_up(self) -> Actions:
        """What time and the new state make due first; asked again until nothing is."""
        attempts = self._attempts
        return (
            attempts.adopt_if_others_did()
            or self._notice_company()
            or attempts.advance()
            or attempts.upkeep()
            or self._catch_up_if_behind()
            or self._lead_if_due()
        )

    def _arrived(self, sender: PeerId, message: RoundControl) -> Actions:
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

    def _replicas_changed(self, event: events.ReplicasChanged) -> Actions:
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

    def _catch_up_if_behind(self) -> Actions:
        view = self._view
        best = view.standing()
        certain = view.are_most(len(view.others.on(best.value, view.now)))
        busy = self._attempts.part is not None
        wanted = view.catch_up_target(best.value, certain, busy)
        if wanted is None:
            return []
        view.catch_up_started(wanted)
        donors = view.others.donors(wanted, view.now)
        return [*self._attempts.forget("catching up"), events.CatchUp(wanted, donors, best.reason, certain)]

    def _lead_if_due(self) -> Actions:
        """The first in order opens a due round at once, the next one if those before stay silent."""
        view = self._view
        attempt_log = view.attempt_log
        if not view.others.serving or self._attempts.part is not None or view.now < attempt_log.quiet_until:
            return []
        due = view.due()
        if not (due.value and view.may_lead()):
            attempt_log.due_since = None
            return []
        if attempt_log.due_since is None:
            attempt_log.due_since = view.now
        rank = view.order().index(view.own)
        if view.now - attempt_log.due_since < rank * view.rules.answer_s:
            return []
        return self._attempts.open(due.reason)
