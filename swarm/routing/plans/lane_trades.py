"""A plan from nothing: the ring's stages by the nearest peers, and trades of stages between lanes until none helps.

It is where the search of `swarm.routing.plans.plan_search` begins: trades of whole lanes find what changes of single
microbatches would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.lane_book import LaneBook, LaneId, Trade
from swarm.routing.path_rules import OrderTree, PathRules
from swarm.vocabulary.types import PeerId

PARTNERS = 8
"""Lanes that are weighed as partners, those with the most slack first."""
WORST = 3
"""So many worst placed lanes look for trades; what the others have to gain does not make the last microbatch come home
sooner."""


@dataclass(frozen=True, slots=True)
class Traded:
    """The lanes of all data nodes, and how many trades were looked at."""

    lanes: dict[PeerId, tuple[PeerRoute, ...]]
    judged: int


def traded_lanes(
    costs: Costs,
    rules: PathRules,
    trees: Mapping[PeerId, Sequence[tuple[frozenset[int], OrderTree]]],
    most_judged: int,
) -> Traded | None:
    """Lanes by trades; None where some stage has nobody.

    Args:
        trees: for each data node what its lanes are to visit at first, and the orders in which they may at first.
        most_judged: trades that are looked at, or hardly more.
    """
    book = LaneBook(costs, rules, max(map(len, trees.values())))
    for data_node, lanes in trees.items():
        for k, (stages, tree) in enumerate(lanes):
            route = book.cheapest(data_node, tree).get(stages)
            if route is None:
                return None
            book.enter((data_node, k), route)
    while book.judged < most_judged:
        trade = _best_trade(book, most_judged)
        if trade is None:
            break
        for lane, route in zip((trade.asking, trade.asked), trade.routes, strict=True):
            book.leave(lane)
            book.enter(lane, route)
    return Traded({data_node: book.of(data_node) for data_node in trees}, book.judged)


def _best_trade(book: LaneBook, most_judged: int) -> Trade | None:
    """Of the worst placed lane that has any."""
    times: dict[LaneId, float] = {lane: book.round_trip_s(lane) for lane in book.routes}
    by_need = sorted(times, key=lambda lane: (-times[lane], lane))
    for lane in by_need[:WORST]:
        if book.judged >= most_judged:
            break
        partners = [other for other in reversed(by_need) if other[0] != lane[0]][:PARTNERS]
        trade = book.best_trade(lane, partners, times)
        if trade is not None:
            return trade
    return None
