"""What one data node knows of the lanes of all, and what follows from it. Nobody else ever touches this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.deadlock import closes_a_circle, crowded_by, in_order
from swarm.routing.lane_book import LaneBook, LaneId
from swarm.routing.negotiation.groups import Group, share_of
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.path_rules import PathRules, order_tree
from swarm.routing.plans.route_changes import Plan
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
        """Of our microbatches, how many are to visit each stage; exchanges with others come on top."""
        self.lanes = len(sets)
        self.singles = self.lanes if self._period else routes_each(rules, group.total, self.lanes, each)
        """Routes of single microbatches of each data node, once all have agreed to a plan."""
        self.stages: dict[LaneId, frozenset[int]] = {}
        """What the lanes have to visit. One for which some stage has nobody has an empty route."""
        self.planned: dict[PeerId, tuple[Lane, ...]] = {}
        """The routes of those that stand by a plan for all. In the book they stand with the first ones."""
        self.is_planned = False
        """Whether our own are: in the order in which they are to be launched."""
        self.book = LaneBook(self.costs, rules, self.lanes)
        self.ahead = replace(rules, max_back_stops=0)
        """The rules of paths without steps back."""
        dealt = self.dealt_sets()
        self._assumed = set() if dealt is None else set(self.others)
        """Those of whom we have not heard, and need not: by convention we know what they visit at first, and where, if
        they believe what we do."""
        self.versions.update(dict.fromkeys(self._assumed, 1))
        for peer, theirs in ({own: sets} if dealt is None else dealt).items():
            self._enter(peer, theirs)

    @property
    def is_by_convention(self) -> bool:
        """Whether all know what each visits at first, so that nobody has to tell it."""
        return self._period is None

    def dealt_sets(self) -> dict[PeerId, list[frozenset[int]]] | None:
        """What the lanes of all data nodes visit at first; None where each deals to itself."""
        if self._period is not None:
            return None
        members = [member.peer for member in self._group.members]
        ring = fair_sets(self.rules, len(members) * self.lanes, self._group.first * self.lanes)
        return {peer: ring[rank :: len(members)] for rank, peer in enumerate(members)}

    def _enter(self, peer: PeerId, sets: Sequence[frozenset[int]]) -> None:
        """The nearest peers for what a data node visits at first, each lane beside those that are there."""
        for k, stages in enumerate(sets):
            self.stages[peer, k] = stages
            self.book.enter((peer, k), self.book.cheapest(peer, order_tree(self.ahead, stages)).get(stages, ()))

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
        if peer in self.planned:
            return Standing(peer, self.versions[peer], self.planned[peer])
        own = [(peer, k) for k in range(self.lanes)]
        lanes = tuple(Lane(self.book.routes[lane], self.stages[lane], self.book.alone_s(lane)) for lane in own)
        return Standing(peer, self.versions[peer], lanes)

    def take_in(self, standing: Standing) -> bool:
        """Enters news of another member; False when they are none."""
        peer = standing.peer
        if peer not in self.others or standing.version <= self.versions.get(peer, -1):
            return False
        if not self._is_possible(standing):
            return False
        self._stand(standing)
        return True

    def adopt(self, standings: Sequence[Standing]) -> None:
        """All stand as they were offered to, we among them, but for those of whom we have later news."""
        for standing in standings:
            if standing.version > self.versions.get(standing.peer, -1):
                self._stand(standing)
        self.is_planned = True

    def _stand(self, standing: Standing) -> None:
        peer = standing.peer
        self.versions[peer] = standing.version
        self._assumed.discard(peer)
        self.planned.pop(peer, None)
        if len(standing.lanes) > self.lanes:
            self.planned[peer] = standing.lanes
        for k, lane in enumerate(standing.lanes[: self.lanes]):
            if (peer, k) in self.book.routes:
                self.book.leave((peer, k))
            self.stages[peer, k] = lane.stages
            self.book.enter((peer, k), lane.route, lane.alone_s)

    def _is_possible(self, standing: Standing) -> bool:
        """Whether there are as many lanes as there should be. What they visit is the word of whoever visits it."""
        return len(standing.lanes) in (self.lanes, self.singles)

    # ---- single routes -------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The routes of all data nodes' microbatches in launch order; None while somebody is not known, or a route has
        lost a peer."""
        if len(self.versions) <= len(self.others):
            return None
        plan = {peer: self._singles_of(peer) for peer in (self.own, *self.others)}
        return plan if self.is_whole(plan) else None

    def is_whole(self, plan: Plan) -> bool:
        """Whether all peers of its routes are alive."""
        return all(self._may_be_walked(route) for routes in plan.values() for route in routes)

    def sets_of(self, peer: PeerId) -> tuple[frozenset[int], ...]:
        """What each of a data node's single microbatches visits, as agreed."""
        if peer in self.planned:
            return tuple(lane.stages for lane in self.planned[peer])
        return tuple(self.stages[peer, k % self.lanes] for k in range(self.singles))

    def _singles_of(self, peer: PeerId) -> tuple[PeerRoute, ...]:
        if peer in self.planned:
            return tuple(lane.route for lane in self.planned[peer])
        lanes = [(peer, k) for k in range(self.lanes)]
        if not all(self._may_be_walked(self.book.routes[lane]) for lane in lanes):
            return ((),)
        walked = [self._walked(lane) for lane in lanes]
        return tuple(walked[k % self.lanes] for k in range(self.singles))

    def _may_be_walked(self, route: PeerRoute) -> bool:
        return bool(route) and self.book.whole(route)

    def move(self, lane: int, route: PeerRoute, stages: frozenset[int]) -> None:
        """A lane of ours changes. Whoever calls this counts the version."""
        self.book.leave((self.own, lane))
        self.stages[self.own, lane] = stages
        self.book.enter((self.own, lane), route)

    def advance(self) -> None:
        """The next version of how we stand."""
        self.versions[self.own] += 1

    def _is_served(self, lane: LaneId) -> bool:
        """Whether all peers of a lane are alive, and serve the stages that its data node says."""
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
        if self.own in self.planned:
            return self._replace_lost()
        own = [(self.own, k) for k in range(self.lanes)]
        if self.is_planned:
            lost = [lane for lane in own if not self._is_served(lane)]
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
        """Planned routes of ours with a peer that is gone get the cheapest one for the same stages, as far as there is
        one."""
        singles = list(self.planned[self.own])
        for place, lane in enumerate(singles):
            if not self._may_be_walked(lane.route):
                found = self.book.cheapest(self.own, order_tree(self.ahead, lane.stages)).get(lane.stages)
                if found is not None:
                    singles[place] = Lane(found, lane.stages, self.costs.round_trip_s(self.own, found))
        changed = tuple(singles) != self.planned[self.own]
        if changed:
            self.planned[self.own] = tuple(singles)
            self.advance()
        return changed

    def _reckoned(self, lane: LaneId) -> bool:
        """Whether a lane of ours takes so much more or less time than we have told that we should tell it."""
        told, route = self.book.alone_s(lane), self.book.routes[lane]
        if not self._is_served(lane):
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
        trip = book.round_trip_s(lane) if self._is_served(lane) else math.inf
        alone_s, route = book.alone_s(lane), book.leave(lane)
        other = book.cheapest(self.own, order_tree(self.rules, stages)).get(stages)
        if other is not None:
            book.enter(lane, other)
            if book.round_trip_s(lane) < (1 - WORTH_MOVING) * trip:
                return True
            book.leave(lane)
        book.enter(lane, route, alone_s)
        return False

    # ---- launching -----------------------------------------------------------------------------------------------

    def launches(self) -> tuple[PeerRoute, ...]:
        """The routes that our microbatches take in turn: those of our lanes with all peers alive.

        A lane that steps back where microbatches could then wait for each other in a circle (`swarm.routing.deadlock`),
        or while somebody uses the peers of whose lanes we have not heard, is walked in the order of its stages; by
        other peers if that would be slower than any lane is now.
        """
        if self.own in self.planned:
            routes = [lane.route for lane in self.planned[self.own] if self._may_be_walked(lane.route)]
            return tuple(map(self._walked_single, routes))
        return tuple(self._walked(lane) for lane in self._whole())

    def _walked_single(self, route: PeerRoute) -> PeerRoute:
        """A planned route; in the order of its stages where a step back might block, as the others' routes are now."""
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
        known = self._exclusive and not self._assumed and len(self.versions) > len(self.others)
        others = (other for number, other in self.book.routes.items() if number != lane)
        if known and not closes_a_circle(route, others, stage_of, self.book.crowded):
            return route
        if self.costs.round_trip_s(lane[0], ordered) <= max(map(self.book.round_trip_s, self.book.routes)):
            return ordered
        stages = self.book.stages(route)
        return self.book.cheapest(lane[0], order_tree(self.ahead, stages)).get(stages, ordered)
