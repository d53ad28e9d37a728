"""The part of `benchmarks.codec_training` that encodes what passes between the stages of a model.

`boundaries`: one process trains 5 stages, whose 5 boundaries (stage 0 to 1, and so on, and back to stage 0 for the
head) are encoded in both directions. `loss` is that of the trained model with the activations' codec, as it would be
measured in the swarm; `behind` is against `none` of the same seed. `none, other order` reads the same text from another
place on: what so small a change makes, and so what no difference below means anything. Training that diverges (a
gradient is not finite) ends there: `steps` tells.

`everywhere`: workers that average train the same stages; one table for the choice of codecs of all traffic. Half-way
everybody gets the state anew through its codec, as joiners do. The hybrid is mild on activations and their gradients,
hard on pseudo-gradients, and lossless on state (arXiv:2409.02423).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.codec_learner import Boundaries, Learner, Task, Text, manifest_of
from benchmarks.codec_rounds import Leftover, Rounds, Way
from node.averaging.anchor.outer_step import OuterRule
from node.data.feed import START, held_out_microbatches, open_documents
from node.data.packing import Cursor, Microbatch
from node.solo.trainer import evaluate
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec

STAGES: Final = (0, 1, 1, 1, 1)
RULE: Final = OuterRule(1.0, 0.0)
OTHER_ORDER: Final = 5
"""Microbatches that are left out at the beginning."""

BOUNDARIES: Final = {
    "none": Boundaries(),
    "bf16": Boundaries(Codec.BF16, Codec.BF16),
    "int8": Boundaries(Codec.INT8, Codec.INT8),
    "int4 activations, int8 gradients": Boundaries(Codec.INT4, Codec.INT8),
    "int4": Boundaries(Codec.INT4, Codec.INT4),
    "top_k_4": Boundaries(Codec.TOP_K_4, Codec.TOP_K_4),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """A codec for each kind of traffic."""

    boundaries: Boundaries
    out: Way
    back: Way
    state: Codec


def _one(codec: Codec) -> Policy:
    """The same for all traffic, without memory."""
    return Policy(Boundaries(codec, codec), Way(codec), Way(codec), codec)


def _hybrid(codec: Codec, out: Leftover) -> Policy:
    """INT8 for what passes between stages, this one for pseudo-gradients, state as it is."""
    return Policy(Boundaries(Codec.INT8, Codec.INT8), Way(codec, out), Way(codec, Leftover.LATER), Codec.NONE)


POLICIES: Final = {
    "none everywhere": _one(Codec.NONE),
    "int8 everywhere": _one(Codec.INT8),
    "int4 everywhere": _one(Codec.INT4),
    "top_k_4 everywhere": _one(Codec.TOP_K_4),
    "hybrid with int4": _hybrid(Codec.INT4, Leftover.LATER),
    "hybrid with top_k_2": _hybrid(Codec.TOP_K_2, Leftover.STAYS),
}


class Stages:
    """One seed."""

    def __init__(self, task: Task, seed: int, workers: int, inner_steps: int) -> None:
        self._manifest: Manifest = manifest_of(task, seed)
        self._steps = task.steps
        self._workers = workers
        self._inner_steps = inner_steps
        self._documents = open_documents(self._manifest)
        self._held_out: list[Microbatch] = list(
            held_out_microbatches(self._manifest, task.held_out_microbatches, self._documents)
        )

    def alone(self, boundaries: Boundaries, left_out: int = 0) -> dict[str, Any]:
        """One process."""
        learner = Learner(self._manifest, boundaries)
        text = Text(self._manifest, self._documents, 1, self._cursor_after(left_out))
        steps = 0
        with suppress(StateError):
            while steps < self._steps:
                learner.step(text.a_step())
                steps += 1
        return {
            "loss": self._loss(learner),
            "steps": steps,
            "boundary_bytes_per_token": self._per_token(learner, steps),
        }

    def together(self, policy: Policy) -> dict[str, Any]:
        """Workers that average."""
        workers = [Learner(self._manifest, policy.boundaries) for _ in range(self._workers)]
        text = Text(self._manifest, self._documents, self._workers, START)
        rounds = Rounds(workers, RULE, policy.out, policy.back)
        state_bytes, done, count = 0, 0, self._steps // self._inner_steps
        with suppress(StateError):
            while done < count:
                self._to_the_next_round(workers, text)
                rounds.average()
                done += 1
                if done == count // 2:
                    state_bytes = rounds.download(policy.state)
        rounds.stand()
        return {
            "loss": self._loss(workers[0]),
            "steps": done * self._inner_steps,
            "boundary_bytes_per_token": self._per_token(workers[0], done * self._inner_steps),
            "round_bytes": rounds.out_bytes + rounds.back_bytes,
            "state_bytes": state_bytes,
        }

    def _to_the_next_round(self, workers: Sequence[Learner], text: Text) -> None:
        for _ in range(self._inner_steps):
            for worker, microbatch in zip(workers, text.a_step(), strict=True):
                worker.step([microbatch])

    def _loss(self, learner: Learner) -> float:
        return float(evaluate(learner, self._held_out)["loss"])

    def _per_token(self, learner: Learner, steps: int) -> float:
        return round(learner.boundary_bytes / max(1, steps * self._manifest.microbatch_tokens), 1)

    def _cursor_after(self, microbatches: int) -> Cursor:
        text = Text(self._manifest, self._documents, 1)
        for _ in range(microbatches):
            text.a_step()
        return text.cursor


def measure_boundaries(options: argparse.Namespace, task: Task) -> Iterator[dict[str, Any]]:
    """The object that is printed, more complete each time."""
    task = dataclasses.replace(task, stages=STAGES, steps=options.rounds * options.inner_steps)
    done: list[dict[str, Any]] = []
    for seed in options.seeds:
        stages = Stages(task, seed, options.workers, options.inner_steps)
        found: dict[str, Any] = {"boundaries": {}, "everywhere": {}}
        for table, name, measure in _arms(stages):
            row = measure()
            dense = next(iter(found[table].values()), row)["loss"]
            found[table][name] = {**row, "behind": row["loss"] - dense}
            both = [*done, found]
            yield {
                "task": dataclasses.asdict(task),
                "workers": options.workers,
                "seeds": both,
                "summary": summary(both),
            }
        done.append(found)


def _arms(stages: Stages) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Table, name, and what to do; the first of each table is the one without a codec."""
    for name, boundaries in BOUNDARIES.items():
        yield "boundaries", name, partial(stages.alone, boundaries)
    yield "boundaries", "none, other order", partial(stages.alone, Boundaries(), OTHER_ORDER)
    for name, policy in POLICIES.items():
        yield "everywhere", name, partial(stages.together, policy)


def summary(seeds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over the seeds, and of `behind` the largest distance from 0."""
    table: dict[str, dict[str, Any]] = {}
    for kind, rows_by_name in seeds[0].items():
        for name in rows_by_name:
            rows = [seed[kind][name] for seed in seeds if name in seed[kind]]
            means = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
            largest = max(abs(row["behind"]) for row in rows)
            table.setdefault(kind, {})[name] = {**means, "largest_behind": largest}
    return table
