"""Muon: steps along the orthogonalized momentum of the gradient."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from node.model.optimizers.inner_rule import FLOAT_BYTES, InnerRule, ParameterState, Shape, zeros_of

_NEW: Final = 0.2  # Share of the newest gradient in an update (Ma and Yarats 2019, arXiv:1810.06801)
_RMS: Final = 0.2  # RMS of an update's elements, to match AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2)


@dataclass(slots=True)
class Momentum:
    mean: Tensor
    steps: int = 0


class Muon(InnerRule[Momentum]):
    """Muon with quasi-hyperbolic momentum for matrices, else as `torch.optim.Muon` with `match_rms_adamw`."""

    @torch.no_grad()
    def step(self, rate: float) -> None:
        momentum = self._inner.momentum
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = self.states.get(parameter) or Momentum(zeros_of(parameter))
            self.states[parameter] = state
            state.steps += 1
            state.mean.lerp_(gradient, 1 - momentum)
            update = orthogonalized(gradient.lerp(state.mean, 1 - _NEW))
            own_rate, decay = self.rate_and_decay(parameter, rate)
            with self.opened(parameter) as values:
                values.mul_(1 - own_rate * decay)
                values.add_(update, alpha=-own_rate * _RMS * math.sqrt(max(parameter.shape)))

    def slots(self, parameter: nn.Parameter, steps: int) -> Mapping[str, Shape]:
        return {"exp_avg": tuple(parameter.shape)}

    @staticmethod
    def state_bytes(shape: Shape) -> int:
        return FLOAT_BYTES * math.prod(shape)

    def exported(self, state: Momentum) -> ParameterState:
        return ParameterState(state.steps, {"exp_avg": state.mean})

    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> Momentum:
        return Momentum(saved.tensors["exp_avg"], saved.steps)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Orthogonalizes a matrix approximately by Newton-Schulz iterations; singular values end up between 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # the wide orientation has the smaller Gram matrix
    result: Tensor = wide / wide.norm().clamp(min=1e-7)  # no singular value exceeds 1
    if matrix.is_cuda:
        result = result.bfloat16()  # as Jordan et al.; tensor cores are 10 times as fast as in float32
    for _ in range(5):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return (result.T if matrix.shape[0] > matrix.shape[1] else result).to(matrix.dtype)
