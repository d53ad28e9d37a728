"""What skipping stages costs in loss, and how well half of the model does alone: one model of 12 stages, trained at
equal tokens.

    python benchmarks/skipping.py [--seeds 1 2 3] [--arms full 1/2 ...] [--steps N] [--text FILE-OR-FOLDER] [--output
    FILE]

Every arm is trained by the product's own loop (`node.solo.trainer`) on the same text in the same order. Arms called by
a fraction have paths through that share of the 12 stages, stage 0 always, as the planner chooses them; a stage takes
its inner step when it has seen `inner_tokens` of its own. The others are variations of 1/2: `spread` chooses stages
evenly spread over the depth, moving on from path to path; `swap` visits two neighbouring stages of each path in the
other order (SkipPipe's rule); `tenth` takes the full path for every tenth step; `warm` trains its first quarter on full
paths.

After training, the held-out loss of the full model, and of its parts with half of the stages (stage 0 and 5 more):
evenly spread ones, the mean over their ring, and random ones, the mean over 8 draws. `drop` is by how much the part's
perplexity is above that of the same full model, `behind` by how much the full model's is above that of the arm `full`
of the same seed.

Prints one JSON object; medians over the seeds are in `summary`. Progress goes to stderr, and the object so far to
`--output` after each run. A token is a byte, so a perplexity is one per byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import Progress

from node.data.feed import held_out_microbatches, open_documents
from node.data.packing import Microbatch
from node.pipeline.admission import path_rules
from node.solo.trainer import ChooseStages, SoloTrainer, WholeModel, planned_stages
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import all_stages, ring_of_subsets, spread_stages

STAGES: Final = 12
HALF: Final = PathRules(STAGES, STAGES // 2 - 1)
RANDOM_PARTS: Final = 8


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained and for how long; the same for all arms."""

    steps: int
    """Of stage 0."""
    hidden: int = 64
    heads: int = 4
    feed_forward: int = 176
    sequence: int = 64
    rows: int = 2
    microbatches: int = 4
    """In an inner step: as many paths are averaged."""
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    held_out: float = 0.15
    held_out_microbatches: int = 64
    source: str = "python-stdlib"

    @property
    def tokens(self) -> int:
        return self.steps * self.microbatches * self.rows * self.sequence

    @property
    def paths(self) -> int:
        return self.steps * self.microbatches


@dataclass(frozen=True, slots=True)
class Arm:
    """How many of the stages a path visits, stage 0 included, and how they are chosen."""

    visited: int
    choose: Callable[[Manifest, Task], ChooseStages]


def planned(manifest: Manifest, task: Task) -> ChooseStages:
    return planned_stages(manifest)


def spread(manifest: Manifest, task: Task) -> ChooseStages:
    rules = path_rules(manifest)
    return lambda number: spread_stages(rules, number)


def swapped(manifest: Manifest, task: Task) -> ChooseStages:
    """Two neighbours of each path change places, which ones moves on with the number."""

    def choose(number: int) -> Sequence[int]:
        path = list(planned_stages(manifest)(number))
        first = number % (len(path) - 1)
        path[first : first + 2] = reversed(path[first : first + 2])
        return path

    return choose


def every_tenth_step_full(manifest: Manifest, task: Task) -> ChooseStages:
    skipping = spread(manifest, task)
    return lambda number: all_stages(STAGES) if number // task.microbatches % 10 == 9 else skipping(number)


def first_quarter_full(manifest: Manifest, task: Task) -> ChooseStages:
    skipping = spread(manifest, task)
    return lambda number: all_stages(STAGES) if number < task.paths // 4 else skipping(number)


ARMS: Final = {
    "full": Arm(STAGES, planned),
    "3/4": Arm(STAGES * 3 // 4, planned),
    "2/3": Arm(STAGES * 2 // 3, planned),
    "1/2": Arm(STAGES // 2, planned),
    "spread": Arm(STAGES // 2, spread),
    "swap": Arm(STAGES // 2, swapped),
    "tenth": Arm(STAGES // 2, every_tenth_step_full),
    "warm": Arm(STAGES // 2, first_quarter_full),
}


def manifest_of(task: Task, seed: int, visited: int) -> Manifest:
    """The run of an arm. A round with nobody else changes nothing: plain means of one replica."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "skipping",
            "seed": seed,
            "model": {
                "vocabulary": 257,
                "hidden": task.hidden,
                "heads": task.heads,
                "kv_heads": task.heads,
                "feed_forward": task.feed_forward,
                "sequence": task.sequence,
            },
            "stages": {"blocks": [1] * STAGES, "per_path": visited - 1},
            "data": {"source": task.source, "held_out": task.held_out},
            "training": {
                "rows": task.rows,
                "inner_tokens": task.microbatches * task.rows * task.sequence,
                "inner": {"learning_rate": task.learning_rate},
                "outer": {"learning_rate": 1.0, "momentum": 0.0},
                "schedule": {"kind": "cosine", "warmup_steps": task.warmup_steps, "total_steps": task.steps},
            },
        }
    )


def held_out_loss(model: WholeModel, texts: Sequence[Microbatch], paths: Sequence[Sequence[int]]) -> float:
    """Nats per token, the mean over the paths."""
    return statistics.fmean(model.loss(text, path) for path in paths for text in texts)


def random_parts(seed: int) -> list[tuple[int, ...]]:
    generator = Random(seed)
    return [tuple(sorted(generator.sample(all_stages(STAGES), HALF.per_path))) for _ in range(RANDOM_PARTS)]


def measure(task: Task, seed: int, arm: Arm, on_step: Callable[[], None]) -> dict[str, float]:
    """Trains one arm and measures it."""
    manifest = manifest_of(task, seed, arm.visited)
    documents = open_documents(manifest)
    texts = list(held_out_microbatches(manifest, task.held_out_microbatches, documents))
    model = WholeModel(manifest, torch.device("cpu"))
    trainer = SoloTrainer(manifest, model, documents, arm.choose(manifest, task))
    begun = time.process_time()
    for _ in range(task.steps):
        trainer.step(lambda: False)
        on_step()
    spent = time.process_time() - begun
    full = held_out_loss(model, texts, [all_stages(STAGES)])
    halves = held_out_loss(model, texts, ring_of_subsets(HALF))
    drawn = held_out_loss(model, texts, random_parts(seed))
    return {
        "loss": full,
        "perplexity": math.exp(full),
        "half_spread_drop": math.expm1(halves - full),
        "half_random_drop": math.expm1(drawn - full),
        "half_spread_perplexity": math.exp(halves),
        "half_random_perplexity": math.exp(drawn),
        "cpu_s": round(spent, 1),
    }


def with_distance(arms: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Adds how far each arm is behind the full one, where that has been trained."""
    if "full" not in arms:
        return arms
    return {name: {**found, "behind": math.expm1(found["loss"] - arms["full"]["loss"])} for name, found in arms.items()}


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over the seeds that have the arm."""
    names = dict.fromkeys(name for seed in seeds for name in seed["arms"])
    found = {name: [seed["arms"][name] for seed in seeds if name in seed["arms"]] for name in names}
    return {
        name: {"seeds": len(rows)} | {key: statistics.median(row[key] for row in rows if key in row) for key in rows[0]}
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--text", type=Path, help="read this instead of the standard library's source")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = "python-stdlib" if options.text is None else f"path:{options.text}"
    task = Task(steps=options.steps, source=source)
    settings = dataclasses.asdict(task) | {"tokens": task.tokens, "source": source.partition(":")[0]}
    seeds: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as bar:
        for seed in options.seeds:
            seeds.append({"seed": seed, "arms": {}})
            for name in options.arms:
                line = bar.add_task(f"seed {seed}, {name}", total=task.steps)
                seeds[-1]["arms"][name] = measure(task, seed, ARMS[name], partial(bar.advance, line))
                seeds[-1]["arms"] = with_distance(seeds[-1]["arms"])
                result = {"stages": STAGES, "task": settings, "seeds": seeds, "summary": summary(seeds)}
                print(json.dumps({"seed": seed, "arm": name, **seeds[-1]["arms"][name]}), file=sys.stderr, flush=True)
                if options.output is not None:
                    options.output.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
