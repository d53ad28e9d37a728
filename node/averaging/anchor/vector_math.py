"""Arithmetic on long float32 vectors, in stretches short enough to stay in a core's cache.

numpy does one operation at a time. On a vector of 200 MB each of them would read it from memory and write it back; on a
stretch of 128 KiB only the first and the last do. It also lets go of the interpreter inside each operation, and so does
BLAS.

It stands alone because snapshots, reducers, outer step and audits share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from node.averaging.anchor.shared_vector import Vector

STRETCH: Final = 2**15
"""Elements. Five vectors of this length fit into 1 MiB."""


def stretches(length: int) -> Iterator[slice]:
    """Consecutive slices that cover 0 to `length`."""
    return (slice(start, min(start + STRETCH, length)) for start in range(0, length, STRETCH))


def squares(values: Vector) -> float:
    """The sum of squares, in float64 over stretches of float32. Not finite exactly when an element is not, or is beyond
    1e19."""
    with np.errstate(all="ignore"):  # what is not finite shows in the sum
        return sum(float(np.dot(values[part], values[part])) for part in stretches(len(values)))


def squares_of_difference(left: Vector, right: Vector) -> float:
    """The sum of squares of `left` - `right`, as `squares`."""
    room = np.empty(min(STRETCH, len(left)), np.float32)
    total = 0.0
    with np.errstate(all="ignore"):
        for part in stretches(len(left)):
            difference = np.subtract(left[part], right[part], out=room[: part.stop - part.start])
            total += float(np.dot(difference, difference))
    return total


def add_scaled(values: Vector, factor: float, total: Vector) -> None:
    """Adds `factor` * `values` to `total`, rounded after each of the two."""
    scale = np.float32(factor)
    room = np.empty(min(STRETCH, len(total)), np.float32)
    for part in stretches(len(total)):
        scaled = np.multiply(values[part], scale, out=room[: part.stop - part.start])
        np.add(total[part], scaled, out=total[part])
