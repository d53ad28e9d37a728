"""The codec NONE: the elements as they are, row-major, little-endian.

It stands alone because each codec is a module of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode(values: Tensor, out: Tensor) -> None:
    """Copies `values` [n] into `out`, as many bytes on the same device."""
    out.copy_(values.view(torch.uint8))


def decode(data: Tensor, out: Tensor) -> None:
    """Copies `data` into `out` [n], as many bytes on the same device."""
    out.view(torch.uint8).copy_(data)
