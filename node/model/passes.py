"""Forward and backward passes of one model part for one microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from node.model.head_loss import HeadSum, loss_and_gradient
from node.model.optimizers.packed import NarrowCopy
from node.model.parts import HeadPart

FAR_FROM_OVERFLOW: Final = 1e30
"""Limit of a gradient bound, far below the largest float32 and bfloat16 (3e38)."""

Around = Callable[[], AbstractContextManager[object]]
"""Makes the context in which each thread computes a forward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class PassState:
    """State kept between forward and backward pass: the detached input, and the output with its graph."""

    source: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients of a part's input (`source`; None for the embedding, whose input is tokens) and parameters."""

    source: Tensor | None
    parameters: tuple[Tensor, ...]


class Passes(Protocol):
    """Interface to compute forward and backward passes of one model part, on one device or several."""

    def forward(self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext) -> PassState:
        """Computes the part's output for `source` [rows, tokens(, hidden)], and keeps the graph."""

    def backward(self, visit: PassState, gradient: Tensor) -> Gradients:
        """Computes the gradients of input and parameters from the output's `gradient`, and frees the graph."""

    def evaluate(self, source: Tensor, documents: tuple[int, ...]) -> Tensor: ...

    def parameters_changed(self) -> None:
        """Marks copies of the parameters as outdated, after the parameters changed. Older graphs become invalid."""

    def storages(self) -> set[int]:
        """Returns the data pointers of parameters and constants, which are in memory independently of a graph."""

    def weights(self) -> tuple[Tensor, ...]:
        """Returns the tensors that represent the parameters in graphs. They change in place. Empty if not supported."""


class OneDevice:
    """Forward and backward passes of a model part on the one device that holds it."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def forward(self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext) -> PassState:
        return forward(self._part, source, documents, around=around)

    def backward(self, visit: PassState, gradient: Tensor) -> Gradients:
        return backward(self._part, visit, gradient)

    def evaluate(self, source: Tensor, documents: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            result: Tensor = self._part(source, documents)
        return result

    def parameters_changed(self) -> None:
        """Does nothing: the part has no copies of its parameters."""

    def storages(self) -> set[int]:
        return storages(self._part)

    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self._part.parameters())


class HeadPasses(Protocol):
    """Interface to compute the head's loss and gradients, on one device or several."""

    def loss(self, hidden: Tensor, labels: Tensor) -> float:
        """Computes the mean loss in nats per token of `hidden` [rows, tokens, hidden], without a graph."""

    def loss_into(self, hidden: Tensor, labels: Tensor, sums: Sequence[Tensor], weight: int) -> HeadVisit | None:
        """Computes loss and gradients of the head, and adds `weight` times the parameter gradients to `sums`, if given.

        Returns None, adding nothing, if the gradients may not be finite.
        """

    def parameters_changed(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeadVisit:
    """Result of the head's forward and backward pass: the loss, and the gradient of the hidden states."""

    loss: float
    source: Tensor
    take_back: Callable[[], None]
    """Subtracts the added gradients from the sums, up to rounding."""


class OneHead:
    """Loss and gradients of the head on the one device that holds it."""

    def __init__(self, head: HeadPart) -> None:
        self._head = head
        self._is_bounded: bool | None = None

    def loss(self, hidden: Tensor, labels: Tensor) -> float:
        with torch.no_grad():
            return float(self._head(hidden, labels).item())

    def loss_into(self, hidden: Tensor, labels: Tensor, sums: Sequence[Tensor], weight: int) -> HeadVisit | None:
        if not self._bounded():
            return None
        head, count = self._head, labels.numel()
        visit = forward(head.norm, hidden)
        # One narrow copy per step is cheaper than a cast per microbatch.
        if head.lm_head.narrow is None and hidden.dtype is not head.lm_head.weight.dtype:
            head.lm_head.narrow = NarrowCopy(head.lm_head.weight, hidden.dtype)
        normed, matrix = visit.result.detach().flatten(0, -2), head.lm_head.matrix(hidden.dtype).detach()
        wanted = labels.flatten()

        def added(factor: float) -> tuple[Tensor, Tensor]:
            into = HeadSum(sums[1], factor / count) if sums else None
            return loss_and_gradient(normed, matrix, wanted, head.logits_at_once, into)

        def take_back() -> None:
            if sums:
                added(-weight)
                sums[0].sub_(of_norm.parameters[0], alpha=weight)

        loss, gradient = added(weight)
        try:
            of_norm = backward(head.norm, visit, gradient.div_(count).view_as(visit.result))
            assert of_norm.source is not None
            found = HeadVisit(float(loss.item()) / count, of_norm.source, take_back)
        except BaseException:
            # Leave the sums as they were, so that a retry counts once.
            if sums:
                added(-weight)
            raise
        if sums:
            sums[0].add_(of_norm.parameters[0], alpha=weight)
        return found

    def parameters_changed(self) -> None:
        self._is_bounded = None
        if self._head.lm_head.narrow is not None:
            self._head.lm_head.narrow.changed()

    def _bounded(self) -> bool:
        """Tells whether the head's weights are too small to make logits or gradients overflow (by Cauchy-Schwarz)."""
        if self._is_bounded is None:
            matrix, scale = self._head.lm_head.weight.detach(), self._head.norm.weight.detach()
            length = torch.linalg.vector_norm(matrix) * torch.linalg.vector_norm(scale, ord=float("inf"))
            self._is_bounded = float(length.item()) * math.sqrt(matrix.shape[1]) < FAR_FROM_OVERFLOW
        return self._is_bounded


def storages(part: nn.Module) -> set[int]:
    """Returns the data pointers of a part's parameters, to recognise them in a graph."""
    return {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}


def forward(part: nn.Module, source: Tensor, *constants: object, around: Around = nullcontext) -> PassState:
    """Computes the part's output for `source` [rows, tokens(, hidden)]. `constants` get no gradient."""
    source = source.detach()
    if source.is_floating_point():
        source.requires_grad_()
    with torch.enable_grad(), around():
        return PassState(source, part(source, *constants))


def backward(part: nn.Module, visit: PassState, gradient: Tensor | None = None) -> Gradients:
    """Computes gradients of input and parameters, and frees the graph. `gradient`: of the output; None for a loss."""
    parameters = list(part.parameters())
    if not visit.source.requires_grad:
        return Gradients(None, gradients_of(visit, gradient, parameters))
    source, *rest = gradients_of(visit, gradient, [visit.source, *parameters])
    return Gradients(source, tuple(rest))


def gradients_of(
    visit: PassState, gradient: Tensor | None, wanted: Sequence[Tensor] | Sequence[GradientEdge]
) -> tuple[Tensor, ...]:
    """Computes only the wanted gradients, and frees the graph. `gradient`: of the output; None for a loss."""
    end = visit.result if gradient is None else _End.apply(visit.result, gradient)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(end, wanted)


class _End(torch.autograd.Function):
    """A scalar made from `result`, whose derivative with respect to `result` is defined as `gradient`."""

    # Passing the gradient to `torch.autograd.grad` would import sympy to compare shapes: 0.6 s and 34 MB in every node.

    @staticmethod
    def forward(ctx: Any, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return result.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None
