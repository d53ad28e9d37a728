"""Searches the cheapest route by dynamic programming over stages and numbers of stages visited so far.

The search time is linear in replicas and quadratic in stages: at most NEAREST replicas of a stage are combined.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.vocabulary.types import PeerId

NEAREST = 6
"""Largest number of replicas per stage in a search: those with the cheapest detour from the data node."""

_Front = list[tuple[float, PeerId, PeerRoute]]


@dataclass(frozen=True, slots=True)
class Priced:
    """A route, as the peers to visit in order, and its price in seconds."""

    price: float
    route: PeerRoute


def cheapest_route(
    costs: Costs,
    data_node: PeerId,
    price: Mapping[PeerId, float],
    among: Sequence[Sequence[PeerId]],
    length: int,
    max_jump: int,
) -> Priced | None:
    """Returns the cheapest route through `length` stages in ascending order, or None.

    Args:
        price: seconds of a visit to each peer, without links.
        among: allowed replicas by stage; empty for a stage that is not visited. Entry 0 is not read.
        max_jump: largest step between stages.
    """
    message, from_data_node = costs.message_s, costs.message_s[data_node]
    # By stage and number of stages visited so far: the cheapest route to each of the stage's peers.
    fronts: list[list[_Front]] = [[[(0.0, data_node, ())]]]
    best: Priced | None = None
    for stage in range(1, len(among)):
        near = _nearest(from_data_node, price, among[stage])
        here: list[_Front] = [[]]
        for visited in range(1, length + 1):
            before = [
                entry
                for front in fronts[max(0, stage - max_jump) : stage]
                if len(front) >= visited
                for entry in front[visited - 1]
            ]
            here.append(_extended(message, price, before, near) if before else [])
        for cost, peer, route in here[length]:
            total = cost + 2 * from_data_node[peer]
            if best is None or total < best.price:
                best = Priced(total, route)
        fronts.append(here)
    return best


def _nearest(
    from_data_node: Mapping[PeerId, float], price: Mapping[PeerId, float], peers: Sequence[PeerId]
) -> Sequence[PeerId]:
    if len(peers) <= NEAREST:
        return peers
    return heapq.nsmallest(NEAREST, peers, key=lambda peer: 2 * from_data_node[peer] + price[peer])


def _extended(
    message: Mapping[PeerId, Mapping[PeerId, float]],
    price: Mapping[PeerId, float],
    before: _Front,
    peers: Sequence[PeerId],
) -> _Front:
    """Returns the cheapest extension of the routes in `before` to each of `peers`."""
    extended: _Front = []
    for peer in peers:
        best: PeerRoute = ()
        links, least = message[peer], math.inf
        for cost, last, route in before:
            total = cost + 2 * links[last]
            if total < least:
                least, best = total, route
        extended.append((least + price[peer], peer, (*best, peer)))
    return extended
