"""A matrix in the narrower element type of its products: one copy for all graphs, where a cast in each visit would
leave one in every graph that is kept.

It stands alone because layers use the copy, and whoever changes their parameters says that it is stale.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class Narrow(Protocol):
    """A matrix that products are made with, in place of a float32 one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def storage(self) -> int:
        """Where its memory begins."""
        ...

    def fresh(self) -> Tensor:
        """The matrix as the float32 one is now. To autograd it is a leaf of its own."""
        ...

    def changed(self) -> None:
        """Notes that the float32 one has changed."""
        ...


class NarrowCopy:
    """The copy of a float32 matrix in the type of its products, renewed in place. It invalidates older graphs."""

    def __init__(self, matrix: nn.Parameter, dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._copy = torch.empty_like(matrix, dtype=dtype).requires_grad_()
        self._version: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._copy.dtype

    @property
    def storage(self) -> int:
        """Where its memory begins."""
        return self._copy.untyped_storage().data_ptr()

    def fresh(self) -> Tensor:
        """The copy of the matrix as it is now. To autograd it is a leaf of its own."""
        version = self._matrix._version
        if self._version != version:
            with torch.no_grad():
                self._copy.copy_(self._matrix)
            self._version = version
        return self._copy

    def changed(self) -> None:
        """Notes that the matrix has changed: by a fused optimizer, whose writes torch does not count."""
        self._version = None
