"""Lanes of all data nodes in one book: what one planner that sees everything at once would trade.

The node does not work like this: there every data node has its own book and talks (`swarm.routing.negotiation`).
"""

from __future__ import annotations

from collections import Counter

from swarm.routing.lane_book import LaneBook, Trade
from swarm.routing.path_rules import order_tree
from swarm.routing.route_search import Priced, cheapest_by_set
from swarm.routing.stage_balance import fair_sets
from swarm.vocabulary.types import PeerId, Reasoned

PARTNERS = 8
"""Lanes that one asks in its turn, those with the most slack first."""
WORST = 3
"""How many of the worst placed lanes get their turn before the market is called settled."""


class LaneMarket(LaneBook):
    """The lanes of all data nodes, traded in turns without delay or loss."""

    # ---- a cold start --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """First lanes: the worst placed data node takes the set of stages that suits it best, then the next.

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
            self.enter(lane, priced[stages].route)

    def _priced(self, data_node: PeerId, bag: Counter[frozenset[int]]) -> dict[frozenset[int], Priced]:
        trees = [order_tree(self._rules, stages) for stages in bag]
        return cheapest_by_set(self._costs, data_node, self._price, *trees)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def settle(self, turns: int) -> int:
        """Up to `turns` turns of trade; returns how many trades were made."""
        for made in range(turns):
            trade = self.next_trade().value
            if trade is None:
                return made
            self.make(trade)
        return turns

    def make(self, trade: Trade) -> None:
        """Both sides change their lanes."""
        for lane in (trade.asking, trade.asked):
            self.leave(lane)
        self.enter(trade.asking, trade.routes[0])
        self.enter(trade.asked, trade.routes[1])

    def next_trade(self) -> Reasoned[Trade | None]:
        """The best trade that the worst placed lane finds, else the next; None when none of the worst finds one."""
        times = {lane: self.round_trip_s(lane) for lane in self.routes}
        by_need = sorted(times, key=lambda lane: (-times[lane], lane))
        for asking in by_need[:WORST]:
            partners = [lane for lane in reversed(by_need) if lane != asking][:PARTNERS]
            best = self.best_trade(asking, partners, times)
            if best is not None:
                return Reasoned(
                    best, f"{asking[0]} has the longest round trip, {times[asking]:.2f} s, and may shorten it"
                )
        return Reasoned(None, "no trade of the worst placed data nodes makes the long round trips shorter")
