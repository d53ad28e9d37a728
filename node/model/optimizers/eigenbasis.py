"""The eigenvectors of a symmetric matrix, refined by orthogonal iteration in chunks of a few milliseconds.

LAPACK's own routines for it, and those for a QR decomposition, run for a second on a side of 2048 and cannot be
interrupted. Here columns are made orthogonal panel by panel, each twice against all before it (block Gram-Schmidt;
Giraud et al. 2005, https://doi.org/10.1007/s00211-005-0615-4: twice is enough), and only within a panel by LAPACK.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_CHUNK_OPERATIONS: Final = {"cpu": 1e8}
"""Of one chunk at most, by the kind of device: 1 to 5 ms of one core."""
_ELSEWHERE: Final = 5e9
_NARROWEST: Final = 8
"""Columns of a panel: with fewer, each chunk reads the whole matrix for next to nothing."""
_SHIFT: Final = 1e-6
"""Of the largest eigenvalue, added to all: directions that the matrix says nothing of, within float32, keep their
vectors."""
_TOLERANCE: Final = 1e-3
"""How far products of two of the vectors may be from 0 and 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Eigenbasis:
    """Refined eigenvectors, those of the largest eigenvalue first."""

    vectors: Tensor
    """[side, side], orthonormal columns."""
    order: Tensor
    """[side] int64: the column of the basis before that each comes from."""


def refined(statistics: Tensor, basis: Tensor, iterations: int = 1) -> Generator[None, None, Eigenbasis | None]:
    """Refines eigenvectors by so many orthogonal iterations: a product with the matrix, then a QR decomposition (Vyas
    et al. 2024, arXiv:2409.11321, algorithm 4). Yields after each chunk.

    Returns None where there is nothing to go by (a matrix of zeros), or what came out is not orthonormal (a matrix that
    is not finite).

    Args:
        statistics: [side, side] float32, symmetric and positive semidefinite.
        basis: [side, side] orthonormal columns; is not changed, and neither is the other.
    """
    order = torch.arange(len(basis), device=basis.device)
    for _ in range(iterations):
        product, values = torch.empty_like(basis), basis.new_empty(len(basis))
        for columns in _panels(basis):
            torch.mm(statistics, basis[:, columns], out=product[:, columns])
            values[columns] = (basis[:, columns] * product[:, columns]).sum(0)
            yield
        largest = values.max().item()
        if not 0 < largest < math.inf:
            return None
        turn = values.argsort(descending=True, stable=True)
        vectors = torch.empty_like(basis)
        for columns in _panels(basis):
            kept = turn[columns]
            panel = product[:, kept].div_(largest).add_(basis[:, kept], alpha=_SHIFT)
            vectors[:, columns] = yield from _orthonormal(panel, vectors[:, : columns.start])
        order, basis = order[turn], vectors
    error = torch.zeros((), device=basis.device)
    for columns in _panels(basis):
        products = basis.T @ basis[:, columns]
        products.diagonal(-columns.start).sub_(1)
        error = torch.maximum(error, products.abs().max())
        yield
    return Eigenbasis(basis, order) if error.item() <= _TOLERANCE else None


def _orthonormal(panel: Tensor, before: Tensor) -> Generator[None, None, Tensor]:
    """The panel's columns made orthonormal, and orthogonal to those before, which are."""
    for _ in range(2 if before.shape[1] else 1):
        rest = panel - before @ (before.T @ panel) if before.shape[1] else panel
        panel = torch.linalg.qr(rest).Q
        yield
    return panel


def _panels(matrix: Tensor) -> list[slice]:
    """Of columns, so many that a product of the whole matrix with one is a chunk."""
    side = len(matrix)
    width = max(_NARROWEST, int(_CHUNK_OPERATIONS.get(matrix.device.type, _ELSEWHERE) / (4 * side**2)))
    return [slice(start, min(side, start + width)) for start in range(0, side, width)]
