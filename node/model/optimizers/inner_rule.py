"""Base class of the optimizer rules, and the interface by which they schedule idle work."""

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
    """Returns zeros of the parameter's shape and dtype with their own memory, even if the parameter is expanded."""
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterState:
    """Optimizer state of one parameter that was stepped at least once."""

    steps: int
    """Steps of this parameter. A part without visits is not stepped."""
    tensors: Mapping[str, Tensor]
    packed: Mapping[str, PackedFloats] = field(default_factory=dict)
    """Packed tensors that share memory with the optimizer. Empty in copies and restored states."""


class AtDeadline:
    """Work deferred until its result is needed, for callers without an idle-time queue."""

    def __init__(self, work: Iterator[None], name: str) -> None:
        self._work = work

    def finish(self) -> None:
        deque(self._work, maxlen=0)

    def cancel(self) -> None:
        self._work = iter(())


Deferred = AtDeadline | IdleWork
"""Scheduled idle work. Call `finish` (computes the rest, raises its errors) or `cancel` exactly once."""

Submit = Callable[[Iterator[None], str], Deferred]
"""Schedules an iterator of chunks (a few ms each) on the compute thread by name. Raises ResourceExhausted if full."""


class InnerRule(ABC, Generic[State]):
    """Optimizer arithmetic for some of a module's float32 parameters. Runs on the compute thread."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.states: dict[nn.Parameter, State] = {}
        self.packed: Mapping[nn.Parameter, PackedFloats] = {}

    @abstractmethod
    def step(self, rate: float) -> None:
        """Steps every parameter that has a gradient."""

    @abstractmethod
    def slots(self, parameter: nn.Parameter, steps: int) -> Mapping[str, Shape]:
        """Returns names and shapes of a parameter's state after `steps` steps (at least 1)."""

    @abstractmethod
    def exported(self, state: State) -> ParameterState:
        """Returns the state as plain tensors that share its memory."""

    @abstractmethod
    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> State:
        """Builds the state from tensors with the right `slots` on the parameter's device. Takes them without a copy."""

    @contextmanager
    def opened(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """Yields the parameter's values for an in-place change. Packs them again at exit."""
        held = self.packed.get(parameter)
        values = parameter if held is None else held.unpacked()
        yield values
        if held is not None:
            held.store(values)

    @contextmanager
    def opened_part(self, parameter: nn.Parameter, part: slice) -> Iterator[Tensor]:
        """Like `opened`, for a slice of the flattened parameter."""
        held = self.packed.get(parameter)
        values = parameter.view(-1)[part] if held is None else held.read(part)
        yield values
        if held is not None:
            held.write(part, values)

    def clear(self) -> None:
        self.states.clear()
