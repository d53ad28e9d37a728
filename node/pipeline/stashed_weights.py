"""The weights from before an inner step, for visits whose forward pass came before it and whose backward pass comes
after it: weight stashing (Narayanan et al. 2019, "PipeDream", section 3.3).

A visit's gradient is only a gradient if backward goes through the weights that made its output. Without a copy of them
an inner step makes every graph under way useless: those visits are computed anew, with the new weights, so that their
gradients belong to neither. At a staleness of 1 that was one visit in five of a swarm, and in a small run the loss was
some per cent higher (docs/BENCHMARKS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from node.model.device import device_errors
from swarm.vocabulary.errors import OutOfMemory, StateError

Weights = tuple[Tensor, ...]


class WeightVersion:
    """What the weights were between two changes of the parameters."""

    def __init__(self, weights: Weights) -> None:
        self.visits = 0
        """Under way, whose forward pass was computed with it."""
        self._weights: Weights | None = weights

    @property
    def is_there(self) -> bool:
        """Whether it can still be computed with."""
        return self._weights is not None

    def refer_to(self, weights: Weights | None) -> None:
        """Says where it is from now on; None when it is gone."""
        self._weights = weights

    def __getitem__(self, place: int) -> Tensor:
        if self._weights is None:
            raise StateError("the weights that this graph refers to are gone")
        return self._weights[place]


@dataclass(frozen=True, slots=True)
class _Seen:
    """How a graph looks at one of the weights."""

    place: int
    size: torch.Size
    stride: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A tensor of a graph that is no weight, and the version that it had then."""

    tensor: Tensor
    version: int


class WeightStash:
    """The versions of one part's weights that visits under way were computed with. Used on the compute thread.

    Args:
        weights: what graphs refer to (`node.model.passes.Passes.weights`): always the same tensors, each in memory of
            its own, changed in place.
        most: versions besides the current one; with 0 none outlives an inner step.
        room: bytes that copies may take.
    """

    def __init__(self, weights: Callable[[], Weights], most: int, room: int) -> None:
        self._up_to_date, self._weights = weights, weights()
        self._places = {_memory(tensor): place for place, tensor in enumerate(self._weights)}
        size = sum(tensor.nbytes for tensor in self._weights)
        # Weights that cannot be told apart by their memory could not be found in a graph.
        can_be_found = len(self._places) == len(self._weights) and size > 0
        self.copies = min(most, room // size) if can_be_found else 0
        """Versions that may be kept."""
        self.bytes = self.copies * size
        """That these take, or will."""
        self._unused: list[Weights] = []
        """Copies made already: fresh memory would be zeroed by the system at every step."""
        self._copies: dict[WeightVersion, Weights] = {}
        self.current = WeightVersion(self._weights)

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """What a forward pass is computed within, so that its graph refers to the current version wherever that will
        be."""
        version = self.current

        def pack(tensor: Tensor) -> _Seen | _Saved:
            place = self._places.get(_memory(tensor))
            if place is not None:
                return _Seen(place, tensor.shape, tensor.stride(), tensor.storage_offset())
            # Detached: it may be the output of the very node that saves it, a cycle for ever.
            return _Saved(tensor.detach(), tensor._version)

        def unpack(saved: _Seen | _Saved) -> Tensor:
            if isinstance(saved, _Seen):
                return version[saved.place].detach().as_strided(saved.size, saved.stride, saved.offset)
            if saved.tensor._version != saved.version:
                raise StateError("a tensor that the graph needs has been changed in place")
            return saved.tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @contextmanager
    def in_place(self, version: WeightVersion) -> Iterator[None]:
        """Lets the part compute with a version that is there, within the block."""
        copy = self._copies.get(version)
        if copy is None:
            yield
            return
        # Whatever of it is a copy of the parameters is made anew first: else it would be while another is in its place.
        own = [tensor.data for tensor in self._up_to_date()]
        try:
            for tensor, kept in zip(self._weights, copy, strict=True):
                tensor.data = kept
            yield
        finally:
            for tensor, data in zip(self._weights, own, strict=True):
                tensor.data = data

    @torch.no_grad()
    def before_step(self) -> None:
        """Copies the current version, if visits need it, because an inner step changes the weights next. Where there is
        no more room the oldest one makes room: a visit that is under way for so long is one that was held up.
        """
        version, copy = self.current, self._free_copy() if self.current.visits else None
        self._go_on_from(copy)
        if copy is not None:
            self._copies[version] = copy
            for kept, tensor in zip(copy, self._weights, strict=True):
                kept.copy_(tensor)

    def changed(self) -> None:
        """Notes that the weights have changed otherwise: the current version is gone."""
        self._go_on_from(None)

    def _go_on_from(self, copy: Weights | None) -> None:
        """Begins another version; the one before is in the copy, if there is one."""
        self.current.refer_to(copy)
        self.current = WeightVersion(self._weights)

    def done(self, version: WeightVersion) -> None:
        """Notes that a visit does not need its version any more."""
        version.visits -= 1
        if version.visits == 0 and version in self._copies:
            version.refer_to(None)
            self._unused.append(self._copies.pop(version))

    def _free_copy(self) -> Weights | None:
        if self._unused:
            return self._unused.pop()
        if self.copies == 0:
            return None
        if len(self._copies) == self.copies:
            oldest = next(iter(self._copies))
            oldest.refer_to(None)
            return self._copies.pop(oldest)
        try:
            with device_errors():
                return tuple(torch.empty_like(tensor, requires_grad=False) for tensor in self._weights)
        except OutOfMemory:
            return None


def _memory(tensor: Tensor) -> int:
    """Where its memory begins."""
    return tensor.untyped_storage().data_ptr()
