"""The codec INT4: blocks of 64 elements, each with a scale, each element four bits. 34 bytes for 64 elements.

The encoding of n elements is ceil(n / 2) bytes of codes, then ceil(n / 64) scales (bfloat16, little-endian). A block of w elements takes ceil(w / 2) bytes; byte
i has the code of element i in its lower half and that of element ceil(w / 2) + i in its upper half (0 where there is none). A code is a whole number from 0
to 15; an element decodes to (code - 8) * scale. A scale is its block's element of largest magnitude / -8, so that all sixteen codes are used and
this element is met exactly up to the scale's rounding: it may be negative. The relative error is 0.1 on normal data.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.codecs.blocks import Room, Rounding, check_encoded, check_received, inverse_of, pieces, slice_elements
from protocol.tensor_spec import INT4_BLOCK, blocks_of

LARGEST_SCALE: Final = float(np.finfo(np.float32).max) / 16
"""So that no code decodes to infinity."""


def encode(values: Tensor, out: Tensor) -> None:
    """Writes codes and scales.

    Args:
        values: [n], float32 or bfloat16.
        out: [ceil(n / 2) + 2 * ceil(n / 64)] bytes, on the same device.

    Raises:
        StateError: a value is not finite, or near the largest float32; `out` is then undefined.
    """
    elements, device = len(values), values.device
    packed, scales = out[: -(-elements // 2)], torch.empty(blocks_of(elements, INT4_BLOCK), 1, device=device)
    size = min(elements, slice_elements(device))
    rounding, codes = Rounding(size, device, offset=8.0), Room(size, torch.uint8, device)
    floats = Room(size if values.dtype is not torch.float32 else 0, torch.float32, device)
    for piece in pieces(elements, INT4_BLOCK, slice_elements(device)):
        x = values[piece.start : piece.stop].view(-1, piece.width)
        if x.dtype is not torch.float32:
            x = floats.like(x).copy_(x)
        scale = scales[piece.first : piece.end]
        _signed_largest(x, scale)
        scale.div_(-8).copy_(scale.bfloat16())
        code = codes.like(x).copy_(rounding(x, inverse_of(scale))).clamp_(max=15)
        _pack(code, packed[piece.start // 2 : -(-piece.stop // 2)].view(len(x), -1))
    check_encoded(scales, LARGEST_SCALE, "INT4")
    out[len(packed) :].copy_(scales.bfloat16().view(-1).view(torch.uint8))


def decode(data: Tensor, out: Tensor) -> None:
    """Writes (code - 8) * scale, exactly in float32.

    Args:
        data: [ceil(n / 2) + 2 * ceil(n / 64)] bytes.
        out: [n], float32 or bfloat16, on the same device.

    Raises:
        ProtocolViolation: a scale's magnitude is neither 0 nor from SMALLEST_SCALE to LARGEST_SCALE; `out` is untouched.
    """
    elements, device = len(out), out.device
    packed = data[: -(-elements // 2)]
    scales = data[len(packed) :].clone().view(torch.bfloat16).float().view(-1, 1)
    check_received(scales, LARGEST_SCALE, "INT4")
    offsets = scales.mul(-8)
    size = min(elements, slice_elements(device))
    halves, numbers = Room(size // 2 + 1, torch.uint8, device), Room(size, torch.float32, device)
    for piece in pieces(elements, INT4_BLOCK, slice_elements(device)):
        part = out[piece.start : piece.stop].view(-1, piece.width)
        code = packed[piece.start // 2 : -(-piece.stop // 2)].view(len(part), -1)
        scale, offset = scales[piece.first : piece.end], offsets[piece.first : piece.end]
        target = part if part.dtype is torch.float32 else numbers.like(part)
        lower, upper = target[:, : code.shape[1]], target[:, code.shape[1] :]
        half = halves.like(code)
        lower.copy_(torch.bitwise_and(code, 15, out=half))
        upper.copy_(torch.bitwise_right_shift(code, 4, out=half)[:, : upper.shape[1]])
        torch.addcmul(offset, target, scale, out=target)
        if target is not part:
            part.copy_(target)


def _signed_largest(x: Tensor, result: Tensor) -> None:
    """Of each row of `x` [blocks, width], into `result` [blocks, 1]: the element of largest magnitude. NaN where there is one."""
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    torch.where(high < -low, low, high, out=result)


def _pack(code: Tensor, out: Tensor) -> None:
    """[blocks, width] into [blocks, ceil(width / 2)]."""
    lower, upper = code[:, : out.shape[1]], code[:, out.shape[1] :]
    if upper.shape[1] == lower.shape[1]:
        torch.add(lower, upper, alpha=16, out=out)
    else:
        out.copy_(lower)
        out[:, : upper.shape[1]].add_(upper, alpha=16)
