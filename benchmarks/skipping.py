"""What skipping stages costs in loss at equal tokens and at equal time, and how well half of the model does alone.

One model of 12 stages, trained by the product's own loop on the same text in the same order; a token is a byte, or one
of `--tokenizer` (4096 tokens). `--size larger` has 4.2 million parameters and 2,048 tokens a step.
`tokens`: an arm called by a fraction has paths through that share of the stages, stage 0 always, skipped in a ring.
`spread` chooses half of the stages evenly over the depth. `rules` are those of `skipstone new`; of those, `every 4th`
has all stages on every 4th path instead of every 10th, `varied` on none. `trap` has 12 stages after an empty stage 0
and 6 on a path, where ring and `spread` know two sets of stages only. `behind`: the full model's perplexity over that
of `full`, minus 1. `half_spread_drop`, `half_random_drop`: the same for half of the stages (evenly spread; 8 random
draws) over the same full model.

`time`: all arms get the emulated seconds in which full paths make `--steps` steps. Each stage after stage 0 has two
replicas of 1 to 4 visits a second, log-uniform by seed; the first full stage sets the pace, and a faster arm trains on
more text. `r` is the largest ratio of visits between stages (`stages.visit_ratio`), dealt as a data node does.
`time_share`: share of the seconds after which the arm is first below the last loss of full paths (null: never).
`summary` has medians over the seeds.
"""

import dataclasses
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import kit
from benchmarks.kit import Solo, curve_of, medians, reached, run_of, size_of, source_of, tell
from lab.world.arms import ring_stages
from node.pipeline.admission import path_rules
from node.solo.trainer import ChooseStages, planned_stages
from protocol.manifest.manifest import Manifest
from swarm.routing.path_rules import PathRules, ring_of_subsets, spread_stages
from swarm.routing.planner import visit_shares

STAGES: Final = 12
TRAP_STAGES: Final = 13
RANDOM_PARTS: Final = 8
REPLICAS: Final = 2
FASTEST: Final = 4.0  # visits per second of a replica; the slowest may serve 1
POINTS: Final = 12


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained; the same for all arms. `steps` are those of stage 0."""

    steps: int
    hidden: int = 64
    heads: int = 4
    feed_forward: int = 176
    sequence: int = 64
    rows: int = 2
    microbatches: int = 4
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    held_out_microbatches: int = 64
    held_out: float = 0.15
    vocabulary: int = 257
    tokenizer: str = "bytes"
    source: str = "python-stdlib"

    @property
    def paths(self) -> int:
        return self.steps * self.microbatches


SIZES: Final = {"small": Task(0), "larger": Task(0, 144, 4, 384, 128, 8, 2, 4e-3, 60, 48, 0.05)}


def manifest_of(task: Task, seed: int, visited: int, stages: int = STAGES, full_every: int = 0) -> Manifest:
    """A run whose paths have `visited` stages, stage 0 included; its rounds change nothing."""
    return run_of(
        "skipping",
        [int(stages == STAGES), *(1 for _ in range(1, stages))],
        seed=seed,
        **size_of(task),
        model={"vocabulary": task.vocabulary},
        stages={"per_path": visited - 1},
        sections={"paths": {"max_jump": 3, "full_every": full_every}},
        data={"source": task.source, "held_out": task.held_out, **tokens_of(task)},
        inner={"learning_rate": task.learning_rate},
        outer={"learning_rate": 1.0, "momentum": 0.0},
        schedule={"kind": "cosine", "warmup_steps": task.warmup_steps, "total_steps": task.steps},
    )


def tokens_of(task: Task) -> dict[str, str]:
    if task.tokenizer == "bytes":
        return {}
    digest = hashlib.sha256(Path(task.tokenizer).read_bytes()).hexdigest()
    return {"tokenizer": f"file:{task.tokenizer}", "tokenizer_sha256": digest}


def ring(manifest: Manifest) -> ChooseStages:
    rules = path_rules(manifest)
    return lambda number: ring_stages(rules, number)


def spread(manifest: Manifest) -> ChooseStages:
    rules = path_rules(manifest)
    return lambda number: spread_stages(rules, number)


@dataclass(frozen=True, slots=True)
class Arm:
    """`visited` stages of a path, stage 0 included, and how they are chosen."""

    visited: int
    choose: Callable[[Manifest], ChooseStages]
    stages: int = STAGES
    full_every: int = 0


ARMS: Final = {
    "full": Arm(STAGES, ring),
    "3/4": Arm(STAGES * 3 // 4, ring),
    "2/3": Arm(STAGES * 2 // 3, ring),
    "1/2": Arm(STAGES // 2, ring),
    "spread": Arm(STAGES // 2, spread),
    "rules": Arm(STAGES // 2, planned_stages, full_every=10),
    "3/4, rules": Arm(STAGES * 3 // 4, planned_stages, full_every=10),
    "every 4th": Arm(STAGES // 2, planned_stages, full_every=4),
}
TRAP_ARMS: Final = {
    "full": Arm(TRAP_STAGES, ring, TRAP_STAGES),
    "ring": Arm(7, ring, TRAP_STAGES),
    "spread": Arm(7, spread, TRAP_STAGES),
    "varied": Arm(7, planned_stages, TRAP_STAGES),
    "rules": Arm(7, planned_stages, TRAP_STAGES, full_every=10),
}


def trained_arm(arms: dict[str, Arm], task: Task, seed: int, name: str) -> dict[str, Any]:
    """Trains one arm and measures the whole model and its halves."""
    arm = arms[name]
    manifest = manifest_of(task, seed, arm.visited, arm.stages, arm.full_every)
    trained = Solo(manifest, task.held_out_microbatches, arm.choose(manifest))
    for _ in range(task.steps):
        trained.step()
    half, random = PathRules(arm.stages, (arm.stages - 1) // 2), Random(seed)
    parts = [tuple(sorted(random.sample(range(1, arm.stages), half.per_path))) for _ in range(RANDOM_PARTS)]
    full, halves, drawn = trained.loss(), trained.loss(ring_of_subsets(half)), trained.loss(parts)
    return {
        "loss": full,
        "perplexity": math.exp(full),
        "half_spread_drop": math.expm1(halves - full),
        "half_random_drop": math.expm1(drawn - full),
    }


TIMED_ARMS: Final = {
    "full": (STAGES, 1.0),
    "3/4": (STAGES * 3 // 4, 1.0),
    "3/4, ring": (STAGES * 3 // 4, 1.0),
    "3/4, r 1.5": (STAGES * 3 // 4, 1.5),
    "2/3": (STAGES * 2 // 3, 1.0),
    "2/3, r 1.5": (STAGES * 2 // 3, 1.5),
}
"""Stages of a path, stage 0 included, and the largest ratio of visits."""


def shares_of(name: str, capacities: Sequence[float]) -> list[float]:
    """The shares of microbatches that a data node would send to each stage."""
    visited, ratio = TIMED_ARMS[name]
    return visit_shares(PathRules(STAGES, visited - 1, visit_ratio=ratio), capacities)


def rate_of(shares: Sequence[float], capacities: Sequence[float]) -> float:
    """Microbatches per second until the first stage is busy all the time."""
    return min(capacity / share for capacity, share in zip(capacities, shares, strict=True))


def stages_at(shares: Sequence[float], turn: int) -> tuple[int, ...]:
    """The stages of microbatch `turn` by systematic sampling (Madow, 1949): the shares lie end to end on a line, and it
    visits those in whose intervals its point and all points one further lie."""
    point = turn * (5**0.5 - 1) / 2 % 1
    ends = [0.0, *itertools.accumulate(shares)]
    ends[-1] = round(ends[-1])  # the number of stages of a path
    intervals = enumerate(itertools.pairwise(ends), start=1)
    return tuple(stage for stage, (begin, end) in intervals if math.ceil(end - point) > math.ceil(begin - point))


def capacities(seed: int) -> list[float]:
    """Visits per second of each stage after stage 0, the sum over its replicas."""
    random = Random(seed)
    return [sum(FASTEST ** random.random() for _ in range(REPLICAS)) for _ in range(STAGES - 1)]


def at_equal_time(task: Task, seed: int, name: str) -> dict[str, Any]:
    """Trains one arm for the seconds that full paths need for the task's steps."""
    speeds = capacities(seed)
    shares, full = shares_of(name, speeds), shares_of("full", speeds)
    rate, seconds = rate_of(shares, speeds), task.paths / rate_of(full, speeds)
    steps = int(seconds * rate / task.microbatches)
    manifest = manifest_of(dataclasses.replace(task, steps=steps), seed, TIMED_ARMS[name][0])
    choose = ring(manifest) if name.endswith("ring") else partial(stages_at, shares)
    trained = Solo(manifest, task.held_out_microbatches, choose)

    def look(step: int) -> list[float]:
        return [round(step * task.microbatches / rate, 2), trained.loss()]

    curve = curve_of(steps, POINTS, trained.step, look)
    return {
        "microbatches_per_s": rate,
        "most_visits": max(shares),
        "least_visits": min(shares),
        "steps": steps,
        "loss": curve[-1][1],
        "curve": curve,
    }


def compared(arms: dict[str, dict[str, Any]]) -> None:
    """Adds each arm's distance to full paths, if those were trained."""
    full = arms.get("full")
    for found in arms.values() if full else ():
        found["behind"] = math.expm1(found["loss"] - full["loss"])
        if "curve" in found:
            found["pace"] = found["microbatches_per_s"] / full["microbatches_per_s"]
            found["time_share"] = reached(found["curve"], 0, full["loss"], full["curve"][-1][0])


def measure(options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    size = {"hidden": 8, "feed_forward": 16, "sequence": 16, "held_out_microbatches": 2} if options.quick else {}
    tokens = {} if options.tokenizer is None else {"tokenizer": str(options.tokenizer), "vocabulary": 4096}
    task, steps = dataclasses.replace(SIZES[options.size], **size, **tokens), options.steps
    warmup_steps = min(task.warmup_steps, steps // 2)
    task = dataclasses.replace(task, steps=steps, warmup_steps=warmup_steps, source=source_of(options.text))
    parts = {
        "tokens": (partial(trained_arm, ARMS), options.arms),
        "trap": (partial(trained_arm, TRAP_ARMS), options.trap_arms),
        "time": (at_equal_time, options.timed_arms),
    }
    found: dict[str, Any] = {}
    for part in options.parts:
        measured, names = parts[part]
        seeds = {seed: {name: measured(task, seed, name) for name in names} for seed in options.seeds}
        for arms in seeds.values():
            compared(arms)
        rows = {name: [arms[name] for arms in seeds.values()] for name in names}
        keys = {name: [key for key in of[0] if key != "curve"] for name, of in rows.items()}
        found[part] = {"summary": {name: medians(of, keys[name]) for name, of in rows.items()}, "seeds": seeds}
        tell(found[part]["summary"])
    told = dataclasses.asdict(task) | {"source": task.source.partition(":")[0], "tokenizer": task.tokenizer[:5]}
    return {"stages": STAGES, "task": told, **found}


if __name__ == "__main__":
    arms = {"arms": tuple(ARMS), "trap_arms": tuple(TRAP_ARMS), "timed_arms": tuple(TIMED_ARMS)}
    quick = {"seeds": [1], "steps": 2, "arms": ["full", "1/2"], "trap_arms": ["rules"], "timed_arms": ["2/3, r 1.5"]}
    usual = {"size": "small", "tokenizer": Path, "text": Path, "steps": 1000}
    kit.run(__doc__, measure, quick, seeds=[1, 2, 3], parts=("tokens", "trap", "time"), **arms, **usual)
