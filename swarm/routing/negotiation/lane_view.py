"""What one data node knows of the lanes of all, and what follows from it. Nobody else ever touches this."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.deadlock import closes_a_circle, crowded_by, in_order
from swarm.routing.lane_book import LaneBook, LaneId
from swarm.routing.negotiation.groups import Group, share_of
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.path_rules import PathRules, order_tree
from swarm.routing.stage_balance import fair_sets, free_lanes, lanes_for, routes_each
from swarm.routing.visit_shares import (
    VisitShares,
    capacities_of,
    equal_shares,
    first_deal,
    moved_sets,
    reconsidered,
    share_period,
)
from swarm.vocabulary.routing_messages import Lane, Standing
from swarm.vocabulary.types import PeerId, Reasoned

WORTH_TELLING = 0.05
"""Share of a lane's round trip by which it must have changed before the others are told."""
WORTH_MOVING = 0.05
"""Share of the round trip that another route for the same stages must save before a lane moves there by itself."""


class View:
    """One epoch: the time in which the same data nodes are alive. All that was agreed ends with it.

    Args:
        own: this data node, one of the group.

    Raises:
        ValueError: the rules allow no lanes with equal visits.
    """

    def __init__(self, own: PeerId, group: Group, costs: Costs, rules: PathRules, talk: TalkRules) -> None:
        self.own, self.rules = own, rules
        self._group = group
        self.epoch = group.epoch
        self.others = tuple(member.peer for member in group.members if member.peer != own)
        self.versions: dict[PeerId, int] = {own: 1}
        self.costs, self._exclusive = share_of(costs, group)
        each = talk.microbatches
        self._period = share_period(rules, each)
        self.shares, sets = self._dealt(each)
        """Of our microbatches, how many are to visit each stage; trades with others come on top."""
        self.lanes = len(sets)
        self.singles = self.lanes if self._period else routes_each(rules, group.total, self.lanes, each)
        """Routes of single microbatches of a data node that has refined its lanes."""
        self.stages: dict[LaneId, frozenset[int]] = {}
        """What the lanes have to visit. One for which some stage has nobody has an empty route."""
        self._refined_stages: tuple[frozenset[int], ...] = ()
        self.refined: dict[PeerId, tuple[PeerRoute, ...]] = {}
        """The routes of those that have refined their lanes. In the book they stand with the first ones."""
        self.is_refined = False
        """Whether our own are: in the order in which they are to be launched."""
        self.book = LaneBook(self.costs, rules, self.lanes)
        self._ahead = replace(rules, max_back_stops=0)
        for k, stages in enumerate(sets):
            self.stages[own, k] = stages
            self.book.enter((own, k), self.book.cheapest(own, order_tree(self._ahead, stages)).get(stages, ()))

    def _dealt(self, each: int | None) -> tuple[Reasoned[VisitShares], list[frozenset[int]]]:
        """What our lanes are to visit at first: a part of everybody's ring, or a whole period of shares of our own."""
        rules, group = self.rules, self._group
        count, rank = len(group.members), group.rank(self.own)
        if self._period is not None:
            offset = (group.first + rank) * self._period // group.total
            return first_deal(rules, capacities_of(self.costs), self._period, offset)
        lanes = free_lanes(rules) if each is None else lanes_for(rules, group.total, each)
        ring = fair_sets(rules, count * lanes, group.first * lanes)
        return Reasoned(equal_shares(rules), "equal, as the run wants them"), ring[rank::count]

    @property
    def version(self) -> int:
        return self.versions[self.own]

    # ---- standing ------------------------------------------------------------------------------------------------

    def standing(self) -> Standing:
        """How we stand."""
        return self.standing_of(self.own)

    def standing_of(self, peer: PeerId) -> Standing:
        """How a data node stands, as far as we know."""
        if peer in self.refined:
            alone_s = self.book.alone_s((peer, 0))
            singles = tuple(Lane(route, self.book.stages(route), alone_s) for route in self.refined[peer])
            return Standing(peer, self.versions[peer], singles)
        held = [(peer, k) for k in range(self.lanes)]
        lanes = tuple(Lane(self.book.routes[lane], self.stages[lane], self.book.alone_s(lane)) for lane in held)
        return Standing(peer, self.versions[peer], lanes)

    def take_in(self, standing: Standing) -> bool:
        """Enters news of another member; False when they are none."""
        peer = standing.peer
        if peer not in self.others or standing.version <= self.versions.get(peer, -1):
            return False
        if not self._is_possible(standing):
            return False
        self.versions[peer] = standing.version
        self.refined.pop(peer, None)
        if len(standing.lanes) > self.lanes:
            self.refined[peer] = tuple(lane.route for lane in standing.lanes)
        for k, lane in enumerate(standing.lanes[: self.lanes]):
            if (peer, k) in self.book.routes:
                self.book.leave((peer, k))
            self.stages[peer, k] = lane.stages
            self.book.enter((peer, k), lane.route, lane.alone_s)
        return True

    def _is_possible(self, standing: Standing) -> bool:
        """Whether there are as many lanes as there should be. What they visit is the word of whoever visits it."""
        return len(standing.lanes) in (self.lanes, self.singles)

    # ---- single routes -------------------------------------------------------------------------------------------

    def plan(self) -> dict[PeerId, tuple[PeerRoute, ...]] | None:
        """The routes of all data nodes' microbatches in launch order; None while somebody is not known, or a route has
        lost a peer."""
        if len(self.versions) <= len(self.others):
            return None
        plan = {peer: self._singles_of(peer) for peer in (self.own, *self.others)}
        return plan if all(self._may_be_walked(route) for routes in plan.values() for route in routes) else None

    def _singles_of(self, peer: PeerId) -> tuple[PeerRoute, ...]:
        if peer in self.refined:
            return self.refined[peer]
        lanes = [(peer, k) for k in range(self.lanes)]
        if not all(self._may_be_walked(self.book.routes[lane]) for lane in lanes):
            return ((),)
        walked = [self._walked(lane) for lane in lanes]
        return tuple(walked[k % self.lanes] for k in range(self.singles))

    def told_singles(self, peer: PeerId) -> tuple[PeerRoute, ...]:
        """The routes of a data node's single microbatches as it tells of them, whether they can be walked or not."""
        told = self.refined.get(peer)
        return told or tuple(self.book.routes[peer, k % self.lanes] for k in range(self.singles))

    def replace(self, place: int, route: PeerRoute) -> None:
        """One microbatch of ours takes another route. Whoever calls this counts the version."""
        if self.singles == self.lanes:
            self.is_refined = True
            self.move(place, route, self.book.stages(route))
        else:
            routes = list(self.told_singles(self.own))
            routes[place] = route
            self.refine(routes)

    def standing_with(self, peer: PeerId, place: int, lane: Lane) -> Standing:
        """How another data node stands from its next version on, when one of its microbatches takes another route: as
        it will say itself."""
        if self.singles == self.lanes:
            lanes = list(self.standing_of(peer).lanes)
            lanes[place] = lane
        else:
            routes, alone_s = list(self.told_singles(peer)), self.book.alone_s((peer, 0))
            routes[place] = lane.route
            lanes = [Lane(route, self.book.stages(route), alone_s) for route in routes]
        return Standing(peer, self.versions[peer] + 1, tuple(lanes))

    def _may_be_walked(self, route: PeerRoute) -> bool:
        return bool(route) and self.book.whole(route)

    def refine(self, routes: Sequence[PeerRoute]) -> None:
        """Our microbatches take these routes from now on. Whoever calls this counts the version."""
        self.is_refined = True
        if self.singles == self.lanes:
            for k, route in enumerate(routes):
                self.move(k, route, self.book.stages(route))
        else:
            self.refined[self.own] = tuple(routes)
            self._refined_stages = tuple(self.book.stages(route) for route in routes)

    def move(self, lane: int, route: PeerRoute, stages: frozenset[int]) -> None:
        """A lane of ours changes. Whoever calls this counts the version."""
        self.book.leave((self.own, lane))
        self.stages[self.own, lane] = stages
        self.book.enter((self.own, lane), route)

    def advance(self) -> None:
        """The next version of how we stand."""
        self.versions[self.own] += 1

    def tradable(self, lane: LaneId) -> bool:
        """Whether all peers of a lane are alive, and serve the stages that its data node says; and it is a lane yet."""
        if lane[0] in self.refined or (self.is_refined and lane[0] == self.own):
            return False
        return self.book.serves(self.book.routes[lane], self.stages[lane])

    # ---- costs ---------------------------------------------------------------------------------------------------

    def reckon_with(self, costs: Costs) -> bool:
        """New figures: lanes of ours with a peer that is gone, or with a clearly better one, get another route for the
        same stages.

        Returns:
            Whether a lane of ours changed, or its round trip by more than WORTH_TELLING.
        """
        before = self.book
        self.costs, self._exclusive = share_of(costs, self._group)
        self.book = LaneBook(self.costs, self.rules, self.lanes)
        for lane, route in before.routes.items():
            self.book.enter(lane, route, before.alone_s(lane))
        if self.own in self.refined:
            return self._replace_lost()
        own = [(self.own, k) for k in range(self.lanes)]
        if self.is_refined:
            lost = [lane for lane in own if not self.book.serves(self.book.routes[lane], self.stages[lane])]
            changed = [self._reroute(lane) for lane in lost]
        else:
            changed = [self._reckoned(lane) or self._reroute(lane) for lane in own]
        if any(changed):
            self.advance()
        return any(changed)

    def redeal(self) -> bool:
        """Moves to other shares where the figures make them worth it: some of our lanes exchange a stage. The others
        are told, as of any change; nobody has to agree, for each has shares of its own.

        Returns:
            Whether a lane of ours changed.
        """
        if self._period is None:
            return False
        held, own = self.shares, [(self.own, k) for k in range(self.lanes)]
        found = reconsidered(self.rules, held.value, capacities_of(self.costs), self._period)
        if found.value == held.value:
            return False
        self.shares = found
        before = [self.stages[lane] for lane in own]
        after = moved_sets(self.rules, before, held.value, found.value)
        for (_, k), old, new in zip(own, before, after, strict=True):
            if new != old:
                self.move(k, self.book.cheapest(self.own, order_tree(self.rules, new)).get(new, ()), new)
        if after != before:
            self.advance()
        return after != before

    def _replace_lost(self) -> bool:
        """Refined routes of ours with a peer that is gone get the cheapest one for the same stages, as far as there is
        one."""
        singles = list(self.refined[self.own])
        lost = [place for place, route in enumerate(singles) if not self._may_be_walked(route)]
        for place in lost:
            stages = self._refined_stages[place]
            singles[place] = self.book.cheapest(self.own, order_tree(self._ahead, stages)).get(stages, singles[place])
        changed = tuple(singles) != self.refined[self.own]
        if changed:
            self.refined[self.own] = tuple(singles)
            self.advance()
        return changed

    def _reckoned(self, lane: LaneId) -> bool:
        """Whether a lane of ours takes so much more or less time than we have told that we should tell it."""
        told, route = self.book.alone_s(lane), self.book.routes[lane]
        if not self.tradable(lane):
            return False
        takes = self.costs.round_trip_s(self.own, route)
        if abs(takes - told) <= WORTH_TELLING * told:
            return False
        self.book.leave(lane)
        self.book.enter(lane, route, takes)
        self._reroute(lane)
        return True

    def _reroute(self, lane: LaneId) -> bool:
        """Another route for the same stages, if the lane needs it or is much better off."""
        book, stages = self.book, self.stages[lane]
        trip = book.round_trip_s(lane) if self.tradable(lane) else math.inf
        alone_s, route = book.alone_s(lane), book.leave(lane)
        other = book.cheapest(self.own, order_tree(self.rules, stages)).get(stages)
        if other is not None:
            book.enter(lane, other)
            if book.round_trip_s(lane) < (1 - WORTH_MOVING) * trip:
                return True
            book.leave(lane)
        book.enter(lane, route, alone_s)
        return False

    def straighten(self) -> bool:
        """Lanes of ours that are walked by other peers than the others know of (see `launches`) move there.

        Returns:
            Whether a lane of ours changed.
        """
        walked = {lane: self._walked(lane) for lane in self._whole()}
        moved = {lane: route for lane, route in walked.items() if set(route) != set(self.book.routes[lane])}
        for lane, route in moved.items():
            self.move(lane[1], route, self.stages[lane])
        if moved:
            self.advance()
        return bool(moved)

    # ---- launching -----------------------------------------------------------------------------------------------

    def launches(self) -> tuple[PeerRoute, ...]:
        """The routes that our microbatches take in turn: those of our lanes with all peers alive.

        A lane that steps back where microbatches could then wait for each other in a circle (`swarm.routing.deadlock`),
        or while somebody uses the peers of whose lanes we have not heard, is walked in the order of its stages; by
        other peers if that would be slower than any lane is now.
        """
        if self.own in self.refined:
            return tuple(self._walked_single(route) for route in self.refined[self.own] if self._may_be_walked(route))
        return tuple(self._walked(lane) for lane in self._whole())

    def _walked_single(self, route: PeerRoute) -> PeerRoute:
        """A refined route; in the order of its stages where a step back might block, as the others' routes are now."""
        ordered = in_order(route, self.book.stage_of)
        plan = None if ordered == route else self.plan()
        if plan is None:
            return ordered
        others = {other for routes in plan.values() for other in routes if other != route}
        return ordered if closes_a_circle(route, others, self.book.stage_of, crowded_by(plan, self.costs)) else route

    def _whole(self) -> list[LaneId]:
        """Our lanes that can be walked."""
        own = ((self.own, k) for k in range(self.lanes))
        return [lane for lane in own if self.book.routes[lane] and self.book.whole(self.book.routes[lane])]

    def _walked(self, lane: LaneId) -> PeerRoute:
        route, stage_of = self.book.routes[lane], self.book.stage_of
        ordered = in_order(route, stage_of)
        if ordered == route:
            return route
        known = self._exclusive and len(self.versions) > len(self.others)
        others = (other for number, other in self.book.routes.items() if number != lane)
        if known and not closes_a_circle(route, others, stage_of, self.book.crowded):
            return route
        if self.costs.round_trip_s(lane[0], ordered) <= max(map(self.book.round_trip_s, self.book.routes)):
            return ordered
        stages = self.book.stages(route)
        return self.book.cheapest(lane[0], order_tree(self._ahead, stages)).get(stages, ordered)

    # ---- need ----------------------------------------------------------------------------------------------------

    def times(self) -> dict[LaneId, float]:
        """Expected round trips of all lanes that we know, the worst placed first."""
        times = {lane: self.book.round_trip_s(lane) for lane in self.book.routes}
        return dict(sorted(times.items(), key=lambda item: (-item[1], item[0])))


def place_of(own: PeerId, times: Mapping[LaneId, float], worst: int) -> tuple[int, list[LaneId]]:
    """How many others go before us, and which lanes of ours are among the `worst` of all."""
    before: set[PeerId] = set()
    lanes: list[LaneId] = []
    for lane in list(times)[:worst]:
        if lane[0] == own:
            lanes.append(lane)
        elif not lanes:
            before.add(lane[0])
    return len(before), lanes
