"""The codec BF16: the elements as bfloat16, little-endian, rounded to nearest, ties to even.

NaN and infinity pass, and what is beyond the largest bfloat16 becomes infinity: this is what the other codecs fall back
to.

It stands alone because each codec is a module of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.codecs.blockwise import in_slices


def encode(values: Tensor, out: Tensor) -> None:
    """Writes `values` [n], float32 or bfloat16, into `out` [2 * n] bytes on the same device."""
    for half, value in in_slices(out.view(torch.bfloat16).view(-1, 1), values.view(-1, 1)):
        half.copy_(value)


def decode(data: Tensor, out: Tensor) -> None:
    """Writes `data` [2 * n] bytes into `out` [n], float32 or bfloat16, on the same device."""
    for value, half in in_slices(out.view(-1, 1), data.view(torch.bfloat16).view(-1, 1)):
        value.copy_(half)
