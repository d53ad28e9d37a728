"""Anchor: the parameters and outer momentum that a module's replicas agreed on last, with their hashes."""

import math
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from node.averaging.anchor.shared_vector import (
    Layout,
    SharedVector,
    SpareArrays,
    StateVectors,
    Vector,
    cut_vector,
    empty_part,
    empty_vector,
    squared_distance,
)
from node.checkpoint.state import AnchorState, TensorsInParts
from swarm.vocabulary.errors import CorruptSnapshot, ResourceExhausted
from swarm.vocabulary.types import AnchorVersion

_HEADER: Final = struct.Struct("<QQQIQQ")
_DOMAIN: Final = b"skipstone-anchor:1\0"


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """Immutable parameters and outer momentum of a module, float32. Anchors share fragments that did not change."""

    layout: Layout
    version: AnchorVersion
    parameters: SharedVector
    momentum: SharedVector  # Momentum of the outer optimizer, [elements]
    hashes: tuple[bytes, ...]  # Hashes of the chunks of the parameters, then of the momentum

    def chunk(self, number: int) -> memoryview:
        return chunk_bytes(self.layout, self.parameters, self.momentum, number)


def initial_anchor(layout: Layout, parameters: Vector | SharedVector) -> Anchor:
    """Returns the anchor before the first round: these parameters (a SharedVector is not copied) and zero momentum."""
    if not isinstance(parameters, SharedVector):
        parameters = cut_vector(layout, parameters)
    momentum = _zeros_like(parameters)
    hashes = hash_all(layout, parameters, momentum)
    return Anchor(layout, version_of(layout, hashes, 0, 0, 0, 0), parameters, momentum, hashes)


def distance_between(one: Anchor, other: Anchor) -> float:
    """Returns the Euclidean distance of two anchors (parameters and momentum); not finite if an element is not."""
    total = 0.0
    # Equal hashes mean equal bytes, so compare only the chunks that differ.
    for number, (left, right) in enumerate(zip(one.hashes, other.hashes, strict=True)):
        if left != right:
            numbers = (np.frombuffer(anchor.chunk(number), "<f4") for anchor in (one, other))
            total += squared_distance(*numbers)
    return math.sqrt(total)


def version_of(
    layout: Layout, hashes: Sequence[bytes], round_number: int, steps: int, tokens: int, fragment: int
) -> AnchorVersion:
    header = _HEADER.pack(round_number, steps, tokens, fragment, layout.elements, layout.chunk_elements)
    digest = blake3(_DOMAIN + header + b"".join(hashes)).digest()
    return AnchorVersion(round_number, steps, tokens, fragment, digest)


def hash_all(layout: Layout, parameters: Vector | SharedVector, momentum: Vector | SharedVector) -> tuple[bytes, ...]:
    return tuple(hash_of(chunk_bytes(layout, parameters, momentum, number)) for number in range(2 * layout.chunks))


def hash_of(data: memoryview) -> bytes:
    return blake3(data).digest()


def chunk_bytes(
    layout: Layout, parameters: Vector | SharedVector, momentum: Vector | SharedVector, number: int
) -> memoryview:
    """Returns a view of chunk `number`, counted over parameters, then momentum. Raises IndexError if none."""
    if not 0 <= number < 2 * layout.chunks:
        raise IndexError(f"chunk {number} does not exist: there are {2 * layout.chunks}")
    vector, index = (parameters, number) if number < layout.chunks else (momentum, number - layout.chunks)
    return vector[layout.range_of(index, index + 1)].view(np.uint8).data


def restored_anchor(layout: Layout, saved: AnchorState) -> Anchor:
    """Rebuilds an anchor from a checkpoint. Raises CorruptSnapshot if its shapes or its digest do not match."""
    try:
        parameters = _vector(layout, saved.parameters)
        momentum = _zeros_like(parameters) if saved.momentum is None else _vector(layout, saved.momentum)
    except (KeyError, RuntimeError) as error:
        raise CorruptSnapshot(f"the saved anchor belongs to another model: {error}") from error
    hashes, version = hash_all(layout, parameters, momentum), saved.version
    if version_of(layout, hashes, version.round, version.steps, version.tokens, version.fragment) != version:
        raise CorruptSnapshot(f"the saved anchor of round {version.round} does not match its digest")
    return Anchor(layout, version, parameters, momentum, hashes)


class Named(TensorsInParts):
    """Tensors of a module's vector by parameter name. A tensor is a view if all its elements are in one array."""

    def __init__(self, layout: Layout, vector: Vector | SharedVector) -> None:
        self._spans = {span.name: span for span in layout.spans}
        self._vector = vector

    def __getitem__(self, name: str) -> Tensor:
        span = self._spans[name]
        return torch.from_numpy(self._vector[span.start : span.stop]).view(span.shape)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._spans[name].shape

    def parts_of(self, name: str) -> Iterator[Tensor]:
        part = slice(self._spans[name].start, self._spans[name].stop)
        if isinstance(self._vector, SharedVector):
            return (torch.from_numpy(piece) for _, piece in self._vector.pieces(part))
        return iter((torch.from_numpy(self._vector[part]),))

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


def tensors_of(layout: Layout, vector: Vector | SharedVector) -> dict[str, Tensor]:
    return dict(Named(layout, vector))


def _vector(layout: Layout, tensors: Mapping[str, Tensor]) -> SharedVector:
    vector = empty_vector(layout)
    for span in layout.spans:
        tensor = tensors[span.name]
        if tuple(tensor.shape) != span.shape:
            raise RuntimeError(f"{span.name} has shape {tuple(tensor.shape)} instead of {span.shape}")
        flat = tensor.reshape(-1)
        for part, room in vector.pieces(slice(span.start, span.stop)):
            torch.from_numpy(room).copy_(flat[part.start - span.start : part.stop - span.start])
    return vector


def _zeros_like(vector: SharedVector) -> SharedVector:
    return SharedVector([np.zeros_like(array) for array in vector.arrays])


STATES: Final = 4  # States in memory at most, unfinished ones included
LENT_AT_MOST: Final = 2


class AnchorStore:
    """The current anchor of a replica, and older anchors that other peers still download. Used from two threads."""

    def __init__(self, current: Anchor, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._now = now
        self.current = current
        self._older: list[Anchor] = []  # the newest last
        self._leased_until: dict[bytes, float] = {}
        self._lent: list[weakref.ref[Vector]] = []
        parts = [self.layout.range_of(*fragment) for fragment in self.layout.fragments]
        self._arrays = SpareArrays(max(part.stop - part.start for part in parts))

    @property
    def layout(self) -> Layout:
        return self.current.layout

    def get(self, digest: bytes) -> Anchor | None:
        with self._lock:
            return self._find(digest)

    def saved(self) -> AnchorState:
        anchor, layout = self.current, self.layout
        return AnchorState(anchor.version, Named(layout, anchor.parameters), Named(layout, anchor.momentum))

    def lease(self, digest: bytes, seconds: float) -> bool:
        """Keeps the anchor with this digest for `seconds` unless a round needs the memory. Returns False if unknown."""
        with self._lock:
            if self._find(digest) is None:
                return False
            self._leased_until[digest] = max(self._leased_until.get(digest, 0.0), self._now() + seconds)
            return True

    def spare(self, part: slice | None = None) -> StateVectors:
        """Allocates parameters and momentum for a new anchor. Raises ResourceExhausted if two are unfinished."""
        with self._lock:
            # An anchor is unfinished until `put` or `give_back`, or until the last reference to its vectors is dropped.
            if self._alive() >= LENT_AT_MOST:
                raise ResourceExhausted(f"{LENT_AT_MOST} anchors of this module are lent; put or give back one first")
            self._older = [anchor for anchor in self._older if self._is_leased(anchor)]
            self._make_room(1)
            empty = partial(empty_vector, self.layout) if part is None else partial(empty_part, part, self._arrays)
            pair = (empty(), empty())
            self._lent.append(weakref.ref(pair[0].arrays[0]))
            return pair

    def give_back(self, parameters: SharedVector, momentum: SharedVector) -> None:
        with self._lock:
            self._forget_lent(parameters)

    def put(self, anchor: Anchor) -> None:
        with self._lock:
            if anchor is self.current:
                return
            self._forget_lent(anchor.parameters)
            self._older.append(self.current)
            self.current = anchor
            # Keep leased anchors, and the previous one: other members may commit a little later and need it.
            self._older = [a for a in self._older[:-1] if self._is_leased(a)] + self._older[-1:]
            self._make_room(0)

    def _find(self, digest: bytes) -> Anchor | None:
        return next((a for a in (self.current, *self._older) if a.version.digest == digest), None)

    def _is_leased(self, anchor: Anchor) -> bool:
        return self._leased_until.get(anchor.version.digest, 0.0) > self._now()

    def _alive(self) -> int:
        self._lent = [ref for ref in self._lent if ref() is not None]  # dropped vectors no longer count
        return len(self._lent)

    def _forget_lent(self, parameters: SharedVector) -> None:
        # Compares arrays, because `parameters` may combine them in another vector.
        theirs = {id(array) for array in parameters.arrays}
        self._lent = [ref for ref in self._lent if (array := ref()) is not None and id(array) not in theirs]

    def _make_room(self, more: int) -> None:
        # A new anchor has priority: the oldest one is dropped, and its downloads start again.
        while self._older and 1 + len(self._older) + self._alive() + more > STATES:
            self._leased_until.pop(self._older.pop(0).version.digest, None)
