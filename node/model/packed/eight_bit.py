"""Moments in 8 bits: blockwise quantisation with a dynamic map (Dettmers et al. 2021, arXiv:2110.02861, sections 2.1
and 2.2), by torch's own operators, so that it is the same on every device.

A block is 256 elements in a row (2048 in the paper, 256 in bitsandbytes today). It is divided by its largest element,
and each quotient becomes the number of the nearest of 256 values, which lie close to 0 as densely, in proportion, as
close to 1. Two things differ from the paper:

* The scale is the largest element with its sign, so that this one is always kept exactly: to unpack and pack again
  changes nothing, and what a checkpoint holds as float32 is gone on from to the bit.
* A variance above 0 never becomes 0 (Li et al. 2023, arXiv:2309.01507, section 4.1): an element whose gradients are
  thousands of times smaller than its block's largest would else be moved by mean / epsilon, which is thousands of
  steps at once. Rounded up, it is moved too little.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from node.model.packed.packed_floats import PackedFloats

BLOCK: Final = 256
"""Elements that share a scale."""
_DECADES: Final = 7
_SCALE_BYTES: Final = 4


class EightBit(PackedFloats):
    """A float32 tensor in 8 bits an element and a float32 scale a block, initially 0. Unsigned values stay above 0."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, is_signed: bool) -> None:
        super().__init__(shape, device)
        blocks = -(-self.numel() // BLOCK)
        self._codes = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(blocks, 1, device=device)
        self._values, self._middles = _map_on(device, is_signed)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    @torch.no_grad()
    def read(self, part: slice) -> Tensor:
        blocks = _blocks_of(part)
        codes = self._codes[blocks]
        values = self._values.index_select(0, codes.view(-1).int()).view_as(codes)
        return values.mul_(self._scales[blocks]).view(-1)[: part.stop - part.start]

    @torch.no_grad()
    def write(self, part: slice, values: Tensor) -> None:
        blocks = _blocks_of(part)
        values = values.to(self._codes.device, torch.float32)
        tiles = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        scales = tiles.gather(1, tiles.abs().argmax(1, keepdim=True))
        quotients = tiles / torch.where(scales == 0, 1.0, scales)
        self._codes[blocks] = torch.bucketize(quotients, self._middles, out_int32=True).to(torch.uint8)
        self._scales[blocks] = scales


def eight_bit_bytes(elements: int) -> int:
    """The bytes of so many elements in one tensor."""
    return -(-elements // BLOCK) * (BLOCK + _SCALE_BYTES)


def _blocks_of(part: slice) -> slice:
    assert part.start % BLOCK == 0, "parts begin where a block does"
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


@functools.cache
def dynamic_map(*, is_signed: bool) -> tuple[float, ...]:
    """The 256 ascending values of the paper, laid out as bitsandbytes' `create_dynamic_map` does."""
    positive: list[float] = []
    for decade in range(_DECADES):
        steps = 2**decade if is_signed else 2 ** (decade + 1)
        size = 10.0 ** (decade - _DECADES + 1)
        positive += [size * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    if not is_signed:
        return (10.0**-_DECADES, *positive, 1.0)
    return (*(-value for value in reversed(positive)), 0.0, *positive, 1.0)


@functools.lru_cache(maxsize=32)
def _map_on(device: torch.device, is_signed: bool) -> tuple[Tensor, Tensor]:
    """The values, and the 255 middles between two of them."""
    values = torch.tensor(dynamic_map(is_signed=is_signed), dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2
    return values.float().to(device), middles.float().to(device)
