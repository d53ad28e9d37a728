"""The codec LOW_RANK: a matrix [m, n] as the product of two thin ones (Vogels et al. 2019, "PowerSGD",
arXiv:1905.13727).

The encoding is P [m, rank], then Q [n, rank], row-major bfloat16, little-endian; it decodes to P Q^T. The encoder takes
one step of subspace iteration: P is an orthonormal basis of the columns of M Q', where Q' is what the step before it
found (the warm start) or fixed random numbers, and Q is M^T P. So P Q^T is M projected on P, and never longer than M
but for rounding. With a warm start the basis follows the largest singular vectors of a matrix that changes slowly.

Decoding is exact to the bit on every machine: a product of two bfloat16 is a float32 without rounding, and products are
added one after the other, in the order of the columns. Elements smaller than SMALLEST_ELEMENT are taken for 0, because
products of such numbers could be rounded.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.codecs.blockwise import Room, pieces, slice_elements
from swarm.vocabulary.errors import ProtocolViolation, StateError

LARGEST_ELEMENT: Final = float(np.finfo(np.float32).max) / 4
"""That the decoded matrix may have; in bfloat16 it is finite, too."""
SMALLEST_ELEMENT: Final = 2.0**-63
"""Of P and Q: a product of two such numbers is the smallest normal float32."""


def encode(matrix: Tensor, out: Tensor, rank: int, start: Tensor | None = None) -> Tensor:
    """Writes P and Q.

    Args:
        matrix: [m, n], float32 or bfloat16.
        out: [2 * rank * (m + n)] bytes, on the same device.
        rank: 1 to the smaller of m and n.
        start: [n, rank] float32, what the last encoding of such a matrix returned.

    Returns:
        Q [n, rank] float32, the start of the next one.

    Raises:
        StateError: an element is not finite, or so large that the products are not; `out` is then undefined.
    """
    x = matrix.float()
    if start is None or not bool(start.any()):
        start = first_start(x.shape[1], rank).to(x.device)
    columns = x @ start
    _check_encoded(columns)
    left: Tensor = torch.linalg.qr(columns)[0]
    right = x.t() @ left
    _check_encoded(left, right)
    halves = out.view(torch.bfloat16)
    halves[: left.numel()].view_as(left).copy_(left)
    halves[left.numel() :].view_as(right).copy_(right)
    return right


def first_start(columns: int, rank: int) -> Tensor:
    """Normal random numbers [columns, rank], the same for the same shape."""
    generator = torch.Generator().manual_seed(columns * 65_536 + rank)
    return torch.randn(columns, rank, generator=generator)


def decode(data: Tensor, out: Tensor) -> None:
    """Writes P Q^T.

    Args:
        data: [2 * rank * (m + n)] bytes; the rank follows.
        out: [m, n], float32 or bfloat16, on the same device.

    Raises:
        ProtocolViolation: an element could become larger than LARGEST_ELEMENT, or is no number; `out` is untouched.
    """
    rows, columns = out.shape
    rank = len(data) // (2 * (rows + columns))
    halves = data.clone().view(torch.bfloat16).float()
    halves.masked_fill_(halves.abs() < SMALLEST_ELEMENT, 0.0)
    left, right = halves[: rows * rank].view(rows, rank), halves[rows * rank :].view(columns, rank).t().contiguous()
    largest = left.abs().amax(0).double() @ right.abs().amax(1).double()
    if not bool(largest <= LARGEST_ELEMENT):  # NaN, too
        raise ProtocolViolation("a LOW_RANK encoding has an element that is no number or too large")
    room = Room(min(out.numel(), max(columns, slice_elements(out.device))), torch.float32, out.device)
    for piece in pieces(out.numel(), columns, slice_elements(out.device)):
        part = out[piece.first : piece.end]
        total = room.like(part).zero_()
        for column in range(rank):
            total.addcmul_(left[piece.first : piece.end, column : column + 1], right[column : column + 1])
        part.copy_(total)


def _check_encoded(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not bool((tensor.abs() <= LARGEST_ELEMENT).all()):
            raise StateError(
                "LOW_RANK can express finite values only, and none near the largest float32; this has others"
            )
