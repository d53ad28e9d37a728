"""What SOAP and Muon are worth as inner optimizers against AdamW, and what it costs to refresh SOAP's bases.

    python benchmarks/optimizers.py [--seeds 1 2 3] [--rates 1.5e-3 3e-3 6e-3] [--steps N] [--arms ...] [--text FILE]
        [--output FILE] [--plot FILE]

One small model, trained from the start to the end of a cosine schedule with the product's parts (modules, accumulators,
inner optimizer) on the same text in the same order; a token is a byte. Each optimizer has every learning rate and every
seed. Losses are of held-out text, in nats a byte.

SOAP comes in three arms, of which the first two compute the same numbers:

    soap            refreshed between the microbatches of the following steps, as in a peer's idle time
    soap in step    the same bases at the same steps, but computed when they are due, inside the inner step
    soap at once    the published algorithm: all matrices after the same steps, used at once, computed inside the step

Another arm, `adamw 8bit`, is AdamW with the moments that `--moments 8bit` keeps.

Seconds are those of this process on the processor, so other work on the machine changes them little. `foreground_s`
leaves out what was computed between microbatches: what a peer spends when that falls into its waiting. `p99_step_ms` is
of the inner step's job, the first ten steps left out.

Prints one JSON object. `runs` has a curve of [step, foreground seconds, loss] each. `best` has for each optimizer and
seed the learning rate with the least final loss, that loss, and `steps_share` and `seconds_share`: of AdamW's, until
the last loss of AdamW's best (null: never). `summary` has their medians over the seeds. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.skipping import held_out_loss
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.model.device import flush_denormals
from node.model.moments import MomentType
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures
from node.model.optimizers.inner_rule import AtDeadline, InnerRule
from node.model.optimizers.soap import Soap
from node.solo.trainer import WholeModel
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.routing.stage_balance import all_stages
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import MicrobatchId, PeerId

READER: Final = PeerId("reader")
POINTS: Final = 20
"""Of a curve, after the one before training."""
WARM: Final = 10
"""First steps that say nothing of the others' time."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained and for how long; the same for all arms."""

    steps: int
    blocks: int = 2
    hidden: int = 128
    heads: int = 4
    feed_forward: int = 352
    sequence: int = 128
    rows: int = 4
    microbatches: int = 2
    """In an inner step."""
    warmup_share: float = 0.05
    beta1: float = 0.9
    held_out_microbatches: int = 12
    source: str = "python-stdlib"


@dataclass(frozen=True, slots=True)
class Arm:
    """An inner optimizer, and when its refreshes are computed."""

    name: str
    lag: int = 2
    in_idle_time: bool = False
    spread: bool = True
    moments: MomentType = MomentType.FLOAT32


ARMS: Final = {
    "adamw": Arm("adamw"),
    "adamw 8bit": Arm("adamw", moments=MomentType.EIGHT_BIT),
    "muon": Arm("muon"),
    "soap": Arm("soap", in_idle_time=True),
    "soap in step": Arm("soap"),
    "soap at once": Arm("soap", lag=1, spread=False),
}
COMPARED: Final = ("adamw", "muon", "soap")
"""With every learning rate; the others with the middle one."""


def manifest_of(task: Task, arm: Arm, seed: int, rate: float) -> Manifest:
    """The run of one arm."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "optimizers",
            "seed": seed,
            "model": {
                "vocabulary": 257,
                "hidden": task.hidden,
                "heads": task.heads,
                "kv_heads": task.heads,
                "feed_forward": task.feed_forward,
                "sequence": task.sequence,
            },
            "stages": {"blocks": [0, task.blocks]},
            "data": {"source": task.source, "held_out": 0.1},
            "training": {
                "rows": task.rows,
                "inner_tokens": task.microbatches * task.rows * task.sequence,
                "inner": {"name": arm.name, "learning_rate": rate, "refresh_lag": arm.lag, "beta1": task.beta1},
                "schedule": {
                    "kind": "cosine",
                    "warmup_steps": int(task.steps * task.warmup_share),
                    "total_steps": task.steps,
                },
            },
        }
    )


class IdleTime:
    """Work that is computed when there is nothing else to do: its chunks in order of arrival."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._work: deque[Iterator[None]] = deque()

    def submit(self, work: Iterator[None], name: str) -> AtDeadline:
        self._work.append(work)
        return AtDeadline(work, name)

    def fill(self) -> None:
        """Computes all that there is."""
        begun = time.thread_time()
        while self._work:
            for _ in self._work[0]:
                pass
            self._work.popleft()
        self.seconds += time.thread_time() - begun


class Trainer:
    """The model with its accumulators and inner optimizers, as data node and stage peers have them."""

    def __init__(self, manifest: Manifest, arm: Arm) -> None:
        self.model = WholeModel(manifest, torch.device("cpu"))
        self.step_ms: list[float] = []
        """Of the inner step's job, all modules together."""
        self._manifest, self._idle, self._arm = manifest, IdleTime(), arm
        self._feed = TrainingFeed(manifest, open_documents(manifest), READER)
        self._sums = {part: Accumulator(part) for _, parts in self.model.modules() for part in parts}
        self._optimizers = [self._optimizer([self._sums[part] for part in parts]) for _, parts in self.model.modules()]
        self._count = 0
        self._seconds = 0.0

    @property
    def foreground_s(self) -> float:
        """Processor seconds without those of idle time."""
        return self._seconds - self._idle.seconds

    def step(self) -> tuple[StepFigures, ...]:
        """One inner step of every module."""
        begun = time.thread_time()
        for _ in range(self._manifest.microbatches_per_step):
            text = self._feed.next()
            loss, gradients = self.model.gradients(text)
            for part, of_part in gradients.items():
                added = self._sums[part].add(MicrobatchId(READER, self._count), text.size, of_part)
                if added is not Addition.ADDED:
                    raise StateError(f"training has diverged: loss {loss} in microbatch {self._count}")
            self._count += 1
            if self._arm.in_idle_time:
                self._idle.fill()
        stepping = time.thread_time()
        figures = tuple(optimizer.step() for optimizer in self._optimizers)
        ended = time.thread_time()
        self.step_ms.append((ended - stepping) * 1e3)
        self._seconds += ended - begun
        return figures

    def _optimizer(self, sums: Sequence[Accumulator]) -> InnerOptimizer:
        training = self._manifest.training
        submit = self._idle.submit if self._arm.in_idle_time else AtDeadline
        optimizer = InnerOptimizer(training, sums, submit=submit, moments=self._arm.moments)
        if not self._arm.spread:
            optimizer.rules = tuple(self._at_once(rule) for rule in optimizer.rules)
        return optimizer

    def _at_once(self, rule: InnerRule[Any]) -> InnerRule[Any]:
        return Soap(rule.parameters, self._manifest.training.inner, spread=False) if isinstance(rule, Soap) else rule


def measure(task: Task, name: str, seed: int, rate: float) -> dict[str, Any]:
    """Trains one arm to the end of its schedule."""
    manifest = manifest_of(task, ARMS[name], seed, rate)
    return {"arm": name, "seed": seed, "rate": rate, **trained(task, manifest, Trainer(manifest, ARMS[name]))}


def trained(task: Task, manifest: Manifest, trainer: Trainer) -> dict[str, Any]:
    """Trains to the end of the schedule, and says what came of it."""
    texts = list(held_out_microbatches(manifest, task.held_out_microbatches, open_documents(manifest)))
    measured_at = {round(task.steps * point / POINTS) for point in range(POINTS + 1)}
    curve, diverged = [], False
    for step in range(task.steps + 1):
        if step and not diverged:
            try:
                trainer.step()
            except StateError:
                diverged = True
        if step in measured_at and not diverged:
            loss = held_out_loss(trainer.model, texts, [all_stages(2)])
            curve.append([step, round(trainer.foreground_s, 3), loss])
    times = sorted(trainer.step_ms[WARM:])
    return {
        "loss": None if diverged else curve[-1][2],
        "foreground_s": trainer.foreground_s,
        "idle_s": trainer._idle.seconds,
        "median_step_ms": statistics.median(times),
        "p99_step_ms": times[int(0.99 * (len(times) - 1))],
        "curve": curve,
    }


def best_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each seed and optimizer the run with the least final loss, and how soon it was at AdamW's."""
    found = []
    for seed in dict.fromkeys(run["seed"] for run in runs):
        best: dict[str, dict[str, Any]] = {}
        for run in (run for run in runs if run["seed"] == seed and run["loss"] is not None):
            if run["arm"] not in best or run["loss"] < best[run["arm"]]["loss"]:
                best[run["arm"]] = run
        adamw = best.get("adamw")
        for run in best.values():
            row = {key: run[key] for key in ("arm", "seed", "rate", "loss", "median_step_ms", "p99_step_ms", "idle_s")}
            if adamw is not None:
                row["steps_share"] = reached(run["curve"], 0, adamw["loss"], adamw["curve"][-1][0])
                row["seconds_share"] = reached(run["curve"], 1, adamw["loss"], adamw["curve"][-1][1])
                row["loss_over_adamw"] = run["loss"] - adamw["loss"]
            found.append(row)
    return found


def reached(curve: Sequence[Sequence[float]], column: int, loss: float, of: float) -> float | None:
    """Where a curve, straight between its points, is first down to a loss, as a share; of 0 steps, 1 seconds."""
    for before, at in pairwise(curve):
        if at[2] <= loss:
            part = 0.0 if before[2] <= loss else (before[2] - loss) / (before[2] - at[2])
            return (before[column] + part * (at[column] - before[column])) / of
    return None


def summary(best: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Medians over the seeds, for each arm; of the shares over those that got there, if most did."""
    found: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(row["arm"] for row in best):
        rows = [row for row in best if row["arm"] == name]
        found[name] = {}
        for key in (key for key in rows[0] if key not in ("arm", "seed")):
            there = [row[key] for row in rows if row[key] is not None]
            found[name][key] = statistics.median(there) if 2 * len(there) > len(rows) else None
    return found


def draw(runs: Sequence[dict[str, Any]], best: Sequence[dict[str, Any]], file: Path) -> None:
    """The best run of each arm and seed, by steps and by seconds."""
    from matplotlib.figure import Figure

    seeds = list(dict.fromkeys(row["seed"] for row in best))
    figure = Figure(figsize=(4.2 * len(seeds), 6.4), layout="constrained")
    for row, (column, label) in enumerate(((0, "inner steps"), (1, "processor seconds, idle time left out"))):
        for place, seed in enumerate(seeds):
            axes = figure.add_subplot(2, len(seeds), row * len(seeds) + place + 1)
            for colour, name in enumerate(ARMS):
                rates = [each["rate"] for each in best if each["seed"] == seed and each["arm"] == name]
                for run in runs:
                    if run["seed"] == seed and run["arm"] == name and run["rate"] in rates:
                        points = [point for point in run["curve"] if point[0] >= run["curve"][-1][0] // 6]
                        axes.plot(
                            [point[column] for point in points],
                            [point[2] for point in points],
                            "--" if name not in COMPARED else "-",
                            color=f"C{colour}",
                            label=f"{name}, {run['rate']:g}",
                            linewidth=1.3,
                        )
            axes.set(title=f"seed {seed}", xlabel=label, ylabel="held-out loss, nats a byte")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--microbatches", type=int, default=2, help="in an inner step")
    parser.add_argument("--text", type=Path, help="read this instead of the standard library's source")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG (needs the extra `plot`)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    source = "python-stdlib" if options.text is None else f"path:{options.text}"
    task = Task(steps=options.steps, microbatches=options.microbatches, source=source)
    settings = dataclasses.asdict(task) | {"source": source.partition(":")[0]}
    middle = sorted(options.rates)[len(options.rates) // 2]
    planned = [
        (name, seed, rate)
        for seed in options.seeds
        for name in options.arms
        for rate in options.rates
        if name in COMPARED or rate == middle
    ]
    runs: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as bar:
        for name, seed, rate in bar.track(planned):
            runs.append(measure(task, name, seed, rate))
            best = best_of(runs)
            result = {"task": settings, "summary": summary(best), "best": best, "runs": runs}
            if options.output is not None:
                options.output.write_text(json.dumps(result, indent=1))
    if options.plot is not None:
        draw(runs, result["best"], options.plot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
