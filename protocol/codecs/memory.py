"""Views of the same memory by numpy, torch and the interpreter, and pinned memory that GPUs copy at full speed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.interfaces.tensor_spec import DType

Vector = npt.NDArray[np.float32]  # Contiguous, one-dimensional

ELEMENT_TYPES: Final = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
DTYPES: Final = {kind: dtype for dtype, kind in ELEMENT_TYPES.items()}


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """A tensor over the array's memory; read-only memory is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def octets_of(data: memoryview) -> Tensor:
    """The bytes as a tensor, not copied (but see `tensor_of`)."""
    return tensor_of(np.frombuffer(data, dtype=np.uint8))


def octets_of_tensor(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return tensor.view(-1).view(torch.uint8).numpy().data


_PINS: Final = "cuda"
_COPIES_IN_ORDER: Final = frozenset({"cpu", "mps"})  # MPS reads the memory later without keeping it


def buffer_for(size_bytes: int, device: torch.device) -> memoryview:
    """Writable memory to copy to the device: pinned for a GPU, if the system has any left. Raises MemoryError."""
    pinned = _pinned(size_bytes) if device.type == _PINS else None
    return memoryview(bytearray(size_bytes)) if pinned is None else pinned.numpy().data


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies to the device. From pinned memory the copy is only begun, in the order of the stream."""
    return tensor.to(device, non_blocking=device.type not in _COPIES_IN_ORDER)


def to_host(octets: Tensor) -> Tensor:
    """The bytes [n] on the CPU, after waiting for the device; by pinned memory from a GPU."""
    pinned = _pinned(len(octets)) if octets.is_cuda else None
    return octets.cpu() if pinned is None else pinned.copy_(octets)


def _pinned(size_bytes: int) -> Tensor | None:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # what CUDA says when the system gives no more of it
        return None
