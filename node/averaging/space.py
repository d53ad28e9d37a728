"""Where the vectors of a download come from."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from node.averaging.anchor import Vector
from node.averaging.layout import Layout
from swarm.errors import ResourceExhausted


class Space(Protocol):
    """`node.averaging.shelf.Shelf` is one."""

    def spare(self) -> tuple[Vector, Vector]:
        """Parameters and momentum to be written, [elements] each. Raises ResourceExhausted."""
        ...

    def give_back(self, parameters: Vector, momentum: Vector) -> None: ...


class FreshSpace:
    """For a node that has no shelf yet, because this download brings its first anchor."""

    def __init__(self, layout: Layout) -> None:
        self._elements = layout.elements

    def spare(self) -> tuple[Vector, Vector]:
        """Raises ResourceExhausted."""
        try:
            return np.empty(self._elements, np.float32), np.empty(self._elements, np.float32)
        except MemoryError:
            raise ResourceExhausted(f"no memory for the module's state ({self._elements * 8} bytes)") from None

    def give_back(self, parameters: Vector, momentum: Vector) -> None:
        return
