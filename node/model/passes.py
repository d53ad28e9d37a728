"""One part's visit by one microbatch: forward now, backward when the gradient comes back.

A visit ends at the part's border: the graph of one part never reaches into another, in a swarm because there is a
network between them, in one process so that it computes exactly the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """The state between forward and backward: the input, cut off from whatever made it, and the output with its
    graph.
    """

    source: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The results of backward. `source` is None for the embedding, whose input is tokens."""

    source: Tensor | None
    parameters: tuple[Tensor, ...]
    """In the order of `part.parameters()`."""


def forward(part: nn.Module, source: Tensor, *constants: Tensor) -> Visit:
    """Computes the part on `source` [rows, tokens(, hidden)], keeping the graph. `constants` (labels) get no
    gradient."""
    source = source.detach()
    if source.is_floating_point():
        source.requires_grad_()
    with torch.enable_grad():
        return Visit(source, part(source, *constants))


def backward(part: nn.Module, visit: Visit, gradient: Tensor | None = None) -> Gradients:
    """Computes the gradients of the visit's input and of the part's parameters; frees the graph, touches no `.grad`.

    `gradient` is the loss's gradient for the visit's result; None when the result is the loss itself.
    """
    parameters = list(part.parameters())
    end = visit.result if gradient is None else _End.apply(visit.result, gradient)  # type: ignore[no-untyped-call]
    if not visit.source.requires_grad:
        return Gradients(None, torch.autograd.grad(end, parameters))
    source, *rest = torch.autograd.grad(end, [visit.source, *parameters])
    return Gradients(source, tuple(rest))


class _End(torch.autograd.Function):
    """A scalar whose gradient for `result` is the given one, to the bit.

    `torch.autograd.grad` takes a gradient, too, and compares its shape with symbols: the first time it imports sympy,
    which is 0.6 s of computing and 34 MB for every node. The engine compares the shapes in any case.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return result.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None
