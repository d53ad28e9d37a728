"""From bytes that a fuzzer makes up to a tensor's spec and encoding, and what must hold when they are decoded."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import torch

from protocol.codecs import Encoded, decode, encode
from protocol.codecs.memory import ELEMENT_TYPES
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

MOST_ELEMENTS: Final = 2**16
MAY_BE_ANYTHING: Final = frozenset({Codec.NONE, Codec.BF16, Codec.PLANES})
"""The others promise finite numbers."""
UNTOUCHED: Final = -7.0

_HEAD: Final = struct.Struct("<BBBBBBBBI")
"""Codec, element type and way, number of dimensions, four dimensions, outliers, rank, compressed bytes."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a peer may send: a spec that `fault` has no objection to, and as many bytes as it says."""

    spec: TensorSpec
    data: bytes


def received(made_up: bytes) -> Received | None:
    """None when the bytes make no tensor. A quarter of them says how an honest encoding is damaged, so that decoding
    gets far."""
    if len(made_up) < _HEAD.size:
        return None
    codec, kind, dimensions, *shape, outliers, compressed = _HEAD.unpack_from(made_up)
    spec = TensorSpec(
        tuple(max(1, size) for size in shape[: 1 + dimensions % 4]),
        list(DType)[kind % 3],
        list(Codec)[codec % len(Codec)],
        outliers,
        compressed,
    )
    rest = made_up[_HEAD.size :]
    if kind % 4 == 3:
        honest = honest_encoding(spec)
        return Received(honest.spec, damaged(bytes(honest.data), rest))
    if spec.fault() is not None or spec.elements > MOST_ELEMENTS:
        return None
    return Received(spec, filled(rest, spec.byte_length))


def honest_encoding(spec: TensorSpec) -> Encoded:
    """Of normal numbers with a few channels that stand out; as another codec where this one does not take them."""
    shape = spec.shape if math.prod(spec.shape) <= MOST_ELEMENTS else spec.shape[:1]
    dtype = DType.FLOAT32 if spec.dtype is DType.FLOAT16 else spec.dtype
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    values[..., ::40] *= 30
    values = values.to(ELEMENT_TYPES[dtype])
    return encode(values, spec.codec)


def damaged(data: bytes, by: bytes) -> bytes:
    """Each three bytes of `by` change one byte: two say which, one how."""
    result = bytearray(data)
    for at, how in struct.iter_unpack("<HB", by[: len(by) // 3 * 3]):
        result[at % len(result)] ^= how
    return bytes(result)


def filled(data: bytes, length: int) -> bytes:
    """So many bytes: cut off, or repeated."""
    return (data * (length // len(data) + 1) if data else bytes(length))[:length]


def check(case: Received) -> bool:
    """Decodes it; whether it was taken.

    Raises:
        AssertionError: a promise is broken. Anything else that comes out is wrong as well.
    """
    spec = case.spec
    assert spec.fault() is None, spec.fault()
    out = torch.full(spec.shape, UNTOUCHED, dtype=ELEMENT_TYPES[spec.dtype])
    try:
        decode(spec, memoryview(bytearray(case.data)), out)
    except ProtocolViolation:
        untouched = spec.codec is Codec.PLANES or bool((out == UNTOUCHED).all())
        assert untouched, f"refused, but written: {spec}"
        return False
    if spec.codec not in MAY_BE_ANYTHING and not spec.outliers:
        assert bool(out.isfinite().all()), f"not finite: {spec}"
    return True
