"""Tensors as training makes them, for `benchmarks.codecs`: captured from a small llama that the product's own code
trains, in one process.

Hidden states and their gradients at every border between stages, a pseudo-gradient, parameters, and Adam's moments.
Hidden states are of as many rows as make 8.4 MB of float32; nothing is tiled. Two more are made: normal numbers, and
hidden states two of whose channels have been made larger, as in trained models of billions of parameters (Dettmers et
al. 2022, LLM.int8()), which so small a model does not show.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from node.data.feed import START, TrainingFeed, open_documents
from node.data.packing import Microbatch
from node.model import passes as visit
from node.model.initialization import parameters_of
from node.model.optimizer import Accumulator, Addition, InnerOptimizer
from node.solo.trainer import WholeModel
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import MicrobatchId, PeerId

READER: Final = PeerId("reader")
OUTLIERS: Final = {17: 60.0, 101: 25.0}
"""Channels, and how many times larger they are made."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained before anything is captured."""

    steps: int
    source: str = "python-stdlib"
    round_steps: int = 20
    """Inner steps that the pseudo-gradient spans."""
    hidden: int = 256
    heads: int = 8
    feed_forward: int = 688
    stages: int = 6
    """Of one block each."""
    sequence: int = 128
    rows: int = 8
    captured_microbatches: int = 8
    """Whose rows make one: 64 x 128 x 256 hidden states."""


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """Tensors by class; an error is one over all tensors of a class. Contiguous, on the CPU, float32 but for
    `bf16_*`."""

    classes: Mapping[str, tuple[Tensor, ...]]
    loss: float
    """Nats per byte of the microbatches captured, which had not been trained on."""


def captured(task: Task, file: Path | None = None) -> Captured:
    """What the training brings; read from the file if there is one, else written there."""
    if file is not None and file.exists():
        return _read(task, file)
    result = _train_and_capture(task)
    if file is not None:
        _write(result, task, file)
    return result


def with_outliers(hidden: Tensor) -> Tensor:
    """Hidden states two of whose channels have been made larger."""
    result = hidden.clone()
    for channel, factor in OUTLIERS.items():
        result[..., channel] *= factor
    return result


def manifest_of(task: Task) -> Manifest:
    """The run."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "codecs",
            "seed": 1,
            "model": {
                "vocabulary": 257,
                "hidden": task.hidden,
                "heads": task.heads,
                "kv_heads": task.heads,
                "feed_forward": task.feed_forward,
                "sequence": task.sequence,
            },
            "stages": {"blocks": [1] * task.stages},
            "data": {"source": task.source},
            "training": {
                "rows": task.rows,
                "inner_tokens": task.rows * task.sequence,
                "inner": {"learning_rate": 2e-3},
                "schedule": {
                    "kind": "constant",
                    "warmup_steps": max(1, task.steps // 10),
                    "total_steps": task.steps + 1,
                },
            },
        }
    )


class _Trainer:
    """All modules of a run with their accumulators and optimizers, as data node and stage peers have them."""

    def __init__(self, manifest: Manifest) -> None:
        self.model = WholeModel(manifest, torch.device("cpu"))
        self._parts = [parts for _, parts in self.model.modules()]
        self._accumulators: dict[nn.Module, Accumulator] = {
            part: Accumulator(part) for parts in self._parts for part in parts
        }
        self._optimizers = [
            InnerOptimizer(manifest.training, [self._accumulators[part] for part in parts]) for parts in self._parts
        ]
        self._steps = 0

    def step(self, microbatch: Microbatch) -> float:
        """An inner step of every module; the loss in nats per byte."""
        loss, gradients = self.model.gradients(microbatch)
        for part, of_part in gradients.items():
            if (
                self._accumulators[part].add(MicrobatchId(READER, self._steps), microbatch.size, of_part)
                is not Addition.ADDED
            ):
                raise StateError(f"training has diverged: loss {loss} in step {self._steps}")
        for optimizer in self._optimizers:
            optimizer.step()
        self._steps += 1
        return loss

    def parameters(self) -> list[Tensor]:
        """Copies, in the order of the modules and of the names in them."""
        return [tensor.clone() for parts in self._parts for _, tensor in sorted(parameters_of(*parts).items())]

    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        """First and second, in the same order."""
        states = [
            optimizer.export_state(parameters_of(*parts))
            for parts, optimizer in zip(self._parts, self._optimizers, strict=True)
        ]
        moved = [own.tensors for state in states for _, own in sorted(state.parameters.items())]
        return [tensors["exp_avg"] for tensors in moved], [tensors["exp_avg_sq"] for tensors in moved]


def _train_and_capture(task: Task) -> Captured:
    manifest = manifest_of(task)
    feed = TrainingFeed(manifest, open_documents(manifest), READER, START)
    trainer = _Trainer(manifest)
    for number in range(1, task.steps + 1):
        loss = trainer.step(feed.next())
        if number % 50 == 0:
            print(f"capture: step {number} of {task.steps}, loss {loss:.2f}", file=sys.stderr)
    loss, hidden, gradients = _at_borders(trainer.model, [feed.next() for _ in range(task.captured_microbatches)])
    anchor = trainer.parameters()
    for _ in range(task.round_steps):
        trainer.step(feed.next())
    parameters = trainer.parameters()
    difference = [old - new for old, new in zip(anchor, parameters, strict=True)]
    first, second = trainer.moments()
    flat = _flat(parameters)
    return Captured(
        {
            "activations": tuple(hidden),
            "activation_gradients": tuple(gradients),
            "pseudo_gradient": (_flat(difference),),
            "pseudo_gradient_matrices": tuple(tensor for tensor in difference if tensor.ndim == 2),
            "parameters": (flat,),
            "first_moment": (_flat(first),),
            "second_moment": (_flat(second),),
            "normal": (torch.randn(hidden[0].shape, generator=torch.Generator().manual_seed(1)),),
            "outliers": (with_outliers(hidden[len(hidden) // 2]),),
            "bf16_activations": tuple(tensor.bfloat16() for tensor in hidden),
            "bf16_parameters": (flat.bfloat16(),),
        },
        loss,
    )


def _at_borders(model: WholeModel, microbatches: Sequence[Microbatch]) -> tuple[float, list[Tensor], list[Tensor]]:
    """Mean loss, and at each border between stages the hidden states and the gradients that come back, [rows, tokens,
    hidden]."""
    losses: list[float] = []
    hidden: list[list[Tensor]] = []
    gradients: list[list[Tensor]] = []
    for microbatch in microbatches:
        visits = [visit.forward(model.embedding, microbatch.tokens)]
        for stack in model.stacks:
            visits.append(visit.forward(stack, visits[-1].result))
        end = visit.forward(model.head, visits[-1].result, microbatch.labels)
        losses.append(end.result.item())
        hidden.append([each.result.detach() for each in visits])
        back = [visit.backward(model.head, end).source]
        for stack, each in zip(reversed(model.stacks), reversed(visits[1:]), strict=True):
            back.append(visit.backward(stack, each, back[-1]).source)
        gradients.append([gradient for gradient in reversed(back) if gradient is not None])
    return (
        sum(losses) / len(losses),
        [torch.cat(parts) for parts in zip(*hidden, strict=True)],
        [torch.cat(parts) for parts in zip(*gradients, strict=True)],
    )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """As replicas send them, [elements]."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _write(result: Captured, task: Task, file: Path) -> None:
    tensors = {f"{name}/{n}": tensor for name, tensors in result.classes.items() for n, tensor in enumerate(tensors)}
    save_file(tensors, file, metadata={"task": json.dumps(dataclasses.asdict(task)), "loss": str(result.loss)})


def _read(task: Task, file: Path) -> Captured:
    """Raises SystemExit when the file is of another task."""
    classes: dict[str, dict[int, Tensor]] = {}
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        if json.loads(metadata["task"]) != dataclasses.asdict(task):
            raise SystemExit(f"{file} has tensors of another training; name another file, or delete it")
        for key in opened.keys():  # noqa: SIM118
            name, _, number = key.partition("/")
            classes.setdefault(name, {})[int(number)] = opened.get_tensor(key)
    ordered = {name: tuple(tensor for _, tensor in sorted(found.items())) for name, found in classes.items()}
    return Captured(ordered, float(metadata["loss"]))


def described(task: Task, found: Captured) -> dict[str, object]:
    """For the report: what was trained, and what each class consists of."""
    return {
        "task": dataclasses.asdict(task) | {"source": task.source.partition(":")[0]},
        "loss": round(found.loss, 3),
        "outlier_channels": {str(channel): factor for channel, factor in OUTLIERS.items()},
        "classes": {
            name: {
                "tensors": len(tensors),
                "largest_shape": list(max(tensors, key=Tensor.numel).shape),
                "float32_mb": round(sum(tensor.numel() for tensor in tensors) * 4e-6, 2),
                "rms": float(f"{_rms(tensors):.3g}"),
            }
            for name, tensors in found.classes.items()
        },
    }


def _rms(tensors: Sequence[Tensor]) -> float:
    squares = sum(float(tensor.double().square().sum()) for tensor in tensors)
    return float((squares / sum(tensor.numel() for tensor in tensors)) ** 0.5)
