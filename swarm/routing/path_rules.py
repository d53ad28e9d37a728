"""Legal orders of stages on a path, by SkipPipe's rules (arXiv 2502.19913 and its code).

With f the highest stage visited so far, the next stage is at most f + `max_forward_jump`. A step back goes to f - 1;
the number and the summed distance of steps back are bounded. Stage 0, the data node, is at both ends of every path.
Every `full_every`th path visits all stages: that takes a quarter off the distance to full paths (docs/results.md).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import MAX_VISIT_RATIO, ModuleId

FAR = 1024  # Value of `max_forward_jump` that allows a jump to any later stage


@dataclass(frozen=True, slots=True)
class PathRules:
    """Rules of a run's paths, from its manifest. Raises ManifestError if no path can keep them."""

    stages: int  # With stage 0
    per_path: int  # Stages after stage 0 that a path visits
    max_forward_jump: int = FAR  # Largest step beyond the highest stage visited
    max_back_stops: int = 0  # Most steps back
    max_back_distance: int = 0  # Largest sum of steps back
    visit_ratio: float = 1.0  # Largest ratio of visits between two stages after stage 0; 1: equal visits
    experts: tuple[int, ...] = ()  # Modules of each stage, with stage 0; empty: one each
    max_end_jump: int = FAR  # Largest step from the highest stage visited to the head behind the last stage
    full_every: int = 0  # Every such path visits all stages; 0: none does

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
        return tuple(ModuleId(stage, expert) for expert in range(self.experts[stage] if self.experts else 1))

    @property
    def skippable(self) -> int:
        return self.stages - 1

    @property
    def fewest(self) -> int:
        """Number of stages that a path may visit while a stage has no peer: one fewer, in a run that skips stages."""
        return self.per_path - 1 if 1 < self.per_path < self.skippable else self.per_path

    def length(self, number: int) -> int:
        """Returns how many stages after stage 0 microbatch `number` should visit."""
        return self.skippable if self.full_every and number % self.full_every == 0 else self.per_path

    def fault(self, order: Sequence[int]) -> str | None:
        """Returns why a path may not visit these stages in this order, or None."""
        is_full = self.full_every > 0 and len(order) == self.skippable
        if not (is_full or len(order) == self.per_path) or len(set(order)) != len(order):
            return f"not {self.per_path} different stages: {list(order)}"
        if any(not 1 <= stage < self.stages for stage in order):
            return f"a stage outside 1 to {self.stages - 1}: {list(order)}"
        highest = stops = distance = 0
        for stage in order:
            if stage > highest:
                is_legal = stage - highest <= self.max_forward_jump
                highest = stage
            else:
                stops, distance = stops + 1, distance + highest - stage
                is_legal = stage == highest - 1 and stops <= self.max_back_stops and distance <= self.max_back_distance
            if not is_legal:
                return f"stage {stage} may not follow in {list(order)}"
        if order and self.stages - highest > self.max_end_jump:
            return f"too many stages are skipped after stage {highest} in {list(order)}"
        return None

    def fault_as_taken(self, order: Sequence[int]) -> str | None:
        """Returns why a path in flight is illegal, or None. A repair may have removed stages."""
        fault = self.fault(order)
        longest = self.skippable if self.full_every else self.per_path
        return self.repaired(len(order)).fault(order) if fault and self.fewest <= len(order) < longest else fault

    def repaired(self, length: int) -> "PathRules":
        """Returns the rules of a path of `length` stages from which a lost one was removed: two jumps become one."""
        jump, end = 2 * self.max_forward_jump, 2 * self.max_end_jump
        return replace(self, per_path=length, max_forward_jump=jump, max_end_jump=end)


def spread_stages(rules: PathRules, shift: int = 0) -> tuple[int, ...]:
    """Returns `rules.per_path` stages after stage 0, evenly spread over the depth, rotated by `shift` stages."""
    skippable = rules.skippable
    # Bresenham's line: stage i is visited where the multiple of per_path / skippable passes a whole number.
    return tuple(i + 1 for i in range(skippable) if (i + shift) * rules.per_path % skippable < rules.per_path)


def ring_of_subsets(rules: PathRules) -> tuple[tuple[int, ...], ...]:
    """Returns the distinct results of `spread_stages` in order of shift. Each stage is in equally many results."""
    skippable = rules.skippable
    distinct = skippable // math.gcd(skippable, rules.per_path) if skippable else 1
    return tuple(spread_stages(rules, shift) for shift in range(distinct))


def evenly_chosen(available: Sequence[int], count: int, stages: int) -> tuple[int, ...]:
    """Returns the first available stage and `count` - 1 others with the least sum of squared jumps, up to the head.

    As in `spread_stages`, the first one is never skipped: without the first blocks, a model is worth least.
    """
    best: list[tuple[int, tuple[int, ...]]] = [(0, (available[0],))]  # Sum and stages of the best path to each stage
    for taken in range(1, count):
        before, longer = 0, []
        for number, stage in enumerate(available[taken:], start=1):
            # Squares are convex: the later the stage, the later the one before it. That leaves few candidates.
            candidates = range(before, min(number, len(best)))
            total, before = min((best[at][0] + (stage - best[at][1][-1]) ** 2, at) for at in candidates)
            longer.append((total, (*best[before][1], stage)))
        best = longer
    return min((total + (stages - path[-1]) ** 2, -path[-1], path) for total, path in best)[2]


def chosen_subsets(
    stages: int, per_path: int | None, *, every: bool, available: Collection[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the stage sets to use: all available stages if `per_path` is None, else one or `every` even choice.

    `available`: stages after stage 0; None: all. Raises ConfigError if there are too few.
    """
    there = tuple(range(1, stages) if available is None else sorted(available))
    if per_path is None:
        return (there,)
    if not min(1, stages - 1) <= per_path <= len(there):
        gap = f", of which {len(there)} are available: {', '.join(map(str, there))}" if len(there) < stages - 1 else ""
        raise ConfigError(
            f"{per_path} stages per path were requested; this run has {stages - 1} after stage 0{gap}",
            hint=f"Choose 1 to {len(there)}." if there else "Omit --stages-per-path.",
        )
    if len(there) < stages - 1 and not every:
        return (evenly_chosen(there, per_path, stages),)
    ring = ring_of_subsets(PathRules(1 + len(there), per_path))
    return tuple(tuple(there[stage - 1] for stage in each) for each in (ring if every else ring[:1]))
