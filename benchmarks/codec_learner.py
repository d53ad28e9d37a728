"""A model that is trained in one process with codecs at its stages' boundaries, and its text: what both parts of
`benchmarks.codec_training` have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from node.averaging.anchor.local_replica import LocalReplica
from node.averaging.anchor.shared_vector import Vector
from node.data.documents import Documents
from node.data.feed import START, TrainingFeed
from node.data.packing import Cursor, Microbatch
from node.model import passes as visit
from node.model.initialization import parameters_of
from node.model.optimizer import Accumulator, Addition, InnerOptimizer
from node.solo.trainer import WholeModel
from protocol.codecs import decode, encode
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec, MicrobatchId, PeerId

READER = PeerId("reader")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained and for how long. Sizes are in tokens (bytes of text), rows and elements."""

    source: str
    """The manifest's `data.source`."""
    stages: tuple[int, ...]
    """Blocks of each."""
    hidden: int
    heads: int
    feed_forward: int
    sequence: int
    rows: int
    """Of a microbatch; each worker's inner step is one microbatch."""
    steps: int
    """Inner steps in all."""
    learning_rate: float
    """At its peak, after `warmup_steps`; it falls to a tenth on a cosine."""
    warmup_steps: int
    held_out_microbatches: int


def manifest_of(task: Task, seed: int) -> Manifest:
    """The run that the task is."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "codecs",
            "seed": seed,
            "model": {
                "vocabulary": 257,
                "hidden": task.hidden,
                "heads": task.heads,
                "kv_heads": task.heads,
                "feed_forward": task.feed_forward,
                "sequence": task.sequence,
            },
            "stages": {"blocks": list(task.stages)},
            "data": {"source": task.source, "held_out": 0.1},
            "training": {
                "rows": task.rows,
                "inner_tokens": task.rows * task.sequence,
                "inner": {"learning_rate": task.learning_rate},
                "schedule": {"kind": "cosine", "warmup_steps": task.warmup_steps, "total_steps": task.steps},
            },
        }
    )


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Codecs of what passes between stages."""

    activations: Codec = Codec.NONE
    gradients: Codec = Codec.NONE


class Learner:
    """All stages with their inner optimizers, as in `node.solo.trainer`. What a stage hands on, forward and backward,
    goes through a codec: from stage 0 to stage 1 and so on, and from the last one back to stage 0, which has the
    head."""

    def __init__(self, manifest: Manifest, boundaries: Boundaries = Boundaries()) -> None:
        self.model = WholeModel(manifest, CPU)
        self.boundaries = boundaries
        self.boundary_bytes = 0
        """Encoded, in both directions, since the start; of training only."""
        self._accumulators = {part: Accumulator(part) for _, parts in self.model.modules() for part in parts}
        self._modules = [self._optimized(manifest, parts) for _, parts in self.model.modules()]
        self._microbatches = 0

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        """An inner step of every stage with these microbatches; their mean loss.

        Raises:
            StateError: a gradient is not finite.
        """
        losses = [self._add(microbatch) for microbatch in microbatches]
        for _, optimizer, _ in self._modules:
            optimizer.step()
        return math.fsum(losses) / len(losses)

    @torch.no_grad()
    def loss(self, microbatch: Microbatch) -> float:
        """Mean nats per token, with the codec of the activations at the boundaries."""
        hidden = self.model.embedding(microbatch.tokens)
        for stack in self.model.stacks:
            hidden = stack(_passed(hidden, self.boundaries.activations)[0])
        return float(self.model.head(_passed(hidden, self.boundaries.activations)[0], microbatch.labels).item())

    def vector(self) -> Vector:
        """A copy of all parameters, module after module, each laid out as its anchor."""
        parts = []
        for _, _, replica in self._modules:
            parts.append(np.empty(replica.layout.elements, np.float32))
            replica.read(slice(0, replica.layout.elements), parts[-1])
        return np.concatenate(parts)

    def write(self, values: Vector) -> None:
        """The parameters become these."""
        start = 0
        for _, _, replica in self._modules:
            elements = replica.layout.elements
            replica.write(slice(0, elements), values[start : start + elements])
            start += elements

    def matrices(self) -> list[tuple[int, tuple[int, ...]]]:
        """Where each parameter begins in the vector, and its shape."""
        found, start = [], 0
        for _, _, replica in self._modules:
            found += [(start + place.start, place.shape) for place in replica.layout.places]
            start += replica.layout.elements
        return found

    def follow(self, other: Learner) -> None:
        """Becomes a copy of the other, its optimizers' state included."""
        self.write(other.vector())
        for (parts, optimizer, _), (those, its, _) in zip(self._modules, other._modules, strict=True):
            optimizer.import_state(parameters_of(*parts), its.export_state(parameters_of(*those)))

    def _optimized(
        self, manifest: Manifest, parts: tuple[nn.Module, ...]
    ) -> tuple[tuple[nn.Module, ...], InnerOptimizer, LocalReplica]:
        optimizer = InnerOptimizer(manifest.training, [self._accumulators[part] for part in parts])
        return parts, optimizer, LocalReplica(parts, manifest.training.fragments, optimizer)

    def _add(self, microbatch: Microbatch) -> float:
        loss, gradients = self._gradients(microbatch)
        name = MicrobatchId(READER, self._microbatches)
        self._microbatches += 1
        for part, of_part in gradients.items():
            if self._accumulators[part].add(name, microbatch.size, of_part) is not Addition.ADDED:
                raise StateError(f"training has diverged: loss {loss} in microbatch {self._microbatches}")
        return loss

    def _gradients(self, microbatch: Microbatch) -> tuple[float, dict[nn.Module, tuple[Tensor, ...]]]:
        """As `WholeModel.gradients`."""
        model = self.model
        visits = [visit.forward(model.embedding, microbatch.tokens)]
        for stack in model.stacks:
            visits.append(visit.forward(stack, self._sent(visits[-1].result, self.boundaries.activations)))
        last = self._sent(visits[-1].result, self.boundaries.activations)
        end = visit.forward(model.head, last, microbatch.labels)
        found = visit.backward(model.head, end)
        gradients: dict[nn.Module, tuple[Tensor, ...]] = {model.head: found.parameters}
        for part in [*reversed(model.stacks), model.embedding]:
            assert found.source is not None
            found = visit.backward(part, visits.pop(), self._sent(found.source, self.boundaries.gradients))
            gradients[part] = found.parameters
        return end.result.item(), gradients

    def _sent(self, values: Tensor, codec: Codec) -> Tensor:
        passed, size = _passed(values.detach(), codec)
        self.boundary_bytes += size
        return passed


def _passed(values: Tensor, codec: Codec) -> tuple[Tensor, int]:
    """What the other side has of it, and the bytes it took."""
    values = values.contiguous()
    sent = encode(values, codec)
    out = torch.empty_like(values)
    decode(sent.spec, sent.data, out)
    return out, sent.spec.byte_length


class Text:
    """One feed, dealt to the workers in turn."""

    def __init__(self, manifest: Manifest, documents: Documents, workers: int, start: Cursor = START) -> None:
        self._feed = TrainingFeed(manifest, documents, READER, start)
        self._workers = workers

    @property
    def cursor(self) -> Cursor:
        """Where the next step begins."""
        return self._feed.cursor

    def a_step(self) -> list[Microbatch]:
        """A microbatch for each worker."""
        return [self._feed.next() for _ in range(self._workers)]
