"""The neighbourhood of a plan: small changes of single microbatches' routes, by chance, after which every stage is
visited as often as before and every order is legal."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.path_rules import PathRules, order_tree, orders
from swarm.simulation.forecast import Unit
from swarm.vocabulary.types import PeerId

Routes = dict[PeerId, list[PeerRoute]]
"""A plan that is being changed: the routes of every data node's microbatches, in launch order."""
Change = Mapping[Unit, PeerRoute]
"""New routes of some microbatches."""
Orders = tuple[tuple[int, ...], ...]

MOST_ORDERS = 64
"""Legal orders of the same stages that are weighed."""


class Moves:
    """Random changes of plans of one swarm.

    Args:
        costs: who serves which stage.
        rng: every choice comes from it.
    """

    def __init__(self, costs: Costs, rules: PathRules, rng: random.Random) -> None:
        self._stages, self._stage_of = costs.stages, costs.stage_of()
        self._rules, self._rng = rules, rng
        self._orders: dict[frozenset[int], Orders] = {}
        kinds: tuple[tuple[Callable[[Routes], Change], int], ...] = (
            (self.replica_of_one, 3),
            (self.replica_of_all_alike, 2),
            (self.order_of_one, 2),
            (self.order_of_all_alike, 1),
            (self.launch_order, 3),
            (self.exchange, 6),
            (self.exchange_of_all_alike, 1),
            (self.swap, 1),
        )
        self._kinds = [kind for kind, weight in kinds for _ in range(weight)]

    def any(self, routes: Routes) -> Change:
        """A change of any kind; empty when what chance chose cannot be changed."""
        return self._rng.choice(self._kinds)(routes)

    # ---- the same stages -----------------------------------------------------------------------------------------

    def replica_of_one(self, routes: Routes) -> Change:
        """Another replica for one hop of one microbatch."""
        unit = self._unit(routes)
        route = routes[unit[0]][unit[1]]
        return {unit: changed} if (changed := self._replaced(route)) != route else {}

    def replica_of_all_alike(self, routes: Routes) -> Change:
        """Another replica for one hop of all microbatches of a data node that are on the same route."""
        alike, route = self._alike(routes)
        return dict.fromkeys(alike, changed) if (changed := self._replaced(route)) != route else {}

    def order_of_one(self, routes: Routes) -> Change:
        """Another legal order of one microbatch's peers."""
        unit = self._unit(routes)
        route = routes[unit[0]][unit[1]]
        return {unit: changed} if (changed := self._reordered(route)) != route else {}

    def order_of_all_alike(self, routes: Routes) -> Change:
        """Another legal order for all microbatches of a data node that are on the same route."""
        alike, route = self._alike(routes)
        return dict.fromkeys(alike, changed) if (changed := self._reordered(route)) != route else {}

    def launch_order(self, routes: Routes) -> Change:
        """Two microbatches of a data node change places."""
        data_node, one = self._unit(routes)
        own = routes[data_node]
        other = self._rng.randrange(len(own))
        return {(data_node, one): own[other], (data_node, other): own[one]} if own[one] != own[other] else {}

    # ---- other stages --------------------------------------------------------------------------------------------

    def exchange(self, routes: Routes) -> Change:
        """Two microbatches, of one data node or of two, exchange one stage for another."""
        one, other = self._unit(routes), self._unit(routes)
        mine, theirs = routes[one[0]][one[1]], routes[other[0]][other[1]]
        traded = self._exchanged(mine, theirs)
        return {one: traded[0], other: traded[1]} if traded else {}

    def exchange_of_all_alike(self, routes: Routes) -> Change:
        """All microbatches on one route exchange a stage with as many on another."""
        (some, mine), (others, theirs) = self._alike(routes), self._alike(routes)
        traded = self._exchanged(mine, theirs)
        if not traded:
            return {}
        pairs = list(zip(some, others, strict=False))
        return {unit: traded[0] for unit, _ in pairs} | {unit: traded[1] for _, unit in pairs}

    def swap(self, routes: Routes) -> Change:
        """Two microbatches take each other's route."""
        one, other = self._unit(routes), self._unit(routes)
        mine, theirs = routes[one[0]][one[1]], routes[other[0]][other[1]]
        return {one: theirs, other: mine} if mine != theirs else {}

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _unit(self, routes: Routes) -> Unit:
        data_node = self._rng.choice(list(routes))
        return data_node, self._rng.randrange(len(routes[data_node]))

    def _alike(self, routes: Routes) -> tuple[list[Unit], PeerRoute]:
        data_node, chosen = self._unit(routes)
        route = routes[data_node][chosen]
        return [(data_node, number) for number, other in enumerate(routes[data_node]) if other == route], route

    def _replaced(self, route: PeerRoute) -> PeerRoute:
        place = self._rng.randrange(len(route))
        peer = self._rng.choice(self._stages[self._stage_of[route[place]]])
        return (*route[:place], peer, *route[place + 1 :])

    def _reordered(self, route: PeerRoute) -> PeerRoute:
        by_stage = {self._stage_of[peer]: peer for peer in route}
        return tuple(by_stage[stage] for stage in self._rng.choice(self._legal(frozenset(by_stage))))

    def _exchanged(self, mine: PeerRoute, theirs: PeerRoute) -> tuple[PeerRoute, PeerRoute] | None:
        """Both routes after a random exchange; None when they visit the same stages, or no order would be legal."""
        ours = {self._stage_of[peer]: peer for peer in mine}
        others = {self._stage_of[peer]: peer for peer in theirs}
        given = [stage for stage in ours if stage not in others]
        if not given:
            return None
        gives = self._rng.choice(given)
        takes = self._rng.choice([stage for stage in others if stage not in ours])
        one, other = self._with(mine, ours, gives, takes, others[takes]), None
        if one is not None:
            other = self._with(theirs, others, takes, gives, ours[gives])
        return None if one is None or other is None else (one, other)

    def _with(
        self, route: PeerRoute, by_stage: Mapping[int, PeerId], gives: int, takes: int, known: PeerId
    ) -> PeerRoute | None:
        """The route with one stage for another: half of the time by the peer that served the other microbatch, and half
        of the time at the place of the stage given up, if that order is legal."""
        found = {stage: peer for stage, peer in by_stage.items() if stage != gives}
        found[takes] = known if self._rng.random() < 0.5 else self._rng.choice(self._stages[takes])
        legal = self._legal(frozenset(found))
        if not legal:
            return None
        same = tuple(takes if self._stage_of[peer] == gives else self._stage_of[peer] for peer in route)
        order = same if self._rng.random() < 0.5 and same in legal else self._rng.choice(legal)
        return tuple(found[stage] for stage in order)

    def _legal(self, stages: frozenset[int]) -> Orders:
        known = self._orders.get(stages)
        if known is None:
            found = list(orders(order_tree(self._rules, stages)))
            if len(found) > MOST_ORDERS:
                found = self._rng.sample(found, MOST_ORDERS)
            known = self._orders[stages] = tuple(found)
        return known
