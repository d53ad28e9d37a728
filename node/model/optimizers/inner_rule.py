"""The interface of an optimizer's arithmetic, and the seam by which it submits idle work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from node.model.optimizers.packed import PackedFloats
from swarm.pipeline.compute_queue import IdleWork

Shape = tuple[int, ...]
FLOAT_BYTES = 4
State = TypeVar("State")


def zeros_of(parameter: nn.Parameter) -> Tensor:
    """Zeros of the parameter's shape, on its device, whether or not it has memory of its own."""
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterState:
    """An optimizer's state of one parameter that a step has moved."""

    steps: int
    """Steps that moved it. A part without visits does not step."""
    tensors: Mapping[str, Tensor]
    packed: Mapping[str, PackedFloats] = field(default_factory=dict)
    """Packed tensors in place. Copies and restored states have none."""


class AtDeadline:
    """Work that is put off until it is needed: what there is to do where nobody knows of idle time."""

    def __init__(self, work: Iterator[None], name: str) -> None:
        self._work = work

    def finish(self) -> None:
        deque(self._work, maxlen=0)

    def cancel(self) -> None:
        self._work = iter(())


Deferred = AtDeadline | IdleWork
"""Idle work. `finish` computes the rest and raises its errors, `cancel` drops it; one of the two is called once."""

Submit = Callable[[Iterator[None], str], Deferred]
"""Takes chunks of a few milliseconds for the compute thread, and a name. Raises ResourceExhausted if full."""


class InnerRule(ABC, Generic[State]):
    """The arithmetic of an inner step over some float32 parameters of a module, on the compute thread."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.states: dict[nn.Parameter, State] = {}
        self.packed: Mapping[nn.Parameter, PackedFloats] = {}

    @abstractmethod
    def step(self, rate: float) -> None:
        """Moves every parameter that has a gradient, at this learning rate."""

    @abstractmethod
    def slots(self, parameter: nn.Parameter, steps: int) -> Mapping[str, Shape]:
        """The tensors that the state of a parameter has after so many steps, 1 or more."""

    @abstractmethod
    def exported(self, state: State) -> ParameterState:
        """The state as plain data, which shares its memory."""

    @abstractmethod
    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> State:
        """The state from plain data that has the right `slots`, on the parameter's device; takes the tensors over."""

    @contextmanager
    def opened(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """The numbers of a parameter, to be changed in place before it is closed."""
        held = self.packed.get(parameter)
        values = parameter if held is None else held.unpacked()
        yield values
        if held is not None:
            held.store(values)

    @contextmanager
    def opened_part(self, parameter: nn.Parameter, part: slice) -> Iterator[Tensor]:
        """As `opened`, a part of it flattened."""
        held = self.packed.get(parameter)
        values = parameter.view(-1)[part] if held is None else held.read(part)
        yield values
        if held is not None:
            held.write(part, values)

    def clear(self) -> None:
        self.states.clear()
