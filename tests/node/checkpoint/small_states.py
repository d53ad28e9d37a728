"""Small states of a module for the tests of rounds and catching up."""

from __future__ import annotations

import numpy as np

from node.averaging.anchor.anchor import Anchor, hash_all, version_of
from node.averaging.anchor.layout import Layout, layout_of
from node.averaging.anchor.shared_vector import SharedVector, cut_vector

ELEMENTS = 20 * 4096 + 100


def small_layout(elements: int = ELEMENTS, fragments: int = 1) -> Layout:
    return layout_of({"model.layers.0.weight": (elements,)}, fragments)


def state(round_number: int, layout: Layout | None = None) -> Anchor:
    """The state after a round: random numbers that follow from the round's number."""
    layout = layout or small_layout()
    numbers = np.random.default_rng(round_number)
    parameters, momentum = (cut_vector(layout, numbers.standard_normal(layout.elements, np.float32)) for _ in range(2))
    hashes = hash_all(layout, parameters, momentum)
    version = version_of(layout, hashes, round_number, 10 * round_number, 1000 * round_number, 0)
    return Anchor(layout, version, parameters, momentum, hashes)


def written(anchor: Anchor, parameters: SharedVector, momentum: SharedVector) -> Anchor:
    for source, target in ((anchor.parameters, parameters), (anchor.momentum, momentum)):
        for part, array in target.pieces():
            array[:] = source[part]
    return Anchor(anchor.layout, anchor.version, parameters, momentum, anchor.hashes)
