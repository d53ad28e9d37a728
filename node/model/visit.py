"""One part's visit by one microbatch: forward now, backward when the gradient comes back.

A visit ends at the part's border: the graph of one part never reaches into another, in a swarm because there is a network
between them, in one process so that it computes exactly the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """What backward needs: the input, cut off from whatever made it, and the output with its graph."""

    source: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What backward gives. `source` is None for the embedding, whose input is tokens."""

    source: Tensor | None
    parameters: tuple[Tensor, ...]
    """In the order of `part.parameters()`."""


def forward(part: nn.Module, source: Tensor, *constants: Tensor) -> Visit:
    """Computes the part on `source` [rows, tokens(, hidden)], keeping the graph. `constants` (labels) get no gradient."""
    source = source.detach()
    if source.is_floating_point():
        source.requires_grad_()
    with torch.enable_grad():
        return Visit(source, part(source, *constants))


def backward(part: nn.Module, visit: Visit, gradient: Tensor | None = None) -> Gradients:
    """The gradients of the visit's input and of the part's parameters; frees the graph, touches no `.grad`.

    `gradient` is the loss's gradient for the visit's result; None when the result is the loss itself.
    """
    parameters = list(part.parameters())
    if not visit.source.requires_grad:
        return Gradients(None, torch.autograd.grad(visit.result, parameters, gradient))
    source, *rest = torch.autograd.grad(visit.result, [visit.source, *parameters], gradient)
    return Gradients(source, tuple(rest))
