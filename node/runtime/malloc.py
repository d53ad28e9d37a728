"""A setting of the C library's allocator: it keeps memory that is freed between two chunks.

Each chunk is a fresh byte string of half a megabyte, here and inside gRPC. glibc returns so large a block to the system
as soon as it is free, and the next chunk then faults all its pages in again: measured, about a third of a sender's
processor time (mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD).

It stands alone because it is about the C library, which nothing else here knows of.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 64 * 1024 * 1024
_SMALLEST_MAPPED_BYTES: Final = 32 * 1024 * 1024
"""The highest value that glibc's own adjustment reaches, which this setting turns off. Lower ones make it slower than
that for hidden states: with 4 MiB, arithmetic on tensors of 8 MiB takes ten times as long."""


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory, for the whole process; to be called once at its start. False where it has
    no such setting.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPED_BYTES))
