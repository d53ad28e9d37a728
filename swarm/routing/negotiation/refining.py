"""Whether it is our turn to refine our routes, and what comes of it: who is done last goes first, the next one when
nothing has happened for a while.

The turns begin when nobody wishes for a trade any more: a data node that has refined its lanes trades none. Each spends
a part of what forecasts it may make until the swarm changes, and whoever finds nothing is silent until there is news.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.negotiation.lane_view import View
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.negotiation.proposals import WORST
from swarm.routing.negotiation.trades import Asking
from swarm.routing.refinement import WORTH_TELLING, Exchange, Plan, Refinement
from swarm.routing.route_forecast import Forecast
from swarm.vocabulary.routing_messages import Accept, Lane, Offer
from swarm.vocabulary.types import PeerId

FREE_ROUNDS = 2
"""How often all data nodes go through their routes in a forecast, where each launches as fast as it can."""
TURN_S = 0.4
"""The next one waits so much longer: about the time of a turn and the news of it."""
TRIES = 3
"""Of an offer whose answer is lost, before the turns begin: who has refined its lanes trades none."""
LEAST_FORECASTS = 12
"""In a turn, however many tasks one has to play."""
AGAIN = 0.25
"""Share of its first budget that a data node may use when the swarm has changed: most routes are good still."""
WORTH_REFINING = 0.05
"""By so much the expected end must have changed with the costs before routes are refined anew."""
EXCHANGE_FORECASTS = 6
"""In the search for one exchange with another data node."""
LATE = 2
"""So many others may be done later than who asks for an exchange."""
ANSWERS = 64
"""Offers of exchanges that are looked into between two changes of the swarm: whoever asks more is not answered."""


class Refining:
    """Our turns of one epoch."""

    def __init__(self, view: View, talk: TalkRules) -> None:
        self._view, self._talk = view, talk
        self._rounds = FREE_ROUNDS if talk.microbatches is None else talk.microbatches // view.singles
        self._costs: Costs | None = None
        self._refinement: Refinement | None = None
        self._expected: tuple[Refinement, Plan, Forecast] | None = None
        self._refused: set[tuple[Exchange, int, int]] = set()
        self._renew()
        self._quiet_since, self._at = 0.0, math.inf
        self.settled_s = math.nan
        """The end that was expected after the last turn."""
        self._settled_costs: Costs | None = None
        """By which that was."""

    @property
    def wakes_at(self) -> float:
        return self._at

    def noticed(self, now: float) -> None:
        """The view has changed. Who is done when is asked later: news come in heaps."""
        talk = self._talk
        trading_s = 0.0 if self._view.refined else WORST * talk.patience_s + TRIES * talk.answer_s
        self._quiet_since = now + trading_s
        self._at = self._quiet_since + self._talk.quiet_s

    def has_told(self, now: float) -> None:
        """Ours have just been told: the next turn waits until the others know."""
        self._quiet_since = now + TURN_S
        self._at = self._quiet_since + self._talk.quiet_s

    def reckoned(self, now: float) -> None:
        """There are new figures, and the trades have as long as before: figures come every few seconds, and would put
        our turn off for ever."""
        if math.isinf(self._at):
            self._quiet_since = now
            self._at = now + self._talk.quiet_s

    def turn(self, now: float) -> tuple[PeerRoute, ...] | Exchange | None:
        """Better routes for our microbatches, or an exchange to ask for; None when it is not our turn, or none were
        found."""
        if now < self._at:
            return None
        self._at = math.inf
        plan = self._view.plan()
        if plan is None:
            return None
        if self._left <= 0 and self._exchanges_left <= 0 and self._costs is self._view.costs:
            return None
        refinement = self._by_costs()
        expected = self._expected_of(plan, refinement)
        finish, last = expected.finish_s, expected.worth[0]
        if math.isinf(last):
            return None
        if self._settled_costs is not self._view.costs and abs(last - self.settled_s) > WORTH_REFINING * self.settled_s:
            self._renew(AGAIN)
        if self._left <= 0 and self._exchanges_left <= 0:
            return None
        own = self._view.own
        before = sum((end, peer) > (finish[own], own) for peer, end in finish.items())
        at = self._quiet_since + self._talk.quiet_s + before * TURN_S
        if now < at:
            self._at = at
            return None
        may_improve = min(self._left, self._tasks_left) > 0
        routes = self._improved(plan, refinement, expected) if may_improve else None
        if routes is not None or self._exchanges_left <= 0 or before > LATE:
            return routes
        self._exchanges_left -= 1
        self._settle(last)
        return refinement.exchange(plan, expected, EXCHANGE_FORECASTS, self._is_refused)

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def refused(self, exchange: Exchange, now: float) -> None:
        """Not this one, as things stand."""
        self._refused.add(self._as_things_stand(exchange))
        self.reckoned(now)

    def answer(self, asking: PeerId, offer: Offer) -> Accept | None:
        """Our new route, if the exchange helps by what we know."""
        view = self._view
        plan, exchange = view.plan(), self._asked(asking, offer)
        if plan is None or exchange is None or self._answers_left <= 0:
            return None
        self._answers_left -= 1
        refinement = self._by_costs()
        route = refinement.answer(plan, self._expected_of(plan, refinement), asking, exchange)
        if route is None:
            return None
        return Accept(view.epoch, offer.number, Lane(route, offer.stages, view.costs.round_trip_s(view.own, route)))

    def helps(self, asking: Asking, accept: Accept) -> bool:
        """Whether our exchange is still worth it with the route that the other side has found."""
        view, exchange = self._view, asking.exchange
        plan = view.plan()
        if plan is None or exchange is None or view.versions.get(asking.asked) != asking.offer.asked_version:
            return False
        route = accept.lane.route
        if not view.book.serves(route, asking.offer.stages) or len(route) != len(asking.offer.stages):
            return False
        refinement = self._by_costs()
        expected = self._expected_of(plan, refinement)
        return refinement.helps(plan, expected, view.own, replace(exchange, other_route=route))

    def _asked(self, asking: PeerId, offer: Offer) -> Exchange | None:
        """What we are asked for; None where it is nothing that may be asked."""
        view = self._view
        if max(offer.asking_lane, offer.asked_lane) >= view.singles or not view.book.whole(offer.route):
            return None
        ours, theirs = view.told_singles(view.own)[offer.asked_lane], view.told_singles(asking)[offer.asking_lane]
        before = Counter(view.book.stages(ours)) + Counter(view.book.stages(theirs))
        if before != Counter(view.book.stages(offer.route)) + Counter(offer.stages):
            return None
        others = tuple(view.costs.stages[stage][0] for stage in sorted(offer.stages))
        return Exchange(offer.asking_lane, offer.route, view.own, offer.asked_lane, others)

    def _is_refused(self, exchange: Exchange) -> bool:
        return self._as_things_stand(exchange) in self._refused

    def _as_things_stand(self, exchange: Exchange) -> tuple[Exchange, int, int]:
        return exchange, self._view.version, self._view.versions.get(exchange.other, -1)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _renew(self, share: float = 1.0) -> None:
        """As many turns again, and such a share of what they may cost."""
        talk = self._talk
        self._left, self._tasks_left = talk.turns_each, int(share * talk.tasks_each)
        self._exchanges_left, self._answers_left = math.ceil(share * talk.exchanges_each), ANSWERS
        self._refused.clear()

    def _settle(self, last_s: float) -> None:
        self.settled_s, self._settled_costs = last_s, self._view.costs

    def _by_costs(self) -> Refinement:
        view = self._view
        if self._costs is not view.costs or self._refinement is None:
            self._costs = view.costs
            self._refinement = Refinement(
                view.own, view.costs, view.rules, self._rounds, is_free=self._talk.microbatches is None
            )
        return self._refinement

    def _expected_of(self, plan: Plan, refinement: Refinement) -> Forecast:
        """The forecast of a plan, made once: the turn is often waited for."""
        if self._expected is None or self._expected[0] is not refinement or self._expected[1] != plan:
            self._expected = refinement, plan, refinement.expected(plan)
            self._tasks_left -= self._tasks_of(plan)
        return self._expected[2]

    def _tasks_of(self, plan: Plan) -> int:
        """That one forecast plays."""
        return max(1, sum(2 * len(route) + 3 for routes in plan.values() for route in routes) * self._rounds)

    def _improved(self, plan: Plan, refinement: Refinement, before: Forecast) -> tuple[PeerRoute, ...] | None:
        tasks = self._tasks_of(plan)
        found = refinement.improve(plan, before, max(LEAST_FORECASTS, self._tasks_left // (self._left * tasks)))
        self._left -= 1
        self._tasks_left -= found.forecasts * tasks
        is_told = refinement.is_worth(before, found.expected, WORTH_TELLING)
        self._settle(found.expected.worth[0] if is_told else before.worth[0])
        return found.routes if is_told else None
