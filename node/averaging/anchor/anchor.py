"""The anchor: a module's last agreed parameters and outer momentum, with the hashes that prove them.

Both vectors are float32 in this machine's memory, never on the compute device: they are touched once a round. The
digest is BLAKE3 over the version's numbers and the list of chunk hashes, so whoever has the digest can check the list,
and with the list each chunk. In a checkpoint the vectors lie by parameter name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from node.averaging.anchor.layout import Layout
from node.averaging.anchor.shared_vector import SharedVector, Vector, cut_vector, empty_vector
from node.averaging.anchor.vector_math import squares_of_difference
from node.checkpoint.state import AnchorState, TensorsInParts
from swarm.vocabulary.errors import CorruptSnapshot
from swarm.vocabulary.types import AnchorVersion

HASH_BYTES: Final = 32
_HEADER: Final = struct.Struct("<QQQIQQ")
_DOMAIN: Final = b"skipstone-anchor:1\0"


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """Immutable by agreement: a commit makes another one, which shares the arrays of the fragments that it leaves."""

    layout: Layout
    version: AnchorVersion
    parameters: SharedVector
    """[elements]"""
    momentum: SharedVector
    """[elements]; of the outer optimizer."""
    hashes: tuple[bytes, ...]
    """Of each chunk of the parameters, then of each chunk of the momentum."""

    def chunk(self, number: int) -> memoryview:
        """The bytes of a chunk, little-endian float32; numbers as in
        `swarm.vocabulary.averaging_messages.StateRequest`."""
        return chunk_bytes(self.layout, self.parameters, self.momentum, number)


def initial_anchor(layout: Layout, parameters: Vector | SharedVector) -> Anchor:
    """The anchor before the first round: `parameters`, which it keeps if they are a `SharedVector`, and momentum 0."""
    if not isinstance(parameters, SharedVector):
        parameters = cut_vector(layout, parameters)
    momentum = _zeros_like(parameters)
    hashes = hash_all(layout, parameters, momentum)
    return Anchor(layout, version_of(layout, hashes, 0, 0, 0, 0), parameters, momentum, hashes)


def distance_between(one: Anchor, other: Anchor) -> float:
    """The Euclidean distance between two anchors of one layout, over parameters and momentum; not finite when an
    element is not. Chunks with the same hash are the same."""
    total = 0.0
    for number, (left, right) in enumerate(zip(one.hashes, other.hashes, strict=True)):
        if left != right:
            numbers = (np.frombuffer(anchor.chunk(number), "<f4") for anchor in (one, other))
            total += squares_of_difference(*numbers)
    return math.sqrt(total)


def version_of(
    layout: Layout, hashes: Sequence[bytes], round_number: int, steps: int, tokens: int, fragment: int
) -> AnchorVersion:
    """The anchor's version with its digest."""
    header = _HEADER.pack(round_number, steps, tokens, fragment, layout.elements, layout.chunk_elements)
    digest = blake3(_DOMAIN + header + b"".join(hashes)).digest()
    return AnchorVersion(round_number, steps, tokens, fragment, digest)


def hash_all(layout: Layout, parameters: Vector | SharedVector, momentum: Vector | SharedVector) -> tuple[bytes, ...]:
    """The hash list of a whole state."""
    return tuple(hash_of(chunk_bytes(layout, parameters, momentum, number)) for number in range(2 * layout.chunks))


def hash_of(data: memoryview) -> bytes:
    """The BLAKE3 hash of bytes, 32 bytes."""
    return blake3(data).digest()


def chunk_bytes(
    layout: Layout, parameters: Vector | SharedVector, momentum: Vector | SharedVector, number: int
) -> memoryview:
    """A view of one chunk's bytes; writable when the arrays are.

    Raises:
        IndexError: there is no such chunk.
    """
    if not 0 <= number < 2 * layout.chunks:
        raise IndexError(f"chunk {number} of {2 * layout.chunks}")
    vector, index = (parameters, number) if number < layout.chunks else (momentum, number - layout.chunks)
    return vector[layout.range_of(index, index + 1)].view(np.uint8).data


# ---- in checkpoints: by parameter name ------------------------------------------------------------


def anchor_state(anchor: Anchor) -> AnchorState:
    """The saved form of an anchor, which shares its memory."""
    return AnchorState(anchor.version, Named(anchor.layout, anchor.parameters), Named(anchor.layout, anchor.momentum))


def restored_anchor(layout: Layout, saved: AnchorState) -> Anchor:
    """The anchor of a saved state.

    Raises:
        CorruptSnapshot: it is of another model, or not the state that its digest names.
    """
    try:
        parameters = _vector(layout, saved.parameters)
        momentum = _zeros_like(parameters) if saved.momentum is None else _vector(layout, saved.momentum)
    except (KeyError, RuntimeError) as error:
        raise CorruptSnapshot(f"the saved anchor is of another model: {error}") from error
    hashes, version = hash_all(layout, parameters, momentum), saved.version
    if version_of(layout, hashes, version.round, version.steps, version.tokens, version.fragment) != version:
        raise CorruptSnapshot(f"the saved anchor of round {version.round} is not the state that its digest names")
    return Anchor(layout, version, parameters, momentum, hashes)


class Named(TensorsInParts):
    """The parameters in a vector, by name, each made when it is asked for. A tensor shares the vector's memory, unless
    it lies in several of its arrays: then it is a copy.
    """

    def __init__(self, layout: Layout, vector: Vector | SharedVector) -> None:
        self._places = {place.name: place for place in layout.places}
        self._vector = vector

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        return torch.from_numpy(self._vector[place.start : place.stop]).view(place.shape)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def parts_of(self, name: str) -> Iterator[Tensor]:
        part = slice(self._places[name].start, self._places[name].stop)
        if isinstance(self._vector, SharedVector):
            return (torch.from_numpy(piece) for _, piece in self._vector.pieces(part))
        return iter((torch.from_numpy(self._vector[part]),))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def tensors_of(layout: Layout, vector: Vector | SharedVector) -> dict[str, Tensor]:
    """The parameters in a vector, by name, as `Named` gives them."""
    return dict(Named(layout, vector))


def _vector(layout: Layout, tensors: Mapping[str, Tensor]) -> SharedVector:
    vector = empty_vector(layout)
    for place in layout.places:
        tensor = tensors[place.name]
        if tuple(tensor.shape) != place.shape:
            raise RuntimeError(f"{place.name} has the shape {tuple(tensor.shape)} instead of {place.shape}")
        flat = tensor.reshape(-1)
        for part, room in vector.pieces(slice(place.start, place.stop)):
            torch.from_numpy(room).copy_(flat[part.start - place.start : part.stop - place.start])
    return vector


def _zeros_like(vector: SharedVector) -> SharedVector:
    return SharedVector([np.zeros_like(array) for array in vector.arrays])
