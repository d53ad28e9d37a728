"""A module's parameters as one vector with an array per fragment, so that anchors can share arrays.

Its layout depends only on names and shapes. Chunks are hashed and sent as a whole. Each round averages one fragment.
Fragments are strided: blocks 0, F, 2F, ..., then 1, F+1, ... (Douillard et al. 2025, arXiv:2501.18512).
"""

import bisect
import itertools
import math
import re
import weakref
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from swarm.vocabulary.errors import OutOfMemory

CHUNKS_AT_LEAST: Final = 64  # Chunks per module that `chunk_elements` aims at, so that shards can have any proportion

_BLOCK: Final = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of a module's parameters, chunks and fragments in one float32 vector."""

    spans: tuple[ParameterSpan, ...]
    chunk_elements: int
    fragments: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return self.spans[-1].stop

    @property
    def chunks(self) -> int:
        return -(-self.elements // self.chunk_elements)

    def range_of(self, first_chunk: int, end_chunk: int) -> slice:
        return slice(first_chunk * self.chunk_elements, min(end_chunk * self.chunk_elements, self.elements))


def layout_of(shapes: Mapping[str, tuple[int, ...]], fragments: int) -> Layout:
    """Lays out parameters of these shapes as one vector with at most `fragments` fragments."""
    names = sorted(shapes, key=lambda name: (_block(name) % fragments, _block(name), name))  # by fragment, then depth
    spans = []
    start = 0
    for name in names:
        spans.append(ParameterSpan(name, tuple(shapes[name]), start))
        start = spans[-1].stop
    chunk = chunk_elements(start)
    chunks = -(-start // chunk)
    count = min(fragments, chunks)  # a small module may have fewer chunks than fragments
    borders = [round(number * chunks / count) for number in range(count + 1)]
    return Layout(tuple(spans), chunk, tuple(itertools.pairwise(borders)))


def chunk_elements(elements: int) -> int:
    """Returns the elements per chunk: a power of two within limits, for at least CHUNKS_AT_LEAST chunks if possible."""
    wished = max(1, elements // CHUNKS_AT_LEAST)
    return max(4096, min(2**20, 1 << (wished.bit_length() - 1)))


def _block(name: str) -> int:
    match = _BLOCK.match(name)
    return 0 if match is None else int(match[1])


KEPT: Final = 2
LARGEST_KEPT_BYTES: Final = 64 * 1024 * 1024  # Largest block kept for reuse. Larger ones return to the system.


class SpareArrays:
    """Pool that reuses the memory of fragment-sized arrays without a view left, because zeroing 80 MB is slow."""

    def __init__(self, elements: int) -> None:
        self._bytes = elements * np.dtype(np.float32).itemsize
        self._spare: deque[bytearray] = deque(maxlen=KEPT)

    def empty(self, elements: int) -> npt.NDArray[np.float32]:
        """Returns an array of this length with undefined values, reused if possible. Raises MemoryError."""
        if self._bytes > LARGEST_KEPT_BYTES:
            return np.empty(elements, np.float32)
        try:
            block = self._spare.pop()
        except IndexError:
            block = bytearray(self._bytes)
        array = np.frombuffer(block, np.float32, elements)
        # The block returns to the pool when the array and all its views are gone.
        weakref.finalize(array, self._spare.append, block).atexit = False
        return array


Vector = npt.NDArray[np.float32]
StateVectors = tuple["SharedVector", "SharedVector"]


class SharedVector:
    """Consecutive arrays that read like one float32 vector, whose first element has index `start`."""

    __slots__ = ("__weakref__", "_starts", "arrays")

    def __init__(self, arrays: Sequence[Vector], start: int = 0) -> None:
        self.arrays = tuple(arrays)
        self._starts = tuple(itertools.accumulate((len(array) for array in self.arrays), initial=start))

    def __len__(self) -> int:
        return self._starts[-1] - self._starts[0]

    def __getitem__(self, part: slice) -> Vector:
        """Returns the elements of a slice: a view if all of them are in one array, else a copy."""
        pieces = [piece for _, piece in self.pieces(part)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.float32)])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.concatenate(self.arrays).astype(dtype or np.float32, copy=False)

    def pieces(self, part: slice | None = None) -> Iterator[tuple[slice, Vector]]:
        """Yields, for each array in `part` (None: all), the slice of the vector that it covers and a view of it."""
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

    def copy(self) -> "SharedVector":
        return SharedVector([array.copy() for array in self.arrays], self._starts[0])

    def replaced(self, place: int, other: "SharedVector") -> "SharedVector":
        (array,) = other.arrays
        return SharedVector((*self.arrays[:place], array, *self.arrays[place + 1 :]), self._starts[0])

    def sharing(self, other: "SharedVector", places: Container[int]) -> "SharedVector":
        arrays = zip(self.arrays, other.arrays, strict=True)
        return SharedVector([new if at in places else own for at, (own, new) in enumerate(arrays)], self._starts[0])


def empty_vector(layout: Layout) -> SharedVector:
    """Allocates a vector for all parameters of a module, with undefined values. Raises OutOfMemory."""
    parts = [layout.range_of(*fragment) for fragment in layout.fragments]
    try:
        return SharedVector([np.empty(part.stop - part.start, np.float32) for part in parts])
    except MemoryError:
        raise OutOfMemory(f"not enough memory for another state of this module ({layout.elements * 8} bytes)") from None


def empty_part(part: slice, arrays: SpareArrays) -> SharedVector:
    try:
        return SharedVector([arrays.empty(part.stop - part.start)], part.start)
    except MemoryError:
        raise OutOfMemory(f"not enough memory for a fragment ({(part.stop - part.start) * 4} bytes)") from None


def cut_vector(layout: Layout, values: Vector | SharedVector) -> SharedVector:
    cut = empty_vector(layout)
    for part, array in cut.pieces():
        array[:] = values[part]
    return cut


STRETCH: Final = 2**15  # Elements per operation, small enough that five operands fit in a 1 MiB cache


def stretches(length: int) -> Iterator[slice]:
    return (slice(start, min(start + STRETCH, length)) for start in range(0, length, STRETCH))


def squares(values: Vector) -> float:
    """Returns the sum of the squared elements. Not finite if an element is not finite, or on overflow."""
    with np.errstate(all="ignore"):  # the sum shows non-finite elements
        return sum(float(np.dot(values[part], values[part])) for part in stretches(len(values)))


def squared_distance(left: Vector, right: Vector) -> float:
    room = np.empty(min(STRETCH, len(left)), np.float32)
    total = 0.0
    with np.errstate(all="ignore"):
        for part in stretches(len(left)):
            difference = np.subtract(left[part], right[part], out=room[: part.stop - part.start])
            total += float(np.dot(difference, difference))
    return total


def add_scaled(values: Vector, factor: float, total: Vector) -> None:
    """Adds `factor` * `values` to `total`, and rounds to float32 after each of the two operations."""
    scale = np.float32(factor)
    room = np.empty(min(STRETCH, len(total)), np.float32)
    for part in stretches(len(total)):
        scaled = np.multiply(values[part], scale, out=room[: part.stop - part.start])
        np.add(total[part], scaled, out=total[part])
