"""What the blockwise codecs (INT8, FP8, INT4) share: cutting a vector into blocks, and the bounds of scales.

Everything goes in slices that fit a core's cache: the arithmetic is cheap, the way to memory is not. Slices are large
enough that the calls themselves (about 1 microsecond each) cost little, and just too small for torch to share one among
threads: who wants more than one core encodes several vectors at once. (Threads that wait for each other over so little
work, on a machine that is busy with something else, were measured to be 1000 times slower.) A GPU takes everything in
one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from swarm.vocabulary.errors import ProtocolViolation, StateError

SMALLEST_SCALE: Final = float(np.finfo(np.float32).tiny)
"""Numbers below the smallest normal one are left out because processors need not agree about them. A block whose scale
would be smaller becomes zeros: dividing by such a scale would overflow."""

SLICE_ELEMENTS: Final = 255 * 128
"""128 KiB of float32. torch shares work among threads from 32768 elements on (its GRAIN_SIZE)."""
SLICES_OF_ONE_THREAD: Final = 4
"""Are taken at once where there is one thread, and nobody to share with: fewer calls. Half a MiB, and as much scratch
memory, still fit a core's cache."""
SPAN_ELEMENTS: Final = 24 * SLICE_ELEMENTS
"""3 MiB. A span is encoded with one computation of scales, which are few and cost little but calls."""

_ROUNDING: Final = 1.5 * 2.0**23
"""What is added to a float32 below 2^22 to round it, ties to even: at this size there are no fractions, and the number
stands in the lowest bits, in two's complement. One step instead of three, and torch's own rounding takes threads from
2048 elements on."""
ROUNDED_ZERO: Final = 0x4B400000
"""Its bits."""


Expect = Callable[[Tensor, str], None]
"""Takes a bool of the device that must hold, and what is at fault where it does not. Looking at it at once waits for
the device; who collects such bools and looks at all of them later, with the result, waits once."""


def or_cannot_express(holds: Tensor, fault: str) -> None:
    """Raises StateError unless it holds."""
    if not bool(holds):
        raise StateError(fault)


def or_violates(holds: Tensor, fault: str) -> None:
    """Raises ProtocolViolation unless it holds."""
    if not bool(holds):
        raise ProtocolViolation(fault)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of blocks; only the last one of a vector may be a single shorter one."""

    first: int
    end: int
    """Of its blocks."""
    start: int
    stop: int
    """Of its elements."""

    @property
    def width(self) -> int:
        """The width of its blocks, in elements."""
        return (self.stop - self.start) // (self.end - self.first)


def pieces(elements: int, width: int, at_once: int) -> Iterator[Piece]:
    """Cuts a vector into runs of whole blocks of `width` elements, as many at a time as `at_once` elements hold; then
    the shorter last one by itself.
    """
    whole, rest = divmod(elements, width)
    step = max(1, at_once // width)
    for first in range(0, whole, step):
        end = min(first + step, whole)
        yield Piece(first, end, first * width, end * width)
    if rest:
        yield Piece(whole, whole + 1, whole * width, elements)


def slice_elements(device: torch.device) -> int:
    """The number of elements that are computed on at once, so that a core's cache holds them."""
    if device.type != "cpu":
        return 2**62
    return SLICE_ELEMENTS * (1 if torch.get_num_threads() > 1 else SLICES_OF_ONE_THREAD)


def span_elements(device: torch.device) -> int:
    """The number of elements whose scales are computed at once."""
    return SPAN_ELEMENTS if device.type == "cpu" else 2**62


def in_slices(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts matrices with equally many rows into slices of rows, as many at a time as fit a core's cache in the first.

    They are cut up by one call each: one for every slice takes as long as arithmetic on 10 KiB.
    """
    count, width = matrices[0].shape
    rows = max(1, slice_elements(matrices[0].device) // width)
    sizes = [min(rows, count - first) for first in range(0, count, rows)]
    return zip(*(matrix.split_with_sizes(sizes) for matrix in matrices), strict=True)


class Room:
    """Scratch memory for slices, taken once for a whole vector."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(elements, dtype=dtype, device=device)
        self._last = self._flat

    def like(self, x: Tensor) -> Tensor:
        """The scratch memory, in the shape of `x`."""
        if self._last.shape != x.shape:
            self._last = self._flat[: x.numel()].view(x.shape)
        return self._last


class Rounding:
    """Rounds `x * factor` to whole numbers, ties to even; their magnitude must be below 2^22."""

    def __init__(self, elements: int, width: int, device: torch.device, offset: float = 0.0) -> None:
        self._constant = torch.full((1, width), _ROUNDING + offset, device=device)
        self._room = Room(elements, torch.float32, device)
        self._row = self._sums = self._bits = torch.empty(0)

    def __call__(self, x: Tensor, factor: Tensor) -> Tensor:
        """[blocks, width] int32: ROUNDED_ZERO, the offset and the number; valid until the next call."""
        if self._sums.shape != x.shape:
            self._row, self._sums = self._constant[:, : x.shape[1]], self._room.like(x)
            self._bits = self._sums.view(torch.int32)
        torch.addcmul(self._row, x, factor, out=self._sums)
        return self._bits


def in_float32(x: Tensor, room: Room) -> Tensor:
    """`x` itself when it is float32, else its copy as float32 in `room`."""
    if x.dtype is torch.float32:
        return x
    result = room.like(x)
    for target, part in in_slices(result, x):
        target.copy_(part)
    return result


def extremes(x: Tensor, highest: Tensor, lowest: Tensor) -> None:
    """The largest and the smallest element of each row of `x` [blocks, width], into two [blocks, 1]; NaN where there is
    one. (Twice as fast as magnitudes, and three times as fast as `torch.aminmax`.)"""
    for part, high, low in in_slices(x, highest, lowest):
        torch.amax(part, 1, keepdim=True, out=high)
        torch.amin(part, 1, keepdim=True, out=low)


def largest_magnitudes(x: Tensor, result: Tensor) -> Tensor:
    """Writes the largest magnitude of each row of `x` [blocks, width] into `result` [blocks, 1]; NaN where there is
    one.
    """
    lowest = torch.empty_like(result)
    extremes(x, result, lowest)
    return torch.maximum(result, lowest.neg_(), out=result)


def scaled(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes code * scale, each rounded once to float32.

    Args:
        codes: [blocks, width] int8.
        scales: [blocks, 1] float32.
        out: [blocks, width], float32 or bfloat16.
    """
    if out.dtype is torch.float32:
        for target, code, scale in in_slices(out, codes, scales):
            target.copy_(code).mul_(scale)
        return
    numbers = Room(min(out.numel(), slice_elements(out.device)), torch.float32, out.device)
    for target, code, scale in in_slices(out, codes, scales):
        target.copy_(numbers.like(code).copy_(code).mul_(scale))


def inverse_of(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale vanishes; those are set to 0."""
    sizes = scale.abs()
    # As nearly always, and what follows takes three times as long. To look at it a device would have to be waited for.
    if scale.is_cpu and float(sizes.amin()) >= SMALLEST_SCALE:
        return scale.reciprocal()
    vanishing = sizes < SMALLEST_SCALE
    scale.masked_fill_(vanishing, 0.0)
    return scale.reciprocal().masked_fill_(vanishing, 0.0)


def check_encoded(scales: Tensor, largest: float, codec: str, expect: Expect = or_cannot_express) -> None:
    """Checks encoded scales: expects that no value was not finite, or larger than the codec can express. The scales
    have none that vanish.
    """
    holds = (scales.abs() <= largest).all()
    if scales.is_cpu and bool(holds):
        return
    expect(holds, f"{codec} can express finite values only, and none near the largest float32; this has others")


def check_received(scales: Tensor, largest: float, codec: str, expect: Expect = or_violates) -> None:
    """Checks received scales: expects that each is 0, or from SMALLEST_SCALE to `largest`."""
    sizes = scales.masked_fill(scales == 0, SMALLEST_SCALE)
    allowed = sizes.clamp(SMALLEST_SCALE, largest)  # NaN is equal to nothing
    if scales.is_cpu and torch.equal(sizes, allowed):
        return
    fault = f"an {codec} encoding has a scale that is no number, negative, too large or too small"
    expect((sizes == allowed).all(), fault)
