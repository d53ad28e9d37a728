"""The codec FP8: blocks of 128 elements, each with a scale, each element a float of 8 bits. 33 bytes for 32 elements.

The encoding of n elements is n codes, then ceil(n / 128) scales (float32, little-endian). A code is e4m3: a sign, four
bits of exponent with bias 7, three of mantissa (OCP 8-bit Floating Point Specification 1.0, without its NaN: 0x7f and
0xff decode to 480 and -480, which no encoder writes). A block's scale is its largest magnitude / 448; an element
decodes to code * scale. The relative error of an element is at most 1/16 down to 1/28672 of the largest in its block:
worse than INT8 where a block's elements are alike, better where one of them is far larger than the rest.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.codecs.blockwise import (
    Expect,
    Room,
    check_encoded,
    check_received,
    in_float32,
    in_slices,
    inverse_of,
    largest_magnitudes,
    or_cannot_express,
    or_violates,
    pieces,
    slice_elements,
    span_elements,
)
from protocol.interfaces.tensor_spec import BLOCK, blocks_of

LARGEST_CODE: Final = 448.0
LARGEST_SCALE: Final = float(np.finfo(np.float32).max) / 512
"""So that no code decodes to infinity."""

_SEVEN_PLACES: Final = 2**7
"""A shift to the left, which torch has only in a slower way."""
_SIGN_BELOW_EXPONENT: Final = -0x4001
"""All bits of an int16 but the 14th."""
_EXPONENT_GAP: Final = 256.0
"""An e4m3 in the place of a float16's upper bits is so many times too small: their biases are 7 and 15."""


def encode(values: Tensor, out: Tensor, expect: Expect = or_cannot_express) -> None:
    """Writes codes and scales.

    Args:
        values: [n], float32 or bfloat16.
        out: [n + 4 * ceil(n / 128)] bytes, on the same device.
        expect: takes whether the codec can express the values.

    Raises:
        StateError: a value is not finite, or near the largest float32; `out` is then undefined.
    """
    elements, device = len(values), values.device
    codes = out[:elements].view(torch.float8_e4m3fn)
    scales = torch.empty(blocks_of(elements, BLOCK), 1, device=device)
    span = min(elements, span_elements(device))
    floats = Room(span if values.dtype is not torch.float32 else 0, torch.float32, device)
    room = Room(min(elements, slice_elements(device)), torch.float32, device)
    for piece in pieces(elements, BLOCK, span_elements(device)):
        x = in_float32(values[piece.start : piece.stop].view(-1, piece.width), floats)
        scale, code = scales[piece.first : piece.end], codes[piece.start : piece.stop].view(-1, piece.width)
        largest_magnitudes(x, scale).div_(LARGEST_CODE)
        for part, factor, result in in_slices(x, inverse_of(scale), code):
            result.copy_(torch.mul(part, factor, out=room.like(part)).clamp_(-LARGEST_CODE, LARGEST_CODE))
    check_encoded(scales, LARGEST_SCALE, "FP8", expect)
    out[elements:].copy_(scales.view(-1).view(torch.uint8))


def decode(data: Tensor, out: Tensor, expect: Expect = or_violates) -> None:
    """Writes code * scale.

    Args:
        data: [n + 4 * ceil(n / 128)] bytes.
        out: [n], float32 or bfloat16, on the same device.
        expect: takes whether this is an encoding.

    Raises:
        ProtocolViolation: a scale is neither 0 nor from SMALLEST_SCALE to LARGEST_SCALE; `out` is untouched.
    """
    elements, device = len(out), out.device
    scales = data[elements:].clone().view(torch.float32).view(-1, 1)
    check_received(scales, LARGEST_SCALE, "FP8", expect)
    factors = scales.mul_(_EXPONENT_GAP)
    codes = data[:elements].view(torch.int8)
    size = min(elements, slice_elements(device))
    halves, numbers = Room(size, torch.int16, device), Room(size, torch.float32, device)
    for piece in pieces(elements, BLOCK, elements):
        targets = out[piece.start : piece.stop].view(-1, piece.width)
        coded = codes[piece.start : piece.stop].view(-1, piece.width)
        for target, code, factor in in_slices(targets, coded, factors[piece.first : piece.end]):
            bits = halves.like(code).copy_(code).mul_(_SEVEN_PLACES).bitwise_and_(_SIGN_BELOW_EXPONENT)
            number = target if target.dtype is torch.float32 else numbers.like(code)
            number.copy_(bits.view(torch.float16)).mul_(factor)
            if number is not target:
                target.copy_(number)
