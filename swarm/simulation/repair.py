"""Who takes a dead peer's place on a route, as the simulation of churn has it: the nearest peer of the same stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.paths.costs import Costs, Route
from swarm.vocabulary import PeerId, Reasoned


@dataclass(frozen=True, slots=True)
class NoRoute:
    """These stages have no peer left."""

    stages: frozenset[int]


def repaired(costs: Costs, data_node: PeerId, kept: Route, stages: Sequence[int]) -> Reasoned[Route | NoRoute]:
    """A broken route made whole: who was visited stays, and others visit the stages that are left, in their order.

    Args:
        costs: without the dead.
        kept: the peers already visited.
        stages: what is left to visit.
    """
    here, chosen = kept[-1] if kept else data_node, list(kept)
    for stage in stages:
        live = costs.stages[stage]
        if not live:
            return Reasoned(NoRoute(frozenset({stage})), f"stage {stage} has no peer left")
        _, here = min((_detour_s(costs, here, peer, data_node), peer) for peer in live)
        chosen.append(here)
    return Reasoned(tuple(chosen), f"stages {list(stages)} by the nearest peers that are left")


def _detour_s(costs: Costs, here: PeerId, peer: PeerId, ahead: PeerId) -> float:
    ways = costs.message_s[here][peer] + costs.message_s[peer][ahead]
    return 2 * ways + (1 + costs.backward_factor) * costs.forward_s[peer]
