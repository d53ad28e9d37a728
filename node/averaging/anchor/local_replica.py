"""A replica's parameters as a vector laid out like its anchor. Everything here runs on the compute thread.

Training goes on during a round; the work since the snapshot is carried over to the new anchor (Streaming DiLoCo with a
merging factor of 1; Douillard et al. 2025, arXiv:2501.18512).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from node.averaging.anchor.anchor import Anchor, initial_anchor
from node.averaging.anchor.layout import Layout, layout_of
from node.averaging.anchor.shared_vector import Vector, empty_vector
from node.model.initialization import floats_of
from node.model.packed import Floats


class Schedule(Protocol):
    """The part of an inner optimizer that rounds need."""

    steps: int
    tokens: int
    """Position in the learning rate schedule, with `steps`."""
    replicas: int
    """Replicas that train the module."""
    before_step: Callable[[], None]
    """Called at the beginning of each inner step."""
    before_change: Callable[[], None]
    """To be called before the parameters change."""

    def start_anew(self, steps: int, tokens: int) -> None:
        """Drops the optimizer's state, because the parameters have changed."""
        ...


class LocalReplica:
    """One replica's parameters.

    Args:
        parts: the module, on its device; its parameters are float32 and contiguous.
        parameters_changed: called after writes, so that older autograd graphs are not used.
    """

    def __init__(
        self,
        parts: Iterable[nn.Module],
        fragments: int,
        optimizer: Schedule,
        parameters_changed: Callable[[], None] = lambda: None,
    ) -> None:
        parameters = floats_of(*parts)
        self.layout = layout_of({name: tuple(tensor.shape) for name, tensor in parameters.items()}, fragments)
        self.optimizer = optimizer
        self._changed = parameters_changed
        self._memory = _in_order(self.layout, parameters)
        self._starts = [place.start for place in self.layout.places]

    def read(self, part: slice, out: Vector) -> None:
        """Copies this part of the vector to `out`."""
        target = torch.from_numpy(out)
        for here, there in self._overlaps(part):
            target[there].copy_(_read(*here))

    def write(self, part: slice, values: Vector) -> None:
        """Writes `values` to this part of the vector."""
        self.optimizer.before_change()
        source = torch.from_numpy(values)
        for here, there in self._overlaps(part):
            _write(*here, source[there])
        self._changed()

    def carry(self, part: slice, snapshot: Vector, new: Vector) -> None:
        """Sets this part to `new` + (current - `snapshot`), exactly `new` where nothing changed since."""
        self.optimizer.before_change()
        before, after = torch.from_numpy(snapshot), torch.from_numpy(new)
        for here, there in self._overlaps(part):
            values = _read(*here)
            values.sub_(before[there].to(values.device)).add_(after[there].to(values.device))
            if not isinstance(here[0], Tensor):
                here[0].write(here[1], values)
        self._changed()

    def _overlaps(self, part: slice) -> Iterator[tuple[_Piece, slice]]:
        index = bisect.bisect_right(self._starts, part.start) - 1
        for place, memory in zip(self.layout.places[index:], self._memory[index:], strict=True):
            if place.start >= part.stop:
                return
            start, stop = max(place.start, part.start), min(place.stop, part.stop)
            piece = memory, slice(start - place.start, stop - place.start)
            yield piece, slice(start - part.start, stop - part.start)


def anchor_of(replica: LocalReplica) -> Anchor:
    """The anchor of the current parameters, before the first round."""
    parameters = empty_vector(replica.layout)
    for part, array in parameters.pieces():
        replica.read(part, array)
    return initial_anchor(replica.layout, parameters)


def _in_order(layout: Layout, parameters: Mapping[str, Floats]) -> tuple[Floats, ...]:
    named = (parameters[place.name] for place in layout.places)
    return tuple(floats.view(-1) if isinstance(floats, Tensor) else floats for floats in named)


_Piece = tuple[Floats, slice]


def _read(memory: Floats, part: slice) -> Tensor:
    """A view, or a copy of packed memory."""
    return memory[part] if isinstance(memory, Tensor) else memory.read(part)


def _write(memory: Floats, part: slice, values: Tensor) -> None:
    if isinstance(memory, Tensor):
        memory[part].copy_(values)
    else:
        memory.write(part, values)
