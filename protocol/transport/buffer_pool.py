"""A pool of receive buffers. Hidden states of a run all have one size at most, and fresh pages cost more than the copy
into them.

It stands alone because receivers of microbatches and of states reuse buffers, and no link knows of it.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.vocabulary.errors import ResourceExhausted


class BufferPool:
    """Buffers of one size, at most `limit` of them in use. Used on the event loop's thread only.

    Args:
        size_bytes: of every buffer.
        limit: buffers in use at once; the bound on memory is `size_bytes` x `limit`.
        allocate: makes a buffer of so many bytes, of memory that a device copies from, say; or raises MemoryError.
    """

    def __init__(self, size_bytes: int, limit: int, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.size_bytes = size_bytes
        self.limit = limit
        self.in_use = 0
        self._allocate = allocate or _ordinary
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """A writable buffer of `size_bytes` bytes with whatever it held before. Raises ResourceExhausted: `limit`
        buffers are in use, or this machine has no memory for another.
        """
        if self.in_use >= self.limit:
            raise ResourceExhausted(f"all {self.limit} receive buffers of {self.size_bytes} bytes are in use")
        try:
            buffer = self._free.pop() if self._free else self._allocate(self.size_bytes)
        except MemoryError:
            raise ResourceExhausted(f"no memory for a receive buffer of {self.size_bytes} bytes") from None
        self.in_use += 1
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        """Returns a buffer, or a part of it, to the pool; nothing may read or write it afterwards."""
        self.in_use -= 1
        self._free.append(memoryview(buffer.obj))


def _ordinary(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))
