"""The layout of a module's parameters as one vector: where each lies, its chunks, and which of them make a fragment.

Chunks are what is hashed, downloaded and given to a reducer; all replicas of a module cut alike because everything
follows from the names and shapes. A fragment is a run of chunks. So that each fragment has blocks from all depths
(Douillard et al. 2025, arXiv:2501.18512: strided fragments do better than sequential ones), the vector is laid out
fragment by fragment: blocks 0, F, 2F, ..., then 1, F+1, ... The borders are those of the nearest chunks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SMALLEST_CHUNK: Final = 4096
LARGEST_CHUNK: Final = 2**20
CHUNKS_AT_LEAST: Final = 64
"""As many as a module of any use has, so that reducers can be given shares of any proportion."""

_BLOCK: Final = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one parameter in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """A module's layout, counted in elements (float32) or chunks."""

    places: tuple[Place, ...]
    chunk_elements: int
    fragments: tuple[tuple[int, int], ...]
    """First and end chunk of each."""

    @property
    def elements(self) -> int:
        return self.places[-1].stop

    @property
    def chunks(self) -> int:
        return -(-self.elements // self.chunk_elements)

    def range_of(self, first_chunk: int, end_chunk: int) -> slice:
        """The slice of the elements of these chunks; the last chunk of the vector may be shorter than the others."""
        return slice(first_chunk * self.chunk_elements, min(end_chunk * self.chunk_elements, self.elements))


def layout_of(shapes: Mapping[str, tuple[int, ...]], fragments: int) -> Layout:
    """The layout of a module with these parameters.

    Args:
        shapes: of each parameter, by its name in the whole model.
        fragments: how many the manifest asks for; there are no more than chunks.
    """
    names = sorted(shapes, key=lambda name: (_block(name) % fragments, _block(name), name))
    places = []
    start = 0
    for name in names:
        places.append(Place(name, tuple(shapes[name]), start))
        start = places[-1].stop
    chunk = chunk_elements(start)
    chunks = -(-start // chunk)
    count = min(fragments, chunks)
    borders = [round(number * chunks / count) for number in range(count + 1)]
    return Layout(tuple(places), chunk, tuple(itertools.pairwise(borders)))


def chunk_elements(elements: int) -> int:
    """The elements of a chunk: a power of two that gives at least CHUNKS_AT_LEAST chunks, within the limits: hash lists
    stay below 64 KiB up to 10^9 elements.
    """
    wished = max(1, elements // CHUNKS_AT_LEAST)
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, 1 << (wished.bit_length() - 1)))


def _block(name: str) -> int:
    match = _BLOCK.match(name)
    return 0 if match is None else int(match[1])
