"""Setting of glibc's allocator: keep freed memory, else every chunk faults its pages in again (mallopt(3))."""

import contextlib
import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 64 * 1024 * 1024
# Largest threshold of glibc's own adjustment. With 4 MiB, arithmetic on 8 MiB tensors takes ten times as long.
_SMALLEST_MAPPED_BYTES: Final = 32 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory in this process. False if it has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPED_BYTES))


def give_back_memory() -> None:
    """Returns the kept memory to the system."""
    with contextlib.suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
