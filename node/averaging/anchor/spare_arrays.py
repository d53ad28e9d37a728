"""The memory of anchors that nobody reads any more, kept for the next ones.

It stands alone because it is about when memory is free, and not about what lies in it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

KEPT: Final = 2
"""Blocks: parameters and momentum of one fragment."""
LARGEST_KEPT_BYTES: Final = 64 * 1024 * 1024
"""Of a block. What is larger goes back to the system: it would be missed there for longer than the moment that it takes
to have it anew."""


class SpareArrays:
    """The arrays of a replica's fragments, whose memory is used again.

    The system gives memory that is filled with zeros, which for two arrays of 40 MB took a tenth of a round of four
    peers. An array here is not of numpy's own memory, so every view of it, also of a part and a tensor's, keeps it
    alive; when the last is gone, its memory is spare, on whatever thread that happens.

    Args:
        elements: of the largest array.
    """

    def __init__(self, elements: int) -> None:
        self._bytes = elements * np.dtype(np.float32).itemsize
        self._spare: deque[bytearray] = deque(maxlen=KEPT)

    def empty(self, elements: int) -> npt.NDArray[np.float32]:
        """An array to be written. Raises MemoryError."""
        if self._bytes > LARGEST_KEPT_BYTES:
            return np.empty(elements, np.float32)
        try:
            block = self._spare.pop()
        except IndexError:
            block = bytearray(self._bytes)
        array = np.frombuffer(block, np.float32, elements)
        weakref.finalize(array, self._spare.append, block).atexit = False
        return array
