"""numpy's, torch's and the interpreter's views of the same memory."""

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
