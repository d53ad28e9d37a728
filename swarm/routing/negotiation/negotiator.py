"""One data node's part in the talk about lanes: what befalls it (`words.Event`) and what it does then (`words.Action`).

The story. When the data nodes that are alive change, an epoch begins: each takes the stages that the ring deals it
(`swarm.routing.stage_balance`) and the nearest peers for them. What the ring deals all know, so nobody tells of it.
Then they look for a better plan of all, each in turn, and offer what they find; each judges by what it knows, and is
bound until it hears the decision; once all have accepted the one that offers decides, and tells everyone.

What is kept whatever happens:

* In every epoch the stages of all lanes together are those that the ring dealt (where visits are unequal: each data
  node to itself, by `swarm.routing.visit_shares`), but for an offer that some have heard decided and others not yet. An
  offer leaves the sum as it was, and holds only where all data nodes stand as it says; each of them checks that.
* Whoever is bound stays so until it hears the decision, or the epoch ends. If the one that offers dies, the membership
  view says so, and the ring deals anew: then nobody needs to know how it ended.
* Nothing of one epoch counts in another. While views differ, those that do not agree on who is alive agree on nothing.
  Whoever comes back to an epoch (somebody was taken for dead, and was not) stands where it stood when it left.
* News are told until heard. So talk ends: when nobody finds a better plan, and everyone has heard, nobody says a word.

Nothing here does IO, draws random numbers or knows another negotiator.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.lane_book import LaneBook
from swarm.routing.negotiation.acknowledgements import News
from swarm.routing.negotiation.groups import group_of
from swarm.routing.negotiation.lane_view import View
from swarm.routing.negotiation.negotiation_events import (
    Action,
    Arrived,
    Event,
    LanesChanged,
    Member,
    SwarmChanged,
    TalkRules,
    Tell,
)
from swarm.routing.negotiation.offers import Asking, Bound, is_as_things_stand, offer_of
from swarm.routing.negotiation.planning import Planning
from swarm.routing.path_rules import PathRules
from swarm.routing.plans.route_changes import Plan
from swarm.routing.stage_balance import Lanes, spread
from swarm.routing.visit_shares import VisitShares
from swarm.vocabulary.routing_messages import Abandon, Accept, Decline, Heard, LaneControl, Offer, Told
from swarm.vocabulary.types import Hop, ModuleId, PeerId, Reasoned, short

Actions = list[Action]


BETWEEN_DEALS_S = 10.0
"""Between two changes of a data node's shares at least: about the time of the talk that follows one, and of enough new
measurements."""
MOST_LEFT = 32
"""Epochs that are remembered in case they come back."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """An epoch that our view has left. If it comes back (a data node was taken for dead, and was not) we stand where we
    stood."""

    view: View
    planning: Planning
    asking: Asking | None = None
    bound: Bound | None = None
    decided: int | None = None


class Negotiator:
    """See the module.

    Args:
        own: this data node.
    """

    def __init__(self, own: PeerId, rules: PathRules, talk: TalkRules) -> None:
        self._own, self._rules, self._talk = own, rules, talk
        self._view: View | None = None
        self._news = News(talk)
        self._planning: Planning | None = None
        self._asking: Asking | None = None
        self._bound: Bound | None = None
        self._left: dict[bytes, _Epoch] = {}
        self._costs: Costs | None = None
        """New costs that wait for the end of an offer."""
        self._decided: int | None = None
        """The number of the last offer of ours that was decided in this epoch."""
        self._deal_at = 0.0
        """Until then shares stay as they are."""
        self._number = 0
        self._launches: tuple[PeerRoute, ...] = ()
        self._lanes_of: tuple[tuple[PeerRoute, ...], LaneBook | None] = (), None
        """From what the lanes were made."""
        self._lanes: Lanes = ()
        self._why = ""

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def launches(self) -> tuple[PeerRoute, ...]:
        """The routes that our microbatches take in turn; empty before the first view and while a stage has nobody."""
        return self._launches

    @property
    def lanes(self) -> Lanes:
        """The launches as hops, in the order in which microbatches take them: planned ones in the order that was
        forecast, others spread out."""
        book = None if self._view is None else self._view.book
        if self._lanes_of != (self._launches, book) and self._view is not None:
            self._lanes_of = self._launches, book
            stage_of = self._view.book.stage_of
            whole = [route for route in self._launches if all(peer in stage_of for peer in route)]
            hops = tuple(tuple(Hop(ModuleId(stage_of[peer]), peer) for peer in route) for route in whole)
            self._lanes = hops if self._view.is_planned else spread(hops)
        return self._lanes

    @property
    def stages(self) -> tuple[frozenset[int], ...]:
        """What each of our lanes visits, as agreed."""
        view = self._view
        if view is None:
            return ()
        return view.sets_of(self._own)[: len(view.planned.get(self._own, ())) or view.lanes]

    @property
    def shares(self) -> Reasoned[VisitShares] | None:
        """How often our microbatches are to visit each stage, and why; None before the first view."""
        return None if self._view is None else self._view.shares

    @property
    def wakes_at(self) -> float:
        """When a Tick is due; infinite when there is nothing to wait for."""
        times = [self._news.wakes_at]
        if self._asking is not None:
            times.append(self._asking.again_at)
        if self._bound is not None:
            times.append(self._bound.repeat_at)
        if self._planning is not None and self._is_free:
            times.append(self._planning.wakes_at)
        return min(times)

    @property
    def _is_free(self) -> bool:
        """Whether no offer is under way."""
        return self._asking is None and self._bound is None

    @property
    def settled(self) -> bool:
        """Whether we have nothing more to say: no offer, no plan to look for, and everyone has heard."""
        return self._asking is None and self._bound is None and math.isinf(self.wakes_at)

    def describe(self) -> str:
        """One line for people."""
        if self._view is None:
            return "no view of the data nodes yet"
        state = "settled" if self.settled else "talking"
        if self._bound is not None:
            state = f"bound to an offer of {short(self._bound.asking)}"
        elif self._asking is not None:
            state = f"asking {len(self._asking.waiting)} others"
        return f"{len(self._launches)} lanes, version {self._view.version}, {state}; {self._why}"

    # ---- the machine ---------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Actions:
        """What is to be done, in order. Messages of other epochs and of offers that are over are ignored, never an
        error.

        Args:
            now: seconds of a monotonic clock.

        Raises:
            ValueError: the members' number and the rules allow no lanes with equal visits.
        """
        actions: Actions = []
        match event:
            case SwarmChanged(members, costs):
                actions = self._swarm_changed(members, costs, now)
            case Arrived(sender, message):
                view = self._view
                if view is not None and sender in view.others and message.epoch == view.epoch:
                    actions = self._arrived(view, sender, message, now)
        if self._view is not None and self._planning is not None:
            actions += self._go_on(self._view, self._planning, now)
        return actions

    def _swarm_changed(self, members: frozenset[Member], costs: Costs, now: float) -> Actions:
        if all(member.peer != self._own for member in members):
            return []
        group = group_of(self._own, members)
        if self._view is not None and self._view.epoch == group.epoch:
            self._costs = costs
            return []
        self._leave()
        back = self._left.pop(group.epoch, None)
        if back is None:
            view = View(self._own, group, costs, self._rules, self._talk)
            back = _Epoch(view, Planning(view, self._talk))
            self._costs, is_new = None, True
        else:
            self._costs, is_new = costs, False
        self._view, self._planning = back.view, back.planning
        self._asking, self._bound, self._decided = back.asking, back.bound, back.decided
        self._deal_at = now + BETWEEN_DEALS_S
        self._planning.noticed(now)
        self._news.clear()
        told = [] if is_new and self._view.is_by_convention else self._told(self._view, now)
        return [*told, *self._launching(self._view, "other data nodes are alive")]

    def _leave(self) -> None:
        """Keeps what was agreed in this epoch, for the others may never leave it."""
        if self._view is not None and self._planning is not None:
            left = _Epoch(self._view, self._planning, self._asking, self._bound, self._decided)
            self._left[self._view.epoch] = left
        while len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def _go_on(self, view: View, planning: Planning, now: float) -> Actions:
        """What time brings."""
        actions: Actions = [self._tell(view, peer) for peer in self._news.again(now)]
        actions += [self._acknowledge(view, peer) for peer in self._news.overdue(now)]
        asking, bound = self._asking, self._bound
        if asking is not None and self._costs is not None:
            actions += self._give_up(view, planning, asking, now)
        elif asking is not None and now >= asking.again_at:
            actions += self._ask_again(view, planning, asking, now)
        if bound is not None and now >= bound.repeat_at:
            bound.wait_s = min(2 * bound.wait_s, self._talk.longest_repeat_s)
            bound.repeat_at = now + bound.wait_s
            actions.append(Tell(bound.asking, Accept(view.epoch, bound.offer.number)))
        if self._is_free:
            actions += self._reckon(view, planning, now)
        if self._is_free and now >= planning.wakes_at:
            plan = planning.turn(now)
            if plan is not None:
                actions += self._offer(view, planning, plan, now)
        return actions

    def _reckon(self, view: View, planning: Planning, now: float) -> Actions:
        costs, self._costs = self._costs, None
        if costs is None:
            return []
        changed, why = view.reckon_with(costs), "peers or costs changed"
        if now >= self._deal_at and view.redeal():
            self._deal_at = now + BETWEEN_DEALS_S
            changed, why = True, f"other visit shares: {view.shares.reason}"
        (planning.noticed if changed else planning.reckoned)(now)
        told = self._told(view, now) if changed else []
        return [*told, *self._launching(view, why)]

    # ---- telling -------------------------------------------------------------------------------------------------

    def _told(self, view: View, now: float) -> Actions:
        self._news.spread(view.others, now)
        return [self._tell(view, peer) for peer in view.others]

    def _tell(self, view: View, peer: PeerId) -> Tell:
        self._news.answered(peer)
        return Tell(peer, Told(view.epoch, view.standing(), self._decided, view.versions.get(peer, 0)))

    def _acknowledge(self, view: View, peer: PeerId) -> Tell:
        self._news.answered(peer)
        return Tell(peer, Heard(view.epoch, view.versions.get(peer, 0)))

    def _launching(self, view: View, why: str) -> Actions:
        launches = view.launches()
        if launches == self._launches:
            return []
        self._launches, self._why = launches, why
        return [LanesChanged(launches, why)]

    # ---- asking --------------------------------------------------------------------------------------------------

    def _offer(self, view: View, planning: Planning, plan: Plan, now: float) -> Actions:
        self._number += 1
        offer = offer_of(view, plan, self._number)
        self._asking = Asking(offer, set(view.others), now + self._talk.answer_s)
        if not view.others:
            return self._decide(view, planning, self._asking, now)
        return [Tell(peer, offer) for peer in view.others]

    def _ask_again(self, view: View, planning: Planning, asking: Asking, now: float) -> Actions:
        """Those that have not answered."""
        if asking.tries >= self._talk.asked:
            return self._give_up(view, planning, asking, now)
        asking.tries += 1
        asking.again_at = now + self._talk.answer_s
        return [Tell(peer, asking.offer) for peer in view.others if peer in asking.waiting]

    def _give_up(self, view: View, planning: Planning, asking: Asking, now: float) -> Actions:
        """Our offer, to be made again if all stand as they stand now."""
        self._asking = None
        planning.put_off(now, _share(self._own, asking.offer.number))
        return [Tell(peer, Abandon(view.epoch, asking.offer.number)) for peer in view.others]

    def _accepted(self, view: View, planning: Planning, sender: PeerId, accept: Accept, now: float) -> Actions:
        asking = self._asking
        if asking is not None and asking.offer.number == accept.number:
            asking.waiting.discard(sender)
            return [] if asking.waiting else self._decide(view, planning, asking, now)
        if accept.number == self._decided:
            return [self._tell(view, sender)]
        return [Tell(sender, Abandon(view.epoch, accept.number))]

    def _decide(self, view: View, planning: Planning, asking: Asking, now: float) -> Actions:
        """Whoever has accepted asks until it hears of it, so it need not be told again."""
        self._asking, self._decided = None, asking.offer.number
        self._adopt(view, planning, asking.offer, now)
        tell = [self._tell(view, peer) for peer in view.others]
        return [*tell, *self._launching(view, "all agreed to a plan of ours")]

    def _declined(self, view: View, planning: Planning, sender: PeerId, decline: Decline, now: float) -> Actions:
        asking = self._asking
        if asking is None or asking.offer.number != decline.number or sender not in asking.waiting:
            return []
        actions = self._give_up(view, planning, asking, now)
        if decline.sender.peer == sender and view.take_in(decline.sender):
            planning.noticed(now)
        elif not decline.busy:
            planning.refused(now)
        return actions

    # ---- asked ---------------------------------------------------------------------------------------------------

    def _offered(self, view: View, planning: Planning, sender: PeerId, offer: Offer, now: float) -> Actions:
        bound, actions = self._bound, list[Action]()
        if bound is not None and bound.asking == sender:
            if bound.offer.number == offer.number:
                return [Tell(sender, Accept(view.epoch, offer.number))]
            if bound.offer.number < offer.number:  # one at a time: it has given up the one before, or decided it
                self._bound = None
                if _version_of(self._own, offer) > _version_of(self._own, bound.offer):
                    self._adopt(view, planning, bound.offer, now)
                    actions = self._launching(view, f"all agreed to a plan of {short(sender)}")
        if self._asking is not None and sender < self._own and self._costs is None:
            # Of two offers that cross, all see the same one win.
            actions += self._give_up(view, planning, self._asking, now)
        if not self._is_free or self._costs is not None:
            return [*actions, Tell(sender, Decline(view.epoch, offer.number, True, view.standing()))]
        if not (is_as_things_stand(view, offer) and planning.accepts(offer)):
            return [*actions, Tell(sender, Decline(view.epoch, offer.number, False, view.standing()))]
        self._bound = Bound(sender, offer, now + self._talk.answer_s, self._talk.answer_s)
        return [*actions, Tell(sender, Accept(view.epoch, offer.number))]

    def _adopt(self, view: View, planning: Planning, offer: Offer, now: float) -> None:
        """All stand as offered. Whoever has agreed to that knows how all stood before, so nothing is left to tell."""
        view.adopt(offer.standings)
        self._news.clear()
        planning.decided(now)

    # ---- news ----------------------------------------------------------------------------------------------------

    def _arrived(self, view: View, sender: PeerId, message: LaneControl, now: float) -> Actions:
        planning = self._planning
        assert planning is not None
        match message:
            case Told():
                return self._heard_news(view, planning, sender, message, now)
            case Heard(version=version):
                self._acknowledged(view, sender, version)
            case Offer():
                return self._offered(view, planning, sender, message, now)
            case Accept():
                return self._accepted(view, planning, sender, message, now)
            case Decline():
                return self._declined(view, planning, sender, message, now)
            case Abandon(number=number):
                if self._bound is not None and (self._bound.asking, self._bound.offer.number) == (sender, number):
                    self._bound = None
                    planning.noticed(now)
        return []

    def _heard_news(self, view: View, planning: Planning, sender: PeerId, told: Told, now: float) -> Actions:
        if told.sender.peer != sender:
            return []
        self._acknowledged(view, sender, told.heard)
        bound, why = self._bound, "another's lanes changed"
        is_decision = bound is not None and (bound.asking, bound.offer.number) == (sender, told.number)
        if bound is not None and is_decision:
            self._bound, why = None, f"all agreed to a plan of {short(sender)}"
            self._adopt(view, planning, bound.offer, now)
        if view.take_in(told.sender):
            self._news.owe(sender, now)
            planning.noticed(now)
        elif is_decision:
            return self._launching(view, why)
        elif view.versions.get(sender) == told.sender.version:
            return [self._acknowledge(view, sender)]  # told again, for what we said was lost
        return self._launching(view, why)

    def _acknowledged(self, view: View, sender: PeerId, version: int) -> None:
        if version == view.version:
            self._news.heard(sender)


def _version_of(peer: PeerId, offer: Offer) -> int:
    """At which a data node would stand; 0 where it is not named."""
    return max((standing.version for standing in offer.standings if standing.peer == peer), default=0)


def _share(own: PeerId, number: int) -> float:
    """A share of 1 that differs from peer to peer and from time to time."""
    return (zlib.crc32(f"{own} {number}".encode()) % 1024) / 1024
