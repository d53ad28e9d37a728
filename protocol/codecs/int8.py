"""The codec INT8: blocks of 128 elements, each with a scale, each element a signed byte. 33 bytes for 32 elements.

The encoding of n elements is n codes (int8), then ceil(n / 128) scales (float32, little-endian). A block's scale is its
largest magnitude / 127, its codes are value / scale rounded to the nearest whole number, ties to even; an element
decodes to code * scale in float32. So the error of an element is at most half a scale (1/254 of the largest in its
block), and on normal data the relative error of the whole is 6.5e-3 whatever its magnitude. Scales are 0, or from
SMALLEST_SCALE to LARGEST_SCALE.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from protocol.codecs.blockwise import (
    Expect,
    Room,
    Rounding,
    check_encoded,
    check_received,
    in_float32,
    in_slices,
    inverse_of,
    largest_magnitudes,
    or_cannot_express,
    or_violates,
    pieces,
    scaled,
    slice_elements,
    span_elements,
)
from protocol.interfaces.tensor_spec import BLOCK, blocks_of

LARGEST_SCALE: Final = torch.finfo(torch.bfloat16).max / 128
"""So that no code, -128 included, decodes to infinity, in bfloat16 neither."""
LARGEST_VALUE: Final = 127 * LARGEST_SCALE


def encode(values: Tensor, out: Tensor, expect: Expect = or_cannot_express) -> None:
    """Writes codes and scales.

    Args:
        values: [n], float32 or bfloat16.
        out: [n + 4 * ceil(n / 128)] bytes, on the same device.
        expect: takes whether the codec can express the values.

    Raises:
        StateError: a value is not finite, or beyond LARGEST_VALUE; `out` is then undefined.
    """
    elements, device = len(values), values.device
    codes = out[:elements].view(torch.int8)
    # A GPU divides by a number of the host by multiplying with its inverse, which may be off by one bit.
    divisor = torch.full((), 127.0, device=device)
    scales = torch.empty(blocks_of(elements, BLOCK), 1, device=device)
    span = min(elements, span_elements(device))
    floats = Room(span if values.dtype is not torch.float32 else 0, torch.float32, device)
    rounding = Rounding(min(elements, slice_elements(device)), BLOCK, device)
    for piece in pieces(elements, BLOCK, span_elements(device)):
        x = in_float32(values[piece.start : piece.stop].view(-1, piece.width), floats)
        scale, code = scales[piece.first : piece.end], codes[piece.start : piece.stop].view(-1, piece.width)
        largest_magnitudes(x, scale).div_(divisor)
        for part, factor, result in in_slices(x, inverse_of(scale), code):
            result.copy_(rounding(part, factor))
    check_encoded(scales, LARGEST_SCALE, "INT8", expect)
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
    codes, scales = data[: len(out)].view(torch.int8), data[len(out) :].clone().view(torch.float32).view(-1, 1)
    check_received(scales, LARGEST_SCALE, "INT8", expect)
    for piece in pieces(len(out), BLOCK, len(out)):
        target = out[piece.start : piece.stop].view(-1, piece.width)
        scaled(codes[piece.start : piece.stop].view(-1, piece.width), scales[piece.first : piece.end], target)
