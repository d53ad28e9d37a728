"""A peer dies after the talk has settled: what the lanes that are left are worth, beside a plan made anew."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.negotiation_events import Member, TalkRules
from swarm.simulation.forecast import forecast
from swarm.simulation.instance import Instance, launched
from swarm.simulation.negotiation_world import Network, Talking
from swarm.vocabulary.types import PeerId

SETTLED_S = 120.0
"""By then nobody has anything more to say, if messages arrive."""
VIEWS_DIFFER_S = 0.5
"""Within so long the death is in every membership view."""


@dataclass(frozen=True, slots=True)
class AfterDeath:
    """Seconds.

    Args:
        at_once: makespan of an iteration along the lanes that hold as soon as all data nodes know of the death.
        settled: the same when they have talked about it.
        anew: of a plan that the data nodes that are left agree on from a cold start.
        replanning_cpu: of all data nodes together, until the talk has ended.
        replanning_cpu_each: of the one with the most.
    """

    at_once: float
    settled: float
    anew: float
    replanning_cpu: float
    replanning_cpu_each: float


def after_death(
    instance: Instance, gone: PeerId, network: Network, cpu_clock: Callable[[], float], seed: int
) -> AfterDeath:
    """What a death costs.

    Raises:
        ValueError: the peer was the last of its stage.
    """
    costs = instance.costs.without(frozenset({gone}))
    if not all(costs.stages):
        raise ValueError("the last peer of a stage cannot be missed")
    talking = _talk(instance, instance.costs, network, cpu_clock, seed)
    before = dict(talking.cpu_each_s)
    if gone in talking.machines:
        talking.die(gone)
    members = [Member(peer) for peer in costs.data_nodes]
    talking.tell_of_change(members, dict.fromkeys(costs.data_nodes, costs), VIEWS_DIFFER_S)
    talking.run(VIEWS_DIFFER_S)
    at_once = _makespan_s(instance, costs, talking, VIEWS_DIFFER_S)
    talking.run(SETTLED_S)
    cpu_each = [talking.cpu_each_s[peer] - before[peer] for peer in costs.data_nodes]
    anew = _talk(instance, costs, network, cpu_clock, seed)
    return AfterDeath(
        at_once,
        _makespan_s(instance, costs, talking, SETTLED_S),
        _makespan_s(instance, costs, anew, 0.0),
        math.fsum(cpu_each),
        max(cpu_each),
    )


def _talk(instance: Instance, costs: Costs, network: Network, cpu_clock: Callable[[], float], seed: int) -> Talking:
    """A talk among these data nodes that has come to its end at time 0."""
    talking = Talking(
        instance.rules,
        TalkRules(instance.microbatches),
        dict.fromkeys(costs.data_nodes, costs),
        network,
        random.Random(seed),  # noqa: S311 - a repeatable world, not a secret
        cpu_clock,
        -SETTLED_S,
    )
    talking.run(0.0)
    return talking


def _makespan_s(instance: Instance, costs: Costs, talking: Talking, now: float) -> float:
    plan = {peer: launched(talking.lanes_at(peer, now), instance.microbatches) for peer in costs.data_nodes}
    return forecast(costs, plan).makespan_s
