"""The contenders of `benchmarks.paths`: each turns an instance into the routes of all data nodes, for the same number
of microbatches.

Full pipelines visit all stages, the others as many as the instance says. Every arm visits each stage equally often, and
is played by the same simulator.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.paths_central import improved
from benchmarks.paths_online import SmallestVirtualTime
from benchmarks.paths_ours import cold_plan, talked_plan
from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.path_rules import PathRules, order_tree, orders
from swarm.routing.stage_balance import fair_sets, visits
from swarm.simulation.baselines.earliest_return import EarliestReturn
from swarm.simulation.baselines.one_by_one import one_by_one
from swarm.simulation.central.central_planner import central_plan
from swarm.simulation.forecast import forecast
from swarm.simulation.instance import Instance, Plan
from swarm.simulation.lower_bound import lower_bound_s
from swarm.vocabulary.types import PeerId

DRAWS: Final = 20
"""Worlds in which every cost is off, and random plans of the cost-blind arm."""
DOUBT: Final = 0.05
FIRST_DRAW: Final = 1000
"""Seed of the first such world: none of those that the planner itself makes up to test its changes."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What an arm launches.

    Args:
        rules: what its paths keep to; a full pipeline's differ from the instance's.
        plans: one, or several of an arm whose iterations differ.
    """

    rules: PathRules
    plans: Sequence[Plan]


def arms(instance: Instance, attempts: int) -> dict[str, Arm]:
    """All arms, in the order of the table.

    Args:
        attempts: of the two arms that a central search makes better; they are no decentralized plans.
    """
    rules = instance.rules
    straight = replace(rules, per_path=rules.skippable, max_back_stops=0)
    full = replace(rules, per_path=rules.skippable)
    found = {kept: talked_plan(instance, kept) for kept in (straight, full, rules)}
    in_order = replace(rules, max_back_stops=0)
    best_full = min((straight, full), key=lambda kept: forecast(instance.costs, found[kept]).makespan_s)
    return {
        "full, fixed pairs, one data node a chain": Arm(straight, [fixed_pairs(instance)]),
        "full, fixed pairs, all data nodes": Arm(straight, [fixed_pairs_of_all(instance)]),
        "full, SWARM's rule": Arm(straight, one_by_one(replace(instance, rules=straight), SmallestVirtualTime)),
        "full, searched routes": Arm(straight, [found[straight]]),
        "full, searched routes, steps back": Arm(full, [found[full]]),
        "full, the better one improved centrally": Arm(full, [improved(instance, found[best_full], attempts)]),
        "skipping, cost-blind": Arm(rules, [cost_blind(instance, seed) for seed in range(DRAWS)]),
        "skipping, SWARM's rule": Arm(rules, one_by_one(instance, SmallestVirtualTime)),
        "skipping, earliest return": Arm(rules, one_by_one(instance, EarliestReturn)),
        "ours, cold": Arm(rules, [cold_plan(instance)]),
        "ours, no steps back": Arm(in_order, [talked_plan(instance, in_order)]),
        "ours": Arm(rules, [found[rules]]),
        "ours, one planner that knows everything": Arm(rules, [central_plan(instance)]),
        "ours, improved centrally": Arm(rules, [improved(instance, found[rules], attempts)]),
    }


# ---- arms without a search -------------------------------------------------------------------------------------------


def fixed_pairs(instance: Instance) -> Plan:
    """The baseline as SkipPipe published it: replica k of each stage feeds replica k of the next, and only data nodes
    with such a chain send.

    The microbatches of the whole iteration are shared out over the chains.
    """
    chains = _chains(instance.costs)
    senders = instance.costs.data_nodes[: len(chains)]
    shares = [instance.total // len(senders) + (k < instance.total % len(senders)) for k in range(len(senders))]
    return {peer: (chains[k],) * shares[k] for k, peer in enumerate(senders)}


def fixed_pairs_of_all(instance: Instance) -> Plan:
    """The same chains, used in turn by all data nodes."""
    chains = _chains(instance.costs)
    return {
        peer: (chains[k % len(chains)],) * instance.microbatches for k, peer in enumerate(instance.costs.data_nodes)
    }


def _chains(costs: Costs) -> list[PeerRoute]:
    return list(zip(*costs.stages[1:], strict=False))[: len(costs.data_nodes)]


def cost_blind(instance: Instance, seed: int) -> Plan:
    """Random legal orders with equal visits to every stage, and as equal ones to its replicas as can be."""
    rng = random.Random(seed)
    sets = fair_sets(instance.rules, instance.total)
    rng.shuffle(sets)
    decks = {stage: _Deck(peers, rng) for stage, peers in enumerate(instance.costs.stages)}
    routes = iter(
        tuple(decks[stage].draw() for stage in rng.choice(list(orders(order_tree(instance.rules, stages)))))
        for stages in sets
    )
    return {peer: tuple(next(routes) for _ in range(instance.microbatches)) for peer in instance.costs.data_nodes}


class _Deck:
    """Deals out all of its cards before any of them again."""

    def __init__(self, cards: Sequence[PeerId], rng: random.Random) -> None:
        self._cards, self._rng, self._left = list(cards), rng, list[PeerId]()

    def draw(self) -> PeerId:
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


# ---- measuring -------------------------------------------------------------------------------------------------------


def fault(instance: Instance, arm: Arm) -> str | None:
    """Why the arm does not do the same work as the others: an illegal path, unequal visits, a microbatch too few; None
    when it does."""
    stage_of = instance.costs.stage_of()
    for plan in arm.plans:
        walked = [[stage_of[peer] for peer in route] for routes in plan.values() for route in routes]
        wrong = next((found for order in walked if (found := arm.rules.fault(order)) is not None), None)
        if wrong is not None:
            return wrong
        if len(walked) != instance.total:
            return f"{len(walked)} microbatches, not {instance.total}"
        counted = visits(walked)
        if len({counted[stage] for stage in range(1, arm.rules.stages)}) > 1:
            return f"visits differ between stages: {dict(sorted(counted.items()))}"
    return None


def off_by_chance(costs: Costs, rng: random.Random) -> Costs:
    """The same swarm with every cost off by up to DOUBT."""

    def off(seconds: float) -> float:
        return seconds * rng.uniform(1 - DOUBT, 1 + DOUBT)

    return replace(
        costs,
        forward_s={peer: off(seconds) for peer, seconds in costs.forward_s.items()},
        message_s={
            here: {there: off(seconds) for there, seconds in row.items()} for here, row in costs.message_s.items()
        },
    )


def measure(instance: Instance, arm: Arm) -> dict[str, Any]:
    """Makespan as planned and the median in worlds a little off; of an arm with several plans the median over them,
    each in a world of its own.

    Raises:
        ValueError: the arm's plan is not legal, or does other work than the others.
    """
    wrong = fault(instance, arm)
    if wrong is not None:
        raise ValueError(wrong)
    worlds = [off_by_chance(instance.costs, random.Random(FIRST_DRAW + draw)) for draw in range(DRAWS)]
    planned = [forecast(instance.costs, plan) for plan in arm.plans]
    doubted = [forecast(world, arm.plans[k % len(arm.plans)]).makespan_s for k, world in enumerate(worlds)]
    return {
        "makespan_s": _rounded(statistics.median(played.makespan_s for played in planned)),
        "off_by_5_percent_s": _rounded(statistics.median(doubted)),
        "waiting_s_each": _rounded(statistics.median(played.waiting_s() for played in planned) / instance.total),
        "stuck": sum(played.makespan_s == float("inf") for played in planned),
    }


def decompose(instance: Instance, attempts: int, report: Callable[[str], None]) -> Mapping[str, Any]:
    """Every arm on one instance."""
    table = {}
    for name, arm in arms(instance, attempts).items():
        table[name] = measure(instance, arm)
        report(f"{instance.name}: {name}: {table[name]['makespan_s']} s")
    return {"instance": instance.name, "lower_bound_s": _rounded(lower_bound_s(instance)), "arms": table}


def _rounded(seconds: float) -> float | None:
    """None stands for never: JSON has no infinity."""
    return None if seconds == float("inf") else round(seconds, 2)
