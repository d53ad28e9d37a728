"""Planners of a data node that choose peers by another rule than the node's: SWARM's, and the greedy one. Pure.

Only the choice of a microbatch's path differs: repair in flight, and all else that a planner is asked for, are the
node's own. So a data node that is given one of these is compared with one that is not, in real processes
(`tests/e2e/emulated_paths.py`) as in virtual time (`benchmarks/paths_virtual.py`).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.greedy_rule import least_route
from benchmarks.swarm_rule import SwarmRule
from swarm.membership.membership import Membership
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import NoReplica, Planner
from swarm.routing.stage_balance import ring_stages
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId, Reasoned, Route

OURS, SWARM, GREEDY = "ours", "swarm", "greedy"
RULES: Final = (OURS, SWARM, GREEDY)


class RulePlanner(Planner, ABC):
    """A planner without lanes: the stages are those of the ring, the peers are chosen by `_route`."""

    def __init__(self, rules: PathRules, membership: Membership, times: MeasuredTimes) -> None:
        super().__init__(rules, membership, times)
        self._view = membership
        self.chosen: Path | None = None
        """The last path."""

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """As the planner's own. `route` is empty: runs with experts have no rule but the node's."""
        stages = ring_stages(self.rules.stages, self.rules.per_path, number)
        missing = tuple(m for m in map(ModuleId, stages) if not self._view.replicas(m, now))
        if missing:
            return Reasoned(NoReplica(missing), "no peer left")
        hops = tuple(Hop(ModuleId(s), p) for s, p in zip(stages, self._route(stages, in_flight, now), strict=True))
        self.chosen = Path(self._view.own, hops)
        return Reasoned(self.chosen, "by another rule")

    @abstractmethod
    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> tuple[PeerId, ...]:
        """A peer for each stage, which all have some."""


class SwarmPlanner(RulePlanner):
    """SWARM's rule: the peer of each stage whose turn it is by virtual time. Whoever owns it tells `rule` what becomes
    of the microbatches.

    Args:
        tokens: of a microbatch.
    """

    def __init__(
        self, rules: PathRules, membership: Membership, times: MeasuredTimes, tokens: int, chance: random.Random
    ) -> None:
        super().__init__(rules, membership, times)
        self._tokens, self.rule = tokens, SwarmRule(chance)

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> tuple[PeerId, ...]:
        return tuple(self._choose(ModuleId(stage), now) for stage in stages)

    def _choose(self, module: ModuleId, now: float) -> PeerId:
        speeds = {a.peer: a.tokens_per_second for a in self._view.replicas(module, now)}
        announced_s = {peer: self._tokens / speed if speed else 0.0 for peer, speed in speeds.items()}
        peer = self.rule.choose(module, announced_s)
        assert peer is not None
        return peer


class GreedyPlanner(RulePlanner):
    """The rule of three lines: the path with the least links and service times, by this data node's own measurements
    and its own microbatches under way."""

    def __init__(
        self, rules: PathRules, membership: Membership, times: MeasuredTimes, own: Callable[[], Announcement]
    ) -> None:
        super().__init__(rules, membership, times)
        self._book, self._own = times, own

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> tuple[PeerId, ...]:
        replicas = [self._view.replicas(ModuleId(stage), now) for stage in range(1, self.rules.stages)]
        costs = self._book.costs([[self._own()], *replicas], in_flight=1)
        return least_route(costs, self._view.own, stages, in_flight)


def planner_by(
    rule: str,
    rules: PathRules,
    membership: Membership,
    times: MeasuredTimes,
    *,
    own: Callable[[], Announcement],
    tokens: int,
    seed: int,
) -> SwarmPlanner | GreedyPlanner | None:
    """A data node's planner of the rule; None for the node's own.

    Args:
        own: what the data node announces now.
        tokens: of a microbatch.
        seed: of what SWARM's rule leaves to chance, another for each data node.
    """
    if rule == SWARM:
        return SwarmPlanner(rules, membership, times, tokens, random.Random(f"{seed} {membership.own}"))
    return GreedyPlanner(rules, membership, times, own) if rule == GREEDY else None
