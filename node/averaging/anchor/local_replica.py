"""A replica's parameters as a vector with the layout of its anchor. Used on the compute thread."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from node.averaging.anchor.anchor import Anchor, initial_anchor
from node.averaging.anchor.layout import layout_of
from node.averaging.anchor.shared_vector import Vector, empty_vector
from node.model.initialization import floats_of
from node.model.optimizers.packed import Floats


class Schedule(Protocol):
    """An inner optimizer as averaging rounds see it: its counters, callbacks and reset."""

    steps: int
    tokens: int
    replicas: int
    before_step: Callable[[], None]
    before_change: Callable[[], None]

    def start_anew(self, steps: int, tokens: int) -> None:
        """Resets the optimizer state after the parameters were replaced, and sets its counters."""
        ...


class LocalReplica:
    """Access to one replica's parameters as a vector. Calls `parameters_changed` after each write."""

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
        named = (parameters[span.name] for span in self.layout.spans)
        self._memory = tuple(floats.view(-1) if isinstance(floats, Tensor) else floats for floats in named)
        self._starts = [span.start for span in self.layout.spans]

    def read(self, part: slice, out: Vector) -> None:
        target = torch.from_numpy(out)
        for here, there in self._overlaps(part):
            target[there].copy_(_read(*here))

    def write(self, part: slice, values: Vector) -> None:
        self.optimizer.before_change()
        source = torch.from_numpy(values)
        for (memory, here), there in self._overlaps(part):
            if isinstance(memory, Tensor):
                memory[here].copy_(source[there])
            else:
                memory.write(here, source[there])
        self._changed()

    def carry(self, part: slice, snapshot: Vector, new: Vector) -> None:
        """Sets a parameter slice to `new` + (current - `snapshot`), to keep local progress (arXiv:2501.18512)."""
        self.optimizer.before_change()
        before, after = torch.from_numpy(snapshot), torch.from_numpy(new)
        for here, there in self._overlaps(part):
            values = _read(*here)
            # For tensors `values` is a view, so this writes in place.
            values.sub_(before[there].to(values.device)).add_(after[there].to(values.device))
            if not isinstance(here[0], Tensor):
                here[0].write(here[1], values)
        self._changed()

    def _overlaps(self, part: slice) -> Iterator[tuple[_Piece, slice]]:
        index = bisect.bisect_right(self._starts, part.start) - 1
        for span, memory in zip(self.layout.spans[index:], self._memory[index:], strict=True):
            if span.start >= part.stop:
                return
            start, stop = max(span.start, part.start), min(span.stop, part.stop)
            piece = memory, slice(start - span.start, stop - span.start)
            yield piece, slice(start - part.start, stop - part.start)


def anchor_of(replica: LocalReplica) -> Anchor:
    parameters = empty_vector(replica.layout)
    for part, array in parameters.pieces():
        replica.read(part, array)
    return initial_anchor(replica.layout, parameters)


_Piece = tuple[Floats, slice]


def _read(memory: Floats, part: slice) -> Tensor:
    return memory[part] if isinstance(memory, Tensor) else memory.read(part)
