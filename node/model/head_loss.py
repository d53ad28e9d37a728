"""The cross entropy of a linear head with its gradients, in one pass over pieces of the positions.

The logits are never computed twice (unlike Cut Cross-Entropy, Wijmans et al. 2024, arXiv:2411.09009).
Shapes: `positions` hidden states, `hidden` wide; a matrix [vocabulary, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED: Final = -100
STRIP: Final = 2**22
"""Elements of the matrix's gradient computed at a time if the product cannot add them itself."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadSum:
    """A matrix, float32 or wider, to which the head's gradient is added `weight` times."""

    matrix: Tensor
    weight: float


@torch.no_grad()
def loss_and_gradient(
    hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int, into: HeadSum | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the summed cross entropy in nats, a float32 scalar, and its gradient for `hidden`.

    Args:
        hidden: [positions, hidden].
        matrix: [vocabulary, hidden], of the same element type.
        labels: [positions] int64, with IGNORED where nothing is predicted.
        into: takes the matrix's gradient; unchanged, up to rounding, if there is no memory for it.
    """
    gradient = torch.empty_like(hidden)
    done = 0
    rooms = _Rooms(hidden, matrix, logits_at_once, into)
    loss = hidden.new_zeros((), dtype=torch.float32)
    try:
        for piece in rooms.pieces(len(hidden)):
            found, of_logits = rooms.loss_and_gradient_of_logits(hidden[piece], labels[piece])
            torch.mm(of_logits, matrix, out=gradient[piece])
            rooms.add(of_logits, hidden[piece])
            loss.add_(found)
            done = piece.stop
    except BaseException:
        if into is not None and done:
            undo = HeadSum(into.matrix, -into.weight)
            loss_and_gradient(hidden[:done], matrix, labels[:done], logits_at_once, undo)
        raise
    return loss, gradient


@torch.no_grad()
def loss_alone(hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int) -> Tensor:
    rooms = _Rooms(hidden, matrix, logits_at_once, None)
    loss = hidden.new_zeros((), dtype=torch.float32)
    for piece in rooms.pieces(len(hidden)):
        loss.add_(rooms.loss(hidden[piece], labels[piece]))
    return loss


class SummedLoss(torch.autograd.Function):
    """Autograd version of `loss_and_gradient`: `apply(hidden, matrix, labels, logits_at_once)`, any float matrix."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int) -> Tensor:
        narrow = matrix.to(hidden.dtype)
        if not any(ctx.needs_input_grad):
            return loss_alone(hidden, narrow, labels, logits_at_once)
        total = torch.zeros_like(matrix)
        into = HeadSum(total, 1.0) if ctx.needs_input_grad[1] else None
        loss, gradient = loss_and_gradient(hidden, narrow, labels, logits_at_once, into)
        ctx.gradients = [gradient, total]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient, total = ctx.gradients
        ctx.gradients = None  # they are scaled where they lie, so only once
        return gradient.mul_(factor), total.mul_(factor), None, None


class _Rooms:
    """The memory of one pass, all had before anything is added, and the arithmetic in it."""

    def __init__(self, hidden: Tensor, matrix: Tensor, logits_at_once: int, into: HeadSum | None) -> None:
        vocabulary, width = matrix.shape
        self._matrix, self._into = matrix, into
        self._at_once = max(1, min(len(hidden), logits_at_once // vocabulary))
        self._logits = hidden.new_empty(self._at_once, vocabulary)
        self._floats = self._logits if hidden.dtype is torch.float32 else self._logits.float()
        self._strip = max(1, STRIP // width)
        if into is not None and into.matrix.dtype is not hidden.dtype:
            self._products = hidden.new_empty(self._strip, width)
            self._wide = torch.empty_like(self._products, dtype=into.matrix.dtype)

    def pieces(self, positions: int) -> list[slice]:
        return [slice(start, min(start + self._at_once, positions)) for start in range(0, positions, self._at_once)]

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self._losses(hidden, labels)[0].sum()

    def loss_and_gradient_of_logits(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of a piece, and its gradient for the logits, valid until the next piece."""
        losses, odds, total, is_scored, places = self._losses(hidden, labels)
        odds.mul_(is_scored / total).scatter_add_(1, places, -is_scored)  # softmax less one at the label
        if odds.dtype is not hidden.dtype:
            odds = self._logits[: len(hidden)].copy_(odds)
        return losses.sum(), odds

    def _losses(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Losses [positions, 1], exponentials, their sums, whether each position counts (1 or 0), its label's logit."""
        count = len(hidden)
        logits = torch.mm(hidden, self._matrix.t(), out=self._logits[:count])
        floats = self._floats[:count]
        if floats.dtype is not logits.dtype:
            floats.copy_(logits)
        ignored = (labels == IGNORED).unsqueeze(1)
        places = labels.unsqueeze(1).masked_fill(ignored, 0)
        floats.sub_(floats.amax(1, keepdim=True))
        of_label = floats.gather(1, places)
        total = floats.exp_().sum(1, keepdim=True)
        losses = (total.log() - of_label).masked_fill(ignored, 0.0)
        return losses, floats, total, (~ignored).to(floats.dtype), places

    def add(self, of_logits: Tensor, hidden: Tensor) -> None:
        if self._into is None:
            return
        total, weight = self._into.matrix, self._into.weight
        if total.dtype is hidden.dtype:
            total.addmm_(of_logits.t(), hidden, alpha=weight)
            return
        for start in range(0, len(total), self._strip):
            strip = total[start : start + self._strip]
            products, wide = self._products[: len(strip)], self._wide[: len(strip)]
            torch.mm(of_logits[:, start : start + len(strip)].t(), hidden, out=products)
            strip.add_(wide.copy_(products), alpha=weight)
