"""The codec NONE: float32 elements as they are, little-endian."""

from __future__ import annotations

from typing import Final

import numpy as np

from protocol.codecs.memory import Vector, floats_of, tensor_of

_SLICE: Final = 32_640
"""Elements. From 32768 on torch shares work among threads; see `protocol.codecs.int8` for why that is not wanted."""


def encode_into(values: Vector, out: memoryview) -> None:
    """Copies."""
    np.copyto(floats_of(out), values)


def decode_into(data: memoryview, out: Vector) -> None:
    """Copies."""
    np.copyto(out, floats_of(data))


def add_decoded(data: memoryview, coefficient: float, total: Vector) -> None:
    """One pass over both."""
    target, source = tensor_of(total), tensor_of(floats_of(data))
    for part in (slice(first, first + _SLICE) for first in range(0, len(total), _SLICE)):
        target[part].add_(source[part], alpha=coefficient)
