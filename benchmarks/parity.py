"""What rounds cost in loss: 4 replicas that average every 10, 50 or 100 inner steps against one process, at equal
tokens.

    python benchmarks/parity.py [--seeds 1 2 3] [--inner-steps 10 50 100] [--steps 3000] [--output FILE]
    python benchmarks/parity.py --difference

One process trains with the replicas' microbatches together in each step, at each of three learning rates; the best of
them is what the best of two or three settings of the rounds is held against. The replicas read the same microbatches,
dealt in turn. Their rounds are the real ones (runner, round machine, gRPC with mutual TLS on loopback), in lock-step.
Each outer step is also taken by an in-process reference in plain torch.

Prints one JSON object. `--difference` trains only 20 rounds of 2 inner steps, with the rounds and with a reference that
also trains its own replicas, and prints by how much their parameters differ. Progress goes to stderr, and the object so
far to `--output` after each run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.parity_learner import REPLICAS, Dealer, Learner, Rule, Task, manifest_of
from benchmarks.parity_reference import OuterReference, Reference
from benchmarks.parity_rounds import hall
from node.data.documents import Documents
from node.data.feed import START, held_out_microbatches, open_documents
from node.data.packing import Cursor
from node.solo.trainer import evaluate
from protocol.manifest.manifest import Manifest

TASK: Final = Task(
    hidden=16,
    heads=2,
    feed_forward=48,
    blocks=1,
    sequence=64,
    rows=8,
    microbatches=1,
    steps=3000,
    common_steps=800,
    warmup_steps=50,
    final_ratio=0.0,
    beta2=0.95,
    held_out_microbatches=128,
)
BASELINE_RATES: Final = (12e-3, 24e-3, 48e-3)
"""Learning rates of one process; the best one, seed by seed, is the baseline."""
COMMON_RATE: Final = 24e-3
RULES: Final = {
    10: (Rule(10, 40e-3, 0.0, 1.0, 0.0), Rule(10, 24e-3, 0.0, 0.8, 0.5), Rule(10, 12e-3, 0.0, 0.8, 0.5)),
    50: (Rule(50, 24e-3, 0.0, 0.8, 0.5), Rule(50, 16e-3, 0.0, 0.8, 0.5)),
    100: (Rule(100, 24e-3, 0.0, 0.8, 0.5), Rule(100, 16e-3, 0.0, 0.8, 0.5)),
}
"""Two or three settings each; the best one, seed by seed, is held against the best of the baseline's three."""
TARGETS: Final = {10: 1.01, 50: 1.02, 100: 1.03}
"""Held-out loss over that of the baseline."""
DIFFERENCE_ROUNDS: Final = 20
DIFFERENCE_RULE: Final = Rule(2, 1e-3, 0.0, 0.7, 0.9)
"""Few steps between rounds: training is chaotic, and what float32 rounds off grows from step to step whoever
averages."""


class Run:
    """One seed: its text and what is measured on it."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self._seed = seed
        manifest = self.manifest(COMMON_RATE, REPLICAS)
        self._documents: Documents = open_documents(manifest)
        self._held_out = list(held_out_microbatches(manifest, task.held_out_microbatches, self._documents))

    def manifest(self, inner_rate: float, replicas: int, rule: Rule | None = None) -> Manifest:
        return manifest_of(self._task, self._seed, inner_rate, replicas, rule)

    def dealer(self, start: Cursor = START) -> Dealer:
        """A new one, which begins there in the text."""
        return Dealer(self.manifest(COMMON_RATE, REPLICAS), self._documents, self._task.microbatches, start)

    def held_out_loss(self, learner: Learner) -> float:
        return float(evaluate(learner.model, self._held_out)["loss"])

    def baseline(self, inner_rate: float) -> float:
        """The loss of one process after all steps."""
        learner, dealer = Learner(self.manifest(inner_rate, REPLICAS)), self.dealer()
        for _ in range(self._task.steps):
            learner.step(dealer.a_whole_step())
        return self.held_out_loss(learner)

    async def rounds(self, rule: Rule) -> dict[str, Any]:
        """The loss of replicas that average, and how far the reference's outer steps led away from theirs."""
        dealer = self.dealer(self._common_start[1])
        manifest = self.manifest(rule.inner_rate, 1, rule)
        learners = self._replicas(manifest)
        reference = OuterReference(learners[0].vector(), rule)
        after_20, largest, waited = None, 0.0, 0.0
        rounds = (self._task.steps - self._task.common_steps) // rule.inner_steps
        async with hall(learners, manifest) as peers:
            for number in range(1, rounds + 1):
                for _ in range(rule.inner_steps):
                    await peers.step(dealer.a_step())
                expected = reference.step([learner.vector() for learner in learners], [1] * REPLICAS)
                begun = time.monotonic()
                anchor = await peers.a_round()
                waited += time.monotonic() - begun
                largest = max(largest, _difference(expected, anchor.parameters))
                after_20 = largest if number <= DIFFERENCE_ROUNDS else after_20
        return {
            "rounds": rounds,
            "loss": self.held_out_loss(learners[0]),
            "reference_difference_20_rounds": after_20,
            "reference_difference": largest,
            "mean_round_s": round(waited / rounds, 3),
        }

    @cached_property
    def _common_start(self) -> tuple[Learner, Cursor]:
        """One process after the common steps, and where in the text it stands."""
        learner, dealer = Learner(self.manifest(COMMON_RATE, REPLICAS)), self.dealer()
        for _ in range(self._task.common_steps):
            learner.step(dealer.a_whole_step())
        return learner, dealer.cursor

    def _replicas(self, manifest: Manifest) -> list[Learner]:
        """Copies of the common start."""
        learners = [Learner(manifest) for _ in range(REPLICAS)]
        for learner in learners:
            learner.follow(self._common_start[0])
        return learners


def _difference(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    return float(np.abs(left - right).max())


async def difference(task: Task, seed: int, rule: Rule, rounds: int) -> float:
    """The largest difference of any parameter after so many rounds from the first step on, between real rounds and the
    whole algorithm in one process."""
    manifest = manifest_of(task, seed, rule.inner_rate, 1, rule)
    documents = open_documents(manifest)
    dealer = Dealer(manifest, documents, task.microbatches)
    dealt = [[dealer.a_step() for _ in range(rule.inner_steps)] for _ in range(rounds)]
    learners = [Learner(manifest) for _ in range(REPLICAS)]
    async with hall(learners, manifest) as peers:
        for steps in dealt:
            for step in steps:
                await peers.step(step)
            await peers.a_round()
    reference = Reference([Learner(manifest) for _ in range(REPLICAS)], rule)
    for steps in dealt:
        expected = reference.a_round(steps)
    return max(_difference(expected, learner.vector()) for learner in learners)


def measure_seed(task: Task, seed: int, inner_steps: Iterable[int]) -> Iterable[dict[str, Any]]:
    """What is known of a seed, more after each run."""
    run = Run(task, seed)
    found: dict[str, Any] = {"seed": seed, "baselines": {}, "rounds": {}}
    for rate in BASELINE_RATES:
        found["baselines"][rate] = run.baseline(rate)
        yield found
    best = min(found["baselines"].values())
    for count in inner_steps:
        tried = [{**asyncio.run(run.rounds(rule)), "inner_rate": rule.inner_rate} for rule in RULES[count]]
        ratio = min(measured["loss"] for measured in tried) / best
        found["rounds"][count] = {
            "ratio": ratio,
            "target": TARGETS[count],
            "met": ratio <= TARGETS[count],
            "tried": tried,
        }
        yield found


def summary(seeds: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Of the ratios over the seeds, for each number of inner steps."""
    ratios: dict[int, list[float]] = {}
    for seed in seeds:
        for count, measured in seed["rounds"].items():
            ratios.setdefault(count, []).append(measured["ratio"])
    return {
        count: {"mean_ratio": statistics.mean(values), "worst_ratio": max(values), "target": TARGETS[count]}
        for count, values in ratios.items()
    }


def settings(task: Task) -> dict[str, Any]:
    return {
        "replicas": REPLICAS,
        "task": dataclasses.asdict(task),
        "tokens": task.tokens,
        "baseline_rates": BASELINE_RATES,
        "common_rate": COMMON_RATE,
        "rules": {count: [dataclasses.asdict(rule) for rule in rules] for count, rules in RULES.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--inner-steps", type=int, nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--steps", type=int, default=TASK.steps, help="of one process; the replicas take as many")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--difference", action="store_true")
    options = parser.parse_args()
    task = dataclasses.replace(TASK, steps=options.steps)
    torch.set_num_threads(1)
    if options.difference:
        apart = asyncio.run(difference(TASK, options.seeds[0], DIFFERENCE_RULE, DIFFERENCE_ROUNDS))
        print(
            json.dumps({"rounds": DIFFERENCE_ROUNDS, "rule": dataclasses.asdict(DIFFERENCE_RULE), "difference": apart})
        )
        return
    done: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for seed in options.seeds:
        for found in measure_seed(task, seed, options.inner_steps):
            result = {**settings(task), "seeds": [*done, found], "summary": summary([*done, found])}
            print(json.dumps(found), file=sys.stderr)
            if options.output is not None:
                options.output.write_text(json.dumps(result, indent=1))
        done.append(found)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
