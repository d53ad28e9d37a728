"""The codec INT8: blocks of 128 elements, each with a scale, each element a signed byte. 33 bytes for 32 elements.

The encoding of n elements is n codes (int8), then ceil(n / 128) scales (float32, little-endian). A block's scale is its largest
magnitude / 127, its codes are value / scale rounded to the nearest whole number, ties to even; an element decodes to
code * scale in float32. So the error of an element is at most half a scale (1/254 of the largest in its block), and on normal data the
relative error of the whole is 6.5e-3 whatever its magnitude. A block whose scale would be below the smallest normal number (its
largest magnitude below 1.5e-36) becomes zeros: dividing by such a scale would overflow.

Everything goes in slices that fit a core's cache: the arithmetic is cheap, the way to memory is not. Slices are large enough that
the calls themselves (about 1 microsecond each) cost little, and just too small for torch to share one among threads: who wants
more than one core encodes several vectors at once. (Threads that wait for each other over so little work, on a machine that
is busy with something else, were measured to be 1000 times slower.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.codecs.memory import Vector, codes_of, floats_of, tensor_of
from protocol.seams import INT8_BLOCK
from swarm.errors import ProtocolViolation, StateError

LARGEST_SCALE: Final = float(np.finfo(np.float32).max) / 128
"""So that no code, -128 included, decodes to infinity."""
LARGEST_VALUE: Final = 127 * LARGEST_SCALE
SMALLEST_SCALE: Final = float(np.finfo(np.float32).tiny)

_SLICE_BLOCKS: Final = 255
"""128 KiB of float32. torch shares work among threads from 32768 elements on (its GRAIN_SIZE), which are 256 blocks."""
_SPAN_BLOCKS: Final = 8 * _SLICE_BLOCKS
"""1 MiB: as much as is encoded with one computation of scales, which are few and cost little but calls."""

_ROUNDING: Final = torch.full((_SLICE_BLOCKS, INT8_BLOCK), 1.5 * 2**23)
"""What is added to a float32 below 2^22 to round it: at this size there are no fractions, and the number stands in the lowest bits, in two's
complement. One step instead of three, and torch's own rounding takes threads from 2048 elements on."""


def encode_into(values: Vector, out: memoryview) -> None:
    """Writes codes and scales.

    Raises:
        StateError: a value is not finite, or beyond LARGEST_VALUE.
    """
    source, codes = tensor_of(values), tensor_of(codes_of(out[: len(values)]))
    scales = torch.empty(-(-len(values) // INT8_BLOCK), 1)
    room = torch.empty(_SLICE_BLOCKS, INT8_BLOCK)
    for first, end, x, code in _pieces(source, codes, _SPAN_BLOCKS):
        _encode_span(x, code, scales[first:end], room)
    if not _in_range(scales.numpy()):
        raise StateError(f"INT8 can express finite values up to {LARGEST_VALUE:.2g} only; this update has others")
    floats_of(out[len(values) :])[:] = scales.numpy()[:, 0]


def decode_into(data: memoryview, out: Vector) -> None:
    """Writes code * scale.

    Raises:
        ProtocolViolation: a scale is neither 0 nor from SMALLEST_SCALE to LARGEST_SCALE.
    """
    scales = _checked_scales(data, len(out))
    for first, end, target, code in _pieces(tensor_of(out), tensor_of(codes_of(data[: len(out)])), _SLICE_BLOCKS):
        target.copy_(code).mul_(scales[first:end])


def add_decoded(data: memoryview, coefficient: float, total: Vector) -> None:
    """Adds code * (coefficient * scale). Errors as `decode_into`."""
    factors = _checked_scales(data, len(total)).mul_(coefficient)
    numbers = torch.empty(_SLICE_BLOCKS, INT8_BLOCK)
    for first, end, target, code in _pieces(tensor_of(total), tensor_of(codes_of(data[: len(total)])), _SLICE_BLOCKS):
        number = _shaped_as(target, numbers).copy_(code)
        torch.addcmul(target, number, factors[first:end], out=target)


def _encode_span(x: Tensor, code: Tensor, scale: Tensor, room: Tensor) -> None:
    """`x` and `code` [blocks, width], `scale` [blocks, 1]; `room` for one slice."""
    lowest = torch.empty_like(scale)
    sizes = [min(_SLICE_BLOCKS, len(x) - first) for first in range(0, len(x), _SLICE_BLOCKS)]
    slices = x.split_with_sizes(sizes)
    for part, high, low in zip(slices, scale.split_with_sizes(sizes), lowest.split_with_sizes(sizes), strict=True):
        torch.amax(part, 1, keepdim=True, out=high)
        torch.amin(part, 1, keepdim=True, out=low)
    torch.maximum(scale, lowest.neg_(), out=scale).div_(127)
    vanishing = scale < SMALLEST_SCALE
    scale.masked_fill_(vanishing, 0.0)
    inverse = scale.reciprocal().masked_fill_(vanishing, 0.0)
    for part, factor, result in zip(slices, inverse.split_with_sizes(sizes), code.split_with_sizes(sizes), strict=True):
        scaled = torch.addcmul(_shaped_as(part, _ROUNDING), part, factor, out=_shaped_as(part, room))
        result.copy_(scaled.view(torch.int32))


def _pieces(vector: Tensor, codes: Tensor, blocks: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """First and end block, and both as [blocks, width]: so many whole blocks at a time, then the shorter last one by itself."""
    whole, rest = divmod(len(vector), INT8_BLOCK)
    split = whole * INT8_BLOCK
    vectors, codings = vector[:split].view(-1, INT8_BLOCK), codes[:split].view(-1, INT8_BLOCK)
    for first in range(0, whole, blocks):
        end = min(first + blocks, whole)
        yield first, end, vectors[first:end], codings[first:end]
    if rest:
        yield whole, whole + 1, vector[split:].view(1, -1), codes[split:].view(1, -1)


def _shaped_as(x: Tensor, room: Tensor) -> Tensor:
    return room if x.shape == room.shape else room[: x.shape[0], : x.shape[1]]


def _checked_scales(data: memoryview, elements: int) -> Tensor:
    """[blocks, 1], copied: in the encoding they may stand at any byte."""
    scales = floats_of(data[elements:]).copy()
    if not _in_range(scales):
        raise ProtocolViolation("an INT8 encoding has a scale that is no number, negative, too large or too small")
    return torch.from_numpy(scales).view(-1, 1)


def _in_range(scales: Vector) -> bool:
    """False also for NaN. Numbers below the smallest normal one are left out because processors need not agree about them."""
    return bool(((scales == 0) | (scales >= SMALLEST_SCALE) & (scales <= LARGEST_SCALE)).all())
