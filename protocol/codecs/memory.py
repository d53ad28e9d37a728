"""numpy's and torch's views of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Vector = npt.NDArray[np.float32]
"""Contiguous, one-dimensional."""


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """A tensor over the array's memory. torch knows no memory that may only be read: that is copied. (What links bring is writable.)"""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def floats_of(data: memoryview) -> Vector:
    """The bytes as little-endian float32, not copied."""
    return np.frombuffer(data, dtype="<f4")


def codes_of(data: memoryview) -> npt.NDArray[np.int8]:
    """The bytes as signed ones, not copied."""
    return np.frombuffer(data, dtype=np.int8)
