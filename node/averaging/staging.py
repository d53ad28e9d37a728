"""The next anchor in the making: results of the exchange are applied and hashed as they come. Runs on the averaging thread."""

from __future__ import annotations

from node.averaging.anchor import Anchor, Vector, chunk_bytes, hash_of, version_of
from node.averaging.outer import OuterRule
from node.averaging.vectors import STRETCH


class Staging:
    """Takes the outer step from `base` for one fragment, a run of chunks at a time.

    Args:
        parameters, momentum: to be written; what they hold before does not matter.
    """

    def __init__(self, base: Anchor, rule: OuterRule, parameters: Vector, momentum: Vector) -> None:
        self._base = base
        self._rule = rule
        self._parameters = parameters
        self._momentum = momentum
        self._hashes = list(base.hashes)
        self._layout = base.layout
        self._chunks = base.layout.chunks
        self._at_a_time = max(1, STRETCH // base.layout.chunk_elements)

    def keep_others(self, first_chunk: int, end_chunk: int) -> None:
        """Takes everything but these chunks over from the base."""
        layout = self._layout
        for rest in (layout.range_of(0, first_chunk), layout.range_of(end_chunk, layout.chunks)):
            self._parameters[rest] = self._base.parameters[rest]
            self._momentum[rest] = self._base.momentum[rest]

    def apply(self, first_chunk: int, end_chunk: int, gradient: Vector) -> None:
        """The outer step for these chunks with the averaged pseudo-gradient there, and their hashes.

        A few chunks at a time, so that they are hashed while they are still in the cache.
        """
        start = self._layout.range_of(first_chunk, end_chunk).start
        for first in range(first_chunk, end_chunk, self._at_a_time):
            end = min(first + self._at_a_time, end_chunk)
            part = self._layout.range_of(first, end)
            self._rule.step(
                gradient[part.start - start : part.stop - start],
                self._base.parameters[part],
                self._base.momentum[part],
                self._parameters[part],
                self._momentum[part],
            )
            for chunk in range(first, end):
                for number in (chunk, self._chunks + chunk):
                    self._hashes[number] = hash_of(chunk_bytes(self._layout, self._parameters, self._momentum, number))

    def finish(self, number: int, steps: int, tokens: int) -> Anchor:
        """The anchor that round `number` makes, when every chunk of the fragment has been applied."""
        before = self._base.version
        fragment = (before.fragment + 1) % len(self._layout.fragments)
        hashes = tuple(self._hashes)
        version = version_of(self._layout, hashes, number, steps, tokens, fragment)
        return Anchor(self._layout, version, self._parameters, self._momentum, hashes)
