"""Legal orders of stages on a path, by SkipPipe's rules (arXiv 2502.19913 and its code).

With f the highest stage visited so far, the next stage is at most f + `max_forward_jump`. A step back goes to f - 1;
the number and the summed distance of steps back are bounded. Stage 0, the data node, is at both ends of every path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import MAX_VISIT_RATIO, ModuleId

FAR = 1024
"""Value of `max_forward_jump` that allows a jump to any later stage."""


@dataclass(frozen=True, slots=True)
class PathRules:
    """Rules of a run's paths, from its manifest.

    Args:
        stages: number of stages, with stage 0.
        per_path: number of stages after stage 0 that a path visits.
        max_forward_jump: largest step beyond the highest stage visited.
        max_back_stops: largest number of steps back.
        max_back_distance: largest sum of steps back.
        visit_ratio: largest ratio of visits between two stages after stage 0; 1: equal visits.
        experts: number of modules of each stage, with stage 0; empty: one each.

    Raises:
        ManifestError: no path can keep the rules.
    """

    stages: int
    per_path: int
    max_forward_jump: int = FAR
    max_back_stops: int = 0
    max_back_distance: int = 0
    visit_ratio: float = 1.0
    experts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.per_path < max(1, self.stages):
            raise ManifestError(f"a path cannot visit {self.per_path} of the {self.stages - 1} stages after stage 0")
        if self.max_forward_jump < 1 or min(self.max_back_stops, self.max_back_distance) < 0:
            raise ManifestError("a path must be able to go forward, and cannot step back a negative number of times")
        if not 1 <= self.visit_ratio <= MAX_VISIT_RATIO:
            raise ManifestError(f"a visit ratio of {self.visit_ratio} is not from 1 to {MAX_VISIT_RATIO:g}")
        if self.experts and (len(self.experts) != self.stages or min(self.experts) < 1 or self.experts[0] != 1):
            raise ManifestError(f"{list(self.experts)} are not the experts of {self.stages} stages, one at stage 0")

    @property
    def has_experts(self) -> bool:
        """Whether some stage has several modules, so that documents are routed."""
        return max(self.experts, default=1) > 1

    def modules_at(self, stage: int) -> tuple[ModuleId, ...]:
        """Returns the modules of a stage, one per expert."""
        return tuple(ModuleId(stage, expert) for expert in range(self.experts[stage] if self.experts else 1))

    @property
    def skippable(self) -> int:
        """Number of stages after stage 0."""
        return self.stages - 1

    @property
    def fewest(self) -> int:
        """Number of stages that a path may visit while a stage has no peer: one fewer, in a run that skips stages."""
        return self.per_path - 1 if 1 < self.per_path < self.skippable else self.per_path

    def fault(self, order: Sequence[int]) -> str | None:
        """Returns why a path may not visit these stages in this order, or None."""
        if len(order) != self.per_path or len(set(order)) != len(order):
            return f"not {self.per_path} different stages: {list(order)}"
        if any(not 1 <= stage < self.stages for stage in order):
            return f"a stage outside 1 to {self.stages - 1}: {list(order)}"
        step = _Step(0, 0, 0)
        for stage in order:
            following = _after(self, step, stage)
            if following is None:
                return f"stage {stage} may not follow in {list(order)}"
            step = following
        return None

    def fault_as_taken(self, order: Sequence[int]) -> str | None:
        """Returns why a path in flight is illegal, or None. A repair may have removed one stage."""
        rules = replace(self, per_path=self.fewest) if len(order) == self.fewest else self
        return rules.fault(order)


@dataclass(frozen=True, slots=True)
class _Step:
    frontier: int
    back_stops: int
    back_distance: int


def _after(rules: PathRules, step: _Step, stage: int) -> _Step | None:
    """Returns the state of a path after a visit to `stage`, or None if the rules forbid the visit."""
    if stage > step.frontier:
        if stage - step.frontier > rules.max_forward_jump:
            return None
        return _Step(stage, step.back_stops, step.back_distance)
    stops, distance = step.back_stops + 1, step.back_distance + step.frontier - stage
    if stage != step.frontier - 1 or stops > rules.max_back_stops or distance > rules.max_back_distance:
        return None
    return _Step(step.frontier, stops, distance)


# ---- sets of stages --------------------------------------------------------------------------------------------------


def ring_stages(rules: PathRules, turn: int) -> tuple[int, ...]:
    """Returns the stages that microbatch `turn` visits if the skipped stages rotate like a ring.

    Over any `skippable` consecutive microbatches every stage is visited equally often.
    """
    skips = rules.skippable - rules.per_path
    skipped = {(turn * skips + k) % rules.skippable for k in range(skips)}
    return tuple(stage for stage in range(1, rules.stages) if stage - 1 not in skipped)


def spread_stages(rules: PathRules, shift: int = 0) -> tuple[int, ...]:
    """Returns `rules.per_path` stages after stage 0, evenly spread over the depth, rotated by `shift` stages.

    Over `skippable` shifts every stage is chosen equally often.
    """
    skippable = rules.skippable
    # Bresenham's line: stage i is visited where the multiple of per_path / skippable passes a whole number.
    return tuple(i + 1 for i in range(skippable) if (i + shift) * rules.per_path % skippable < rules.per_path)


def ring_of_subsets(rules: PathRules) -> tuple[tuple[int, ...], ...]:
    """Returns the distinct results of `spread_stages` in order of shift. Each stage is in equally many results."""
    skippable = rules.skippable
    distinct = skippable // math.gcd(skippable, rules.per_path) if skippable else 1
    return tuple(spread_stages(rules, shift) for shift in range(distinct))


def chosen_subsets(stages: int, per_path: int | None, *, every: bool) -> tuple[tuple[int, ...], ...]:
    """Returns the sets of stages with which a model is evaluated.

    Args:
        stages: number of stages of the model, with stage 0.
        per_path: number of stages after stage 0 on a path; None: all.
        every: whether all of `ring_of_subsets` are evaluated, or only the first.

    Raises:
        ConfigError: the model has no path of that length.
    """
    if per_path is None:
        return (tuple(range(1, stages)),)
    if not min(1, stages - 1) <= per_path <= stages - 1:
        raise ConfigError(
            f"{per_path} stages per path were requested; this run has {stages - 1} after stage 0",
            hint=f"Choose 1 to {stages - 1}.",
        )
    rules = PathRules(stages, per_path)
    return ring_of_subsets(rules) if every else (spread_stages(rules),)
