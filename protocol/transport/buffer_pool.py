"""A pool of receive buffers: fresh pages would cost more than the copy into them."""

from __future__ import annotations

from collections.abc import Callable

from swarm.vocabulary.errors import ResourceExhausted


class BufferPool:
    """At most `limit` buffers of `size_bytes` bytes. `allocate` makes one or raises MemoryError."""

    def __init__(self, size_bytes: int, limit: int, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.size_bytes = size_bytes
        self.limit = limit
        self.in_use = 0
        self._allocate = allocate or _ordinary
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """A writable buffer with arbitrary content. Raises ResourceExhausted."""
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
