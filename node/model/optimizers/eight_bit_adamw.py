"""The arithmetic of AdamW with moments in 8 bits, over large matrices.

The step itself is AdamW's kernel in float32, over a part of a matrix at a time: its moments are unpacked, moved and
packed again, so that beside the 8 bits never more than a part is there.

By torch's operators alone. bitsandbytes (0.50.2 was read) quantises alike, where it has no kernel for a device by these
operators too. But its scales have no sign, so what a checkpoint holds as float32 would not be packed to the same again;
its fused step knows no weights in two halves; and its wheel brings 129 MB of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from node.model.optimizers.adamw import Moments, apply_adamw
from node.model.optimizers.inner_rule import InnerRule, ParameterState, Shape
from node.model.packed.eight_bit import EightBit, eight_bit_bytes
from protocol.manifest.training import InnerSection


@dataclass(slots=True)
class EightBitMoments:
    """AdamW's state of one matrix."""

    mean: EightBit
    """Of the gradients."""
    variance: EightBit
    """Mean of their squares."""
    steps: int = 0

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Self:
        """Zeros for a parameter that no step has moved."""
        shape, device = tuple(parameter.shape), parameter.device
        return cls(EightBit(shape, device, is_signed=True), EightBit(shape, device, is_signed=False))


class EightBitAdamW(InnerRule[EightBitMoments]):
    """AdamW with 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861), for large
    matrices (`node.model.shapes.has_eight_bits`)."""

    def __init__(self, parameters: Sequence[nn.Parameter], inner: InnerSection) -> None:
        super().__init__(parameters)
        self._inner = inner

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            state = self.states.get(parameter) or EightBitMoments.of(parameter)
            self.states[parameter] = state
            gradient = parameter.grad.view(-1)
            for part in state.mean.parts():
                steps = torch.full((), float(state.steps), device=parameter.device)
                moments = Moments(state.mean.read(part), state.variance.read(part), steps)
                with self.opened_part(parameter, part) as values:
                    apply_adamw(self._inner, [values], [gradient[part]], [moments], rate, self._inner.weight_decay)
                state.mean.write(part, moments.mean)
                state.variance.write(part, moments.variance)
            state.steps += 1

    def slots(self, parameter: nn.Parameter, steps: int) -> Mapping[str, Shape]:
        return {"exp_avg": tuple(parameter.shape), "exp_avg_sq": tuple(parameter.shape)}

    @staticmethod
    def state_bytes(shape: Shape) -> int:
        """Of the state of a matrix."""
        return 2 * eight_bit_bytes(math.prod(shape))

    def exported(self, state: EightBitMoments) -> ParameterState:
        return ParameterState(state.steps, {}, {"exp_avg": state.mean, "exp_avg_sq": state.variance})

    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> EightBitMoments:
        state = EightBitMoments.of(parameter)
        state.steps = saved.steps
        state.mean.store(saved.tensors["exp_avg"])
        state.variance.store(saved.tensors["exp_avg_sq"])
        return state
