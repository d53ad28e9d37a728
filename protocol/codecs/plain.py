"""The codecs NONE and BF16 (round to nearest, ties to even), row-major, little-endian. NaN and infinity pass."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.codecs.blockwise import in_slices


class Unchanged:
    """The codec NONE. All tensors of a call are on one device."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values.view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(data)


class HalfPrecision:
    """The codec BF16. Elements are float32 or bfloat16, on one device in a call."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        for half, value in in_slices(out.view(torch.bfloat16).view(-1, 1), values.view(-1, 1)):
            half.copy_(value)

    def decode(self, data: Tensor, out: Tensor) -> None:
        for value, half in in_slices(out.view(-1, 1), data.view(torch.bfloat16).view(-1, 1)):
            value.copy_(half)
