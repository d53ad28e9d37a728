"""Whether it is our turn to look for a better plan of all, and what comes of it: each in turn, the next one when
nothing has happened for a while.

A turn is a search by forecasts (`swarm.routing.plans.plan_search`). The first two after a change of the swarm begin
from nothing, too. What is found is offered to all, and each judges it by a forecast of its own. There are few turns,
for each costs three messages a data node, and each data node spends its part of them: so the work is shared.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.lane_view import View
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.negotiation.offers import fault_of
from swarm.routing.path_rules import order_tree
from swarm.routing.plans.lane_trades import traded_lanes
from swarm.routing.plans.plan_search import Found, PlanSearch
from swarm.routing.plans.route_changes import Plan
from swarm.routing.plans.route_forecast import Forecast
from swarm.vocabulary.routing_messages import MAX_OFFERED_LANES, MAX_OFFERED_VISITS, Offer
from swarm.vocabulary.types import PeerId

FREE_ROUNDS = 2
"""How often all data nodes go through their routes in a forecast, where each launches as fast as it can."""
WORTH_OFFERING = 0.002, 0.01
"""Share by which the last data node must be done sooner, or all in the mean, for a plan to be offered."""
MOST_WORSE = 0.02
"""By so much a plan may be worse by our forecast and be accepted: others have measured otherwise."""
USUAL_PEERS, MOST_TIMES = 20, 2.0
"""Whoever has more peers to choose among than usual may search so many times as long at most."""
STARTING = 2
"""So many data nodes, the first whose turn it is, also begin from nothing: the first from trades of lanes, the second
from routes of single microbatches that avoid each other."""
AGAIN = 0.25
"""Share of its first budget that a data node may use when the swarm has changed: most routes are good still."""
WORTH_PLANNING = 0.05
"""By so much the expected end must have changed with the costs before there is a plan anew."""
ANSWERS = 64
"""Offers that are judged between two changes of the swarm: whoever makes more is not answered."""
TASKS_A_TRADE = 60
"""What it takes to judge a trade of lanes, in tasks of a forecast."""
LEAST_OFFERS = 2
"""In a large group, in which each offer is judged by many."""
TRIES = 4
"""Of the offer of one plan, while nobody stands otherwise."""


@dataclass(slots=True)
class _Ready:
    """A plan that we have found, to be offered while all stand as they stood."""

    plan: Plan
    versions: dict[PeerId, int]
    tries: int = 0

    def holds(self, view: View) -> bool:
        """Whether all stand as they stood, and nobody has gone whom only the plan uses."""
        return self.versions == view.versions and view.is_whole(self.plan)


class Planning:
    """Our turns of one epoch."""

    def __init__(self, view: View, talk: TalkRules) -> None:
        self._view, self._talk = view, talk
        self._rounds = FREE_ROUNDS if talk.microbatches is None else talk.microbatches // view.singles
        ranked = sorted(view.versions | dict.fromkeys(view.others, 0), key=lambda peer: _rank(view.epoch, peer))
        self._rank, self._among = ranked.index(view.own), len(ranked)
        self._search: PlanSearch | None = None
        self._costs: Costs | None = None
        self._expected: tuple[PlanSearch, Plan, Forecast] | None = None
        self._settled: tuple[Costs, float] | None = None
        """By which costs an end was expected when plans were last looked for."""
        self._ready: _Ready | None = None
        self._quiet_since, self._at = 0.0, math.inf
        self._most_offers = min(talk.offers, max(LEAST_OFFERS, talk.judged // self._among))
        self._is_first = True
        """Whether no turn of ours has been taken since the swarm changed."""
        self._renew(1.0)

    @property
    def wakes_at(self) -> float:
        return self._at

    def noticed(self, now: float) -> None:
        """The view has changed, or the way is free again: whose turn it is, is reckoned anew."""
        self._quiet_since = now
        self._at = now + self._talk.quiet_s

    def reckoned(self, now: float) -> None:
        """There are new figures: they come every few seconds, and do not put a turn off."""
        if math.isinf(self._at):
            self.noticed(now)

    def put_off(self, now: float, share: float) -> None:
        """Our offer met another, or somebody was silent.

        Args:
            share: from 0 to 1, another for each data node and time.
        """
        self._quiet_since = now + self._talk.patience_s * share
        self._at = self._quiet_since + self._talk.quiet_s

    def refused(self, now: float) -> None:
        """Somebody does not want what we have found."""
        self._ready = None
        self.noticed(now)

    def decided(self, now: float) -> None:
        """All stand otherwise now, as somebody has offered."""
        self._decided += 1
        self._ready = None
        self.noticed(now)

    # ---- our turn ------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> Plan | None:
        """The plan to offer; None when it is not our turn, or nothing better was found."""
        if now < self._at:
            return None
        self._at = math.inf
        view, plan = self._view, self._view.plan()
        if plan is None or not _fits(plan):
            return None
        if self._ready is not None and not self._ready.holds(view):
            self._ready = None
        if self._costs is not view.costs:
            self._changed(plan)
        if (self._turns_left <= 0 and self._ready is None) or self._decided >= self._most_offers:
            return None
        before = (self._rank - self._decided) % self._among
        at = self._quiet_since + self._talk.quiet_s + before * self._talk.turn_s
        if now < at:
            self._at = at
            return None
        if self._ready is None:
            self._ready = self._found(plan)
        ready = self._ready
        if ready is None:
            return None
        ready.tries += 1
        if ready.tries > TRIES:
            self._ready = None
            return None
        return ready.plan

    def _changed(self, plan: Plan) -> None:
        """There are other costs: new turns, if they make much of a difference."""
        search, settled = self._by_costs(), self._settled
        if settled is None:
            return
        last = self._expected_of(plan, search).worth[0]
        if abs(last - settled[1]) > WORTH_PLANNING * settled[1]:
            self._renew(AGAIN)
        else:
            self._settled = self._view.costs, settled[1]

    def _found(self, plan: Plan) -> _Ready | None:
        """A better plan; None when nothing is worth telling."""
        search = self._by_costs()
        before = self._expected_of(plan, search)
        allowance = self._tasks_left // self._turns_left
        until = search.tasks + allowance
        self._turns_left -= 1
        self._tasks_left -= allowance
        starts = [Found(plan, before)]
        if self._is_first and self._rank < STARTING:
            starts += self._anew(search, allowance // 2 if self._rank == 0 else 0)
        self._is_first = False
        found = starts[0]
        for left, start in enumerate(reversed(starts)):
            share = (until - search.tasks) // (len(starts) - left)
            one = search.improve(start.plan, start.expected, share)
            found = min(found, one, key=lambda one: search.worth(one.expected))
        gains = search.gains(before, found.expected)
        if math.isinf(found.expected.worth[0]) or not _is_worth(gains):
            self._settled = self._view.costs, before.worth[0]
            return None
        self._settled = self._view.costs, found.expected.worth[0]
        return _Ready(found.plan, dict(self._view.versions))

    def _anew(self, search: PlanSearch, allowance: int) -> list[Found]:
        """A plan from nothing, as far as there is one: by trades of lanes, or without by routes that avoid each
        other."""
        view = self._view
        dealt = view.dealt_sets()
        if dealt is None:
            return []
        times = 1 if allowance else view.singles // view.lanes
        trees = {
            peer: [(stages, order_tree(view.ahead, stages)) for stages in (*sets,) * times]
            for peer, sets in dealt.items()
        }
        traded = traded_lanes(view.costs, view.rules, trees, allowance // TASKS_A_TRADE)
        if traded is None:
            return []
        search.spend(TASKS_A_TRADE * traded.judged)
        singles = {
            peer: tuple(routes[k % len(routes)] for k in range(view.singles)) for peer, routes in traded.lanes.items()
        }
        plan = search.straightened(singles)
        return [Found(plan, search.expected(plan))]

    # ---- another's offer -------------------------------------------------------------------------------------------

    def accepts(self, offer: Offer) -> bool:
        """Whether all may stand as offered, by what we know."""
        view, plan = self._view, self._view.plan()
        if plan is None or self._answers_left <= 0 or fault_of(view, offer) is not None:
            return False
        self._answers_left -= 1
        search = self._by_costs()
        before = self._expected_of(plan, search)
        offered = {standing.peer: tuple(lane.route for lane in standing.lanes) for standing in offer.standings}
        after = self._expected_of(offered, search)
        return not math.isinf(after.worth[0]) and search.gains(before, after)[0] >= -MOST_WORSE

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _renew(self, share: float) -> None:
        """As many turns again, and such a share of what they may cost."""
        talk = self._talk
        self._decided = 0
        self._turns_left = -(-self._most_offers // self._among)
        peers = len(self._view.book.stage_of)
        self._tasks_left = int(share * talk.tasks_each * min(MOST_TIMES, max(1.0, peers / USUAL_PEERS)))
        self._answers_left = ANSWERS
        self._ready, self._is_first = None, True

    def _by_costs(self) -> PlanSearch:
        view = self._view
        if self._search is None or self._costs is not view.costs:
            self._costs, self._expected = view.costs, None
            self._search = PlanSearch(
                view.own, view.costs, view.rules, self._rounds, is_free=self._talk.microbatches is None
            )
        return self._search

    def _expected_of(self, plan: Plan, search: PlanSearch) -> Forecast:
        """The forecast of a plan; of the last one asked for it is kept."""
        if self._expected is None or self._expected[0] is not search or self._expected[1] != plan:
            self._expected = search, plan, search.expected(plan)
        return self._expected[2]


def _rank(epoch: bytes, peer: PeerId) -> bytes:
    """The order of turns, another one in each epoch."""
    return hashlib.blake2b(peer.encode(), key=epoch, digest_size=8).digest()


def _fits(plan: Plan) -> bool:
    """Whether all of it can be told in one message."""
    routes = [route for singles in plan.values() for route in singles]
    return len(routes) <= MAX_OFFERED_LANES and sum(map(len, routes)) <= MAX_OFFERED_VISITS


def _is_worth(gains: tuple[float, float]) -> bool:
    first, second = gains
    return first >= WORTH_OFFERING[0] or (first >= -1e-9 and second >= WORTH_OFFERING[1])
