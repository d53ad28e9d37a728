"""The saved state of a replica as plain data, and its copy on the way to a checkpoint."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from node.data.packing import Cursor
from node.model.optimizer import InnerState, Tensors
from node.model.optimizers.packed import Floats
from swarm.vocabulary.types import AnchorVersion, ModuleId

SLICE: Final = 2**20
LEAST_ROOM: Final = 64 * 2**20
SHARE: Final = 8
"""Share (1/8) of a copy that may wait to be written."""

Post = Callable[[Callable[[], None]], "Future[None]"]


_Slice = tuple[Floats, slice]


class StateCopy:
    """A float32 copy of tensors at one moment, taken slice by slice; a change of the replica waits for `finish`."""

    def __init__(self, tensors: Mapping[str, Floats], post: Post, room: int | None = None) -> None:
        self.names = tuple(tensors)
        whole = 4 * sum(tensor.numel() for tensor in tensors.values())
        self._room = max(4 * SLICE, max(LEAST_ROOM, whole // SHARE) if room is None else room)
        self._slices = _slices(tensors.values())
        self._next = next(self._slices, None)
        self._post = post
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self._given_up = False

    def advance(self) -> None:
        """Copies as many slices as there is room for, or fewer: other work waits."""
        for _ in range(4):
            with self._changed:
                if not self._has_room():
                    return
            self._copy_next()

    def finish(self) -> None:
        """Copies all that is left, as the writer makes room. Returns at once when it has given up."""
        while self._next is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._given_up or self._has_room())
                if self._given_up:
                    self._next = None
                    return
            self._copy_next()

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of all tensors in order, read once. Raises StateError if the compute thread stops early."""
        asked: Future[None] | None = None
        while True:
            piece = self._take()
            if piece is not None:
                yield piece
            elif self._is_over():
                return
            elif asked is None:
                asked = self._post(self.advance)
                asked.add_done_callback(self._tell)
            else:
                # Not for the job alone: it may wait behind the one that finishes, which waits for us.
                self._wait_for(asked)
                if asked.done():
                    asked.result()
                    asked = None

    def give_up(self) -> None:
        """Takes no more; what is copied already is dropped."""
        with self._changed:
            self._given_up = True
            self._waiting.clear()
            self.waiting_bytes = 0
            self._changed.notify_all()

    def _take(self) -> memoryview | None:
        with self._changed:
            if not self._waiting:
                return None
            piece = self._waiting.popleft()
            self.waiting_bytes -= len(piece)
            self._changed.notify_all()
            return piece

    def _is_over(self) -> bool:
        with self._changed:
            return self._next is None and not self._waiting

    def _wait_for(self, job: Future[None]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: job.done() or self._waiting or self._next is None)

    def _tell(self, job: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._next is not None and self.waiting_bytes + 4 * _length(self._next) <= self._room

    def _copy_next(self) -> None:
        assert self._next is not None
        values = np.empty(_length(self._next), np.float32)
        source, part = self._next
        torch.from_numpy(values).copy_(source[part] if isinstance(source, Tensor) else source.read(part))
        data = values.view(np.uint8).data
        with self._changed:
            self._next = next(self._slices, None)
            if not self._given_up:
                self._waiting.append(data)
                self.waiting_bytes += len(data)
            self._changed.notify_all()


def _slices(tensors: Iterable[Floats]) -> Iterator[_Slice]:
    for tensor in tensors:
        flat = tensor.detach().reshape(-1) if isinstance(tensor, Tensor) else tensor
        for begin in range(0, tensor.numel(), SLICE):
            yield flat, slice(begin, min(begin + SLICE, tensor.numel()))


def _length(piece: _Slice) -> int:
    length: int = piece[1].stop - piece[1].start
    return length


class TensorsInParts(Mapping[str, Tensor], ABC):
    """Tensors by name that lie in memory in several parts, to be written part by part without a copy of the whole."""

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def parts_of(self, name: str) -> Iterator[Tensor]:
        """Its elements, one-dimensional tensors one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """The module's anchor, and this replica's work since."""

    anchor: AnchorState
    steps_since: int
    tokens_since: int


@dataclass(slots=True, eq=False)
class Resumed:
    """The state from which a starting node goes on: nothing, or its own snapshot."""

    module: ModuleId | None = None
    state: ReplicaState | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AnchorState:
    """The last agreed parameters and the outer momentum."""

    version: AnchorVersion
    parameters: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts of a replica's work, counting only what has gone into its parameters."""

    tokens: int
    visits: int
    steps_since_anchor: int
    tokens_since_anchor: int


@dataclass(frozen=True, slots=True)
class DataState:
    """The additional state of a data node, besides its replica of stage 0."""

    cursor: Cursor
    next_number: int
    completed: int
    abandoned: int
    duplicated: int
    loss_first: float | None = None
    loss_last: float | None = None
    steps: int | None = None

    def steps_done(self, per_step: int) -> int:
        """The completed steps; where they are not said, as many as there were so many microbatches."""
        return self.completed // per_step if self.steps is None else self.steps


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaState:
    """The state of one replica of a module at one moment."""

    local: Tensors
    inner: InnerState
    counters: Counters
    anchor: AnchorState | None = None
    data: DataState | None = None
    copying: StateCopy | None = None
