"""What skipping stages is worth at equal time: held-out loss over the seconds of an emulated swarm whose replicas are
not equally fast.

    python benchmarks/skipping_time.py [--seeds 1 2 3] [--steps N] [--text FILE-OR-FOLDER] [--output FILE] [--plot FILE]

The model, the text and the loop are those of `benchmarks/skipping.py`: 12 stages, trained by the product's own loop
(`node.solo.trainer`). A path skips a quarter or a third of them or none. `r` is the largest allowed ratio of visits
between stages (`stages.visit_ratio`): at 1 all are visited equally often, at 1.5 weak ones less, by the shares that a
data node deals (`swarm.routing.prices`).

Time is emulated. Each stage after stage 0 has two replicas whose speeds are drawn by seed, log-uniformly from 1 to 4
visits a second. A swarm whose windows are full launches as many microbatches per second as its first full stage lets
through; links and the data node are taken to be faster. All arms of a seed get the same seconds: those in which full
paths make `--steps` inner steps. So an arm that lets more microbatches through trains on more text, and its learning
rate falls over its own number of steps.

Prints one JSON object: for each seed and arm the microbatches per second, visits of the strongest and the weakest
stage, inner steps, and the curve of seconds and losses of the whole model (nats a byte). `behind` is by how much the
last perplexity is above that of full paths, `time_share` the share of the seconds after which the arm was first below
the last loss of full paths (null: never). `summary` has medians over the seeds. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.skipping import STAGES, Task, held_out_loss, manifest_of
from node.data.feed import held_out_microbatches, open_documents
from node.solo.trainer import SoloTrainer, WholeModel
from swarm.routing.path_rules import PathRules
from swarm.routing.prices import visit_shares
from swarm.routing.stage_balance import all_stages

REPLICAS: Final = 2
FASTEST: Final = 4.0
"""Visits per second; the slowest may serve 1."""
POINTS: Final = 12
"""Of a curve, after the one before training."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How many of the stages a path visits, stage 0 included, and the largest ratio of visits."""

    visited: int
    ratio: float

    def shares(self, capacities: Sequence[float]) -> list[float]:
        """The shares of microbatches that a data node would send to each stage."""
        return visit_shares(PathRules(STAGES, self.visited - 1, visit_ratio=self.ratio), capacities)


def rate_of(shares: Sequence[float], capacities: Sequence[float]) -> float:
    """Microbatches per second until the first stage is busy all the time."""
    return min(capacity / share for capacity, share in zip(capacities, shares, strict=True))


def stages_at(shares: Sequence[float], turn: int) -> tuple[int, ...]:
    """The stages of microbatch `turn` by systematic sampling (Madow, 1949): the shares lie end to end on a line, and it
    visits those in whose intervals its point and all points one further lie."""
    point = turn * (5**0.5 - 1) / 2 % 1
    ends = [0.0, *itertools.accumulate(shares)]
    intervals = enumerate(itertools.pairwise(ends), start=1)
    return tuple(stage for stage, (begin, end) in intervals if math.ceil(end - point) > math.ceil(begin - point))


ARMS: Final = {
    "full": Arm(STAGES, 1.0),
    "3/4": Arm(STAGES * 3 // 4, 1.0),
    "3/4, r 1.5": Arm(STAGES * 3 // 4, 1.5),
    "2/3": Arm(STAGES * 2 // 3, 1.0),
    "2/3, r 1.5": Arm(STAGES * 2 // 3, 1.5),
}


def capacities(seed: int) -> list[float]:
    """Visits per second of each stage after stage 0: those of its replicas together."""
    random = Random(seed)
    return [sum(FASTEST ** random.random() for _ in range(REPLICAS)) for _ in range(STAGES - 1)]


def measure(task: Task, seed: int, arm: Arm, on_step: Callable[[], None]) -> dict[str, Any]:
    """Trains one arm for as many seconds as full paths need for the task's steps.

    `on_step` is called as often as full paths step.
    """
    speeds = capacities(seed)
    shares, full = arm.shares(speeds), ARMS["full"].shares(speeds)
    rate, seconds = rate_of(shares, speeds), task.paths / rate_of(full, speeds)
    steps = int(seconds * rate / task.microbatches)
    own = dataclasses.replace(task, steps=steps)
    manifest = manifest_of(own, seed, arm.visited)
    documents = open_documents(manifest)
    texts = list(held_out_microbatches(manifest, task.held_out_microbatches, documents))
    model = WholeModel(manifest, torch.device("cpu"))
    trainer = SoloTrainer(manifest, model, documents, lambda number: stages_at(shares, number))
    measured_at = {round(steps * point / POINTS) for point in range(POINTS + 1)}
    curve, told = [], 0
    for step in range(steps + 1):
        if step:
            trainer.step(lambda: False)
        if step in measured_at:
            loss = held_out_loss(model, texts, [all_stages(STAGES)])
            curve.append([round(step * task.microbatches / rate, 2), loss])
        while told < step * task.steps // steps:
            told += 1
            on_step()
    return {
        "microbatches_per_s": rate,
        "most_visits": max(shares.visits) / shares.of,
        "least_visits": min(shares.visits) / shares.of,
        "steps": steps,
        "loss": curve[-1][1],
        "curve": curve,
    }


def compared(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds how each arm stands beside the full one, where that has been trained."""
    if "full" not in arms:
        return arms
    full = arms["full"]
    return {
        name: {
            **found,
            "pace": found["microbatches_per_s"] / full["microbatches_per_s"],
            "behind": math.expm1(found["loss"] - full["loss"]),
            "time_share": reached(found["curve"], full["loss"], full["curve"][-1][0]),
        }
        for name, found in arms.items()
    }


def reached(curve: Sequence[Sequence[float]], loss: float, seconds: float) -> float | None:
    """The share of the seconds after which a curve, straight between its points, is first down to a loss."""
    for (before_s, before), (at_s, at) in pairwise(curve):
        if at <= loss:
            part = 0.0 if before <= loss else (before - loss) / (before - at)
            return (before_s + part * (at_s - before_s)) / seconds
    return None


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Medians over the seeds; of `time_share` over those that got there, if most did."""
    found = {}
    for name in dict.fromkeys(name for seed in seeds for name in seed["arms"]):
        rows = [seed["arms"][name] for seed in seeds if name in seed["arms"]]
        keys = [key for key in rows[0] if key not in ("curve", "time_share")]
        shares = [row["time_share"] for row in rows if row.get("time_share") is not None]
        middle = statistics.median(shares) if 2 * len(shares) > len(rows) else None
        found[name] = {key: statistics.median(row[key] for row in rows) for key in keys} | {"time_share": middle}
    return found


def draw(seeds: Sequence[dict[str, Any]], file: Path) -> None:
    """The curves of each seed beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(seeds), 3.6), layout="constrained")
    for place, seed in enumerate(seeds, start=1):
        axes = figure.add_subplot(1, len(seeds), place)
        for colour, (name, found) in enumerate(seed["arms"].items()):
            times, losses = zip(*found["curve"][1:], strict=True)
            axes.plot(times, losses, "--" if "r 1.5" in name else "-", color=f"C{colour}", label=name, linewidth=1.4)
        axes.set(title=f"seed {seed['seed']}", xlabel="emulated seconds", ylabel="held-out loss, nats a byte")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=400, help="inner steps of stage 0 with full paths")
    parser.add_argument("--text", type=Path, help="read this instead of the standard library's source")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG (needs the extra `plot`)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = "python-stdlib" if options.text is None else f"path:{options.text}"
    task = Task(steps=options.steps, source=source)
    settings = dataclasses.asdict(task) | {"source": source.partition(":")[0]}
    seeds: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as bar:
        for seed in options.seeds:
            seeds.append({"seed": seed, "capacities": capacities(seed), "arms": {}})
            for name in options.arms:
                line = bar.add_task(f"seed {seed}, {name}", total=task.steps)
                seeds[-1]["arms"][name] = measure(task, seed, ARMS[name], partial(bar.advance, line))
                seeds[-1]["arms"] = compared(seeds[-1]["arms"])
                result = {"stages": STAGES, "task": settings, "seeds": seeds, "summary": summary(seeds)}
                if options.output is not None:
                    options.output.write_text(json.dumps(result, indent=1))
    if options.plot is not None:
        draw(seeds, options.plot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
