"""Ways to choose paths that are compared: the node's own, SWARM's rule, greedy earliest finish, and a given schedule.

Only the choice of a microbatch's path differs: repair in flight, windows and everything else are the node's own.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.membership.membership import Membership
from swarm.routing.cost_model import PeerRoute
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import NoReplica, Planner
from swarm.routing.stage_balance import ring_stages
from swarm.vocabulary.pipeline_messages import Direction, Receipt
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId, Reasoned, Route

OURS, SWARM, GREEDY = "ours", "swarm", "greedy"
RULES: Final = (OURS, SWARM, GREEDY)
NEW_SAMPLE_WEIGHT: Final = 0.1
WORK: Final = {Direction.FORWARD: 1.0, Direction.BACKWARD: 2.5}
"""Work of a microbatch at one peer, in forward passes."""
WHOLE_VISIT: Final = sum(WORK.values())
MAX_JOURNEYS: Final = 1024

PlannerOf = Callable[[PathRules, Membership, MeasuredTimes], Planner]


def planner_of(arm: str, seed: int, tokens: int, schedule: Mapping[PeerId, Sequence[PeerRoute]] | None) -> PlannerOf:
    """Makes the planners of an arm.

    Args:
        tokens: of a microbatch.
        schedule: what is replayed, instead of an arm.
    """
    if schedule is not None:
        return lambda rules, members, times: ReplayPlanner(rules, members, times, schedule[members.own])
    if arm == SWARM:
        return lambda rules, members, times: SwarmPlanner(rules, members, times, tokens, _chance(seed, members.own))
    return GreedyPlanner if arm == GREEDY else Planner


def _chance(seed: int, own: PeerId) -> random.Random:
    return random.Random(f"{seed} {own}")  # noqa: S311 - a repeatable world, not a secret


class RulePlanner(Planner, ABC):
    """A planner without prices: the stages are those of the ring, the peers are chosen by `_route`."""

    def __init__(self, rules: PathRules, membership: Membership, times: MeasuredTimes) -> None:
        super().__init__(rules, membership, times)
        self._view, self._book = membership, times
        self.chosen: Path | None = None
        """The last path."""

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """As the planner's own. `route` is empty: runs with experts have no rule but the node's."""
        stages = ring_stages(self.rules, number)
        missing = tuple(m for m in map(ModuleId, stages) if not self._view.replicas(m, now))
        if missing:
            return Reasoned(NoReplica(missing), "no peer left")
        hops = tuple(Hop(ModuleId(s), p) for s, p in zip(stages, self._route(stages, in_flight, now), strict=True))
        self.chosen = Path(self._view.own, hops)
        return Reasoned(self.chosen, "by another rule")

    @abstractmethod
    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> PeerRoute:
        """A peer for each stage, which all have some."""


class GreedyPlanner(RulePlanner):
    """The route with the least links and service times, a peer's service once more for each own microbatch there."""

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> PeerRoute:
        costs = self._book.costs([self._view.replicas(ModuleId(stage), now) for stage in range(1, self.rules.stages)])
        ends: list[tuple[float, PeerRoute]] = [(0.0, (self._view.own,))]
        for stage in stages:
            ends = [
                min(
                    (
                        cost
                        + 2 * costs.message_s[way[-1]][peer]
                        + costs.service_s(peer) * (1 + in_flight.get(peer, 0)),
                        (*way, peer),
                    )
                    for cost, way in ends
                )
                for peer in costs.stages[stage]
            ]
        return min((cost + 2 * costs.message_s[way[-1]][self._view.own], way) for cost, way in ends)[1][1:]


class ReplayPlanner(Planner):
    """Takes the routes of a schedule in turn, whatever is measured."""

    def __init__(
        self, rules: PathRules, membership: Membership, times: MeasuredTimes, routes: Sequence[PeerRoute]
    ) -> None:
        super().__init__(rules, membership, times)
        self._view, self._routes = membership, routes

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """As the planner's own. A peer that is gone is replaced by the first to finish."""
        hops = list[Hop]()
        for peer in self._routes[number % len(self._routes)]:
            known = self._view.get(peer)
            if known is None or known.module is None:
                return Reasoned(NoReplica(()), f"{peer} is not known")
            live = [a.peer for a in self._view.replicas(known.module, now)]
            other = peer if peer in live else self.replica(known.module, frozenset(), in_flight, now).value
            if other is None:
                return Reasoned(NoReplica((known.module,)), f"{peer} is gone")
            hops.append(Hop(known.module, other))
        return Reasoned(Path(self._view.own, tuple(hops)), "as scheduled")


class SwarmPlanner(RulePlanner):
    """SWARM's rule: the peer of each stage whose turn it is by virtual time. Its owner reports to `rule`.

    Args:
        tokens: of a microbatch.
    """

    def __init__(
        self, rules: PathRules, membership: Membership, times: MeasuredTimes, tokens: int, chance: random.Random
    ) -> None:
        super().__init__(rules, membership, times)
        self._tokens, self.rule = tokens, SwarmRule(chance)

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> PeerRoute:
        return tuple(self._choose(ModuleId(stage), now) for stage in stages)

    def _choose(self, module: ModuleId, now: float) -> PeerId:
        speeds = {a.peer: a.tokens_per_second for a in self._view.replicas(module, now)}
        announced_s = {peer: self._tokens / speed if speed else 0.0 for peer, speed in speeds.items()}
        peer = self.rule.choose(module, announced_s)
        assert peer is not None
        return peer


@dataclass(slots=True)
class Pace:
    """Seconds that one peer takes for one unit of work."""

    last: float = 0.0
    """When its last task ended."""
    _average: float = 0.0
    _weight: float = 0.0
    """Of all samples so far in the average; the rest is still the zero it began with."""

    def ended(self, began: float, now: float, work: float) -> None:
        """It has done a task that was given to it at `began`."""
        seconds = max(0.0, now - max(began, self.last))
        self._average += NEW_SAMPLE_WEIGHT * (seconds / work - self._average)
        self._weight += NEW_SAMPLE_WEIGHT * (1.0 - self._weight)
        self.last = now

    @property
    def seconds(self) -> float | None:
        """None before the first sample."""
        return self._average / self._weight if self._weight else None


@dataclass(slots=True)
class _Journey:
    path: Path
    last: float
    """When the peer before was done with it."""
    passed: set[tuple[Direction, int]] = field(default_factory=set)


class SwarmRule:
    """One data node's choices.

    Args:
        chance: breaks ties.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._queues: dict[ModuleId, dict[PeerId, tuple[float, float]]] = {}
        self._paces: dict[PeerId, Pace] = {}
        self._announced_s: dict[PeerId, float] = {}
        self._journeys: OrderedDict[MicrobatchId, _Journey] = OrderedDict()
        self.samples = 0
        """Ways, out or back, that were measured so far."""

    def choose(self, module: ModuleId, announced_s: Mapping[PeerId, float]) -> PeerId | None:
        """The peer whose turn it is; None if there is none. Nothing is charged until the microbatch is `launched`.

        Args:
            announced_s: seconds of a whole visit by each peer that serves the module now, as it says itself.
        """
        queue = {peer: turn for peer, turn in self._queues.get(module, {}).items() if peer in announced_s}
        start = min((time for time, _ in queue.values()), default=0.0)
        for peer in announced_s:
            queue.setdefault(peer, (start, self._chance.random()))
        self._queues[module] = queue
        self._announced_s.update(announced_s)
        return min(queue, key=lambda peer: queue[peer], default=None)

    def expected_s(self, peer: PeerId) -> float:
        """Of a whole visit."""
        pace = self._paces.get(peer)
        if pace is None or pace.seconds is None:
            return self._announced_s.get(peer, 0.0)
        return WHOLE_VISIT * pace.seconds

    def launched(self, microbatch: MicrobatchId, path: Path, now: float) -> None:
        """A microbatch sets out: its peers' next turns come later."""
        self._journeys[microbatch] = _Journey(path, now)
        while len(self._journeys) > MAX_JOURNEYS:
            self._journeys.popitem(last=False)
        for hop in path.hops:
            queue = self._queues.get(hop.module, {})
            if hop.peer in queue:
                time, _ = queue[hop.peer]
                queue[hop.peer] = (time + self.expected_s(hop.peer), self._chance.random())

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """`sender` has passed a microbatch on. Repeated receipts count once."""
        journey = self._journeys.get(receipt.microbatch)
        mark = (receipt.direction, receipt.position)
        if journey is None or mark in journey.passed or not -1 <= receipt.position <= len(journey.path.hops):
            return
        journey.passed.add(mark)
        began, journey.last = journey.last, now
        if 0 <= receipt.position < len(journey.path.hops):
            self._paces.setdefault(sender, Pace()).ended(began, now, WORK[receipt.direction])
            self.samples += 1

    def visits(self) -> int:
        """How many visits were measured so far."""
        return self.samples // len(WORK)

    def ended(self, microbatch: MicrobatchId, path: Path | None) -> None:
        """It has come home, or never will (`path` is None). One that is home is kept for a while: the last receipts of
        the way back come a link's delay later."""
        if path is None:
            self._journeys.pop(microbatch, None)
