"""AdamW with moments in float32, or in 8 bits for large matrices."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from node.model.optimizers.inner_rule import FLOAT_BYTES, InnerRule, ParameterState, Shape, zeros_of
from node.model.optimizers.packed import EightBit, eight_bit_bytes
from protocol.manifest.manifest import InnerSection


@dataclass(frozen=True, slots=True)
class Moments:
    mean: Tensor
    variance: Tensor
    steps: Tensor  # Step counter, a float32 scalar on the parameter's device, as the fused kernel requires


class AdamW(InnerRule[Moments]):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), without weight decay on vectors (norms, biases)."""

    @torch.no_grad()
    def step(self, rate: float) -> None:
        groups: defaultdict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            own_rate, decay = self.rate_and_decay(parameter, rate)
            groups[own_rate, decay if parameter.dim() >= 2 else 0.0].append(parameter)
        for (own_rate, decay), parameters in groups.items():
            moved = [p for p in parameters if p.grad is not None and p not in self.packed]
            moments = [self._moments(parameter) for parameter in moved]
            gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
            apply_adamw(self._inner, list[Tensor](moved), gradients, moments, own_rate, decay)
            for parameter in parameters:
                if parameter in self.packed and parameter.grad is not None:
                    self._move_packed(parameter, parameter.grad.view(-1), own_rate, decay)

    def _move_packed(self, parameter: nn.Parameter, gradient: Tensor, rate: float, decay: float) -> None:
        """Applies a step to a packed parameter part by part, so that little of it is unpacked at a time."""
        moments = self._moments(parameter)
        mean, variance, before = moments.mean.view(-1), moments.variance.view(-1), moments.steps.clone()
        for part in self.packed[parameter].parts():
            moments.steps.copy_(before)  # every part is the same step, but the kernel counts each call
            of_part = Moments(mean[part], variance[part], moments.steps)
            with self.opened_part(parameter, part) as values:
                apply_adamw(self._inner, [values], [gradient[part]], [of_part], rate, decay)

    @staticmethod
    def state_bytes(shape: Shape) -> int:
        return 2 * FLOAT_BYTES * math.prod(shape)

    def exported(self, state: Moments) -> ParameterState:
        return ParameterState(int(state.steps.item()), {"exp_avg": state.mean, "exp_avg_sq": state.variance})

    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> Moments:
        steps = torch.full((), float(saved.steps), device=parameter.device)
        return Moments(saved.tensors["exp_avg"], saved.tensors["exp_avg_sq"], steps)

    def _moments(self, parameter: nn.Parameter) -> Moments:
        if parameter not in self.states:
            steps = torch.zeros((), device=parameter.device)
            self.states[parameter] = Moments(zeros_of(parameter), zeros_of(parameter), steps)
        return self.states[parameter]


def apply_adamw(
    inner: InnerSection, moved: list[Tensor], grads: list[Tensor], moments: Sequence[Moments], rate: float, decay: float
) -> None:
    """Applies one AdamW step to tensors and moments in place, and increments the moments' step counters."""
    # `torch.optim.Optimizer` would import the compiler at first use: up to a second at every node's start.
    adamw(
        moved,
        grads,
        [each.mean for each in moments],
        [each.variance for each in moments],
        [],
        [each.steps for each in moments],
        fused=True,  # one pass over memory, on CPU and CUDA
        amsgrad=False,
        beta1=inner.beta1,
        beta2=inner.beta2,
        lr=rate,
        weight_decay=decay,
        eps=inner.epsilon,
        maximize=False,
    )


@dataclass(slots=True)
class EightBitMoments:
    mean: EightBit
    variance: EightBit
    steps: int = 0

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Self:
        """Returns zero moments for a parameter before its first step."""
        shape, device = tuple(parameter.shape), parameter.device
        return cls(EightBit(shape, device, is_signed=True), EightBit(shape, device, is_signed=False))


class EightBitAdamW(InnerRule[EightBitMoments]):
    """AdamW with 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861), for large matrices."""

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            own_rate, decay = self.rate_and_decay(parameter, rate)
            state = self.states.get(parameter) or EightBitMoments.of(parameter)
            self.states[parameter] = state
            gradient = parameter.grad.view(-1)
            for part in state.mean.parts():
                steps = torch.full((), float(state.steps), device=parameter.device)
                moments = Moments(state.mean.read(part), state.variance.read(part), steps)
                with self.opened_part(parameter, part) as values:
                    apply_adamw(self._inner, [values], [gradient[part]], [moments], own_rate, decay)
                state.mean.write(part, moments.mean)
                state.variance.write(part, moments.variance)
            state.steps += 1

    @staticmethod
    def state_bytes(shape: Shape) -> int:
        return 2 * eight_bit_bytes(math.prod(shape))

    def exported(self, state: EightBitMoments) -> ParameterState:
        return ParameterState(state.steps, {}, {"exp_avg": state.mean, "exp_avg_sq": state.variance})

    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> EightBitMoments:
        state = EightBitMoments.of(parameter)
        state.steps = saved.steps
        state.mean.store(saved.tensors["exp_avg"])
        state.variance.store(saved.tensors["exp_avg_sq"])
        return state
