"""Cross entropy of a linear head and its gradients, in one pass over chunks of positions.

The logits are computed only once (unlike Cut Cross-Entropy, Wijmans et al. 2024, arXiv:2411.09009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED: Final = -100
STRIP: Final = 2**22
"""Elements of the matrix gradient computed at a time if the product cannot accumulate into the sum directly."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadSum:
    """Tensor `matrix` (float32 or wider) to which `weight` times the gradient of the head's matrix is added."""

    matrix: Tensor
    weight: float


@torch.no_grad()
def loss_and_gradient(
    hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int, into: HeadSum | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the summed cross entropy in nats (float32 scalar) and its gradient for `hidden`.

    Args:
        hidden: [positions, hidden].
        matrix: [vocabulary, hidden], same dtype as `hidden`.
        labels: [positions] int64; IGNORED positions have no loss.
        into: accumulates the gradient of `matrix`. If the pass fails, it is restored up to rounding.
    """
    gradient = torch.empty_like(hidden)
    done = 0
    workspace = _Workspace(hidden, matrix, logits_at_once, into)
    loss = hidden.new_zeros((), dtype=torch.float32)
    try:
        for piece in workspace.pieces(len(hidden)):
            found, of_logits = workspace.loss_and_gradient_of_logits(hidden[piece], labels[piece])
            torch.mm(of_logits, matrix, out=gradient[piece])
            workspace.add(of_logits, hidden[piece])
            loss.add_(found)
            done = piece.stop
    except BaseException:
        # Subtract the chunks that were added before the failure.
        if into is not None and done:
            undo = HeadSum(into.matrix, -into.weight)
            loss_and_gradient(hidden[:done], matrix, labels[:done], logits_at_once, undo)
        raise
    return loss, gradient


@torch.no_grad()
def loss_alone(hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int) -> Tensor:
    workspace = _Workspace(hidden, matrix, logits_at_once, None)
    loss = hidden.new_zeros((), dtype=torch.float32)
    for piece in workspace.pieces(len(hidden)):
        loss.add_(workspace.loss(hidden[piece], labels[piece]))
    return loss


class SummedLoss(torch.autograd.Function):
    """Summed cross-entropy as an autograd function: `apply(hidden, matrix, labels, logits_at_once)`."""

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
        ctx.gradients = None  # scaled in place below, so they can be used only once
        return gradient.mul_(factor), total.mul_(factor), None, None


class _Workspace:
    """Buffers for the chunks of one pass over the head, all allocated before the first sum changes."""

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
        """Returns a chunk's summed loss and the gradient of its logits. The next call overwrites this gradient."""
        losses, odds, total, is_scored, places = self._losses(hidden, labels)
        odds.mul_(is_scored / total).scatter_add_(1, places, -is_scored)  # softmax minus one-hot
        if odds.dtype is not hidden.dtype:
            odds = self._logits[: len(hidden)].copy_(odds)
        return losses.sum(), odds

    def _losses(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns losses [positions, 1], exponentials of logits, their sums, 1 or 0 (IGNORED), and label indices."""
        count = len(hidden)
        logits = torch.mm(hidden, self._matrix.t(), out=self._logits[:count])
        floats = self._floats[:count]
        if floats.dtype is not logits.dtype:
            floats.copy_(logits)
        ignored = (labels == IGNORED).unsqueeze(1)
        places = labels.unsqueeze(1).masked_fill(ignored, 0)
        # Subtract the maximum, so that exp cannot overflow.
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
        # Mixed dtypes: multiply in the narrow one, accumulate in the wide one, a strip of the vocabulary at a time.
        for start in range(0, len(total), self._strip):
            strip = total[start : start + self._strip]
            products, wide = self._products[: len(strip)], self._wide[: len(strip)]
            torch.mm(of_logits[:, start : start + len(strip)].t(), hidden, out=products)
            strip.add_(wide.copy_(products), alpha=weight)
