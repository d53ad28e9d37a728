"""Which routes a data node's microbatches might take instead, and what each change seems to save: a formula, by which
changes are tried in a good order. Whether one helps, a forecast says.

A visit costs its computing and the mean waiting of all visits there, and what it does to others: the square of its
service over the iteration, for each visit of theirs, weighed by how late their data node is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.deadlock import in_order
from swarm.routing.path_rules import PathRules, order_tree, orders
from swarm.routing.plans.route_forecast import Forecast
from swarm.routing.route_search import NEAREST, cheapest_by_set
from swarm.vocabulary.types import PeerId

LEAST_URGENCY = 1e-3
MOST_ORDERS = 64
"""Of one set of stages that are looked at."""

Plan = dict[PeerId, tuple[PeerRoute, ...]]
"""The routes of each data node's microbatches in launch order."""
Change = tuple[tuple[int, PeerRoute], ...]
"""New routes for some of the microbatches."""


class RouteChanges:
    """The changes of one data node's routes in a plan, each with the seconds that it seems to cost: negative where it
    saves some.

    Args:
        data_node: whose microbatches are to take other routes.
        costs: as whoever asks takes them to be.
        expected: of the plan.
        urgency_power: how much less a data node counts that is done earlier than the last one; 0 where all count alike.
    """

    def __init__(
        self,
        data_node: PeerId,
        costs: Costs,
        rules: PathRules,
        plan: Mapping[PeerId, Sequence[PeerRoute]],
        expected: Forecast,
        urgency_power: int,
    ) -> None:
        self._own, self._costs, self._rules = data_node, costs, rules
        self._stage_of = costs.stage_of()
        self._routes = plan[data_node]
        self._waited = expected.waited_s[data_node]
        self._length = len(self._routes)
        self._nearest: dict[int, Sequence[PeerId]] = {}
        self._swaps: dict[tuple[int, int, int], tuple[float, PeerRoute] | None] = {}
        last = expected.worth[0]
        urgency = {
            peer: (finish / last) ** urgency_power if last > 0 else 1.0 for peer, finish in expected.finish_s.items()
        }
        self._urgency = urgency[self._own]
        waiting: dict[PeerId, float] = {}
        visits: dict[PeerId, int] = {}
        foreign: dict[PeerId, float] = {}
        own: dict[PeerId, int] = {}
        for data_node, routes in plan.items():
            weight = urgency[data_node]
            for route, waited in zip(routes, expected.waited_s[data_node], strict=False):
                end = len(waited) - 2
                for hop, peer in enumerate(route):
                    waiting[peer] = waiting.get(peer, 0.0) + waited[hop + 1] + waited[end - hop]
                    visits[peer] = visits.get(peer, 0) + 1
                    if data_node == self._own:
                        own[peer] = own.get(peer, 0) + 1
                    else:
                        foreign[peer] = foreign.get(peer, 0.0) + weight
        factor = 1 + costs.backward_factor
        self._compute = {peer: factor * costs.forward_s[peer] for peer in self._stage_of}
        self._time = {
            peer: c + waiting.get(peer, 0.0) / max(1, visits.get(peer, 0)) for peer, c in self._compute.items()
        }
        crowd = {peer: costs.service_s(peer) ** 2 / max(last, 1e-9) for peer in self._stage_of}
        self._harm = {peer: crowd[peer] * foreign.get(peer, 0.0) for peer in crowd}
        self._harm_each = {peer: harm / max(self._urgency, LEAST_URGENCY) for peer, harm in self._harm.items()}
        """In seconds of the own data node."""
        self._own_harm = {peer: crowd[peer] * self._urgency * own.get(peer, 0) for peer in crowd}

    def _waits(self, place: int, hop: int) -> float:
        waited = self._waited[place]
        return waited[hop + 1] + waited[len(waited) - 2 - hop]

    def _links_s(self, route: PeerRoute) -> float:
        message, here, total = self._costs.message_s, self._own, 0.0
        for there in (*route, self._own):
            total += message[here][there]
            here = there
        return 2 * total

    def _blocks(self) -> list[tuple[int, ...]]:
        """Each microbatch, all on the same route, and the two halves of these."""
        alike: dict[PeerRoute, list[int]] = {}
        for place, route in enumerate(self._routes):
            alike.setdefault(route, []).append(place)
        blocks: list[tuple[int, ...]] = [(place,) for place in range(self._length)]
        for places in alike.values():
            if len(places) > 1:
                blocks.append(tuple(places))
            if len(places) > 3:
                blocks += [tuple(places[0::2]), tuple(places[1::2])]
        return blocks

    @property
    def longest(self) -> list[int]:
        """One microbatch of each route, those that take longest first."""
        alike = {route: place for place, route in reversed(list(enumerate(self._routes)))}
        takes_s = {place: self._takes_s(place) for place in alike.values()}
        return sorted(takes_s, key=lambda place: (-takes_s[place], place))

    def _takes_s(self, place: int) -> float:
        route = self._routes[place]
        return self._links_s(route) + math.fsum(self._compute[peer] for peer in route) + math.fsum(self._waited[place])

    def stages(self, place: int) -> frozenset[int]:
        """That a microbatch visits."""
        return frozenset(self._stage_of[peer] for peer in self._routes[place])

    def swapped(self, place: int, given: int, taken: int) -> tuple[float, PeerRoute] | None:
        """The route of a microbatch that visits one stage instead of another, in the order of stages; None where that
        is not legal."""
        swap = place, given, taken
        if swap not in self._swaps:
            self._swaps[swap] = self._swapped(place, given, taken)
        return self._swaps[swap]

    def _swapped(self, place: int, given: int, taken: int) -> tuple[float, PeerRoute] | None:
        route, stage_of = self._routes[place], self._stage_of
        hop = next(hop for hop, peer in enumerate(route) if stage_of[peer] == given)
        rest, gone = (*route[:hop], *route[hop + 1 :]), route[hop]
        now_s = self._links_s(route) + self._compute[gone] + self._waits(place, hop) + self._harm_each[gone]
        found = []
        for peer in self._near(taken):
            changed = in_order((*rest, peer), stage_of)
            found.append((self._links_s(changed) + self._time[peer] + self._harm_each[peer] - now_s, changed))
        seconds, best = min(found, default=(0.0, ()))
        if not best or self._rules.fault([stage_of[peer] for peer in best]) is not None:
            return None
        return self._urgency * seconds, best

    def replicas(self) -> Iterator[tuple[float, Change]]:
        """Another replica for one hop of a block."""
        for block in self._blocks():
            route = self._routes[block[0]]
            links_s = self._links_s(route)
            for hop, peer in enumerate(route):
                waited = math.fsum(self._waits(place, hop) for place in block) / len(block)
                for other in self._near(self._stage_of[peer]):
                    if other in route:
                        continue
                    changed = (*route[:hop], other, *route[hop + 1 :])
                    seconds = self._links_s(changed) - links_s + self._time[other] - self._compute[peer] - waited
                    harm = self._harm[other] + self._own_harm[other] - self._harm[peer]
                    yield self._urgency * seconds + harm, tuple((place, changed) for place in block)

    def _near(self, stage: int) -> Sequence[PeerId]:
        if stage not in self._nearest:
            peers, message = self._costs.stages[stage], self._costs.message_s[self._own]
            if len(peers) > NEAREST:
                peers = tuple(sorted(peers, key=lambda p: 2 * message[p] + self._time[p] + self._harm[p])[:NEAREST])
            self._nearest[stage] = peers
        return self._nearest[stage]

    def orders(self) -> Iterator[tuple[float, Change]]:
        """The same peers in another order."""
        stage_of = self._stage_of
        for block in self._blocks():
            route = self._routes[block[0]]
            by_stage = {stage_of[peer]: peer for peer in route}
            links_s = self._links_s(route)
            waited = math.fsum(math.fsum(self._waited[place]) for place in block) / len(block)
            for order in islice(orders(order_tree(self._rules, frozenset(by_stage))), MOST_ORDERS):
                changed = tuple(by_stage[stage] for stage in order)
                if changed != route:
                    seconds = self._links_s(changed) - links_s - 0.5 * waited
                    yield self._urgency * seconds, tuple((place, changed) for place in block)

    def routes(self, most: int) -> Iterator[tuple[float, Change]]:
        """Other peers for all hops at once: the cheapest route, for those that take longest, of one microbatch and of
        all on the same route; at what visits seem to cost, and at half and twice that beyond computing."""
        for place in self.longest[:most]:
            route = self._routes[place]
            stages = self.stages(place)
            tree = order_tree(self._rules, stages)
            now_s = self._links_s(route) + math.fsum(
                self._compute[peer] + self._waits(place, hop) + self._harm_each[peer] for hop, peer in enumerate(route)
            )
            alike = [k for k, other in enumerate(self._routes) if other == route]
            for share in (1.0, 0.5, 2.0):
                price = {
                    peer: self._compute[peer] + share * (self._time[peer] - self._compute[peer] + self._harm_each[peer])
                    for stage in stages
                    for peer in self._costs.stages[stage]
                }
                among = [self._near(stage) if stage in stages else () for stage in range(len(self._costs.stages))]
                best = cheapest_by_set(self._costs, self._own, price, tree, among=among).get(stages)
                if best is None or best.route == route:
                    continue
                score = self._urgency * (best.price - now_s)
                for places in {(place,), tuple(alike)}:
                    yield score, tuple((k, best.route) for k in places)

    def launches(self) -> Iterator[tuple[float, Change]]:
        """Two microbatches change places."""
        waited = [math.fsum(row) for row in self._waited]
        for one in range(self._length):
            for two in range(one + 1, self._length):
                first, second = self._routes[one], self._routes[two]
                if first != second:
                    yield -self._urgency * (waited[one] + waited[two]), ((one, second), (two, first))

    def exchanges(self) -> Iterator[tuple[float, Change]]:
        """Two microbatches exchange a stage that only one of them visits."""
        stages = [self.stages(place) for place in range(self._length)]
        bids: dict[tuple[PeerRoute, int, int], tuple[float, PeerRoute] | None] = {}

        def bid(place: int, given: int, taken: int) -> tuple[float, PeerRoute] | None:
            route = self._routes[place]
            key = route, given, taken
            if key not in bids:
                bids[key] = self._bid(place, route, stages[place], given, taken)
            return bids[key]

        for one in range(self._length):
            for two in range(one + 1, self._length):
                for given in stages[one] - stages[two]:
                    for taken in stages[two] - stages[one]:
                        first, second = bid(one, given, taken), bid(two, taken, given)
                        if first is not None and second is not None:
                            yield first[0] + second[0], ((one, first[1]), (two, second[1]))

    def _bid(
        self, place: int, route: PeerRoute, stages: frozenset[int], given: int, taken: int
    ) -> tuple[float, PeerRoute] | None:
        """What it seems to cost to visit one stage instead of another, the other peers staying."""
        stage_of = self._stage_of
        wanted = stages - {given} | {taken}
        peers: list[tuple[PeerId, ...]] = [()] * len(self._costs.stages)
        for peer in route:
            peers[stage_of[peer]] = (peer,)
        peers[taken] = tuple(self._near(taken))
        price = {peer: self._time[peer] + self._harm_each[peer] for group in peers for peer in group}
        found = cheapest_by_set(self._costs, self._own, price, order_tree(self._rules, wanted), among=peers)
        best = found.get(wanted)
        if best is None:
            return None
        now = self._links_s(route) + math.fsum(
            self._compute[peer] + self._waits(place, hop) + self._harm_each[peer] for hop, peer in enumerate(route)
        )
        return self._urgency * (best.price - now), best.route
