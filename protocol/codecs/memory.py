"""Conversions between numpy, torch and memoryview, without a copy if possible; pinned memory for copies to GPUs."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.interfaces.tensor_spec import DType
from swarm.vocabulary.errors import ResourceExhausted

Vector = npt.NDArray[np.float32]  # Contiguous, one-dimensional

ELEMENT_TYPES: Final = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
DTYPES: Final = {kind: dtype for dtype, kind in ELEMENT_TYPES.items()}


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """Returns a tensor over the array's memory; copies read-only memory."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def octets_of(data: memoryview) -> Tensor:
    """Returns `data` as a tensor of bytes, without a copy unless `data` is read-only."""
    return tensor_of(np.frombuffer(data, dtype=np.uint8))


def octets_of_tensor(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _ordinary(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


def buffer_for(size_bytes: int, device: torch.device) -> memoryview:
    """Allocates writable memory for copies to the device, pinned for a GPU if possible. Raises MemoryError."""
    pinned = _pinned(size_bytes) if device.type == "cuda" else None
    return _ordinary(size_bytes) if pinned is None else pinned.numpy().data


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device. From pinned memory the copy is asynchronous, in stream order."""
    # MPS reads the source later without keeping a reference.
    return tensor.to(device, non_blocking=device.type not in ("cpu", "mps"))


def to_host(octets: Tensor) -> Tensor:
    """Returns the bytes [n] on the CPU, after waiting for the device. Uses pinned memory for a GPU."""
    pinned = _pinned(len(octets)) if octets.is_cuda else None
    return octets.cpu() if pinned is None else pinned.copy_(octets)


def _pinned(size_bytes: int) -> Tensor | None:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # CUDA's error if no more memory can be pinned
        return None


class BufferPool:
    """Pool of at most `limit` buffers of `size_bytes` bytes. `allocate` returns a new buffer or raises MemoryError."""

    def __init__(self, size_bytes: int, limit: int, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.size_bytes = size_bytes
        self.limit = limit
        self.in_use = 0
        self._allocate = allocate or _ordinary
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Returns a writable buffer with arbitrary content. Raises ResourceExhausted at the limit or without memory."""
        if self.in_use >= self.limit:
            raise ResourceExhausted(f"all {self.limit} receive buffers of {self.size_bytes} bytes are in use")
        try:
            buffer = self._free.pop() if self._free else self._allocate(self.size_bytes)
        except MemoryError:
            raise ResourceExhausted(f"no memory for a receive buffer of {self.size_bytes} bytes") from None
        self.in_use += 1
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        """Puts a buffer, or a slice of a buffer, back into the pool. The caller must no longer use its memory."""
        self.in_use -= 1
        self._free.append(memoryview(buffer.obj))
