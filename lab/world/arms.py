"""Path planners to compare: the node's own, SWARM's rule (arXiv 2301.11913), greedy earliest finish, and a schedule."""

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from swarm.membership.membership import Membership
from swarm.routing.measured_times import MeasuredTimes, PeerRoute
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import NoReplica, Planner
from swarm.vocabulary.pipeline_messages import Direction, Receipt
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId, Reasoned, Route

OURS, SWARM, GREEDY = "ours", "swarm", "greedy"
RULES: Final = (OURS, SWARM, GREEDY)
NEW_SAMPLE_WEIGHT: Final = 0.1
WORK: Final = {Direction.FORWARD: 1.0, Direction.BACKWARD: 2.5}
"""Work of each pass, in forward passes."""
WHOLE_VISIT: Final = sum(WORK.values())
MAX_TRACES: Final = 1024

PlannerOf = Callable[[PathRules, Membership, MeasuredTimes], Planner]


def planner_of(arm: str, seed: int, tokens: int, schedule: Mapping[PeerId, Sequence[PeerRoute]] | None) -> PlannerOf:
    """Returns a function that makes a data node's planner for an arm, that is, for one of the rules to compare.

    Args:
        tokens: tokens per microbatch.
        schedule: routes of each data node to replay instead of an arm.
    """
    if schedule is not None:
        return lambda rules, members, times: ReplayPlanner(rules, members, times, schedule[members.own])
    if arm == SWARM:
        return lambda rules, members, times: SwarmPlanner(
            rules,
            members,
            times,
            tokens,
            random.Random(f"{seed} {members.own}"),  # noqa: S311 - a repeatable world
        )
    return GreedyPlanner if arm == GREEDY else Planner


def ring_stages(rules: PathRules, turn: int) -> tuple[int, ...]:
    """Returns the stages of microbatch `turn`; the skipped ones rotate. `skippable` turns visit all equally often."""
    skips = rules.skippable - rules.per_path
    skipped = {(turn * skips + k) % rules.skippable for k in range(skips)}
    return tuple(stage for stage in range(1, rules.stages) if stage - 1 not in skipped)


class RulePlanner(Planner, ABC):
    """Planner that takes stages in rotation, and the peer of each stage by the rule `_route` of a subclass."""

    def __init__(self, rules: PathRules, membership: Membership, times: MeasuredTimes) -> None:
        super().__init__(rules, membership, times)
        self._view, self._measured = membership, times
        self.chosen: Path | None = None  # The last path

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float, *, proven_only: bool = False
    ) -> Reasoned[Path | NoReplica]:
        """Plans a path like `Planner.plan`. `route` is empty: only the node's own planner supports experts."""
        stages = ring_stages(self.rules, number)
        missing = tuple(m for m in map(ModuleId, stages) if not self._view.replicas(m, now))
        if missing:
            return Reasoned(NoReplica(missing), "no peer left")
        hops = tuple(Hop(ModuleId(s), p) for s, p in zip(stages, self._route(stages, in_flight, now), strict=True))
        self.chosen = Path(self._view.own, hops)
        return Reasoned(self.chosen, "by another rule")

    @abstractmethod
    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> PeerRoute:
        """Chooses a peer for each stage. Every stage has at least one replica."""


class GreedyPlanner(RulePlanner):
    """Planner of the path with the least link and service time. Our microbatches in flight count as queues."""

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> PeerRoute:
        replicas = {stage: self._view.replicas(ModuleId(stage), now) for stage in stages}
        costs = self._measured.costs(list(chain.from_iterable(replicas.values())))
        ends: list[tuple[float, PeerRoute]] = [(0.0, (self._view.own,))]
        for stage in stages:
            ends = [
                min(
                    (
                        cost
                        + 2 * costs.message_s[before[-1]][peer]
                        + costs.service_s(peer) * (1 + in_flight.get(peer, 0)),
                        (*before, peer),
                    )
                    for cost, before in ends
                )
                for peer in (announcement.peer for announcement in replicas[stage])
            ]
        return min((cost + 2 * costs.message_s[before[-1]][self._view.own], before) for cost, before in ends)[1][1:]


class ReplayPlanner(Planner):
    """Planner that repeats given routes (the peer of each hop) in the order of a schedule."""

    def __init__(
        self, rules: PathRules, membership: Membership, times: MeasuredTimes, routes: Sequence[PeerRoute]
    ) -> None:
        super().__init__(rules, membership, times)
        self._view, self._routes = membership, routes

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float, *, proven_only: bool = False
    ) -> Reasoned[Path | NoReplica]:
        """Plans a path like `Planner.plan`. An unreachable peer is replaced by the replica that should finish first."""
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
    """Planner that chooses peers by SWARM's rule. Its data node reports launches and receipts to `rule`."""

    def __init__(
        self, rules: PathRules, membership: Membership, times: MeasuredTimes, tokens: int, chance: random.Random
    ) -> None:
        super().__init__(rules, membership, times)
        self._tokens, self.rule = tokens, SwarmRule(chance)

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> PeerRoute:
        route: PeerRoute = ()
        for module in map(ModuleId, stages):
            speeds = {a.peer: a.tokens_per_second for a in self._view.replicas(module, now)}
            announced_s = {peer: self._tokens / speed if speed else 0.0 for peer, speed in speeds.items()}
            route = (*route, self.rule.choose(module, announced_s))
        return route


@dataclass(slots=True)
class Pace:
    """Mean seconds that one peer takes for a forward pass."""

    last: float = 0.0  # End of its last task
    _average: float = 0.0
    _weight: float = 0.0  # Weight of all samples in the average; the rest is the initial zero

    def ended(self, began: float, now: float, work: float) -> None:
        """Adds one sample: a pass, worth `work` forward passes, that the peer received at `began` and ended `now`."""
        seconds = max(0.0, now - max(began, self.last))
        self._average += NEW_SAMPLE_WEIGHT * (seconds / work - self._average)
        self._weight += NEW_SAMPLE_WEIGHT * (1.0 - self._weight)
        self.last = now

    @property
    def seconds(self) -> float | None:
        """Mean seconds of a forward pass; None before the first sample."""
        return self._average / self._weight if self._weight else None


@dataclass(slots=True)
class _Trace:
    path: Path
    last: float  # End of the previous visit
    passed: set[tuple[Direction, int]] = field(default_factory=set)


class SwarmRule:
    """SWARM's rule in one data node: take the replica with the least virtual time, the sum of its visits' seconds.

    Args:
        chance: breaks ties.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._queues: dict[ModuleId, dict[PeerId, tuple[float, float]]] = {}
        self._paces: dict[PeerId, Pace] = {}
        self._announced_s: dict[PeerId, float] = {}
        self._traces: OrderedDict[MicrobatchId, _Trace] = OrderedDict()
        self.samples = 0  # Measured passes

    def choose(self, module: ModuleId, announced_s: Mapping[PeerId, float]) -> PeerId:
        """Returns the replica of a module to use next. Its virtual time advances only in `launched`.

        Args:
            announced_s: announced seconds of a whole visit to each replica of the module; not empty.
        """
        queue = {peer: turn for peer, turn in self._queues.get(module, {}).items() if peer in announced_s}
        start = min((time for time, _ in queue.values()), default=0.0)
        for peer in announced_s:
            queue.setdefault(peer, (start, self._chance.random()))
        self._queues[module] = queue
        self._announced_s.update(announced_s)
        return min(queue, key=lambda peer: queue[peer])

    def expected_s(self, peer: PeerId) -> float:
        """Returns the seconds of a visit (forward and backward pass) to a peer, measured if possible, or announced."""
        pace = self._paces.get(peer)
        if pace is None or pace.seconds is None:
            return self._announced_s.get(peer, 0.0)
        return WHOLE_VISIT * pace.seconds

    def launched(self, microbatch: MicrobatchId, path: Path, now: float) -> None:
        """Moves the next turn of each peer on the path later by the time that it needs for a microbatch."""
        self._traces[microbatch] = _Trace(path, now)
        while len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)
        for hop in path.hops:
            queue = self._queues.get(hop.module, {})
            if hop.peer in queue:
                time, _ = queue[hop.peer]
                queue[hop.peer] = (time + self.expected_s(hop.peer), self._chance.random())

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """Records how long `sender` took: the time since the microbatch's last receipt. Repeated ones are ignored."""
        trace = self._traces.get(receipt.microbatch)
        mark = (receipt.direction, receipt.position)
        if trace is None or mark in trace.passed or not -1 <= receipt.position <= len(trace.path.hops):
            return
        trace.passed.add(mark)
        began, trace.last = trace.last, now
        if 0 <= receipt.position < len(trace.path.hops):
            self._paces.setdefault(sender, Pace()).ended(began, now, WORK[receipt.direction])
            self.samples += 1

    def visits(self) -> int:
        """Returns the number of measured visits."""
        return self.samples // len(WORK)

    def ended(self, microbatch: MicrobatchId, path: Path | None) -> None:
        """Drops a lost microbatch (`path` is None). A completed one stays, because its last receipts arrive later."""
        if path is None:
            self._traces.pop(microbatch, None)
