"""The cheapest route through an order tree when every peer has a price: what a lane costs, with the others' lanes taken
into account.

Dynamic programming over the tree: for each beginning of an order only the cheapest way to each peer of its last stage
is kept. With k candidates for a stage a step costs k squared; k is bounded (`NEAREST`), so that the time to choose
grows with the peers of a stage only by the one look at each of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.path_rules import OrderTree
from swarm.vocabulary.types import PeerId

NEAREST = 6
"""Replicas of one stage that are weighed for a route; of more, the ones that are cheapest as a detour."""

_Front = list[tuple[float, PeerId, PeerRoute]]


@dataclass(frozen=True, slots=True)
class Priced:
    """A route and its price, in seconds of the data node's round trip."""

    price: float
    route: PeerRoute


def candidates(
    costs: Costs, data_node: PeerId, price: Mapping[PeerId, float], nearest: int = NEAREST
) -> tuple[Sequence[PeerId], ...]:
    """The replicas of each stage worth weighing."""
    data_nodes, *others = costs.stages
    return data_nodes, *(_nearest(costs, data_node, price, peers, nearest) for peers in others)


def _nearest(
    costs: Costs, data_node: PeerId, price: Mapping[PeerId, float], peers: Sequence[PeerId], count: int
) -> Sequence[PeerId]:
    message = costs.message_s[data_node]
    return peers if len(peers) <= count else heapq.nsmallest(count, peers, key=lambda p: 2 * message[p] + price[p])


def cheapest_in_order(
    costs: Costs,
    data_node: PeerId,
    stages: Sequence[int],
    price: Mapping[PeerId, float],
    among: Sequence[Sequence[PeerId]],
) -> Priced:
    """The cheapest route through these stages in this order.

    Args:
        price: see `cheapest_by_set`.
        among: by stage, the replicas that may be on it: of each of `stages` one at least. Of many those are weighed
            that are cheapest as a detour.
    """
    tree: OrderTree = ()
    for stage in reversed(stages):
        tree = ((stage, tree),)
    near = [_nearest(costs, data_node, price, peers, NEAREST) for peers in among]
    return cheapest_by_set(costs, data_node, price, tree, among=near)[frozenset(stages)]


def cheapest_by_set(
    costs: Costs,
    data_node: PeerId,
    price: Mapping[PeerId, float],
    *trees: OrderTree,
    nearest: int = NEAREST,
    among: Sequence[Sequence[PeerId]] | None = None,
) -> dict[frozenset[int], Priced]:
    """The cheapest route for every set of stages in the trees; sets that no live replica serves are missing.

    Args:
        price: seconds for a visit to each peer, waiting and what it costs others included; links come on top, twice.
        among: the replicas of each stage that may be on it; the `nearest` ones where not given.
    """
    peers = candidates(costs, data_node, price, nearest) if among is None else tuple(among)
    walk = _Walk(costs, price, peers, data_node)
    for tree in trees:
        walk.down(tree, frozenset(), [(0.0, data_node, ())])
    return walk.best


class _Walk:
    def __init__(
        self, costs: Costs, price: Mapping[PeerId, float], peers: tuple[Sequence[PeerId], ...], data_node: PeerId
    ) -> None:
        self._message, self._price, self._peers = costs.message_s, price, peers
        self._home = costs.message_s[data_node]
        self.best: dict[frozenset[int], Priced] = {}

    def down(self, tree: OrderTree, visited: frozenset[int], front: _Front) -> None:
        for stage, rest in tree:
            reached = self._step(stage, front)
            if not reached:
                continue
            if rest:
                self.down(rest, visited | {stage}, reached)
            else:
                self._keep(visited | {stage}, reached)

    def _step(self, stage: int, front: _Front) -> _Front:
        reached: _Front = []
        for peer in self._peers[stage]:
            way: PeerRoute = ()
            ways, least = self._message[peer], math.inf
            for cost, last, route in front:
                total = cost + 2 * ways[last]
                if total < least:
                    least, way = total, route
            reached.append((least + self._price[peer], peer, (*way, peer)))
        return reached

    def _keep(self, stages: frozenset[int], reached: _Front) -> None:
        for cost, peer, route in reached:
            total = cost + 2 * self._home[peer]
            known = self.best.get(stages)
            if known is None or total < known.price:
                self.best[stages] = Priced(total, route)
