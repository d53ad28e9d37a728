"""The codec INT8: blocks of 128 elements, each with a scale, each element a signed byte. 33 bytes for 32 elements.

The encoding of n elements is n codes (int8), then ceil(n / 128) scales (float32, little-endian). A block's scale is its largest
magnitude / 127, its codes are value / scale rounded to the nearest whole number, ties to even; an element decodes to
code * scale in float32. So the error of an element is at most half a scale (1/254 of the largest in its block), and on normal data the
relative error of the whole is 6.5e-3 whatever its magnitude. Scales are 0, or from SMALLEST_SCALE to LARGEST_SCALE.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from protocol.codecs.blocks import (
    Room,
    Rounding,
    check_encoded,
    check_received,
    inverse_of,
    pieces,
    slice_elements,
    span_elements,
)
from protocol.tensor_spec import BLOCK, blocks_of
from swarm.errors import ProtocolViolation

LARGEST_SCALE: Final = torch.finfo(torch.bfloat16).max / 128
"""So that no code, -128 included, decodes to infinity, in bfloat16 neither."""
LARGEST_VALUE: Final = 127 * LARGEST_SCALE


def encode(values: Tensor, out: Tensor) -> None:
    """Writes codes and scales.

    Args:
        values: [n], float32 or bfloat16.
        out: [n + 4 * ceil(n / 128)] bytes, on the same device.

    Raises:
        StateError: a value is not finite, or beyond LARGEST_VALUE; `out` is then undefined.
    """
    elements, device = len(values), values.device
    codes = out[:elements].view(torch.int8)
    scales = torch.empty(blocks_of(elements, BLOCK), 1, device=device)
    span = min(elements, span_elements(device))
    floats = Room(span if values.dtype is not torch.float32 else 0, torch.float32, device)
    rounding = Rounding(min(elements, slice_elements(device)), device)
    for piece in pieces(elements, BLOCK, span_elements(device)):
        x = values[piece.start : piece.stop].view(-1, piece.width)
        if x.dtype is not torch.float32:
            x = floats.like(x).copy_(x)
        code = codes[piece.start : piece.stop].view(-1, piece.width)
        _encode_span(x, code, scales[piece.first : piece.end], rounding)
    check_encoded(scales, LARGEST_SCALE, "INT8")
    out[elements:].copy_(scales.view(-1).view(torch.uint8))


def _encode_span(x: Tensor, code: Tensor, scale: Tensor, rounding: Rounding) -> None:
    """`x` and `code` [blocks, width], `scale` [blocks, 1]."""
    lowest = torch.empty_like(scale)
    rows = max(1, slice_elements(x.device) // x.shape[1])
    sizes = [min(rows, len(x) - first) for first in range(0, len(x), rows)]
    slices = x.split_with_sizes(sizes)
    for part, high, low in zip(slices, scale.split_with_sizes(sizes), lowest.split_with_sizes(sizes), strict=True):
        torch.amax(part, 1, keepdim=True, out=high)
        torch.amin(part, 1, keepdim=True, out=low)
    torch.maximum(scale, lowest.neg_(), out=scale).div_(127)
    inverse = inverse_of(scale)
    for part, factor, result in zip(slices, inverse.split_with_sizes(sizes), code.split_with_sizes(sizes), strict=True):
        result.copy_(rounding(part, factor))


def decode(data: Tensor, out: Tensor) -> None:
    """Writes code * scale.

    Args:
        data: [n + 4 * ceil(n / 128)] bytes.
        out: [n], float32 or bfloat16, on the same device.

    Raises:
        ProtocolViolation: a scale is neither 0 nor from SMALLEST_SCALE to LARGEST_SCALE; `out` is untouched.
    """
    scales, codes = _checked_scales(data, len(out)), data[: len(out)].view(torch.int8)
    numbers = Room(min(len(out), slice_elements(out.device)), torch.float32, out.device)
    for piece in pieces(len(out), BLOCK, slice_elements(out.device)):
        target = out[piece.start : piece.stop].view(-1, piece.width)
        code, scale = codes[piece.start : piece.stop].view(-1, piece.width), scales[piece.first : piece.end]
        if target.dtype is torch.float32:
            target.copy_(code).mul_(scale)
        else:
            target.copy_(numbers.like(code).copy_(code).mul_(scale))


def _checked_scales(data: Tensor, elements: int) -> Tensor:
    """[blocks, 1], copied: in the encoding they may stand at any byte."""
    scales = data[elements:].clone().view(torch.float32).view(-1, 1)
    if bool((scales < 0).any()):
        raise ProtocolViolation("an INT8 encoding has a scale that is negative")
    check_received(scales, LARGEST_SCALE, "INT8")
    return scales
