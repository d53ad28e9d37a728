"""Saved state of a replica as plain data, and its incremental copy to a checkpoint."""

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
SHARE: Final = 8  # Inverse of the share of a copy that may wait in memory to be written

Post = Callable[[Callable[[], None]], "Future[None]"]


_Slice = tuple[Floats, slice]


class StateCopy:
    """Float32 copy of a replica's tensors, made slice by slice. The replica may change only after `finish`."""

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
        """Copies a few slices, if the buffer of copied slices has room. Takes some milliseconds."""
        for _ in range(4):  # few slices per call, so that microbatches wait only some milliseconds
            with self._changed:
                if not self._has_room():
                    return
            self._copy_next()

    def finish(self) -> None:
        """Copies all remaining slices, as fast as the writer empties the buffer. Returns at once after `give_up`."""
        while self._next is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._given_up or self._has_room())
                if self._given_up:
                    self._next = None
                    return
            self._copy_next()

    def pieces(self) -> Iterator[memoryview]:
        """Yields the copied bytes of all tensors in order, once. Raises StateError if the compute thread stops."""
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
                # Do not wait for the job only: it may be queued behind `finish`, which waits for this thread.
                self._wait_for(asked)
                if asked.done():
                    asked.result()
                    asked = None

    def give_up(self) -> None:
        """Ends the copy early and drops the copied slices."""
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
    """Tensors by name, each stored in several parts that can be written without a copy of the whole tensor."""

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def parts_of(self, name: str) -> Iterator[Tensor]:
        """Yields the elements of the tensor `name` as consecutive one-dimensional tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """The module's anchor, and the inner steps and tokens of this replica since that anchor."""

    anchor: "AnchorState"
    steps_since: int
    tokens_since: int


@dataclass(slots=True, eq=False)
class ResumedState:
    """State from which a node resumes: its own snapshot, or nothing."""

    module: ModuleId | None = None
    state: "ReplicaState | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class AnchorState:
    """An anchor for a checkpoint: parameters and outer momentum as tensors by name."""

    version: AnchorVersion
    parameters: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of the tokens, microbatches and inner steps that a replica was trained with."""

    tokens: int
    visits: int
    steps_since_anchor: int
    tokens_since_anchor: int


@dataclass(frozen=True, slots=True)
class DataState:
    """Saved reading position, microbatch counts and losses of a data node."""

    cursor: Cursor
    next_number: int
    completed: int
    abandoned: int
    duplicated: int
    loss_first: float | None = None
    loss_last: float | None = None
    steps: int | None = None

    def steps_done(self, per_step: int) -> int:
        """Returns the completed inner steps, estimated from microbatches if an old snapshot lacks the count."""
        return self.completed // per_step if self.steps is None else self.steps


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaState:
    """Parameters, optimizer state, counters and anchor of one replica at one moment."""

    local: Tensors
    inner: InnerState
    counters: Counters
    anchor: AnchorState | None = None
    data: DataState | None = None
    copying: StateCopy | None = None
