"""The best way for one microbatch through the timetables: its own time, and the delay it causes others, weighed by
their urgency.

Forwards are found by dynamic programming over the order tree, with the way back counted as if nobody waited; the best
few are then followed out and back exactly. What is minimized is `urgency x own finish + sum over others of their
urgency x their delay`: a data node whose microbatches have time to spare counts its own seconds little, and so leaves a
contested peer to one that has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.path_rules import OrderTree
from swarm.simulation.central.timetable import Timetable
from swarm.simulation.forecast import Task, Unit
from swarm.vocabulary.types import PeerId

FOLLOWED = 3
"""Routes of each set of stages that are followed exactly."""


@dataclass(frozen=True, slots=True)
class Booking:
    """A route, what it costs in weighted seconds, and when the microbatch would be back."""

    cost: float
    finish: float
    route: PeerRoute


class _Ahead(NamedTuple):
    """The forward half of a route; a tuple because hundreds are made for one microbatch."""

    imposed: float
    time: float
    back_s: float
    route: PeerRoute
    starts: tuple[float, ...]


class Bookings:
    """Looks through timetables; changes nothing but by `enter` and `leave`."""

    def __init__(self, costs: Costs, timetables: Mapping[PeerId, Timetable]) -> None:
        self._costs, self._tables = costs, timetables
        self._forward = costs.forward_s
        self._backward = {peer: costs.backward_factor * seconds for peer, seconds in costs.forward_s.items()}

    def by_set(
        self, data_node: PeerId, launch: float, urgency: float, tree: OrderTree, peers: Sequence[Sequence[PeerId]]
    ) -> dict[frozenset[int], Booking]:
        """The best booking for each set of stages in the tree.

        Args:
            launch: when the data node starts the microbatch's first forward.
            peers: the replicas of each stage to choose from.
        """
        found: dict[frozenset[int], list[tuple[float, _Ahead]]] = {}
        start = _Ahead(0.0, launch + self._forward[data_node], 0.0, (), ())
        self._down(tree, peers, data_node, urgency, frozenset(), [start], found)
        best = {}
        for stages, ways in found.items():
            ways.sort(key=lambda way: way[0])
            followed = [self._followed(data_node, urgency, ahead) for _, ahead in ways[:FOLLOWED]]
            best[stages] = min(followed, key=lambda booking: booking.cost)
        return best

    def of_route(self, data_node: PeerId, launch: float, urgency: float, route: PeerRoute) -> Booking:
        """The booking of a given route."""
        ahead, last = _Ahead(0.0, launch + self._forward[data_node], 0.0, (), ()), data_node
        for peer in route:
            ahead, last = self._visited(ahead, last, peer), peer
        return self._followed(data_node, urgency, ahead)

    # ---- forward -------------------------------------------------------------------------------------------------

    def _down(
        self,
        tree: OrderTree,
        peers: Sequence[Sequence[PeerId]],
        data_node: PeerId,
        urgency: float,
        visited: frozenset[int],
        front: list[_Ahead],
        found: dict[frozenset[int], list[tuple[float, _Ahead]]],
    ) -> None:
        home = self._costs.message_s[data_node]
        for stage, rest in tree:
            reached = [self._reached(front, peer, data_node, urgency) for peer in peers[stage]]
            if not reached:
                continue
            if rest:
                self._down(rest, peers, data_node, urgency, visited | {stage}, reached, found)
                continue
            ways = found.setdefault(visited | {stage}, [])
            for way in reached:
                ways.append((way.imposed + urgency * (way.time + way.back_s + 2 * home[way.route[-1]]), way))

    def _reached(self, front: list[_Ahead], peer: PeerId, data_node: PeerId, urgency: float) -> _Ahead:
        """The cheapest way to a peer, and the visit there."""
        links = self._costs.message_s[peer]
        least, chosen = math.inf, front[0]
        for way in front:
            cost = way.imposed + urgency * (
                way.time + way.back_s + 2 * links[way.route[-1] if way.route else data_node]
            )
            if cost < least:
                least, chosen = cost, way
        return self._visited(chosen, chosen.route[-1] if chosen.route else data_node, peer)

    def _visited(self, way: _Ahead, last: PeerId, peer: PeerId) -> _Ahead:
        link, forward = self._costs.message_s[last][peer], self._forward[peer]
        turn = self._tables[peer].forward_turn(way.time + link, forward)
        return _Ahead(
            way.imposed + turn.imposed,
            turn.start + forward,
            way.back_s + link + self._backward[peer],
            (*way.route, peer),
            (*way.starts, turn.start),
        )

    # ---- and back ------------------------------------------------------------------------------------------------

    def _followed(self, data_node: PeerId, urgency: float, ahead: _Ahead) -> Booking:
        message, backward = self._costs.message_s, self._backward
        imposed, time, last = ahead.imposed, ahead.time, data_node
        if ahead.route:
            time += message[ahead.route[-1]][data_node]
        head = self._costs.head_factor * self._forward[data_node]
        turn = self._tables[data_node].turn(time, head)
        imposed, time = imposed + turn.imposed, turn.start + head
        for peer, began in zip(reversed(ahead.route), reversed(ahead.starts), strict=True):
            table = self._tables[peer]
            turn = table.turn(time + message[last][peer], backward[peer])
            time, last = turn.start + backward[peer], peer
            imposed += turn.imposed + table.holding(began, time)
        turn = self._tables[data_node].turn(
            time + (message[last][data_node] if ahead.route else 0.0), backward[data_node]
        )
        finish = turn.start + backward[data_node]
        return Booking(imposed + turn.imposed + urgency * finish, finish, ahead.route)

    # ---- changing ------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, tasks: Sequence[Task], urgency: float) -> None:
        """Writes a microbatch's tasks into the timetables of its peers."""
        by_peer: dict[PeerId, list[Task]] = {}
        for task in tasks:
            by_peer.setdefault(task.peer, []).append(task)
        for peer, own in by_peer.items():
            self._tables[peer].reserve(unit, own, urgency)

    def leave(self, unit: Unit, tasks: Sequence[Task]) -> None:
        """Takes them out again."""
        for peer in {task.peer for task in tasks}:
            self._tables[peer].release(unit)
