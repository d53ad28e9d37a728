"""One data node's part in the talk about lanes: what befalls it (`words.Event`) and what it does then (`words.Action`).

The story. When the data nodes that are alive change, an epoch begins: each takes the stages that the ring deals it
(`swarm.routing.stage_balance`), the nearest peers for them, and tells the others. By what it has heard, each knows how
it is placed. The worst placed offers another one lane for one lane; that one answers with the best route that is left
to it, and is bound until it hears the decision; the first decides, and tells everyone how both stand from now on.

What is kept whatever happens:

* In every epoch the stages of all lanes together are those that the ring dealt (where visits are unequal: each data
  node to itself, by `swarm.routing.visit_shares`), but for trades that one side has heard decided and the other not
  yet. A trade is one stage set for another with the same sum, between two data nodes that stood where the offer says;
  the asked one checks the sum. Only the asking one decides.
* Whoever is bound stays so until it hears the decision, or the epoch ends. If the asking one dies, the membership view
  says so, and the ring deals anew: then nobody needs to know how it ended.
* Nothing of one epoch counts in another. While views differ, those that do not agree on who is alive do not trade.
  Whoever comes back to an epoch (somebody was taken for dead, and was not) stands where it stood when it left.
* News are told until heard. So talk ends: when nobody finds a trade, and everyone has heard, nobody says a word.

Nothing here does IO, draws random numbers or knows another negotiator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
from swarm.routing.negotiation.proposals import Search, Wish
from swarm.routing.negotiation.refining import Refining
from swarm.routing.negotiation.trades import Asking, Bound, answer_to, decision, exchange_offer, helps, offer_for
from swarm.routing.path_rules import PathRules
from swarm.routing.refinement import Exchange
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
    search: Search
    refining: Refining
    asking: Asking | None
    bound: Bound | None


class Negotiator:
    """See the module.

    Args:
        own: this data node.
    """

    def __init__(self, own: PeerId, rules: PathRules, talk: TalkRules) -> None:
        self._own, self._rules, self._talk = own, rules, talk
        self._view: View | None = None
        self._news = News(talk)
        self._search: Search | None = None
        self._refining: Refining | None = None
        self._asking: Asking | None = None
        self._bound: Bound | None = None
        self._left: dict[bytes, _Epoch] = {}
        self._costs: Costs | None = None
        """New costs that wait for the end of a bargain."""
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
        """The launches as hops, in the order in which microbatches take them: refined ones in the order that was
        forecast, others spread out."""
        book = None if self._view is None else self._view.book
        if self._lanes_of != (self._launches, book) and self._view is not None:
            self._lanes_of = self._launches, book
            stage_of = self._view.book.stage_of
            whole = [route for route in self._launches if all(peer in stage_of for peer in route)]
            hops = tuple(tuple(Hop(ModuleId(stage_of[peer]), peer) for peer in route) for route in whole)
            self._lanes = hops if self._view.is_refined else spread(hops)
        return self._lanes

    @property
    def stages(self) -> tuple[frozenset[int], ...]:
        """What each of our lanes visits, as agreed."""
        view = self._view
        return () if view is None else tuple(view.stages[self._own, k] for k in range(view.lanes))

    @property
    def shares(self) -> Reasoned[VisitShares] | None:
        """How often our microbatches are to visit each stage, and why; None before the first view."""
        return None if self._view is None else self._view.shares

    @property
    def wakes_at(self) -> float:
        """When a Tick is due; infinite when there is nothing to wait for."""
        times = [self._news.wakes_at]
        if self._asking is not None and self._asking.decided is None:
            times.append(self._asking.until)
        if self._bound is not None:
            times.append(self._bound.repeat_at)
        if self._search is not None and self._refining is not None and self._is_free:
            times.append(self._search.wakes_at)
            times.append(self._refining.wakes_at)
        return min(times)

    @property
    def _is_free(self) -> bool:
        """Whether no bargain is under way."""
        return self._asking is None and self._bound is None

    @property
    def settled(self) -> bool:
        """Whether we have nothing more to say: no bargain, no wish, and everyone has heard."""
        return self._asking is None and self._bound is None and math.isinf(self.wakes_at)

    def describe(self) -> str:
        """One line for people."""
        if self._view is None:
            return "no view of the data nodes yet"
        state = "settled" if self.settled else "talking"
        if self._bound is not None:
            state = f"bound to an offer of {short(self._bound.asking)}"
        elif self._asking is not None:
            state = f"asking {short(self._asking.asked)}"
        return f"{len(self._launches)} lanes, version {self._view.version}, {state}; {self._why}"

    # ---- the machine ---------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Actions:
        """What is to be done, in order. Messages of other epochs and of bargains that are over are ignored, never an
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
        if self._view is not None and self._search is not None:
            actions += self._go_on(self._view, self._search, now)
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
            back = _Epoch(view, Search(view, self._talk), Refining(view, self._talk), None, None)
            self._costs = None
        else:
            self._costs = costs
        self._view, self._search, self._refining = back.view, back.search, back.refining
        self._asking, self._bound = back.asking, back.bound
        self._deal_at = now + BETWEEN_DEALS_S
        self._noticed(now)
        return [*self._told(self._view, now), *self._launching(self._view, "other data nodes are alive")]

    def _leave(self) -> None:
        """Keeps what was agreed in this epoch, for the others may never leave it."""
        if self._view is not None and self._search is not None and self._refining is not None:
            left = _Epoch(self._view, self._search, self._refining, self._asking, self._bound)
            self._left[self._view.epoch] = left
        while len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def _noticed(self, now: float) -> None:
        """The view has changed, or the way is free again: whose turn it is, is reckoned anew."""
        assert self._search is not None
        assert self._refining is not None
        self._search.noticed(now)
        self._refining.noticed(now)

    def _go_on(self, view: View, search: Search, now: float) -> Actions:
        """What time brings."""
        actions: Actions = [self._tell(view, peer) for peer in self._news.again(now)]
        actions += [self._acknowledge(view, peer) for peer in self._news.overdue(now)]
        asking, bound = self._asking, self._bound
        if asking is not None and asking.decided is None and (now >= asking.until or self._costs is not None):
            actions.append(Tell(asking.asked, Abandon(view.epoch, asking.offer.number)))
            self._asking = None
            self._put_off(search, asking, now)
        if bound is not None and now >= bound.repeat_at:
            bound.wait_s = min(2 * bound.wait_s, self._talk.longest_repeat_s)
            bound.repeat_at = now + bound.wait_s
            actions.append(Tell(bound.asking, bound.accept))
        if self._is_free:
            actions += self._reckon(view, search, now)
            if now >= search.wakes_at:
                actions += self._take_turn(view, search, now)
        if self._is_free and self._refining is not None and now >= self._refining.wakes_at:
            actions += self._refine(view, self._refining, now)
        return actions

    def _refine(self, view: View, refining: Refining, now: float) -> Actions:
        found = refining.turn(now)
        if found is None:
            return []
        if isinstance(found, Exchange):
            self._number += 1
            offer = exchange_offer(view, found, self._number, refining.settled_s)
            self._asking = Asking(found.other, offer, now + self._talk.answer_s, exchange=found)
            return [Tell(found.other, offer)]
        view.refine(found)
        view.advance()
        self._noticed(now)
        refining.has_told(now)
        return [*self._told(view, now), *self._launching(view, "routes were refined")]

    def _take_turn(self, view: View, search: Search, now: float) -> Actions:
        wish = search.wish(now)
        if wish is not None:
            return self._ask(view, search, wish, now)
        if math.isfinite(search.wakes_at) or not view.straighten():
            return []
        self._noticed(now)
        return [*self._told(view, now), *self._launching(view, "straightened, for too many share a peer")]

    def _reckon(self, view: View, search: Search, now: float) -> Actions:
        costs, self._costs = self._costs, None
        if costs is None:
            return []
        changed, why = view.reckon_with(costs), "peers or costs changed"
        if now >= self._deal_at and view.redeal():
            self._deal_at = now + BETWEEN_DEALS_S
            changed, why = True, f"other visit shares: {view.shares.reason}"
        search.renew()
        search.noticed(now)
        assert self._refining is not None
        (self._refining.noticed if changed else self._refining.reckoned)(now)
        told = self._told(view, now) if changed else []
        return [*told, *self._launching(view, why)]

    # ---- telling -------------------------------------------------------------------------------------------------

    def _latest(self, view: View) -> Told:
        if self._asking is not None and self._asking.decided is not None:
            return self._asking.decided
        return Told(view.epoch, view.standing())

    def _told(self, view: View, now: float) -> Actions:
        asking = self._asking
        self._news.spread(view.others, now, asking.asked if asking is not None and asking.decided is not None else None)
        return [self._tell(view, peer) for peer in view.others]

    def _tell(self, view: View, peer: PeerId) -> Tell:
        self._news.answered(peer)
        return Tell(peer, replace(self._latest(view), heard=view.versions.get(peer, 0)))

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

    def _ask(self, view: View, search: Search, wish: Wish, now: float) -> Actions:
        trade = wish.trade
        if trade.asked[0] == self._own:
            stages = [view.book.stages(route) for route in trade.routes]
            for lane, route, visited in zip((trade.asking, trade.asked), trade.routes, stages, strict=True):
                view.move(lane[1], route, visited)
            view.advance()
            search.agreed()
            self._noticed(now)
            return [*self._told(view, now), *self._launching(view, "two lanes of ours changed stages")]
        self._number += 1
        offer = offer_for(view, wish, self._number)
        self._asking = Asking(trade.asked[0], offer, now + self._talk.answer_s)
        return [Tell(trade.asked[0], offer)]

    def _accepted(self, view: View, search: Search, sender: PeerId, accept: Accept, now: float) -> Actions:
        asking = self._asking
        if asking is None or asking.asked != sender or asking.offer.number != accept.number:
            return [Tell(sender, Abandon(view.epoch, accept.number))]
        if asking.decided is not None:
            return [self._tell(view, sender)]
        if not self._helps(view, asking, accept):
            self._asking = None
            self._refused(search, asking, now)
            return [Tell(sender, Abandon(view.epoch, accept.number))]
        asking.decided = decision(view, asking, accept)
        if asking.exchange is None:
            search.agreed()
        return [*self._told(view, now), *self._launching(view, f"traded with {short(sender)}, which we asked")]

    def _declined(self, search: Search, view: View, sender: PeerId, decline: Decline, now: float) -> None:
        asking = self._asking
        if asking is None or asking.asked != sender or asking.offer.number != decline.number or asking.decided:
            return
        self._asking = None
        if decline.sender.peer == sender and view.take_in(decline.sender):
            self._noticed(now)
        elif decline.busy:
            self._put_off(search, asking, now)
        else:
            self._refused(search, asking, now)

    def _helps(self, view: View, asking: Asking, accept: Accept) -> bool:
        if asking.exchange is None or self._refining is None:
            return helps(view, asking, accept)
        return self._refining.helps(asking, accept)

    def _put_off(self, search: Search, asking: Asking, now: float) -> None:
        """The other side is busy or silent."""
        if asking.exchange is None:
            search.put_off((asking.asked, asking.offer.asked_lane), asking.offer.number, now)
        else:
            self._refused(search, asking, now)

    def _refused(self, search: Search, asking: Asking, now: float) -> None:
        if asking.exchange is None:
            search.refused((asking.asked, asking.offer.asked_lane), now)
        elif self._refining is not None:
            self._refining.refused(asking.exchange, now)

    # ---- asked ---------------------------------------------------------------------------------------------------

    def _offered(self, view: View, search: Search, sender: PeerId, offer: Offer, now: float) -> Actions:
        if offer.sender.peer == sender and view.take_in(offer.sender):
            self._noticed(now)
        if self._bound is not None and self._bound.asking == sender and self._bound.offer.number == offer.number:
            return [Tell(sender, self._bound.accept)]
        if self._bound is not None and (self._bound.asking != sender or offer.number < self._bound.offer.number):
            return [Tell(sender, Decline(view.epoch, offer.number, True, view.standing()))]
        self._bound = None  # a sender has one offer at a time: it gave up the one before
        if not self._gives_way(sender, offer) or self._costs is not None:
            return [Tell(sender, Decline(view.epoch, offer.number, True, view.standing()))]
        self._asking = None
        stands = (view.version, view.versions.get(sender)) == (offer.asked_version, offer.sender.version)
        accept = self._answer(view, sender, offer) if stands else None
        if accept is None:
            return [Tell(sender, Decline(view.epoch, offer.number, False, view.standing()))]
        self._bound = Bound(sender, offer, accept, now + self._talk.answer_s, self._talk.answer_s)
        return [Tell(sender, accept)]

    def _answer(self, view: View, sender: PeerId, offer: Offer) -> Accept | None:
        if offer.is_single and self._refining is not None:
            return self._refining.answer(sender, offer)
        return answer_to(view, sender, offer)

    def _gives_way(self, sender: PeerId, offer: Offer) -> bool:
        """Whether no offer of ours is under way, or one to the same data node whose need is greater: of two offers that
        cross, both sides see the same one win."""
        asking = self._asking
        if asking is None:
            return True
        ours = (asking.offer.need_s, self._own)
        return asking.decided is None and asking.asked == sender and (offer.need_s, sender) > ours

    # ---- news ----------------------------------------------------------------------------------------------------

    def _arrived(self, view: View, sender: PeerId, message: LaneControl, now: float) -> Actions:
        assert self._search is not None
        match message:
            case Told():
                return self._heard_news(view, self._search, sender, message, now)
            case Heard(version=version):
                self._acknowledged(view, self._search, sender, version, now)
            case Offer():
                return self._offered(view, self._search, sender, message, now)
            case Accept():
                return self._accepted(view, self._search, sender, message, now)
            case Decline():
                self._declined(self._search, view, sender, message, now)
            case Abandon(number=number):
                if self._bound is not None and (self._bound.asking, self._bound.offer.number) == (sender, number):
                    self._bound = None
                    self._noticed(now)
        return []

    def _heard_news(self, view: View, search: Search, sender: PeerId, told: Told, now: float) -> Actions:
        if told.sender.peer != sender:
            return []
        self._acknowledged(view, search, sender, told.heard, now)
        news = view.take_in(told.sender)
        self._news.owe(sender, now)
        if told.other is not None and told.other.peer in view.others:
            news |= view.take_in(told.other)
            self._news.owe(told.other.peer, now)
        actions: Actions = []
        why = "another's lanes changed"
        bound = self._bound
        if bound is not None and (bound.asking, bound.offer.number) == (sender, told.number):
            if bound.offer.is_single:
                view.replace(bound.offer.asked_lane, bound.accept.lane.route)
            else:
                view.move(bound.offer.asked_lane, bound.accept.lane.route, bound.accept.lane.stages)
            view.advance()
            self._bound, news, why = None, True, f"traded with {short(sender)}, which asked us"
            self._news.spread((peer for peer in view.others if peer != sender), now)
            actions.append(self._acknowledge(view, sender))  # it waits for that
        elif not news:  # told again, for what we said was lost
            actions.append(self._acknowledge(view, sender))
        if news:
            self._noticed(now)
            actions += self._launching(view, why)
        return actions

    def _acknowledged(self, view: View, search: Search, sender: PeerId, version: int, now: float) -> None:
        if version != view.version:
            return
        self._news.heard(sender)
        asking = self._asking
        if asking is not None and asking.decided is not None and asking.asked == sender:
            self._asking = None
            self._noticed(now)
