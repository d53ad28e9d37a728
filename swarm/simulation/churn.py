"""Training under churn in virtual time: peers die and come back while microbatches are under way.

The data nodes launch continuously along their lanes. A death is noticed after `NOTICED_AFTER_S`; then lanes are taken
over as `LaneMarket.resume` does, and every microbatch that was at the dead peer or on its way there goes on at another
peer of the same stage, chosen by `swarm.simulation.churn`. Whoever sent a tensor still holds it: a lost forward is sent
again, and a lost backward is preceded by the forward again, for the stand-in has no activations. A data node that dies
takes its microbatches with it; they are abandoned, and count nowhere. A peer's contribution counts when its data node
closes the microbatch: exactly once for each stage.

Who takes a dead peer's place on a route, as the simulation of churn has it: the nearest peer of the same stage.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.routing.cost_model import Costs, Route
from swarm.routing.stage_balance import lanes_for
from swarm.simulation.instance import Instance
from swarm.simulation.lane_market import LaneMarket
from swarm.vocabulary.types import PeerId, Reasoned


@dataclass(frozen=True, slots=True)
class NoRoute:
    """These stages have no peer left."""

    stages: frozenset[int]


def repaired(costs: Costs, data_node: PeerId, kept: Route, stages: Sequence[int]) -> Reasoned[Route | NoRoute]:
    """A broken route made whole: who was visited stays, and others visit the stages that are left, in their order.

    Args:
        costs: without the dead.
        kept: the peers already visited.
        stages: what is left to visit.
    """
    here, chosen = kept[-1] if kept else data_node, list(kept)
    for stage in stages:
        live = costs.stages[stage]
        if not live:
            return Reasoned(NoRoute(frozenset({stage})), f"stage {stage} has no peer left")
        _, here = min((_detour_s(costs, here, peer, data_node), peer) for peer in live)
        chosen.append(here)
    return Reasoned(tuple(chosen), f"stages {list(stages)} by the nearest peers that are left")


def _detour_s(costs: Costs, here: PeerId, peer: PeerId, ahead: PeerId) -> float:
    ways = costs.message_s[here][peer] + costs.message_s[peer][ahead]
    return 2 * ways + (1 + costs.backward_factor) * costs.forward_s[peer]


NOTICED_AFTER_S = 3.0
"""From a death to the first that goes on without the peer: a missed keep-alive and a round trip."""
AWAY_S = 30.0
"""How long a peer is away; then it, or another like it, serves the same stage."""
TRADES_AT_FIRST = 3
TRADES_AFTER_CHANGE = 4


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was done.

    Args:
        alive_share: mean share of the swarm's compute that was alive.
        accumulated: for each stage, how many completed microbatches it was part of.
        duplicated: contributions beyond one of a microbatch to a stage.
    """

    launched: int
    completed: int
    abandoned: int
    under_way: int
    repaired: int
    alive_share: float
    accumulated: dict[int, int]
    duplicated: int


@dataclass(slots=True)
class _Microbatch:
    data_node: PeerId
    stops: list[PeerId]
    position: int = 0
    version: int = 0
    again: set[PeerId] = field(default_factory=set)
    """Stand-ins that have to repeat the forward before they can go backward."""


@dataclass(slots=True)
class _Server:
    alive: bool = True
    busy: int | None = None
    held: set[int] = field(default_factory=set)
    queue: deque[int] = field(default_factory=deque)
    life: int = 0


def share_of_ideal(churned: Throughput, calm: Throughput) -> float:
    """Completed microbatches as a share of what the compute that was alive would have done without churn."""
    return churned.completed / max(1e-9, calm.completed * churned.alive_share)


def run_churn(instance: Instance, seconds: float, share_a_minute: float, seed: int) -> Throughput:
    """Trains for so many virtual seconds while that share of the peers dies every minute.

    Args:
        share_a_minute: 0 for none; 0.5 for half of the peers a minute.
    """
    return _Churn(instance, share_a_minute / 60.0, random.Random(seed)).run(seconds)  # noqa: S311 - a repeatable world


class _Churn:
    def __init__(self, instance: Instance, deaths_each_s: float, rng: random.Random) -> None:
        self._instance, self._rng, self._rate = instance, rng, deaths_each_s
        self._costs: Costs = instance.costs
        self._stage_of = instance.costs.stage_of()
        self._servers = {peer: _Server() for peer in self._stage_of}
        self._events: list[tuple[float, int, str, PeerId, int, int]] = []
        self._ticket = 0
        self._flights: dict[int, _Microbatch] = {}
        self._counts: Counter[str] = Counter()
        self._accumulated: Counter[tuple[int, int]] = Counter()
        self._alive_s, self._since = 0.0, 0.0
        self._numbers = 0
        self._launched: Counter[PeerId] = Counter()
        self._power = {peer: 1 / max(1e-9, instance.costs.service_s(peer)) for peer in self._stage_of}
        # data nodes launch as fast as each can, so each must visit all stages equally often by itself
        self._lanes = lanes_for(instance.rules, 1, max(1, instance.rules.skippable))
        self._market = LaneMarket(self._costs, instance.rules, self._lanes)
        self._market.open()
        self._market.settle(TRADES_AT_FIRST * len(self._costs.data_nodes))
        self._routes = dict(self._market.routes)
        self._stages = {lane: frozenset(self._stage_of[peer] for peer in route) for lane, route in self._routes.items()}

    # ---- time ----------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> Throughput:
        """Until then; what is under way at the end stays under way."""
        for peer in self._servers:
            self._schedule_death(peer, 0.0)
        for peer in self._instance.costs.data_nodes:
            self._go_on(peer, 0.0)
        while self._events and self._events[0][0] <= seconds:
            now, _, what, peer, number, version = heapq.heappop(self._events)
            self._alive_s += (now - self._since) * self._alive_share()
            self._since = now
            self._happen(now, what, peer, number, version)
        self._alive_s += (seconds - self._since) * self._alive_share()
        return self._report(seconds)

    def _happen(self, now: float, what: str, peer: PeerId, number: int, version: int) -> None:
        if what == "death" and self._servers[peer].life == version:
            self._die(peer, now)
        elif what == "noticed":
            self._noticed(peer, now)
        elif what == "back":
            self._servers[peer].alive = True
            self._replan()
            self._schedule_death(peer, now)
            self._go_on(peer, now)
        elif what == "free" and self._servers[peer].life == version:
            self._servers[peer].busy = None
            self._go_on(peer, now)
        elif what in ("here", "done") and self._current(number, version):
            self._arrive(peer, number, now) if what == "here" else self._finish(peer, number, now)

    def _push(self, when: float, what: str, peer: PeerId, number: int = 0, version: int = 0) -> None:
        self._ticket += 1
        heapq.heappush(self._events, (when, self._ticket, what, peer, number, version))

    def _current(self, number: int, version: int) -> bool:
        flight = self._flights.get(number)
        return flight is not None and flight.version == version

    def _alive_share(self) -> float:
        alive = sum(power for peer, power in self._power.items() if self._servers[peer].alive)
        return alive / sum(self._power.values())

    # ---- work ----------------------------------------------------------------------------------------------------

    def _go_on(self, peer: PeerId, now: float) -> None:
        """Starts the first task that can be, after launching a microbatch if there is room for it."""
        server = self._servers[peer]
        if not server.alive or server.busy is not None:
            return
        room = len(server.held) < self._costs.slots[peer]
        if room and self._stage_of[peer] == 0 and all(self._flights[number].position for number in server.queue):
            self._launch(peer)
        for number in server.queue:
            flight = self._flights[number]
            head = len(flight.stops) // 2
            if flight.position < head and not room:
                continue
            server.queue.remove(number)
            server.busy = number
            if flight.position < head:
                server.held.add(number)
            end = now + self._duration(flight, peer, head)
            self._push(end, "done", peer, number, flight.version)
            self._push(end + self._costs.task_overhead_s, "free", peer, 0, server.life)
            return

    def _duration(self, flight: _Microbatch, peer: PeerId, head: int) -> float:
        if flight.position < head:
            factor = 1.0
        elif flight.position == head:
            factor = self._costs.head_factor
        else:
            factor = self._costs.backward_factor + (peer in flight.again)
        return factor * self._costs.forward_s[peer]

    def _launch(self, data_node: PeerId) -> None:
        lanes = self._market.of(data_node)
        if not lanes:
            return
        route = lanes[self._launched[data_node] % len(lanes)]
        self._launched[data_node] += 1
        self._numbers += 1
        stops = [data_node, *route, data_node, *reversed(route), data_node]
        self._flights[self._numbers] = _Microbatch(data_node, stops)
        self._servers[data_node].queue.append(self._numbers)

    def _arrive(self, peer: PeerId, number: int, now: float) -> None:
        if self._servers[peer].alive:  # else it goes on elsewhere once the death is noticed
            self._servers[peer].queue.append(number)
            self._go_on(peer, now)

    def _finish(self, peer: PeerId, number: int, now: float) -> None:
        flight = self._flights[number]
        if flight.position > len(flight.stops) // 2:
            self._servers[peer].held.discard(number)
        if flight.position + 1 == len(flight.stops):
            self._close(number)
            return
        flight.position += 1
        there = flight.stops[flight.position]
        self._push(now + self._costs.message_s[peer][there], "here", there, number, flight.version)

    def _close(self, number: int) -> None:
        """The data node counts every stage of the path once."""
        flight = self._flights.pop(number)
        self._counts["completed"] += 1
        for peer in flight.stops[1 : len(flight.stops) // 2]:
            self._accumulated[number, self._stage_of[peer]] += 1

    # ---- death ---------------------------------------------------------------------------------------------------

    def _schedule_death(self, peer: PeerId, now: float) -> None:
        if self._rate > 0:
            self._push(now + self._rng.expovariate(self._rate), "death", peer, 0, self._servers[peer].life)

    def _die(self, peer: PeerId, now: float) -> None:
        life = self._servers[peer].life + 1
        self._servers[peer] = _Server(alive=False, life=life)
        self._push(now + NOTICED_AFTER_S, "noticed", peer)
        self._push(now + AWAY_S, "back", peer)
        for number in [number for number, flight in self._flights.items() if flight.data_node == peer]:
            self._abandon(number)

    def _abandon(self, number: int) -> None:
        flight = self._flights.pop(number)
        self._counts["abandoned"] += 1
        for peer in set(flight.stops):
            server = self._servers[peer]
            server.held.discard(number)
            if number in server.queue:
                server.queue.remove(number)

    def _noticed(self, dead: PeerId, now: float) -> None:
        self._replan()
        for number, flight in list(self._flights.items()):
            if dead in flight.stops[flight.position :]:
                self._repair(number, dead, now)

    def _repair(self, number: int, dead: PeerId, now: float) -> None:
        """Another peer takes the dead one's place on the way, out and back."""
        flight = self._flights[number]
        place = flight.stops.index(dead)
        route = repaired(self._costs, flight.data_node, tuple(flight.stops[1:place]), [self._stage_of[dead]]).value
        if isinstance(route, NoRoute):
            self._abandon(number)
            return
        self._counts["repaired"] += 1
        other = route[-1]
        flight.again.discard(dead)
        if flight.position > place:
            flight.again.add(other)
        here = flight.stops[flight.position] == dead
        flight.stops = [other if peer == dead else peer for peer in flight.stops]
        if here:
            flight.version += 1
            sender = flight.stops[flight.position - 1]
            self._push(now + self._costs.message_s[sender][other], "here", other, number, flight.version)

    def _replan(self) -> None:
        """Lanes among those that are alive; none while a stage has nobody."""
        gone = frozenset(peer for peer, server in self._servers.items() if not server.alive)
        self._costs = self._instance.costs.without(gone)
        self._market = LaneMarket(self._costs, self._instance.rules, self._lanes)
        if not all(self._costs.stages):
            return
        live = set(self._costs.data_nodes)
        routes = {lane: route for lane, route in self._routes.items() if lane[0] in live}
        self._market.resume(self._stages, routes)
        self._market.settle(TRADES_AFTER_CHANGE)
        self._routes.update(self._market.routes)
        for lane, route in self._market.routes.items():
            self._stages[lane] = frozenset(self._stage_of[peer] for peer in route)

    def _report(self, seconds: float) -> Throughput:
        per_stage = Counter(stage for _, stage in self._accumulated)
        return Throughput(
            launched=self._numbers,
            completed=self._counts["completed"],
            abandoned=self._counts["abandoned"],
            under_way=len(self._flights),
            repaired=self._counts["repaired"],
            alive_share=self._alive_s / seconds,
            accumulated=dict(per_stage),
            duplicated=sum(count - 1 for count in self._accumulated.values()),
        )
