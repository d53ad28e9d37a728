"""Base class of the optimizer rules (AdamW, SOAP, Muon), and their interface to schedule work for idle time."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from node.model.optimizers.packed import PackedFloats
from protocol.manifest.manifest import InnerSection
from swarm.pipeline.compute_queue import IdleWork

Shape = tuple[int, ...]
FLOAT_BYTES = 4
State = TypeVar("State")


def zeros_of(parameter: nn.Parameter) -> Tensor:
    """Returns new zeros with the parameter's shape and dtype, and memory for each element."""
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterState:
    """Optimizer state of one parameter that was stepped at least once."""

    steps: int  # Steps of this parameter. A part without visits is not stepped.
    tensors: Mapping[str, Tensor]
    packed: Mapping[str, PackedFloats] = field(default_factory=dict)  # Shares memory; empty in copies


class AtDeadline:
    """Deferred work that `finish` computes at once, for callers that have no queue for idle time."""

    def __init__(self, work: Iterator[None], name: str) -> None:
        self._work = work

    def finish(self) -> None:
        deque(self._work, maxlen=0)

    def cancel(self) -> None:
        self._work = iter(())


Deferred = AtDeadline | IdleWork  # Idle work. Call `finish` (raises its errors) or `cancel` exactly once.

Submit = Callable[[Iterator[None], str], Deferred]  # Of chunks of a few ms, by name; may raise ResourceExhausted


class InnerRule(ABC, Generic[State]):
    """Optimizer algorithm for some of a module's float32 parameters. Runs on the compute thread."""

    def __init__(self, parameters: Sequence[nn.Parameter], inner: InnerSection) -> None:
        self._inner = inner
        self.parameters = tuple(parameters)
        self.rates: Mapping[nn.Parameter, float] = {}  # Factors on the learning rate, not on the decay
        self.states: dict[nn.Parameter, State] = {}
        self.packed: Mapping[nn.Parameter, PackedFloats] = {}

    @abstractmethod
    def step(self, rate: float) -> None:
        """Applies one optimizer step to every parameter that has a gradient."""

    def rate_and_decay(self, parameter: nn.Parameter, rate: float) -> tuple[float, float]:
        """Returns a parameter's own rate, and the weight decay by which it shrinks as much as at the full rate."""
        factor = self.rates.get(parameter, 1.0)
        return rate * factor, self._inner.weight_decay / factor

    def slots(self, parameter: nn.Parameter, steps: int) -> Mapping[str, Shape]:
        """Returns names and shapes of a parameter's state tensors after `steps` steps (at least 1)."""
        return {"exp_avg": tuple(parameter.shape), "exp_avg_sq": tuple(parameter.shape)}

    @abstractmethod
    def exported(self, state: State) -> ParameterState:
        """Returns a parameter's state as plain tensors that share its memory."""

    @abstractmethod
    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> State:
        """Builds the state from saved tensors, not copied. They must match `slots` and be on the parameter's device."""

    @contextmanager
    def opened(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """Yields the parameter's values, unpacked, for an in-place change. Packs them again at exit."""
        held = self.packed.get(parameter)
        values = parameter if held is None else held.unpacked()
        yield values
        if held is not None:
            held.store(values)

    @contextmanager
    def opened_part(self, parameter: nn.Parameter, part: slice) -> Iterator[Tensor]:
        """Yields a slice of the flattened parameter for an in-place change, like `opened`."""
        held = self.packed.get(parameter)
        values = parameter.view(-1)[part] if held is None else held.read(part)
        yield values
        if held is not None:
            held.write(part, values)

    def clear(self) -> None:
        self.states.clear()
