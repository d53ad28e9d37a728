"""Layout of a module's parameters as one vector, cut into chunks and fragments by names and shapes alone.

Fragments are strided: blocks 0, F, 2F, ..., then 1, F+1, ... (Douillard et al. 2025, arXiv:2501.18512).
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
"""Chunks per module that `chunk_elements` aims at, so that shards can have any proportion."""

_BLOCK: Final = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Place:
    """Position of one parameter in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """A module's layout in elements (float32) and chunks."""

    places: tuple[Place, ...]
    chunk_elements: int
    fragments: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return self.places[-1].stop

    @property
    def chunks(self) -> int:
        return -(-self.elements // self.chunk_elements)

    def range_of(self, first_chunk: int, end_chunk: int) -> slice:
        return slice(first_chunk * self.chunk_elements, min(end_chunk * self.chunk_elements, self.elements))


def layout_of(shapes: Mapping[str, tuple[int, ...]], fragments: int) -> Layout:
    """Computes the layout for these parameter shapes, in at most `fragments` fragments."""
    # By fragment, then by depth.
    names = sorted(shapes, key=lambda name: (_block(name) % fragments, _block(name), name))
    places = []
    start = 0
    for name in names:
        places.append(Place(name, tuple(shapes[name]), start))
        start = places[-1].stop
    chunk = chunk_elements(start)
    chunks = -(-start // chunk)
    # A small module may have fewer chunks than fragments.
    count = min(fragments, chunks)
    borders = [round(number * chunks / count) for number in range(count + 1)]
    return Layout(tuple(places), chunk, tuple(itertools.pairwise(borders)))


def chunk_elements(elements: int) -> int:
    """Returns the elements per chunk: a power of two that gives at least CHUNKS_AT_LEAST chunks, within the limits."""
    wished = max(1, elements // CHUNKS_AT_LEAST)
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, 1 << (wished.bit_length() - 1)))


def _block(name: str) -> int:
    match = _BLOCK.match(name)
    return 0 if match is None else int(match[1])
