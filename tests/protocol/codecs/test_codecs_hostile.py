"""Whatever a peer sends as a tensor's encoding decodes to what the codec promises, or is refused with nothing touched.

`tests/fuzz/codecs.py` does the same for as long as one likes, guided by coverage and with a bound on memory.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.interfaces.tensor_spec import BLOCK, INT4_BLOCK, DType, TensorSpec, blocks_of, most_outliers
from swarm.vocabulary.types import Codec
from tests.fuzz.decoding import Received, check, damaged, honest_encoding, received

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


@given(st.binary(min_size=14, max_size=300))
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
