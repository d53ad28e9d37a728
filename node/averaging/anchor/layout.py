"""Layout of a module's parameters as one vector, which depends only on their names and shapes.

Chunks are hashed and sent as a whole. Each round averages one fragment. Fragments are strided: blocks 0, F, 2F, ...,
then 1, F+1, ... (Douillard et al. 2025, arXiv:2501.18512).
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
CHUNKS_AT_LEAST: Final = 64  # Chunks per module that `chunk_elements` aims at, so that shards can have any proportion

_BLOCK: Final = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """Position and shape of one parameter in its module's vector."""

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
    # By fragment, then by depth.
    names = sorted(shapes, key=lambda name: (_block(name) % fragments, _block(name), name))
    spans = []
    start = 0
    for name in names:
        spans.append(ParameterSpan(name, tuple(shapes[name]), start))
        start = spans[-1].stop
    chunk = chunk_elements(start)
    chunks = -(-start // chunk)
    # A small module may have fewer chunks than fragments.
    count = min(fragments, chunks)
    borders = [round(number * chunks / count) for number in range(count + 1)]
    return Layout(tuple(spans), chunk, tuple(itertools.pairwise(borders)))


def chunk_elements(elements: int) -> int:
    """Returns the elements per chunk: a power of two within limits, for at least CHUNKS_AT_LEAST chunks if possible."""
    wished = max(1, elements // CHUNKS_AT_LEAST)
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, 1 << (wished.bit_length() - 1)))


def _block(name: str) -> int:
    match = _BLOCK.match(name)
    return 0 if match is None else int(match[1])
