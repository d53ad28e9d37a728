"""One iteration of training in virtual time: the data nodes agree on lanes, revise their announced plans, and launch.

What is known when: before the iteration starts - while the one before it runs - every data node has heard the announcements of all peers (speeds, slots, links)
and, message by message, the lanes and plans of the other data nodes. Turns are taken one after another; a data node whose turn it is has heard of all earlier
ones, because whoever ends a turn tells everyone at once. None knows what another will do later, nor how costs will turn out. A turn takes three
one-way messages (asking, the answer, telling everyone), so some tens of turns fit into the seconds that an iteration over the internet lasts. The world then plays
the plans with its own costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from swarm.paths.balance import lanes_for, ring_set, visits
from swarm.paths.costs import Costs, Route
from swarm.paths.forecast import Forecast, forecast
from swarm.paths.lanes import LaneMarket
from swarm.paths.revision import Revision
from swarm.paths.routing import cheapest_by_set
from swarm.paths.rules import PathRules, order_tree
from swarm.simulation.bounds import lower_bound_s
from swarm.simulation.instances import Instance
from swarm.vocabulary import PeerId

Plan = Mapping[PeerId, tuple[Route, ...]]

LANE_TURNS_EACH = 3
REVISION_TURNS_EACH = 2
"""Turns for each data node, in the mean."""
MOST_REVISED = 128
"""Microbatches in a plan up to which it is revised as a whole; a larger swarm's data nodes leave it at their lanes."""


@dataclass(frozen=True, slots=True)
class Talk:
    """How the plan came about."""

    trades: int
    changes: int
    turns: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """What happened."""

    plan: Plan
    played: Forecast
    planning_cpu_s: float
    bound_s: float
    talk: Talk
    visits: Mapping[int, int]


def agreed_plan(instance: Instance) -> tuple[Plan, Talk]:
    """The plan that the data nodes arrive at, each planning only its own microbatches.

    If the forecast says that microbatches would block each other for good, which takes routes that step back, the data nodes fall back to lanes that do not.
    """
    plan, talk, all_home = _negotiated(instance, instance.rules)
    if instance.rules.max_back_stops and not all_home:
        plan, talk, _ = _negotiated(instance, replace(instance.rules, max_back_stops=0))
    return plan, talk


def _negotiated(instance: Instance, rules: PathRules) -> tuple[Plan, Talk, bool]:
    """A plan, how it came about, and whether all microbatches come home: whether none waits for a slot that only its own end would free."""
    costs, count = instance.costs, len(instance.costs.data_nodes)
    market = LaneMarket(costs, rules, lanes_for(rules, count, instance.microbatches))
    market.open()
    trades = market.settle(LANE_TURNS_EACH * count)
    plan: Plan = {peer: _launches(market.of(peer), instance.microbatches) for peer in costs.data_nodes}
    talked = count + trades + 1
    if instance.total > MOST_REVISED:
        return plan, Talk(trades, 0, talked), math.isfinite(forecast(costs, plan).makespan_s)
    revision, turns = Revision(costs, rules, plan), REVISION_TURNS_EACH * count
    if not math.isfinite(revision.expected.makespan_s):
        return plan, Talk(trades, 0, talked), False
    changes = revision.run(turns)
    plan = {peer: tuple(routes) for peer, routes in revision.plan.items()}
    return plan, Talk(trades, changes, talked + turns), True


def cold_plan(instance: Instance) -> Plan:
    """The plan of data nodes that have heard of nobody's plans: the ring's stages, and the nearest peers for them.

    Without a step back where the rules leave a choice: then microbatches only ever wait for slots of higher stages, and nobody blocks for good.
    """
    costs, rules = instance.costs, instance.rules
    ahead = replace(rules, max_back_stops=0)
    bare = {peer: (1 + costs.backward_factor) * seconds for peer, seconds in costs.forward_s.items()}
    count, plan = len(costs.data_nodes), {}
    for rank, peer in enumerate(costs.data_nodes):
        routes = []
        for number in range(instance.microbatches):
            stages = ring_set(rules, number * count + rank)
            tree = order_tree(ahead, stages) or order_tree(rules, stages)
            routes.append(cheapest_by_set(costs, peer, bare, tree)[stages].route)
        plan[peer] = tuple(routes)
    return plan


def run_iteration(
    instance: Instance, cpu_clock: Callable[[], float], world: Costs | None = None, cold: bool = False
) -> Iteration:
    """Plans and plays one iteration.

    Args:
        cpu_clock: seconds of CPU time; all planning of all data nodes is measured with it.
        world: what costs turn out to be; what was believed when not given.
        cold: nobody has heard of anybody's plans.
    """
    began = cpu_clock()
    plan, talk = (cold_plan(instance), Talk(0, 0, 0)) if cold else agreed_plan(instance)
    spent = cpu_clock() - began
    played = forecast(instance.costs if world is None else world, plan)
    stage_of = instance.costs.stage_of()
    counted = visits((stage_of[peer] for peer in route) for routes in plan.values() for route in routes)
    return Iteration(plan, played, spent, lower_bound_s(instance), talk, counted)


def _launches(lanes: tuple[Route, ...], microbatches: int) -> tuple[Route, ...]:
    return tuple(lanes[number % len(lanes)] for number in range(microbatches))
