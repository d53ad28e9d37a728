"""Which orders of stages a path may visit.

SkipPipe's rules (arXiv 2502.19913 and its code): with f the highest stage visited so far, the next stage is at most f +
`max_forward_jump`; a step back goes exactly to f - 1; steps back are bounded in number and in summed distance. Stage 0
is the data node itself, stands at both ends and is never skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.vocabulary.errors import ManifestError
from swarm.vocabulary.types import MAX_VISIT_RATIO, ModuleId

FAR = 1024
"""A forward jump to any later stage."""


@dataclass(frozen=True, slots=True)
class PathRules:
    """What the manifest says of paths.

    Args:
        stages: number of stages, stage 0 included.
        per_path: how many of the stages after stage 0 a path visits.
        max_forward_jump: how far past the highest stage visited the next one may lie.
        max_back_stops: how many steps back a path may take.
        max_back_distance: how far all its steps back may go together.
        visit_ratio: how many times as often as another one a stage after stage 0 may be visited; 1 for equal visits
            (`swarm.routing.prices`).
        experts: modules of each stage, stage 0 included; empty where each has one.

    Raises:
        ManifestError: a path that long cannot exist.
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
        """The modules of a stage, one for each of its experts."""
        return tuple(ModuleId(stage, expert) for expert in range(self.experts[stage] if self.experts else 1))

    @property
    def skippable(self) -> int:
        """Stages after stage 0."""
        return self.stages - 1

    @property
    def fewest(self) -> int:
        """Stages that a path still visits when one of them has no peer left: one less, in a run that skips stages at
        all."""
        return self.per_path - 1 if 1 < self.per_path < self.skippable else self.per_path

    def fault(self, order: Sequence[int]) -> str | None:
        """Why a path may not visit these stages in this order; None when it may."""
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
        """Likewise of a path that is under way, of which repair may have cut a stage."""
        rules = replace(self, per_path=self.fewest) if len(order) == self.fewest else self
        return rules.fault(order)


@dataclass(frozen=True, slots=True)
class _Step:
    frontier: int
    back_stops: int
    back_distance: int


def _after(rules: PathRules, step: _Step, stage: int) -> _Step | None:
    """Where a path stands after a visit to `stage`, or None when the rules forbid it."""
    if stage > step.frontier:
        if stage - step.frontier > rules.max_forward_jump:
            return None
        return _Step(stage, step.back_stops, step.back_distance)
    stops, distance = step.back_stops + 1, step.back_distance + step.frontier - stage
    if stage != step.frontier - 1 or stops > rules.max_back_stops or distance > rules.max_back_distance:
        return None
    return _Step(step.frontier, stops, distance)
