"""Whether it is our turn to refine our routes, and what comes of it: who is done last goes first, the next one when
nothing has happened for a while.

The turns begin when nobody wishes for a trade any more: a data node that has refined its lanes trades none. Each spends
a part of what forecasts it may make until the swarm changes, and whoever finds nothing is silent until there is news.
"""

from __future__ import annotations

import math

from swarm.routing.cost_model import Costs, Route
from swarm.routing.negotiation.lane_view import View
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.negotiation.proposals import WORST
from swarm.routing.refinement import Plan, Refinement
from swarm.routing.route_forecast import Forecast

FREE_ROUNDS = 2
"""How often all data nodes go through their routes in a forecast, where each launches as fast as it can."""
TURN_S = 0.4
"""The next one waits so much longer: about the time of a turn and the news of it."""
TRIES = 3
"""Of an offer whose answer is lost, before the turns begin: who has refined its lanes trades none."""
LEAST_FORECASTS = 12
"""In a turn, however many tasks one has to play."""
WORTH_REFINING = 0.05
"""By so much the expected end must have changed with the costs before routes are refined anew."""
WORTH_TELLING = 0.0005, 0.01
"""Share by which the last data node must be done sooner, or all in the mean, for a turn's routes to be taken: all
others have to hear of them."""


class Refining:
    """Our turns of one epoch."""

    def __init__(self, view: View, talk: TalkRules) -> None:
        self._view, self._talk = view, talk
        self._rounds = FREE_ROUNDS if talk.microbatches is None else talk.microbatches // view.singles
        self._costs: Costs | None = None
        self._refinement: Refinement | None = None
        self._expected: tuple[Refinement, Plan, Forecast] | None = None
        self._left, self._tasks_left = talk.turns_each, talk.tasks_each
        self._quiet_since, self._at = 0.0, math.inf
        self._settled_s = math.nan
        """The end that was expected after the last turn."""

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

    def turn(self, now: float) -> tuple[Route, ...] | None:
        """Better routes for our microbatches; None when it is not our turn, or none were found."""
        if now < self._at:
            return None
        self._at = math.inf
        plan = self._view.plan()
        if plan is None:
            return None
        if self._left <= 0 and self._costs is self._view.costs:
            return None
        refinement = self._by_costs()
        expected = self._expected_of(plan, refinement)
        finish, last = expected.finish_s, expected.worth[0]
        if math.isinf(last):
            return None
        if abs(last - self._settled_s) > WORTH_REFINING * self._settled_s:
            self._left, self._tasks_left = self._talk.turns_each, self._talk.tasks_each
        if self._left <= 0:
            return None
        own = self._view.own
        before = sum((end, peer) > (finish[own], own) for peer, end in finish.items())
        at = self._quiet_since + self._talk.quiet_s + before * TURN_S
        if now < at:
            self._at = at
            return None
        return self._improved(plan, refinement, expected)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _by_costs(self) -> Refinement:
        view = self._view
        if self._costs is not view.costs or self._refinement is None:
            self._costs = view.costs
            self._refinement = Refinement(view.own, view.costs, view.rules, self._rounds)
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

    def _improved(self, plan: Plan, refinement: Refinement, before: Forecast) -> tuple[Route, ...] | None:
        tasks = self._tasks_of(plan)
        found = refinement.improve(plan, before, max(LEAST_FORECASTS, self._tasks_left // (self._left * tasks)))
        self._left -= 1
        self._tasks_left -= found.forecasts * tasks
        gained = [1 - after / once for after, once in zip(found.expected.worth, before.worth, strict=True) if once > 0]
        is_worth = any(gain >= least for gain, least in zip(gained, WORTH_TELLING, strict=False))
        self._settled_s = found.expected.worth[0] if is_worth else before.worth[0]
        return found.routes if is_worth else None
