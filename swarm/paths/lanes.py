"""Lanes: the standing route of a data node's microbatches, agreed between data nodes by trades.

A lane is what a data node's microbatches take one after another. Microbatches that follow each other on the same peers hardly wait for each other, because they
come at the pace of their data node; those of different data nodes collide. So a peer is priced by the lanes of *others* on it, and the best lanes share little.

Each data node plans only its own lanes. It knows the lanes and the expected round trip that every other data node has announced. The worst placed one speaks
first: it picks a route for itself and asks one other data node to make room for it, which answers with the best route that is left to it. The trade is made if
the worst round trips get better (a power mean, so that a data node with slack pays for one without). The two together visit the same stages as before
(`swarm.paths.balance`). Lanes last over iterations; they are traded anew when announcements change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.paths.balance import fair_sets
from swarm.paths.costs import Costs, Route
from swarm.paths.routing import Priced, cheapest_by_set
from swarm.paths.rules import PathRules, order_tree
from swarm.vocabulary import PeerId, Reasoned

LaneId = tuple[PeerId, int]
"""A data node's lane: its owner and its number there."""

COLLISION_SHARE = 0.5
"""Share of another lane's work at a peer that a microbatch has to wait for, on average, out and back together."""
URGENCY_POWER = 12
"""Exponent of the power mean over round trips: high, so that the slowest data node decides."""
MAX_OPTIONAL = 8
"""Stages that two lanes may divide anew between them; where they differ in more, they trade peers only."""
PARTNERS = 8
"""Data nodes that one asks in its turn, those with the most slack first."""
WORST = 3
"""How many of the worst placed data nodes get their turn before the market is called settled."""


@dataclass(frozen=True, slots=True)
class Trade:
    """Two lanes' routes after a trade, and by how much the power mean falls."""

    asking: LaneId
    asked: LaneId
    routes: tuple[Route, Route]
    gain: float


class LaneMarket:
    """The lanes of all data nodes as the last announcements tell them.

    Args:
        lanes: how many lanes each data node has (`swarm.paths.balance.lanes_for`).
    """

    def __init__(self, costs: Costs, rules: PathRules, lanes: int = 1) -> None:
        self._costs, self._rules, self._lanes = costs, rules, lanes
        self._stage_of = costs.stage_of()
        self._service = {peer: costs.service_s(peer) for peer in self._stage_of}
        self._weight = {peer: costs.slots[peer] / lanes for peer in costs.data_nodes}
        self._load: dict[PeerId, float] = dict.fromkeys(self._stage_of, 0.0)
        self._price = {peer: (1 + costs.backward_factor) * costs.forward_s[peer] for peer in self._stage_of}
        """Of a visit to each peer: its compute time, and the waiting for the lanes that are on it."""
        self.routes: dict[LaneId, Route] = {}

    # ---- what things cost ----------------------------------------------------------------------------------------

    def round_trip_s(self, lane: LaneId) -> float:
        """Expected round trip of a lane, waiting for other lanes included."""
        data_node, route = lane[0], self.routes[lane]
        own = self._weight[data_node]
        waiting = sum((self._load[peer] - own) * self._service[peer] for peer in route)
        return self._costs.round_trip_s(data_node, route) + COLLISION_SHARE * waiting

    def of(self, data_node: PeerId) -> tuple[Route, ...]:
        """A data node's lanes."""
        return tuple(self.routes[data_node, k] for k in range(self._lanes) if (data_node, k) in self.routes)

    def _enter(self, lane: LaneId, route: Route) -> None:
        self.routes[lane] = route
        self._burden(route, self._weight[lane[0]])

    def _leave(self, lane: LaneId) -> Route:
        route = self.routes.pop(lane)
        self._burden(route, -self._weight[lane[0]])
        return route

    def _stages(self, route: Route) -> frozenset[int]:
        return frozenset(self._stage_of[peer] for peer in route)

    # ---- a cold start --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """First lanes, without talk: the worst placed data node takes the set of stages that suits it best, then the next.

        Raises:
            ValueError: a stage has no replica.
        """
        for stage, peers in enumerate(self._costs.stages):
            if not peers:
                raise ValueError(f"stage {stage} has no peer")
        wanted = [(peer, k) for k in range(self._lanes) for peer in self._costs.data_nodes]
        bag = Counter(fair_sets(self._rules, len(wanted)))
        far = {peer: min(best.price for best in self._priced(peer, bag).values()) for peer in self._costs.data_nodes}
        for lane in sorted(wanted, key=lambda lane: (-far[lane[0]] - self._costs.own_work_s(lane[0]), lane)):
            priced = self._priced(lane[0], bag)
            stages = min(priced, key=lambda chosen: (priced[chosen].price, sorted(chosen)))
            bag -= Counter([stages])
            self._enter(lane, priced[stages].route)

    def resume(self, lanes: Mapping[LaneId, frozenset[int]], routes: Mapping[LaneId, Route]) -> int:
        """Takes over lanes agreed earlier; those with a peer that is gone get another route for the same stages, so that visits stay equal.

        Args:
            lanes: the stages of each lane.
            routes: their routes as they were.

        Returns:
            How many lanes were broken.

        Raises:
            ValueError: no live peers serve a lane's stages any more.
        """
        broken = [lane for lane, route in routes.items() if any(peer not in self._stage_of for peer in route)]
        for lane in routes:
            if lane not in broken:
                self._enter(lane, routes[lane])
        for lane in sorted(broken):
            priced = self._priced(lane[0], Counter([lanes[lane]]))
            if lanes[lane] not in priced:
                raise ValueError(f"nobody is left for the stages {sorted(lanes[lane])}")
            self._enter(lane, priced[lanes[lane]].route)
        return len(broken)

    def _priced(self, data_node: PeerId, bag: Counter[frozenset[int]]) -> dict[frozenset[int], Priced]:
        trees = [order_tree(self._rules, stages) for stages in bag]
        return cheapest_by_set(self._costs, data_node, self._price, *trees)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def settle(self, turns: int) -> int:
        """Up to `turns` turns of trade; returns how many trades were made."""
        for made in range(turns):
            trade = self.best_trade().value
            if trade is None:
                return made
            self.make(trade)
        return turns

    def make(self, trade: Trade) -> None:
        """Both sides change their lanes."""
        for lane in (trade.asking, trade.asked):
            self._leave(lane)
        self._enter(trade.asking, trade.routes[0])
        self._enter(trade.asked, trade.routes[1])

    def best_trade(self) -> Reasoned[Trade | None]:
        """The best trade that the worst placed data node finds, else the next; None when none of the worst finds one."""
        times = {lane: self.round_trip_s(lane) for lane in self.routes}
        by_need = sorted(times, key=lambda lane: (-times[lane], lane))
        for asking in by_need[:WORST]:
            partners = [lane for lane in reversed(by_need) if lane != asking][:PARTNERS]
            found = [trade for asked in partners for trade in self._trades(asking, asked, times)]
            best = max(found, key=lambda trade: trade.gain, default=None)
            if best is not None:
                return Reasoned(
                    best, f"{asking[0]} has the longest round trip, {times[asking]:.2f} s, and may shorten it"
                )
        return Reasoned(None, "no trade of the worst placed data nodes makes the long round trips shorter")

    def _trades(self, asking: LaneId, asked: LaneId, times: Mapping[LaneId, float]) -> list[Trade]:
        worst = max(times.values())
        touched = self._sharing((asking, asked))
        before = self._urgency(touched, worst)
        mine, yours = self._leave(asking), self._leave(asked)
        found = []
        for routes in self._divisions(asking[0], asked[0], mine, yours, worst):
            self._enter(asking, routes[0])
            self._enter(asked, routes[1])
            gain = before - self._urgency(touched | self._sharing((asking, asked)), worst)
            also = self._sharing((asking, asked)) - touched
            self._leave(asking)
            self._leave(asked)
            gain += sum((times[lane] / worst) ** URGENCY_POWER for lane in also)
            if gain > 1e-6:
                found.append(Trade(asking, asked, routes, gain))
        self._enter(asking, mine)
        self._enter(asked, yours)
        return found

    def _divisions(
        self, asking: PeerId, asked: PeerId, mine: Route, yours: Route, longest_s: float
    ) -> list[tuple[Route, Route]]:
        """The ways in which the two could share out their stages, each with the best routes for it; neither lane is in the market now."""
        first, second = self._stages(mine), self._stages(yours)
        common, single = first & second, first ^ second
        if len(single) > MAX_OPTIONAL:
            common, single = first, frozenset()
        work = self._costs.own_work_s(asking)
        divisions = []
        asking_tree = order_tree(self._rules, common, single)
        for stages, priced in cheapest_by_set(self._costs, asking, self._price, asking_tree).items():
            if priced.price + work >= longest_s:
                continue
            rest = second if not single else common | (single - stages)
            self._burden(priced.route, self._weight[asking])
            answer = cheapest_by_set(self._costs, asked, self._price, order_tree(self._rules, rest))
            self._burden(priced.route, -self._weight[asking])
            if rest in answer:
                divisions.append((priced.route, answer[rest].route))
        return divisions

    def _burden(self, route: Route, weight: float) -> None:
        for peer in route:
            self._load[peer] += weight
            self._price[peer] += COLLISION_SHARE * weight * self._service[peer]

    def _sharing(self, lanes: Sequence[LaneId]) -> frozenset[LaneId]:
        """The lanes that meet one of these on some peer, themselves included."""
        peers = {peer for lane in lanes for peer in self.routes[lane]}
        return frozenset(lane for lane, route in self.routes.items() if not peers.isdisjoint(route))

    def _urgency(self, lanes: frozenset[LaneId], worst: float) -> float:
        return sum((self.round_trip_s(lane) / worst) ** URGENCY_POWER for lane in lanes)
