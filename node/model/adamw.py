"""The arithmetic of the inner optimizer: AdamW over tensors, with its state in plain sight.

PyTorch's own kernel without `torch.optim.Optimizer`, whose first use imports the compiler: up to a second of CPU time
for every node that starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from protocol.manifest.manifest import AdamWSection


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's state of one parameter."""

    mean: Tensor
    """Of the gradients; float32, shaped as the parameter."""
    variance: Tensor
    """Mean of their squares; likewise."""
    steps: Tensor
    """How many there were: one float32 on the parameter's device, where the fused kernel counts it."""


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101). Vectors (norms) are not decayed: pulling a scale towards 0
    regularises nothing."""

    def __init__(self, parameters: Sequence[nn.Parameter], inner: AdamWSection) -> None:
        self.moments: dict[nn.Parameter, Moments] = {}
        """Of the parameters that a step has moved."""
        self._inner = inner
        self._groups = (
            ([parameter for parameter in parameters if parameter.dim() >= 2], inner.weight_decay),
            ([parameter for parameter in parameters if parameter.dim() < 2], 0.0),
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Moves every parameter that has a gradient."""
        for parameters, decay in self._groups:
            moved = [parameter for parameter in parameters if parameter.grad is not None]
            moments = [self._moments(parameter) for parameter in moved]
            adamw(
                list[Tensor](moved),
                [parameter.grad for parameter in moved if parameter.grad is not None],
                [each.mean for each in moments],
                [each.variance for each in moments],
                [],
                [each.steps for each in moments],
                fused=True,  # one pass over memory on CPU and CUDA alike
                amsgrad=False,
                beta1=self._inner.beta1,
                beta2=self._inner.beta2,
                lr=rate,
                weight_decay=decay,
                eps=self._inner.epsilon,
                maximize=False,
            )

    def _moments(self, parameter: nn.Parameter) -> Moments:
        if parameter not in self.moments:
            steps = torch.zeros((), device=parameter.device)
            self.moments[parameter] = Moments(torch.zeros_like(parameter), torch.zeros_like(parameter), steps)
        return self.moments[parameter]
