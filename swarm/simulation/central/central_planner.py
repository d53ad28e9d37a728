"""For comparison only: one planner that knows everything at once. No node works like this."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import lanes_for
from swarm.simulation.central.lane_market import LaneMarket
from swarm.simulation.central.revision import Revision
from swarm.simulation.forecast import forecast
from swarm.simulation.instance import Instance, Plan, launched
from swarm.simulation.iteration import Iteration, played
from swarm.simulation.lower_bound import lower_bound_s

LANE_TURNS_EACH = 3
REVISION_TURNS_EACH = 2
"""Turns for each data node, in the mean."""
MOST_REVISED = 128
"""Microbatches in a plan up to which it is revised as a whole; that of a larger swarm stays at its lanes."""


def central_iteration(instance: Instance, cpu_clock: Callable[[], float], world: Costs | None = None) -> Iteration:
    """An iteration by the central plan, with the CPU time that it took (see `run_iterations`)."""
    began = cpu_clock()
    plan = central_plan(instance)
    cpu_s = cpu_clock() - began
    return played(instance, plan, world, (cpu_s, cpu_s), lower_bound_s(instance))


def central_plan(instance: Instance) -> Plan:
    """Lanes traded in turns without delay or loss, then single microbatches revised by the forecast of all.

    If the forecast says that microbatches would block each other for good, which takes routes that step back: lanes
    that do not.

    Raises:
        ValueError: a stage cannot be visited.
    """
    plan, all_home = _settled(instance, instance.rules)
    if instance.rules.max_back_stops and not all_home:
        plan, _ = _settled(instance, replace(instance.rules, max_back_stops=0))
    return plan


def _settled(instance: Instance, rules: PathRules) -> tuple[Plan, bool]:
    """A plan, and whether all microbatches come home: whether none waits for a slot that only its own end would
    free."""
    costs, count = instance.costs, len(instance.costs.data_nodes)
    market = LaneMarket(costs, rules, lanes_for(rules, count, instance.microbatches))
    market.open()
    market.settle(LANE_TURNS_EACH * count)
    plan: Plan = {peer: launched(market.of(peer), instance.microbatches) for peer in costs.data_nodes}
    if instance.total > MOST_REVISED:
        return plan, math.isfinite(forecast(costs, plan).makespan_s)
    revision = Revision(costs, rules, plan)
    if not math.isfinite(revision.expected.makespan_s):
        return plan, False
    revision.run(REVISION_TURNS_EACH * count)
    return {peer: tuple(routes) for peer, routes in revision.plan.items()}, True
