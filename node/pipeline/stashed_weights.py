"""The weights from before an inner step, for visits whose forward pass came before it and whose backward pass comes
after it: weight stashing (Narayanan et al. 2019, "PipeDream", section 3.3).

A graph refers to the weights that its forward pass was computed with. Without a copy of them an inner step makes every
graph under way useless, and backward computes the visit again: one in five, at a staleness of 1. With a copy such a
visit's gradient is that of the weights which made its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.model.device import device_errors
from swarm.vocabulary.errors import OutOfMemory, StateError


class WeightVersion:
    """What the weights were between two changes of the parameters, as graphs refer to them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.graphs = 0
        """Graphs under way that refer to it."""
        self._weights: Sequence[Tensor] | None = parameters

    @property
    def is_there(self) -> bool:
        """Whether graphs that refer to it can still be used."""
        return self._weights is not None

    def view(self, seen: _Seen) -> Tensor:
        if self._weights is None:
            raise StateError("the weights that this graph refers to are gone")
        return torch.as_strided(self._weights[seen.place].detach(), seen.size, seen.stride, seen.offset)

    def refer_to(self, weights: Sequence[Tensor] | None) -> None:
        self._weights = weights


@dataclass(frozen=True, slots=True)
class _Seen:
    """How a graph looks at one of the parameters."""

    place: int
    size: torch.Size
    stride: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A tensor of a graph that is no parameter, and the version that it had then."""

    tensor: Tensor
    version: int


class WeightStash:
    """The versions of one part's parameters that graphs under way refer to.

    Args:
        parameters: each in memory of its own, changed in place.
        most: versions besides the current one; with 0 no graph outlives an inner step.
        take: takes so many bytes for a copy, for good, if there is room.
    """

    def __init__(self, parameters: Sequence[Tensor], most: int, take: Callable[[int], bool]) -> None:
        self._parameters = tuple(parameters)
        self._places = {parameter.untyped_storage().data_ptr(): at for at, parameter in enumerate(self._parameters)}
        self._left, self._take = most, take
        self._room: list[tuple[Tensor, ...]] = []
        """Copies that are not in use: fresh memory would be zeroed by the system at every step."""
        self._copies: dict[WeightVersion, tuple[Tensor, ...]] = {}
        self.keeps_graphs = most > 0
        self.current = WeightVersion(self._parameters)

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """What a forward pass is to be computed within, so that its graph refers to the current version."""
        version = self.current

        def pack(tensor: Tensor) -> _Seen | _Saved:
            place = self._places.get(tensor.untyped_storage().data_ptr())
            if place is not None:
                return _Seen(place, tensor.shape, tensor.stride(), tensor.storage_offset())
            # Detached: it may be the output of the very node that saves it, a cycle for ever.
            return _Saved(tensor.detach(), tensor._version)

        def unpack(saved: _Seen | _Saved) -> Tensor:
            if isinstance(saved, _Seen):
                return version.view(saved)
            if saved.tensor._version != saved.version:
                raise StateError("a tensor that the graph needs has been changed in place")
            return saved.tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @torch.no_grad()
    def before_step(self) -> None:
        """Copies the current version, if graphs refer to it and there is room, because an inner step changes the
        parameters next."""
        version, self.current = self.current, WeightVersion(self._parameters)
        copy = self._free_copy() if version.graphs and self.keeps_graphs else None
        version.refer_to(copy)
        if copy is not None:
            self._copies[version] = copy
            for kept, parameter in zip(copy, self._parameters, strict=True):
                kept.copy_(parameter)

    def changed(self) -> None:
        """Notes that the parameters have changed otherwise: graphs of the current version are of no use any more."""
        self.current.refer_to(None)
        self.current = WeightVersion(self._parameters)

    def let_go(self, version: WeightVersion) -> None:
        """Notes that a graph of this version is gone."""
        version.graphs -= 1
        if version.graphs == 0 and version in self._copies:
            version.refer_to(None)
            self._room.append(self._copies.pop(version))

    def _free_copy(self) -> tuple[Tensor, ...] | None:
        if self._room:
            return self._room.pop()
        if self._left == 0 or not self._take(sum(parameter.nbytes for parameter in self._parameters)):
            return None
        self._left -= 1
        try:
            with device_errors():
                return tuple(torch.empty_like(parameter, requires_grad=False) for parameter in self._parameters)
        except OutOfMemory:
            return None
