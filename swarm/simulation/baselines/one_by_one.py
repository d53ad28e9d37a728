"""Plans made one launch after another, by rules that do not talk.

A data node launches as soon as it has a slot and time. The simulator is first come, first served, so what happened
before a launch does not depend on what is launched later: each choice is made with the true past of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.routing.cost_model import PeerRoute
from swarm.simulation.forecast import Forecast, Unit, forecast
from swarm.simulation.instance import Instance, Plan
from swarm.vocabulary.types import PeerId


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known when a data node launches: the time, and how everything goes that has been launched so far, by
    all."""

    unit: Unit
    at: float
    so_far: Forecast
    plan: Mapping[PeerId, Sequence[PeerRoute]]


class Rule(Protocol):
    """Chooses a route at each launch."""

    rehearsals: int
    counted: int
    """Iterations that it is played before those that count, and these."""

    def choose(self, moment: Moment) -> PeerRoute:
        """The route of the microbatch that is about to start."""

    def look_back(self, plan: Mapping[PeerId, Sequence[PeerRoute]], played: Forecast) -> None:
        """How the whole iteration went."""


def one_by_one(instance: Instance, rule_of: Callable[[Instance], Rule]) -> list[Plan]:
    """The routes of the iterations that count, chosen in the order of the launches.

    Raises:
        ValueError: what was launched blocks itself, so that nothing more can be.
    """
    rule = rule_of(instance)
    plans = [_iteration(instance, rule) for _ in range(rule.rehearsals + rule.counted)]
    return plans[rule.rehearsals :]


def _iteration(instance: Instance, rule: Rule) -> Plan:
    plan: dict[PeerId, list[PeerRoute]] = {peer: [] for peer in instance.costs.data_nodes}
    for _ in range(instance.total):
        at, data_node = _next_launch(instance, plan)
        unit = (data_node, len(plan[data_node]))
        plan[data_node].append(rule.choose(Moment(unit, at, forecast(instance.costs, plan), plan)))
    rule.look_back(plan, forecast(instance.costs, plan))
    return {peer: tuple(routes) for peer, routes in plan.items()}


def _next_launch(instance: Instance, plan: Mapping[PeerId, Sequence[PeerRoute]]) -> tuple[float, PeerId]:
    """When and where the next microbatch starts, found by launching one that goes nowhere from every data node that has
    any left."""
    left = [peer for peer, routes in plan.items() if len(routes) < instance.microbatches]
    probed = {peer: [*routes, ()] if peer in left else routes for peer, routes in plan.items()}
    tasks = forecast(instance.costs, probed).tasks
    launches = [(tasks[unit][0].start, unit[0]) for peer in left if (unit := (peer, len(plan[peer]))) in tasks]
    if not launches:
        raise ValueError("microbatches wait for each other's slots for ever")
    return min(launches)
