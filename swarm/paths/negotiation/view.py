"""What one data node knows of the lanes of all, and what follows from it. Nobody else ever touches this."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from swarm.paths.balance import fair_sets, lanes_for
from swarm.paths.book import LaneBook, LaneId
from swarm.paths.costs import Costs, Route
from swarm.paths.negotiation.words import Lane, Member, Standing, TalkRules
from swarm.paths.rules import PathRules, order_tree
from swarm.vocabulary import PeerId

GROUP = 32
"""Data nodes that talk with each other. Of more, neighbours by rank make a group, and know nothing of the lanes of other groups."""
WORTH_MOVING = 0.05
"""Share of the round trip that another route for the same stages must save before a lane moves there by itself."""


class View:
    """One epoch: the time in which the same data nodes are alive. All that was agreed ends with it.

    Args:
        own: this data node, one of the members.

    Raises:
        ValueError: the rules allow no lanes with equal visits.
    """

    def __init__(self, own: PeerId, members: frozenset[Member], costs: Costs, rules: PathRules, talk: TalkRules) -> None:
        ranked = sorted(members, key=lambda member: member.peer)
        rank = next(place for place, member in enumerate(ranked) if member.peer == own)
        first = rank - rank % GROUP
        group = ranked[first : first + GROUP]
        self.own, self.members, self.rules = own, members, rules
        self.epoch = _epoch(group, first, len(ranked))
        self.lanes = lanes_for(rules, len(ranked), talk.microbatches)
        self.fellows = tuple(member.peer for member in group if member.peer != own)
        self.versions: dict[PeerId, int] = {own: 0}
        sets = fair_sets(rules, len(group) * self.lanes, first * self.lanes)
        self._sets = [sets[k * len(group) + rank - first] for k in range(self.lanes)]
        self._ahead = replace(rules, max_back_stops=0)
        self.costs = costs
        self.book = LaneBook(costs, rules, self.lanes)
        for k, stages in enumerate(self._sets):
            route = self._nearest(stages)
            if route is not None:
                self.book.enter((own, k), route)

    @property
    def version(self) -> int:
        return self.versions[self.own]

    # ---- standing ------------------------------------------------------------------------------------------------

    def standing(self) -> Standing:
        """How we stand."""
        return self.standing_of(self.own)

    def standing_of(self, peer: PeerId) -> Standing:
        """How a data node stands, as far as we know."""
        held = ((peer, k) for k in range(self.lanes))
        lanes = tuple(Lane(self.book.routes[lane], self.book.alone_s(lane)) for lane in held if lane in self.book.routes)
        return Standing(peer, self.versions[peer], lanes)

    def take_in(self, standing: Standing) -> bool:
        """Enters news of a fellow; False when they are none."""
        peer = standing.peer
        if peer == self.own or peer not in self.fellows or standing.version <= self.versions.get(peer, -1):
            return False
        if len(standing.lanes) > self.lanes:
            return False
        self.versions[peer] = standing.version
        for k in range(self.lanes):
            if (peer, k) in self.book.routes:
                self.book.leave((peer, k))
        for k, lane in enumerate(standing.lanes):
            self.book.enter((peer, k), lane.route, lane.alone_s)
        return True

    def move(self, lane: int, route: Route) -> None:
        """We change a lane of ours."""
        self.book.leave((self.own, lane))
        self.book.enter((self.own, lane), route)
        self.versions[self.own] += 1

    # ---- costs ---------------------------------------------------------------------------------------------------

    def reckon_with(self, costs: Costs) -> bool:
        """New figures: lanes of ours with a peer that is gone, or with a clearly better one, get another route for the same stages.

        Returns:
            Whether a lane of ours changed.
        """
        before = self.book
        self.book, self.costs = LaneBook(costs, self.rules, self.lanes), costs
        for lane, route in before.routes.items():
            self.book.enter(lane, route, None if lane[0] == self.own and self.book.whole(route) else before.alone_s(lane))
        changed = False
        for k, stages in enumerate(self._stages_of_own(before)):
            changed |= self._reroute(k, stages)
        if changed:
            self.versions[self.own] += 1
        return changed

    def _stages_of_own(self, book: LaneBook) -> list[frozenset[int]]:
        lanes = [(self.own, k) for k in range(self.lanes)]
        return [
            book.stages(book.routes[lane]) if lane in book.routes else stages
            for lane, stages in zip(lanes, self._sets, strict=True)
        ]

    def _reroute(self, k: int, stages: frozenset[int]) -> bool:
        lane = (self.own, k)
        route = self.book.routes.get(lane)
        trip = self.book.round_trip_s(lane) if route is not None and self.book.whole(route) else None
        if route is not None:
            alone = self.book.alone_s(lane)
            self.book.leave(lane)
        other = self.book.cheapest(self.own, order_tree(self.rules, stages)).get(stages)
        if other is None:
            if route is not None:
                self.book.enter(lane, route, alone)
            return False
        self.book.enter(lane, other)
        if trip is None or self.book.round_trip_s(lane) < (1 - WORTH_MOVING) * trip:
            return True
        assert route is not None
        self.book.leave(lane)
        self.book.enter(lane, route, alone)
        return False

    # ---- launching -----------------------------------------------------------------------------------------------

    def launches(self) -> tuple[Route, ...]:
        """The routes that our microbatches take in turn: those of our lanes with all peers alive.

        Where lanes can bring more microbatches to a peer than it has slots for, or while somebody has not told us yet, a lane is walked in the
        order of its stages: whoever waits for a slot then holds only slots of lower stages, and nobody waits in a circle.
        """
        heard = len(self.versions) > len(self.fellows)
        own = (route for route in self.book.of(self.own) if self.book.whole(route))
        return tuple(route if heard and not self.book.crowded(route) else self._in_order(route) for route in own)

    def _in_order(self, route: Route) -> Route:
        """The same peers without a step back. Legal whenever some order of these stages is: sorted, no jump is wider than before."""
        stage_of = self.book.stage_of
        return tuple(sorted(route, key=lambda peer: stage_of[peer]))

    def _nearest(self, stages: frozenset[int]) -> Route | None:
        return self.book.cheapest(self.own, order_tree(self._ahead, stages)).get(stages)

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


def _epoch(group: list[Member], first: int, count: int) -> bytes:
    """A name for this group of data nodes at this place among so many."""
    text = "\n".join([f"{first} {count}", *(f"{member.peer} {member.incarnation}" for member in group)])
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
