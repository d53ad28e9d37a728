"""The codec INT4: blocks of 64 elements, each with a scale, each element four bits. 34 bytes for 64 elements.

The encoding of n elements is ceil(n / 2) bytes of codes, then ceil(n / 64) scales (bfloat16, little-endian). A block of
w elements takes ceil(w / 2) bytes; byte i has the code of element i in its lower half and that of element ceil(w / 2) +
i in its upper half (0 where there is none). A code is a whole number from 0 to 15; an element decodes to (code - 8) *
scale. A scale is its block's element of largest magnitude / -8, so that all sixteen codes are used and this element is
met exactly up to the scale's rounding: it may be negative. The relative error is 0.1 on normal data.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.codecs.blockwise import (
    ROUNDED_ZERO,
    Expect,
    Room,
    Rounding,
    check_encoded,
    check_received,
    extremes,
    in_float32,
    in_slices,
    inverse_of,
    or_cannot_express,
    or_violates,
    pieces,
    scaled,
    slice_elements,
    span_elements,
)
from protocol.interfaces.tensor_spec import INT4_BLOCK, blocks_of

LARGEST_SCALE: Final = float(np.finfo(np.float32).max) / 16
"""So that no code decodes to infinity."""

_HIGHEST_CODE: Final = ROUNDED_ZERO + 15
_EIGHT: Final = torch.int64
"""Eight codes, in whole blocks, are worked on as one number; none of the steps carries from one code into the next."""
_LOWER_HALVES: Final = 0x0F0F0F0F0F0F0F0F
_SIGNS: Final = -0x7F7F7F7F7F7F7F80
"""0x80 in each byte. Adding 0x78 to a code and turning its sign round takes 8 off."""
_SIGNS_LESS_8: Final = 0x7878787878787878


def encode(values: Tensor, out: Tensor, expect: Expect = or_cannot_express) -> None:
    """Writes codes and scales.

    Args:
        values: [n], float32 or bfloat16.
        out: [ceil(n / 2) + 2 * ceil(n / 64)] bytes, on the same device.
        expect: takes whether the codec can express the values.

    Raises:
        StateError: a value is not finite, or near the largest float32; `out` is then undefined.
    """
    elements, device = len(values), values.device
    packed, scales = out[: -(-elements // 2)], torch.empty(blocks_of(elements, INT4_BLOCK), 1, device=device)
    rounding = Rounding(min(elements, slice_elements(device)), INT4_BLOCK, device, offset=8.0)
    span = min(elements, span_elements(device))
    floats = Room(span if values.dtype is not torch.float32 else 0, torch.float32, device)
    codes = Room(span, torch.uint8, device)
    for piece in pieces(elements, INT4_BLOCK, span_elements(device)):
        x = in_float32(values[piece.start : piece.stop].view(-1, piece.width), floats)
        scale, code = scales[piece.first : piece.end], codes.like(x)
        _signed_largest(x, scale)
        scale.div_(-8).copy_(scale.bfloat16())
        for part, factor, result in in_slices(x, inverse_of(scale), code):
            result.copy_(rounding(part, factor).clamp_(max=_HIGHEST_CODE))
        _pack(code, packed[piece.start // 2 : -(-piece.stop // 2)].view(len(x), -1))
    check_encoded(scales, LARGEST_SCALE, "INT4", expect)
    out[len(packed) :].copy_(scales.bfloat16().view(-1).view(torch.uint8))


def decode(data: Tensor, out: Tensor, expect: Expect = or_violates) -> None:
    """Writes (code - 8) * scale, exactly in float32.

    Args:
        data: [ceil(n / 2) + 2 * ceil(n / 64)] bytes.
        out: [n], float32 or bfloat16, on the same device.
        expect: takes whether this is an encoding.

    Raises:
        ProtocolViolation: a scale's magnitude is neither 0 nor from SMALLEST_SCALE to LARGEST_SCALE; `out` is
            untouched.
    """
    elements, device = len(out), out.device
    packed = data[: -(-elements // 2)]
    scales = data[len(packed) :].clone().view(torch.bfloat16).float().view(-1, 1)
    check_received(scales.abs(), LARGEST_SCALE, "INT4", expect)
    codes = Room(min(elements, span_elements(device)), torch.int8, device)
    for piece in pieces(elements, INT4_BLOCK, span_elements(device)):
        target = out[piece.start : piece.stop].view(-1, piece.width)
        code = codes.like(target)
        _unpack(packed[piece.start // 2 : -(-piece.stop // 2)].view(len(code), -1), code)
        scaled(code, scales[piece.first : piece.end], target)


def _signed_largest(x: Tensor, result: Tensor) -> None:
    """Of each row of `x` [blocks, width], into `result` [blocks, 1]: the element of largest magnitude. NaN where there
    is one."""
    lowest = torch.empty_like(result)
    extremes(x, result, lowest)
    torch.where(result < -lowest, lowest, result, out=result)


def _pack(codes: Tensor, out: Tensor) -> None:
    """Writes [blocks, width] uint8 into [blocks, ceil(width / 2)]."""
    if codes.shape[1] == INT4_BLOCK:
        for code, target in in_slices(codes.view(_EIGHT), out.view(_EIGHT)):
            lower, upper = code.chunk(2, 1)
            torch.bitwise_left_shift(upper, 4, out=target).bitwise_or_(lower)
        return
    lower, upper = codes[:, : out.shape[1]], codes[:, out.shape[1] :]
    out.copy_(lower)
    out[:, : upper.shape[1]].add_(upper, alpha=16)


def _unpack(packed: Tensor, out: Tensor) -> None:
    """Writes [blocks, ceil(width / 2)] into [blocks, width] int8: the codes less 8."""
    if out.shape[1] == INT4_BLOCK:
        for target, code in in_slices(out.view(_EIGHT), packed.view(_EIGHT)):
            lower, upper = target.chunk(2, 1)
            lower.copy_(code)
            torch.bitwise_right_shift(code, 4, out=upper)
            target.bitwise_and_(_LOWER_HALVES).add_(_SIGNS_LESS_8).bitwise_xor_(_SIGNS)
        return
    halves = torch.cat((packed.bitwise_and(15), packed.bitwise_right_shift(4)), 1)
    out.copy_(halves[:, : out.shape[1]]).sub_(8)
