"""The lanes that one data node knows of, its own among them, and what they make everything cost.

Microbatches that follow each other on the same peers hardly wait for each other, because they come at the pace of their
data node; those of different data nodes collide. So a peer is priced by the lanes of *others* on it, and the best lanes
share little. A trade between two data nodes is judged by all round trips that it touches: a power mean with a high
exponent, so that a data node with slack pays for one without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.path_rules import OrderTree, PathRules, order_tree
from swarm.routing.route_search import cheapest_by_set
from swarm.vocabulary.types import PeerId

LaneId = tuple[PeerId, int]
"""A data node's lane: its owner and its number there."""

COLLISION_SHARE = 0.5
"""Share of another lane's work at a peer that a microbatch has to wait for, on average, out and back together."""
URGENCY_POWER = 12
"""Exponent of the power mean over round trips: high, so that the slowest data node decides."""
MAX_OPTIONAL = 8
"""Stages that two lanes may divide anew between them; where they differ in more, they trade peers only."""
LEAST_GAIN = 1e-6


@dataclass(frozen=True, slots=True)
class Trade:
    """Two lanes' routes after a trade, and by how much the power mean falls."""

    asking: LaneId
    asked: LaneId
    routes: tuple[PeerRoute, PeerRoute]
    gain: float


class LaneBook:
    """Lanes as last heard. Routes may hold peers that are not in the costs (they are gone, or not yet known); those
    count nothing.

    Args:
        lanes: how many lanes each data node has (`swarm.routing.stage_balance.lanes_for`).
    """

    def __init__(self, costs: Costs, rules: PathRules, lanes: int = 1) -> None:
        self._costs, self._rules, self._lanes = costs, rules, lanes
        self.stage_of = costs.stage_of()
        self._service = {peer: costs.service_s(peer) for peer in self.stage_of}
        self._weight = {peer: costs.slots[peer] / lanes for peer in costs.data_nodes}
        self._together = {peer: -(-costs.slots[peer] // lanes) for peer in costs.data_nodes}
        self._load: dict[PeerId, float] = dict.fromkeys(self.stage_of, 0.0)
        self._most: dict[PeerId, int] = dict.fromkeys(self.stage_of, 0)
        self._price = {peer: (1 + costs.backward_factor) * costs.forward_s[peer] for peer in self.stage_of}
        """Of a visit to each peer: its compute time, and the waiting for the lanes that are on it."""
        self._alone: dict[LaneId, float] = {}
        self.routes: dict[LaneId, PeerRoute] = {}
        self.judged = 0
        """Trades whose gain was asked for: nearly all that trading costs."""

    # ---- looking -------------------------------------------------------------------------------------------------

    def round_trip_s(self, lane: LaneId) -> float:
        """Expected round trip of a lane, waiting for other lanes included."""
        own = self._weight[lane[0]]
        load, service = self._load, self._service
        waiting = sum((load[peer] - own) * service[peer] for peer in self.routes[lane] if peer in load)
        return self._alone[lane] + COLLISION_SHARE * waiting

    def alone_s(self, lane: LaneId) -> float:
        """Round trip of a lane when nobody waits: as its data node said, or by the costs here."""
        return self._alone[lane]

    def of(self, data_node: PeerId) -> tuple[PeerRoute, ...]:
        """A data node's lanes."""
        return tuple(self.routes[data_node, k] for k in range(self._lanes) if (data_node, k) in self.routes)

    def stages(self, route: PeerRoute) -> frozenset[int]:
        """What a route visits, as far as its peers are known."""
        return frozenset(self.stage_of[peer] for peer in route if peer in self.stage_of)

    def whole(self, route: PeerRoute) -> bool:
        """Whether all its peers are there."""
        return all(peer in self.stage_of for peer in route)

    def serves(self, route: PeerRoute, stages: frozenset[int]) -> bool:
        """Whether all its peers are there, and visit just these stages."""
        return self.whole(route) and self.stages(route) == stages

    def crowded(self, peer: PeerId) -> bool:
        """Whether lanes can bring more microbatches at once to a peer than it has slots for."""
        return self._most[peer] > self._costs.slots[peer]

    def cheapest(self, data_node: PeerId, *trees: OrderTree) -> dict[frozenset[int], PeerRoute]:
        """The best route for each set of stages in the trees, at the prices that the lanes in the book make."""
        found = cheapest_by_set(self._costs, data_node, self._price, *trees)
        return {stages: priced.route for stages, priced in found.items()}

    # ---- entering ------------------------------------------------------------------------------------------------

    def enter(self, lane: LaneId, route: PeerRoute, alone_s: float | None = None) -> None:
        """Takes a lane into account.

        Args:
            alone_s: its round trip when nobody waits, as its data node says; by the costs here when not given.
        """
        self.routes[lane] = route
        self._alone[lane] = self._costs.round_trip_s(lane[0], route) if alone_s is None else alone_s
        self._burden(lane[0], route, 1)

    def leave(self, lane: LaneId) -> PeerRoute:
        """Forgets a lane."""
        route = self.routes.pop(lane)
        del self._alone[lane]
        self._burden(lane[0], route, -1)
        return route

    @contextmanager
    def _without(self, *lanes: LaneId) -> Iterator[None]:
        kept = [(lane, self._alone[lane], self.leave(lane)) for lane in lanes]
        try:
            yield
        finally:
            for lane, alone_s, route in kept:
                self.enter(lane, route, alone_s)

    def _burden(self, data_node: PeerId, route: PeerRoute, sign: int) -> None:
        weight, together = sign * self._weight[data_node], sign * self._together[data_node]
        for peer in route:
            if peer in self._load:
                self._load[peer] += weight
                self._most[peer] += together
                self._price[peer] += COLLISION_SHARE * weight * self._service[peer]

    # ---- trades --------------------------------------------------------------------------------------------------

    def best_trade(self, asking: LaneId, partners: Sequence[LaneId], times: Mapping[LaneId, float]) -> Trade | None:
        """The best trade of a lane with one of these; None when none helps.

        Args:
            times: the round trips of all lanes in the book.
        """
        best: Trade | None = None
        worst = max(times.values())
        for asked in partners:
            for routes in self._divisions(asking, asked, worst):
                gain = self.gain(asking, asked, routes, times)
                if gain > (LEAST_GAIN if best is None else best.gain):
                    best = Trade(asking, asked, routes, gain)
        return best

    def gain(
        self, asking: LaneId, asked: LaneId, routes: tuple[PeerRoute, PeerRoute], times: Mapping[LaneId, float]
    ) -> float:
        """By how much the power mean of round trips falls (its sum, in units of the longest one) when both lanes
        change."""
        self.judged += 1
        worst = max(times.values())
        touched = self._sharing((asking, asked))
        with self._without(asking, asked):
            self.enter(asking, routes[0])
            self.enter(asked, routes[1])
            touched |= self._sharing((asking, asked))
            after = math.fsum((self.round_trip_s(lane) / worst) ** URGENCY_POWER for lane in touched)
            self.leave(asking)
            self.leave(asked)
        return math.fsum((times[lane] / worst) ** URGENCY_POWER for lane in touched) - after

    def _divisions(self, asking: LaneId, asked: LaneId, longest_s: float) -> list[tuple[PeerRoute, PeerRoute]]:
        """The ways in which the two could share out their stages, each with the best routes for it."""
        first, second = self.stages(self.routes[asking]), self.stages(self.routes[asked])
        common, single = first & second, first ^ second
        if len(single) > MAX_OPTIONAL:
            common, single = first, frozenset()
        work = self._costs.own_work_s(asking[0])
        divisions = []
        with self._without(asking, asked):
            tree = order_tree(self._rules, common, single)
            for stages, priced in cheapest_by_set(self._costs, asking[0], self._price, tree).items():
                if priced.price + work >= longest_s:
                    continue
                rest = second if not single else common | (single - stages)
                self._burden(asking[0], priced.route, 1)
                theirs = self.cheapest(asked[0], order_tree(self._rules, rest))
                self._burden(asking[0], priced.route, -1)
                if rest in theirs:
                    divisions.append((priced.route, theirs[rest]))
        return divisions

    def _sharing(self, lanes: Sequence[LaneId]) -> frozenset[LaneId]:
        """The lanes that meet one of these on some peer, themselves included."""
        peers = {peer for lane in lanes for peer in self.routes[lane]}
        return frozenset(lane for lane, route in self.routes.items() if not peers.isdisjoint(route))
