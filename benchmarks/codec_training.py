"""What codecs cost in loss: DiLoCo whose pseudo-gradients are encoded, and stages whose boundaries are.

    python benchmarks/codec_training.py --text FILE [--seeds 1 2] [--rules plain ...] [--arms none ...] [--rounds 50]
    [--inner-steps 10] [--workers 2] python benchmarks/codec_training.py --text FILE --boundaries [--seeds 1 2]
    [--rounds 50] [--inner-steps 10] [--workers 2]

A small model is trained on the text for `--common-steps` inner steps by one process, then by workers that average every
`--inner-steps`. What they send and what comes back goes through the real encoders, all in this process; what an
encoding leaves out is lost, sent later (error feedback), or stays in the replica. `apart` is how far the workers stand
from the anchor after the last round, as a share of its length. `behind` is the held-out loss above that of float32
(`none`) with the same outer rule, in nats a token (a byte); the ratios are against float32.

`--boundaries` encodes what passes between the stages of a model instead (`benchmarks.codec_boundaries`).

Prints one JSON object; means over the seeds are in `summary`. Progress goes to stderr, and the object so far to
`--output` after each arm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.codec_boundaries import measure_boundaries
from benchmarks.codec_learner import Learner, Task, Text, manifest_of
from benchmarks.codec_rounds import Leftover, Rounds, Way
from node.averaging.anchor.outer_step import OuterRule
from node.data.feed import held_out_microbatches, open_documents
from node.solo.trainer import evaluate
from swarm.vocabulary.types import Codec

TASK: Final = Task(
    source="",
    stages=(2,),
    hidden=64,
    heads=4,
    feed_forward=176,
    sequence=64,
    rows=8,
    steps=0,
    learning_rate=4e-3,
    warmup_steps=40,
    held_out_microbatches=128,
)
RULES: Final = {
    "plain": OuterRule(1.0, 0.0),
    "mild": OuterRule(0.8, 0.5),
    "diloco": OuterRule(0.7, 0.9),
}
"""Outer optimizers: the plain mean, what suits runs of some thousand steps (docs/BENCHMARKS.md), and DiLoCo's."""

TARGETS: Final = {
    "int4, later": ("relative", 0.005),
    "top_k_4, later": ("nats", 0.05),
    "top_k_2, later": ("nats", 0.05),
    "top_k_2, stays": ("nats", 0.05),
    "top_k_4, stays": ("nats", 0.05),
}
"""How far behind float32 with the same rule an arm may be."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How pseudo-gradients go out and how the mean comes back."""

    out: Way
    back: Way


def _both(codec: Codec, leftover: Leftover = Leftover.LOST) -> Arm:
    """The same codec in both directions. What stays in the replica on the way out is sent later by the reducer."""
    back = Leftover.LATER if leftover is Leftover.STAYS else leftover
    return Arm(Way(codec, leftover), Way(codec, back))


ARMS: Final = {
    "none": _both(Codec.NONE),
    "int8": _both(Codec.INT8),
    "int4": _both(Codec.INT4),
    "int4, later": _both(Codec.INT4, Leftover.LATER),
    "top_k_4": _both(Codec.TOP_K_4),
    "top_k_4, later": _both(Codec.TOP_K_4, Leftover.LATER),
    "top_k_4, stays": _both(Codec.TOP_K_4, Leftover.STAYS),
    "top_k_2, later": _both(Codec.TOP_K_2, Leftover.LATER),
    "top_k_2, stays": _both(Codec.TOP_K_2, Leftover.STAYS),
    "top_k_2, stays; int4 back": Arm(Way(Codec.TOP_K_2, Leftover.STAYS), Way(Codec.INT4, Leftover.LATER)),
}


class Run:
    """One seed: its text, its common start, and what becomes of it."""

    def __init__(self, task: Task, seed: int, workers: int, common_steps: int, inner_steps: int) -> None:
        self._manifest = manifest_of(task, seed)
        self._workers = workers
        self._inner_steps = inner_steps
        self._rounds = (task.steps - common_steps) // inner_steps
        self._documents = open_documents(self._manifest)
        self._held_out = list(held_out_microbatches(self._manifest, task.held_out_microbatches, self._documents))
        self._start, text = Learner(self._manifest), Text(self._manifest, self._documents, workers)
        for _ in range(common_steps):
            self._start.step(text.a_step())
        self._cursor = text.cursor

    def loss(self, learner: Learner) -> float:
        return float(evaluate(learner, self._held_out)["loss"])

    @property
    def loss_at_start(self) -> float:
        return self.loss(self._start)

    def measure(self, rule: OuterRule, arm: Arm) -> dict[str, Any]:
        """The held-out loss of the anchor after all rounds, and the bytes of one of them."""
        begun = time.process_time()
        workers = [Learner(self._manifest) for _ in range(self._workers)]
        for worker in workers:
            worker.follow(self._start)
        text = Text(self._manifest, self._documents, self._workers, self._cursor)
        rounds = Rounds(workers, rule, arm.out, arm.back)
        for _ in range(self._rounds):
            for _ in range(self._inner_steps):
                for worker, microbatch in zip(workers, text.a_step(), strict=True):
                    worker.step([microbatch])
            rounds.average()
        apart = rounds.apart
        rounds.stand()
        return {
            "loss": self.loss(workers[0]),
            "apart": round(apart, 4),
            "out_bytes": rounds.out_bytes,
            "back_bytes": rounds.back_bytes,
            "out_ratio": round(rounds.anchor.nbytes / rounds.out_bytes, 1),
            "back_ratio": round(rounds.anchor.nbytes / rounds.back_bytes, 1),
            "cpu_s": round(time.process_time() - begun, 1),
        }


def measure_seed(run: Run, rules: Iterable[str], arms: Iterable[str]) -> Iterator[dict[str, dict[str, Any]]]:
    """By rule and arm, more after each of them; `none` is always the first."""
    found: dict[str, dict[str, Any]] = {}
    for rule in rules:
        found[rule] = {}
        for name in dict.fromkeys(["none", *arms]):
            row = run.measure(RULES[rule], ARMS[name])
            dense = found[rule].get("none", row)["loss"]
            found[rule][name] = {**row, "behind": row["loss"] - dense, "relative": row["loss"] / dense - 1}
            yield found


def summary(seeds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Means over the seeds that have the arm, and whether the arm's target is met by the mean."""
    table: dict[str, dict[str, Any]] = {}
    for rule in seeds[0]:
        table[rule] = {}
        for name in seeds[0][rule]:
            rows = [seed[rule][name] for seed in seeds if name in seed.get(rule, {})]
            means = {key: statistics.fmean(row[key] for row in rows) for key in ("loss", "behind", "relative")}
            line: dict[str, Any] = {**means, "out_ratio": rows[0]["out_ratio"], "back_ratio": rows[0]["back_ratio"]}
            if name in TARGETS:
                unit, most = TARGETS[name]
                line["met"] = means["relative" if unit == "relative" else "behind"] <= most
            table[rule][name] = line
    return table


def rounds_of_all_seeds(options: argparse.Namespace, task: Task) -> Iterator[dict[str, Any]]:
    """The object that is printed, more complete each time."""
    steps = options.common_steps + options.rounds * options.inner_steps
    task = dataclasses.replace(task, steps=steps)
    settings = {
        "task": dataclasses.asdict(task),
        **{key: getattr(options, key) for key in ("workers", "rounds", "inner_steps", "common_steps")},
        "rules": {name: dataclasses.asdict(RULES[name]) for name in options.rules},
    }
    done: list[dict[str, Any]] = []
    for seed in options.seeds:
        run = Run(task, seed, options.workers, options.common_steps, options.inner_steps)
        found: dict[str, Any] = {}
        for found in measure_seed(run, options.rules, options.arms):
            both = [*done, found]
            yield {**settings, "loss_at_start": run.loss_at_start, "seeds": both, "summary": summary(both)}
        done.append(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", required=True, help="a file or a folder with text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--boundaries", action="store_true")
    parser.add_argument("--rules", nargs="+", default=["plain", "diloco"], choices=list(RULES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--common-steps", type=int, default=100, help="of one process, before the first round")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = dataclasses.replace(TASK, source=f"path:{Path(options.text).resolve()}")
    measured = measure_boundaries(options, task) if options.boundaries else rounds_of_all_seeds(options, task)
    result: dict[str, Any] = {}
    for result in measured:
        print(json.dumps(result["seeds"][-1]), file=sys.stderr)
        if options.output is not None:
            options.output.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
