"""The codec BF16: the elements as bfloat16, little-endian, rounded to nearest, ties to even.

NaN and infinity pass, and what is beyond the largest bfloat16 becomes infinity: this is what the other codecs fall back to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.codecs.blocks import pieces, slice_elements


def encode(values: Tensor, out: Tensor) -> None:
    """`values` [n], float32 or bfloat16; `out` [2 * n] bytes, on the same device."""
    halves = out.view(torch.bfloat16)
    for piece in pieces(len(values), 1, slice_elements(values.device)):
        halves[piece.start : piece.stop].copy_(values[piece.start : piece.stop])


def decode(data: Tensor, out: Tensor) -> None:
    """`data` [2 * n] bytes; `out` [n], float32 or bfloat16, on the same device."""
    halves = data.view(torch.bfloat16)
    for piece in pieces(len(out), 1, slice_elements(out.device)):
        out[piece.start : piece.stop].copy_(halves[piece.start : piece.stop])
