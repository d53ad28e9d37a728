"""The cheapest route when every peer has a price.

Dynamic programming over stages: for each stage and each number of stages visited so far only the cheapest way to each
peer is kept. With k candidates for a stage a step costs k squared; k is bounded (`NEAREST`), so the time to choose
grows with the peers of a stage only by the one look at each of them, and with the stages only by their square.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.vocabulary.types import PeerId

NEAREST = 6
"""Replicas of one stage that are weighed for a route; of more, the ones that are cheapest as a detour."""

_Front = list[tuple[float, PeerId, PeerRoute]]


@dataclass(frozen=True, slots=True)
class Priced:
    """A route and its price, in seconds of the data node's round trip."""

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
    """The cheapest route through `length` stages in ascending order; None where there is none.

    Args:
        price: seconds for a visit to each peer; links come on top, twice.
        among: by stage, the replicas that may be on it; none for a stage that is not visited. Entry 0 is not read.
        max_jump: stages that one step may go on at most.
    """
    message, home = costs.message_s, costs.message_s[data_node]
    fronts: list[list[_Front]] = [[[(0.0, data_node, ())]]]
    """By stage, by the number of stages visited so far, the cheapest way to each of the stage's peers."""
    best: Priced | None = None
    for stage in range(1, len(among)):
        near = _nearest(home, price, among[stage])
        here: list[_Front] = [[]]
        for visited in range(1, length + 1):
            before = [
                way
                for front in fronts[max(0, stage - max_jump) : stage]
                if len(front) >= visited
                for way in front[visited - 1]
            ]
            here.append(_reached(message, price, before, near) if before else [])
        for cost, peer, route in here[length]:
            total = cost + 2 * home[peer]
            if best is None or total < best.price:
                best = Priced(total, route)
        fronts.append(here)
    return best


def _nearest(home: Mapping[PeerId, float], price: Mapping[PeerId, float], peers: Sequence[PeerId]) -> Sequence[PeerId]:
    return peers if len(peers) <= NEAREST else heapq.nsmallest(NEAREST, peers, key=lambda p: 2 * home[p] + price[p])


def _reached(
    message: Mapping[PeerId, Mapping[PeerId, float]],
    price: Mapping[PeerId, float],
    before: _Front,
    peers: Sequence[PeerId],
) -> _Front:
    reached: _Front = []
    for peer in peers:
        way: PeerRoute = ()
        ways, least = message[peer], math.inf
        for cost, last, route in before:
            total = cost + 2 * ways[last]
            if total < least:
                least, way = total, route
        reached.append((least + price[peer], peer, (*way, peer)))
    return reached
