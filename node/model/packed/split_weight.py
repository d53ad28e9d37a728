"""A float32 matrix in two halves: the upper one is the bfloat16 matrix that products are made with, the lower one the
16 bits that it lacks. So the copy for products costs no memory of its own, and nothing is lost: 4 bytes for each
element, not 6.

It stands alone because who makes products sees the upper half only, and who changes the matrix both.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from node.model.packed.packed_floats import PackedFloats

_HALF: Final = 1 << 15


class SplitWeight(PackedFloats):
    """A float32 matrix in two halves: the nearest bfloat16 matrix, used in products, and the 16 bits that it lacks."""

    dtype = torch.bfloat16

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(tuple(matrix.shape), matrix.device)
        self._matrix = torch.empty(self.shape, dtype=torch.bfloat16, device=matrix.device).requires_grad_()
        self._upper = self._matrix.detach().view(torch.int16).view(-1)
        self._lower = torch.empty(self.numel(), dtype=torch.int16, device=matrix.device)
        self.store(matrix)

    @property
    def storage(self) -> int:
        """Where the memory of the upper half begins."""
        return self._matrix.untyped_storage().data_ptr()

    def fresh(self) -> Tensor:
        """The upper half, a bfloat16 matrix. To autograd it is a leaf."""
        return self._matrix

    def changed(self) -> None:
        """Nothing is to be made anew: both halves change at once."""

    @torch.no_grad()
    def read(self, part: slice) -> Tensor:
        bits = self._upper[part].int().bitwise_left_shift_(16).add_(self._lower[part])
        return bits.view(torch.float32)

    @torch.no_grad()
    def write(self, part: slice, values: Tensor) -> None:
        bits = values.to(self._lower.device, torch.float32).contiguous().view(torch.int32)
        upper = bits.add(_HALF).bitwise_right_shift_(16)
        self._upper[part] = upper.to(torch.int16)
        self._lower[part] = (bits - upper.bitwise_left_shift_(16)).to(torch.int16)
