"""A replica's parameters as a vector with the layout of its anchor, and the outer step on them.

The outer step is SGD with Nesterov momentum on the averaged pseudo-gradient (Douillard et al. 2023, arXiv:2311.08105):

    momentum = mu * momentum + g;   parameters = parameters - lr * (g + mu * momentum)

Replicas agree bit for bit: numpy rounds each operation to float32 where a compiler might fuse two.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from node.averaging.anchor.anchor import Anchor, AnchorStore, chunk_bytes, hash_of, initial_anchor, version_of
from node.averaging.anchor.shared_vector import (
    STRETCH,
    SharedVector,
    Vector,
    empty_vector,
    layout_of,
    squares,
    stretches,
)
from node.model.device import gradual_underflow
from node.model.initialization import floats_of
from node.model.optimizer import InnerOptimizer
from node.model.optimizers.packed import Floats
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import MAX_COUNT


class LocalReplica:
    """Access to one replica's parameters as a vector. Calls `parameters_changed` after each write."""

    def __init__(
        self,
        parts: Iterable[nn.Module],
        fragments: int,
        optimizer: InnerOptimizer,
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

    def _overlaps(self, part: slice) -> "Iterator[tuple[_Piece, slice]]":
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


PIECE: Final = 2**18

COARSE: Final = np.float32(2.0**-80)  # Rounds to multiples of 2**-104, as denormal momentum would be slow


@dataclass(frozen=True, slots=True)
class OuterRule:
    """Outer optimizer (SGD with Nesterov momentum) with the settings of `training.outer` in the manifest."""

    learning_rate: float
    momentum: float

    def step(
        self, gradient: Vector, parameters: Vector, momentum: Vector, new_parameters: Vector, new_momentum: Vector
    ) -> None:
        """Computes the next parameters and momentum, [elements]. Outputs may alias the old vectors, not `gradient`."""
        rate, mu = np.float32(self.learning_rate), np.float32(self.momentum)
        rooms = np.empty((2, min(STRETCH, len(gradient))), np.float32)
        with gradual_underflow():
            for part in stretches(len(gradient)):
                g, update = rooms[:, : part.stop - part.start]
                buffer = new_momentum[part]
                _round(gradient[part], out=g)
                np.multiply(momentum[part], mu, out=buffer)
                np.add(buffer, g, out=buffer)
                _round(buffer, out=buffer)
                np.multiply(buffer, mu, out=update)
                np.add(update, g, out=update)
                np.multiply(update, rate, out=update)
                np.subtract(parameters[part], update, out=new_parameters[part])


def _round(values: Vector, out: Vector) -> None:
    # Adding and subtracting COARSE drops the lowest bits of small numbers and leaves numbers above 5e-32 alone.
    np.add(values, COARSE, out=out)
    np.subtract(out, COARSE, out=out)


def outer_rule(manifest: Manifest) -> OuterRule:
    outer = manifest.training.outer
    return OuterRule(outer.learning_rate, outer.momentum)


class Staging:
    """An anchor under construction: `base` with new values in the fragment that the round averages."""

    def __init__(self, base: Anchor, rule: OuterRule, parameters: SharedVector, momentum: SharedVector) -> None:
        self._base = base
        self._rule = rule
        self._parameters = parameters
        self._momentum = momentum
        self._hashes = list(base.hashes)
        self._layout = base.layout
        self._chunks = base.layout.chunks
        self._at_a_time = max(1, STRETCH // base.layout.chunk_elements)

    def apply(self, first_chunk: int, end_chunk: int, gradient: Vector) -> None:
        """Applies the outer step with this averaged pseudo-gradient to a range of chunks, and hashes the new chunks."""
        start = self._layout.range_of(first_chunk, end_chunk).start
        for first in range(first_chunk, end_chunk, self._at_a_time):
            end = min(first + self._at_a_time, end_chunk)
            part = self._layout.range_of(first, end)
            self._rule.step(
                gradient[part.start - start : part.stop - start],
                self._base.parameters[part],
                self._base.momentum[part],
                self._parameters[part],
                self._momentum[part],
            )
            for chunk in range(first, end):
                for number in (chunk, self._chunks + chunk):
                    self._hashes[number] = hash_of(chunk_bytes(self._layout, self._parameters, self._momentum, number))

    def finish(self, number: int, steps: int, tokens: int) -> Anchor:
        """Returns the new anchor, made by round `number`. Requires `apply` for every chunk of the fragment before."""
        before, base = self._base.version, self._base
        fragment = (before.fragment + 1) % len(self._layout.fragments)
        hashes = tuple(self._hashes)
        version = version_of(self._layout, hashes, number, steps, tokens, fragment)
        parameters = base.parameters.replaced(before.fragment, self._parameters)
        momentum = base.momentum.replaced(before.fragment, self._momentum)
        return Anchor(self._layout, version, parameters, momentum, hashes)


def step_alone(replica: LocalReplica, store: AnchorStore, rule: OuterRule, steps: int, tokens: int) -> Anchor:
    """Takes the outer step for a module's only replica, on the compute thread. Raises StateError on divergence."""
    base, layout = store.current, store.layout
    first, end = layout.fragments[base.version.fragment]
    fragment = layout.range_of(first, end)
    staging = Staging(base, rule, *store.spare(fragment))
    at_a_time = max(1, PIECE // layout.chunk_elements)  # bounds the memory for the pseudo-gradient
    for start in range(first, end, at_a_time):
        stop = min(start + at_a_time, end)
        part = layout.range_of(start, stop)
        gradient: Vector = np.empty(part.stop - part.start, np.float32)
        replica.read(part, gradient)
        np.subtract(base.parameters[part], gradient, out=gradient)
        if not math.isfinite(squares(gradient)):  # a diverged replica must not change the anchor
            raise StateError("training diverged: the parameters of this replica are not finite")
        staging.apply(start, stop, gradient)
    version = base.version
    anchor = staging.finish(
        version.round + 1, min(version.steps + steps, MAX_COUNT), min(version.tokens + tokens, MAX_COUNT)
    )
    replica.write(fragment, anchor.parameters[fragment])
    store.put(anchor)
    return anchor
