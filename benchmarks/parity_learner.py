"""One replica of a whole model, and what it is trained on: the part that all sides of `benchmarks.parity` have in
common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from node.averaging.anchor.local_replica import LocalReplica, anchor_of
from node.averaging.anchor.shared_vector import Vector
from node.data.documents import Documents
from node.data.feed import START, TrainingFeed
from node.data.packing import Cursor, Microbatch
from node.model.initialization import parameters_of
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures
from node.solo.trainer import WholeModel
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import MicrobatchId, PeerId

REPLICAS = 4
READER = PeerId("reader")


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained and for how long; the same for all sides. Sizes are in tokens, rows and elements."""

    hidden: int
    heads: int
    feed_forward: int
    blocks: int
    sequence: int
    rows: int
    """Of a microbatch."""
    microbatches: int
    """Of each replica in an inner step; one process has REPLICAS times as many."""
    steps: int
    """Inner steps in all."""
    common_steps: int
    """The first of them, which one process takes for everybody: rounds begin after them."""
    warmup_steps: int
    final_ratio: float
    """Of one process: of its learning rate at the last step."""
    beta2: float
    held_out_microbatches: int

    @property
    def tokens(self) -> int:
        """That each side is trained on."""
        return self.steps * REPLICAS * self.microbatches * self.rows * self.sequence


@dataclass(frozen=True, slots=True)
class Rule:
    """How replicas are trained between rounds and what a round does."""

    inner_steps: int
    inner_rate: float
    """At its peak."""
    final_ratio: float
    """Of the inner rate at the last step. Averaging takes noise out of the parameters, so replicas need not slow down
    as much as one process."""
    outer_rate: float
    outer_momentum: float


def manifest_of(task: Task, seed: int, inner_rate: float, replicas: int, rule: Rule | None = None) -> Manifest:
    """A run of one module whose inner step has the tokens of so many replicas."""
    of_all = REPLICAS * task.microbatches * task.rows * task.sequence
    outer = {"inner_steps": rule.inner_steps, "outer": _outer(rule)} if rule is not None else {}
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "parity",
            "seed": seed,
            "model": {
                "vocabulary": 257,
                "hidden": task.hidden,
                "heads": task.heads,
                "kv_heads": task.heads,
                "feed_forward": task.feed_forward,
                "sequence": task.sequence,
            },
            "stages": {"blocks": [task.blocks]},
            "data": {"held_out": 0.05},
            "training": {
                "rows": task.rows,
                "inner_tokens": replicas * task.microbatches * task.rows * task.sequence,
                "inner": {"learning_rate": inner_rate, "beta2": task.beta2},
                "schedule": {
                    "kind": "cosine",
                    "warmup_tokens": task.warmup_steps * of_all,
                    "total_tokens": task.steps * of_all,
                    "final_ratio": task.final_ratio if rule is None else rule.final_ratio,
                },
                **outer,
            },
        }
    )


def _outer(rule: Rule) -> dict[str, float]:
    return {"learning_rate": rule.outer_rate, "momentum": rule.outer_momentum}


class Learner:
    """A model with its accumulators and its inner optimizer, as in a node."""

    def __init__(self, manifest: Manifest) -> None:
        self.model = WholeModel(manifest, torch.device("cpu"))
        ((self.module, self.parts),) = self.model.modules()
        self._accumulators = {part: Accumulator(part) for part in self.parts}
        self.optimizer = InnerOptimizer(manifest.training, list(self._accumulators.values()))
        self.replica = LocalReplica(self.parts, manifest.training.fragments, self.optimizer)
        self._microbatches = 0

    def step(self, microbatches: Sequence[Microbatch]) -> StepFigures:
        """An inner step with these microbatches.

        Raises:
            StateError: a gradient is not finite.
        """
        for microbatch in microbatches:
            loss, gradients = self.model.gradients(microbatch)
            name = MicrobatchId(READER, self._microbatches)
            for part, accumulator in self._accumulators.items():
                if accumulator.add(name, microbatch.size, gradients[part]) is not Addition.ADDED:
                    raise StateError(f"training has diverged: loss {loss} in microbatch {self._microbatches}")
            self._microbatches += 1
        return self.optimizer.step()

    def vector(self) -> Vector:
        """A copy of all parameters, [elements]."""
        return np.asarray(anchor_of(self.replica).parameters)

    def write(self, values: Vector) -> None:
        self.replica.write(slice(0, self.replica.layout.elements), values)

    def follow(self, other: Learner) -> None:
        """Becomes a copy of the other, its optimizer's state included."""
        self.write(other.vector())
        saved = other.optimizer.export_state(parameters_of(*other.parts))
        self.optimizer.import_state(parameters_of(*self.parts), saved)
        self.optimizer.tokens = other.optimizer.tokens


class Dealer:
    """Deals the microbatches of one feed to the replicas in turn, so that a step of all of them reads what one process
    reads in its step."""

    def __init__(self, manifest: Manifest, documents: Documents, microbatches: int, start: Cursor = START) -> None:
        self._feed = TrainingFeed(manifest, documents, READER, start)
        self._microbatches = microbatches

    @property
    def cursor(self) -> Cursor:
        """Where in the text the next step begins."""
        return self._feed.cursor

    def a_step(self) -> list[list[Microbatch]]:
        """What each replica gets for its next inner step."""
        dealt = [self._feed.next() for _ in range(REPLICAS * self._microbatches)]
        return [dealt[replica::REPLICAS] for replica in range(REPLICAS)]

    def a_whole_step(self) -> list[Microbatch]:
        """The same for one process."""
        return [self._feed.next() for _ in range(REPLICAS * self._microbatches)]
