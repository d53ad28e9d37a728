"""K-FAC for the linear layers of a small model's blocks, and its training with curvature as stale as a pipeline's idle
time makes it.

The Fisher matrix of a layer's weight is taken for the Kronecker product of A, the mean of x x^T over tokens, and B,
that of g g^T, of the layer's inputs x and its outputs' gradients g, which are those of the labels (the empirical
Fisher), as in PipeFisher (Osawa et al. 2022, arXiv:2211.14133). Both are damped: with pi = sqrt(eigenvalue of A /
eigenvalue of B), the means, A + sqrt(l) pi I and B + sqrt(l) / pi I (Martens and Grosse 2015, arXiv:1503.05671, section
6.3); l here is relative to the product of the means. Factors are of the microbatches of one step, and the inverses of
them take effect `lag` steps later, for `every` steps.

What is preconditioned is the mean of the gradients, and the length of the step is that of AdamW's (grafting, Agarwal et
al. 2020, arXiv:2002.11803), which it is until the first inverses are there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.kfac_schedule import Profile
from benchmarks.optimizers import ARMS, Task, Trainer, manifest_of, trained
from node.model import passes
from node.model.blocks import Linear
from node.model.optimizers.adamw import AdamW
from node.model.parts import build_block_stack
from protocol.manifest.manifest import Manifest
from protocol.manifest.training import InnerSection
from swarm.vocabulary.types import ModuleId

DAMPING: Final = 1e-3
"""PipeFisher's for BERT."""
_TINY: Final = 1e-30


@dataclass(frozen=True, slots=True)
class Cycle:
    """The steps from one refresh to the next, and from the step whose microbatches give the curvature to the first that
    is taken with it. In the bubbles both are the refresh period."""

    every: int
    lag: int


@dataclass(slots=True, eq=False)
class Spent:
    """Processor seconds of one kind of work, each time."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    def time(self, work: Callable[[], object]) -> None:
        begun = time.thread_time()
        work()
        self.seconds.append(time.thread_time() - begun)


@dataclass(slots=True, eq=False)
class Factors:
    """The two factors of one linear layer: sums while curvature is collected, inverses once they are adopted."""

    inputs: Tensor
    """[inputs, inputs]"""
    outputs: Tensor
    """[outputs, outputs]"""
    inverses: tuple[Tensor, Tensor] | None = None
    """Of inputs and outputs."""

    def inverted(self) -> tuple[Tensor, Tensor]:
        """The inverses of the damped factors; the sums may be of any number of tokens, since only their shapes count
        beside damping that is relative to them."""
        return _inverse(self.inputs), _inverse(self.outputs)

    def clear(self) -> None:
        self.inputs.zero_()
        self.outputs.zero_()

    def precondition(self, matrix: Tensor) -> Tensor:
        """[outputs, inputs] to the same, of any length."""
        assert self.inverses is not None
        return self.inverses[1] @ matrix @ self.inverses[0]


def _inverse(factor: Tensor) -> Tensor:
    damping = math.sqrt(DAMPING) * factor.trace() / len(factor)
    return torch.cholesky_inverse(torch.linalg.cholesky(factor + damping * torch.eye(len(factor))))


class Kfac(AdamW):
    """The rule of the linear layers' weights.

    Args:
        layers: whose weights it moves; hooks on them collect the curvature.
    """

    def __init__(self, layers: Sequence[Linear], inner: InnerSection, cycle: Cycle) -> None:
        super().__init__([layer.weight for layer in layers], inner)
        self.curvature, self.inversion, self.preconditioning = Spent(), Spent(), Spent()
        """Of one factor of a microbatch and a layer; of all layers; of all layers."""
        self._cycle = cycle
        self._factors = {layer.weight: _no_factors(layer) for layer in layers}
        self._waiting: dict[int, Mapping[nn.Parameter, tuple[Tensor, Tensor]]] = {}
        """Inverses by the number of the step that is the first to be taken with them."""
        self._steps = 0
        for layer in layers:
            layer.register_forward_hook(self._passed)

    @property
    def is_collecting(self) -> bool:
        """Whether the microbatches of the step under way give curvature."""
        return self._steps % self._cycle.every == 0

    def step(self, rate: float) -> None:
        if self.is_collecting:
            self.inversion.time(self._invert)
        for parameter, inverses in self._waiting.pop(self._steps, {}).items():
            self._factors[parameter].inverses = inverses
        self._steps += 1
        before = [parameter.detach().clone() for parameter in self.parameters]
        super().step(rate)
        self.preconditioning.time(partial(self._turn, before, rate))

    @torch.no_grad()
    def _turn(self, before: Sequence[Tensor], rate: float) -> None:
        """Turns AdamW's steps from these parameters into preconditioned ones of their length."""
        for parameter, old in zip(self.parameters, before, strict=True):
            factors = self._factors[parameter]
            if factors.inverses is None or parameter not in self.states:
                continue
            kept = old * (1 - rate * self._inner.weight_decay)
            direction = factors.precondition(self.states[parameter].mean)
            length, own = (torch.linalg.vector_norm(each) for each in (parameter - kept, direction))
            parameter.copy_(kept - direction * (length / own.clamp_min(_TINY)))

    @torch.no_grad()
    def _invert(self) -> None:
        found = {parameter: factors.inverted() for parameter, factors in self._factors.items()}
        self._waiting[self._steps + self._cycle.lag] = found
        for factors in self._factors.values():
            factors.clear()

    def _passed(self, layer: nn.Module, values: tuple[Tensor, ...], output: Tensor) -> None:
        """A hook: a forward pass of a layer."""
        if self.is_collecting and output.requires_grad:
            factors = self._factors[layer.get_parameter("weight")]
            self._add(factors.inputs, values[0])
            output.register_hook(partial(self._add, factors.outputs))

    def _add(self, total: Tensor, vectors: Tensor) -> None:
        flat = vectors.detach().flatten(0, -2)
        self.curvature.time(lambda: total.addmm_(flat.T, flat))


def _no_factors(layer: Linear) -> Factors:
    outputs, inputs = layer.weight.shape
    return Factors(torch.zeros(inputs, inputs), torch.zeros(outputs, outputs))


class KfacTrainer(Trainer):
    """The trainer of the benchmark of optimizers, with K-FAC for the blocks' matrices."""

    def __init__(self, manifest: Manifest, cycle: Cycle) -> None:
        super().__init__(manifest, ARMS["adamw"])
        layers = [layer for stack in self.model.stacks for layer in stack.modules() if isinstance(layer, Linear)]
        inner = manifest.training.inner
        self.kfac = Kfac(layers, inner, cycle)
        own = set(self.kfac.parameters)
        for optimizer in self._optimizers[1:]:
            rest = [parameter for rule in optimizer.rules for parameter in rule.parameters if parameter not in own]
            optimizer.rules = (AdamW(rest, inner), self.kfac)


ADAMW: Final = "adamw"
AT_ONCE: Final = "at once"
"""K-FAC as its authors have it: curvature of the step that is taken with it, each step."""


def cycle_of(arm: str) -> Cycle:
    """Of an arm of K-FAC: `AT_ONCE`, or the refresh period."""
    return Cycle(1, 0) if arm == AT_ONCE else Cycle(int(arm), int(arm))


def measure(task: Task, arm: str, seed: int, rate: float) -> dict[str, Any]:
    """Trains one arm to the end of its schedule: `ADAMW`, or one of K-FAC (`cycle_of`)."""
    manifest = manifest_of(task, ARMS[ADAMW], seed, rate)
    trainer = Trainer(manifest, ARMS[ADAMW]) if arm == ADAMW else KfacTrainer(manifest, cycle_of(arm))
    return {"arm": arm, "seed": seed, "rate": rate, **trained(task, manifest, trainer)}


def measured_profile(task: Task, repeats: int = 20) -> Profile:
    """What the task's blocks cost as one stage, in processor time of one core: medians."""
    manifest = manifest_of(task, ARMS[ADAMW], 1, 1e-3)
    stack, source = build_block_stack(manifest, ModuleId(1)), torch.randn(manifest.hidden_shape)
    forward, backward = Spent(), Spent()
    for _ in range(repeats):
        visits: list[passes.Visit] = []
        forward.time(lambda visits=visits: visits.append(passes.forward(stack, source)))
        backward.time(lambda visits=visits: passes.backward(stack, visits.pop(), source))
    trainer = KfacTrainer(manifest, Cycle(1, 1))
    for _ in range(repeats):
        trainer.step()
    kfac = trainer.kfac
    curvature_ms = 1e3 * sum(kfac.curvature.seconds) / (repeats * task.microbatches)
    medians = (each.median_ms for each in (forward, backward, kfac.inversion, kfac.preconditioning))
    forward_ms, backward_ms, inversion_ms, precondition_ms = medians
    return Profile(forward_ms, backward_ms, curvature_ms, inversion_ms, precondition_ms)
