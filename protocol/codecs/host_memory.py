"""Pinned memory of the host, from which a GPU copies at the full speed of its bus and without waiting."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

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
