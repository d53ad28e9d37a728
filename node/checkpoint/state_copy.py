"""The copy of a replica's tensors on their way to a checkpoint, slice by slice, while nothing changes them.

Only inner steps and rounds change a replica, and its tensors take 12 bytes a parameter as float32 (so they are written,
in whatever form the replica keeps them). So they are not copied at once: the writer asks for the next slices when it
has room, and they are copied between two microbatches. Whoever is about to change the replica first has what is left
copied (`finish`), and waits for the disk where that is more than there is room for: what is written is the replica at
one moment, and takes `room` bytes at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Final

import numpy as np
import torch
from torch import Tensor

from node.model.packed.packed_floats import Floats

SLICE: Final = 2**20
"""Elements (4 MiB) that are copied at a time."""
LEAST_ROOM: Final = 64 * 2**20
"""Bytes: a small replica is copied without ever waiting for the disk."""
SHARE: Final = 8
"""One part in so many of all that is copied may wait to be written: 1.5 bytes a parameter with AdamW."""

Post = Callable[[Callable[[], None]], "Future[None]"]
"""Has a job done on the compute thread, from any thread."""


_Slice = tuple[Floats, slice]
"""A flattened tensor and the elements of it."""


class StateCopy:
    """The copy of these tensors, in order, as float32. `advance` and `finish` are called on the compute thread,
    `pieces` and `give_up` on the writer's.

    Args:
        tensors: by name, on any device; not changed before `finish` has returned.
        room: bytes that wait to be written at most.
    """

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
        """That are copied and not taken yet."""
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
        """The bytes of all the tensors, one after the other. To be read once.

        Raises:
            StateError: the compute thread has stopped before all was copied.
        """
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
