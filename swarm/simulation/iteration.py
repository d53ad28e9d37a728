"""Iterations of training in virtual time: the data nodes talk about lanes, and launch their microbatches along those
they have.

What is known when: every data node has its own negotiator and its own book of lanes. It starts with what is announced
of peers and links; of the other data nodes' lanes it knows what they have told it, one message delay ago or more. Talk
and work go on side by side. At the start of an iteration each data node takes its lanes as they are then for all its
microbatches; what is traded meanwhile holds from the next one on. The world then plays the plans with its own costs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.stage_balance import visits
from swarm.simulation.forecast import Forecast, forecast
from swarm.simulation.instance import Instance, Plan, launched
from swarm.simulation.lower_bound import lower_bound_s
from swarm.simulation.negotiation_world import Network, Talking, TalkSoFar

TALK_S = 30.0
"""How long the data nodes have talked when the first iteration begins: about the length of an iteration over the
internet."""
USUAL = Network()
SILENCE = TalkSoFar(0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Conduct:
    """How the data nodes go about it.

    Args:
        cold: they know nothing of each other: the ring's stages and the nearest peers.
        talk_s: how long they have talked before the first iteration; 0 for a start in the middle of nothing.
        iterations: one after another; the talk goes on.
    """

    cold: bool = False
    talk_s: float = TALK_S
    iterations: int = 1
    network: Network = USUAL


@dataclass(frozen=True, slots=True)
class Iteration:
    """What happened, and the talk and the planning up to its start."""

    plan: Plan
    played: Forecast
    planning_cpu_s: float
    """Of all data nodes together."""
    planning_cpu_each_s: float
    """Of the one with the most."""
    bound_s: float
    talk: TalkSoFar
    visits: Mapping[int, int]


def run_iterations(
    instance: Instance, conduct: Conduct, cpu_clock: Callable[[], float], world: Costs | None = None, seed: int = 0
) -> Sequence[Iteration]:
    """Plans and plays iterations; the next begins when the last microbatch of the one before is home.

    Args:
        cpu_clock: seconds of CPU time; all planning of all data nodes is measured with it.
        world: what costs turn out to be; what was believed when not given.
        seed: of the delays of messages.

    Raises:
        ValueError: a stage cannot be visited.
    """
    costs = instance.costs
    talking = Talking(
        instance.rules,
        TalkRules(instance.microbatches),
        dict.fromkeys(costs.data_nodes, costs),
        conduct.network,
        random.Random(seed),  # noqa: S311 - a repeatable world, not a secret
        cpu_clock,
        -conduct.talk_s,
    )
    bound_s, begins, done = lower_bound_s(instance), 0.0, []
    for _ in range(conduct.iterations):
        if not conduct.cold:
            talking.run(begins)
        plan = {
            peer: launched(talking.lanes_at(peer, begins), instance.microbatches) for peer in instance.costs.data_nodes
        }
        so_far = SILENCE if conduct.cold else talking.so_far()
        cpu_s = talking.cpu_s, max(talking.cpu_each_s.values())
        done.append(played(instance, plan, world, cpu_s, bound_s, so_far))
        if math.isinf(done[-1].played.makespan_s):
            break
        begins += done[-1].played.makespan_s
    return done


def played(
    instance: Instance,
    plan: Plan,
    world: Costs | None,
    cpu_s: tuple[float, float],
    bound_s: float,
    talk: TalkSoFar = SILENCE,
) -> Iteration:
    """The iteration that comes of a plan in the world as it is.

    Args:
        cpu_s: that planning took, all data nodes together and the one with the most.
    """
    forecasted = forecast(instance.costs if world is None else world, plan)
    stage_of = instance.costs.stage_of()
    counted = visits((stage_of[peer] for peer in route) for routes in plan.values() for route in routes)
    return Iteration(plan, forecasted, *cpu_s, bound_s, talk, counted)
