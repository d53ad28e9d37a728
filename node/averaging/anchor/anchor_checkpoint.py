"""Conversion of anchors to and from checkpoints: by parameter name in the file, a vector here."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from node.averaging.anchor.anchor import Anchor, Vector, hash_all, version_of
from node.averaging.anchor.layout import Layout
from node.checkpoint.state import AnchorState
from swarm.vocabulary.errors import CorruptSnapshot


def anchor_state(anchor: Anchor) -> AnchorState:
    """The saved form of an anchor. Shares the anchor's memory, which holds until the round after the next."""
    return AnchorState(
        anchor.version, tensors_of(anchor.layout, anchor.parameters), tensors_of(anchor.layout, anchor.momentum)
    )


def restored_anchor(layout: Layout, saved: AnchorState) -> Anchor:
    """The anchor of a saved state.

    Raises:
        CorruptSnapshot: it is of another model, or not the state that its digest names.
    """
    try:
        parameters = _vector(layout, saved.parameters)
        momentum = np.zeros_like(parameters) if saved.momentum is None else _vector(layout, saved.momentum)
    except (KeyError, RuntimeError) as error:
        raise CorruptSnapshot(f"the saved anchor is of another model: {error}") from error
    hashes, version = hash_all(layout, parameters, momentum), saved.version
    if version_of(layout, hashes, version.round, version.steps, version.tokens, version.fragment) != version:
        raise CorruptSnapshot(f"the saved anchor of round {version.round} is not the state that its digest names")
    return Anchor(layout, version, parameters, momentum, hashes)


def tensors_of(layout: Layout, vector: Vector) -> dict[str, Tensor]:
    """The parameters in a vector, by name. They share its memory."""
    return {place.name: torch.from_numpy(vector[place.start : place.stop]).view(place.shape) for place in layout.places}


def _vector(layout: Layout, tensors: Mapping[str, Tensor]) -> Vector:
    vector: Vector = np.empty(layout.elements, np.float32)
    for name, room in tensors_of(layout, vector).items():
        room.copy_(tensors[name])
    return vector
