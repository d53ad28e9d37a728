"""The vector of a module, or a part of one, as one array a fragment, which the versions of an anchor share.

A round moves one fragment, so of F fragments each version has one array of its own and F - 1 in common with the version
before; only what is in no version any more is let go of. What belongs to an anchor is never written again. Every piece
of a round and every chunk lies in one fragment, and is had without a copy.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from node.averaging.anchor.layout import Layout
from node.averaging.anchor.spare_arrays import SpareArrays
from swarm.vocabulary.errors import OutOfMemory

Vector = npt.NDArray[np.float32]
StateVectors = tuple["SharedVector", "SharedVector"]
"""Parameters and momentum."""


class SharedVector:
    """Arrays one after the other, read as one vector of float32.

    Args:
        start: the index of the first element, for a part of a module's vector.
    """

    __slots__ = ("__weakref__", "_starts", "arrays")

    def __init__(self, arrays: Sequence[Vector], start: int = 0) -> None:
        self.arrays = tuple(arrays)
        self._starts = tuple(itertools.accumulate((len(array) for array in self.arrays), initial=start))

    def __len__(self) -> int:
        return self._starts[-1] - self._starts[0]

    def __getitem__(self, part: slice) -> Vector:
        """The elements of a part: a view where one array has them, else a copy."""
        pieces = [piece for _, piece in self.pieces(part)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.float32)])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.concatenate(self.arrays).astype(dtype or np.float32, copy=False)

    def pieces(self, part: slice | None = None) -> Iterator[tuple[slice, Vector]]:
        """Views of a part, or of all, one after the other, each of one array; and which elements it has."""
        first, end = self._starts[0], self._starts[-1]
        wanted = slice(None) if part is None else part
        start = first if wanted.start is None else max(first, wanted.start)
        stop = end if wanted.stop is None else min(end, wanted.stop)
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            border = min(self._starts[index + 1], stop)
            offset = self._starts[index]
            yield slice(start, border), self.arrays[index][start - offset : border - offset]
            start, index = border, index + 1

    def copy(self) -> SharedVector:
        """The same numbers in arrays of its own."""
        return SharedVector([array.copy() for array in self.arrays], self._starts[0])

    def replaced(self, place: int, other: SharedVector) -> SharedVector:
        """The vector with the one array of `other` at this place, counted from 0."""
        (array,) = other.arrays
        return SharedVector((*self.arrays[:place], array, *self.arrays[place + 1 :]), self._starts[0])

    def sharing(self, other: SharedVector, places: Container[int]) -> SharedVector:
        """The vector with the arrays of `other`, which is cut alike, at some places, counted from 0."""
        arrays = zip(self.arrays, other.arrays, strict=True)
        return SharedVector(
            [theirs if place in places else own for place, (own, theirs) in enumerate(arrays)], self._starts[0]
        )


def empty_vector(layout: Layout) -> SharedVector:
    """A module's vector, to be written, with an array for each fragment. Raises OutOfMemory."""
    try:
        return SharedVector([_empty(layout.range_of(*fragment)) for fragment in layout.fragments])
    except MemoryError:
        raise OutOfMemory(f"no memory for another state of this module ({layout.elements * 8} bytes)") from None


def empty_part(part: slice, arrays: SpareArrays) -> SharedVector:
    """A part of a module's vector in one array, to be written. Raises OutOfMemory."""
    try:
        return SharedVector([arrays.empty(part.stop - part.start)], part.start)
    except MemoryError:
        raise OutOfMemory(f"no memory for a fragment of this module ({(part.stop - part.start) * 4} bytes)") from None


def cut_vector(layout: Layout, values: Vector | SharedVector) -> SharedVector:
    """A copy of a whole vector, cut into fragments."""
    cut = empty_vector(layout)
    for part, array in cut.pieces():
        array[:] = values[part]
    return cut


def _empty(part: slice) -> Vector:
    return np.empty(part.stop - part.start, np.float32)
