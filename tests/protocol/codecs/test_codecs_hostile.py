"""Whatever a peer sends as an encoding decodes to what the codec promises, or is refused with nothing touched."""

import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.codecs import Encoded, decode, encode
from protocol.codecs.memory import ELEMENT_TYPES
from protocol.interfaces.tensor_spec import BLOCK, INT4_BLOCK, DType, TensorSpec, blocks_of, most_outliers
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

MOST_ELEMENTS: Final = 2**16
MAY_BE_ANYTHING: Final = frozenset({Codec.NONE, Codec.BF16})  # The others promise finite numbers
UNTOUCHED: Final = -7.0

_HEAD: Final = struct.Struct("<BBBBBBBBI")
"""Codec, element type and way, number of dimensions, four dimensions, outliers, rank, compressed bytes."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a peer may send: a spec that `fault` has no objection to, and as many bytes as it says."""

    spec: TensorSpec
    data: bytes


def received(made_up: bytes) -> Received | None:
    """None when the bytes, at least a head, make no tensor."""
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
    return encode(values.to(ELEMENT_TYPES[dtype]), spec.codec)


def damaged(data: bytes, by: bytes) -> bytes:
    """Each three bytes of `by` change one byte: two say which, one how."""
    result = bytearray(data)
    for at, how in struct.iter_unpack("<HB", by[: len(by) // 3 * 3]):
        result[at % len(result)] ^= how
    return bytes(result)


def filled(data: bytes, length: int) -> bytes:
    return (data * (length // len(data) + 1) if data else bytes(length))[:length]


def check(case: Received) -> bool:
    """Decodes it; whether it was taken. Raises AssertionError if a promise is broken."""
    spec = case.spec
    assert spec.fault() is None, spec.fault()
    out = torch.full(spec.shape, UNTOUCHED, dtype=ELEMENT_TYPES[spec.dtype])
    try:
        decode(spec, memoryview(bytearray(case.data)), out)
    except ProtocolViolation:
        assert bool((out == UNTOUCHED).all()), f"refused, but written: {spec}"
        return False
    again = torch.full_like(out, 5.0)
    decode(spec, memoryview(bytearray(case.data)), again)
    written = (result.view(-1).view(torch.uint8) for result in (out, again))
    assert torch.equal(*written), f"not all is written: {spec}"
    if spec.codec not in MAY_BE_ANYTHING and not spec.outliers:
        assert bool(out.isfinite().all()), f"not finite: {spec}"
    return True


BLOCKWISE = [Codec.INT8, Codec.INT4]
DTYPES = st.sampled_from([DType.FLOAT32, DType.BFLOAT16])
SHAPES = st.lists(st.integers(1, 20), max_size=3).flatmap(
    lambda front: st.integers(1, 200).map(lambda last: (*front[:3], last))
)
EXTREMES = [0.0, -0.0, 2.0**-126, 2.0**-127, 1e-45, 2.0**120, 2.0**121, -1.0, float("inf"), float("nan"), 3.4028235e38]
SCALES = st.sampled_from([*EXTREMES, *[float(np.finfo(np.float32).max / n) for n in (8, 16, 127, 128, 448, 512)]])


@st.composite
def blockwise(draw: st.DrawFn) -> Received:
    """Any codes, and scales at and beyond the borders of what is allowed."""
    shape, codec = draw(SHAPES), draw(st.sampled_from(BLOCKWISE))
    most = most_outliers(shape) if len(shape) > 1 else 0
    spec = TensorSpec(shape, draw(DTYPES), codec, draw(st.integers(0, most)))
    blocks = blocks_of(spec.elements, INT4_BLOCK if codec is Codec.INT4 else BLOCK)
    width = 2 if codec is Codec.INT4 else 4
    one = struct.pack("<f", draw(SCALES))[-width:]
    base = TensorSpec(shape, spec.dtype, codec).byte_length - width * blocks
    codes = draw(st.sampled_from([b"\x80", b"\x7f", b"\0"])) * base
    apart = draw(st.binary(min_size=(rest := spec.byte_length - base - width * blocks), max_size=rest))
    return Received(spec, codes + one * blocks + apart)


@given(blockwise())
def test_scales_at_the_borders(case: Received) -> None:
    check(case)


@given(st.binary(min_size=_HEAD.size, max_size=300))
def test_anything(made_up: bytes) -> None:
    case = received(made_up)
    if case is not None:
        check(case)


@pytest.mark.parametrize("codec", Codec)
@given(shape=SHAPES, dtype=DTYPES, damage=st.binary(max_size=12))
def test_damaged_encodings(codec: Codec, shape: tuple[int, ...], dtype: DType, damage: bytes) -> None:
    honest = honest_encoding(TensorSpec(shape, dtype, codec))
    taken = check(Received(honest.spec, damaged(bytes(honest.data), damage)))
    assert taken or damage
