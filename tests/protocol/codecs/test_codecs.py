"""Codecs against bytes worked out by hand, against their own promises, and against bytes that nobody should send."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from protocol.codecs import decode_into, encode_into, encoded_bytes
from protocol.codecs.blockwise import INT8
from protocol.codecs.memory import Vector
from protocol.interfaces.tensor_spec import BLOCK
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.types import Codec

INT8_SPAN = 16 * 255 * BLOCK  # Elements from which on a vector is encoded in several spans
LARGEST_SCALE, LARGEST_VALUE = INT8.largest_scale, INT8.largest_scale * 127
VECTOR_CODECS = list(Codec)


def encoded(codec: Codec, values: Vector) -> bytearray:
    out = bytearray(encoded_bytes(codec, len(values)))
    encode_into(codec, values, memoryview(out))
    return out


def decoded(codec: Codec, data: bytes | bytearray, elements: int) -> Vector:
    out = np.full(elements, np.nan, np.float32)
    decode_into(codec, memoryview(data), out)
    return out


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def normal(elements: int, scale: float = 1.0, seed: int = 0) -> Vector:
    return (np.random.default_rng(seed).standard_normal(elements) * scale).astype(np.float32)


class TestFormat:
    def test_int8_worked_out_by_hand(self) -> None:
        first = [127.0, -127.0, 1.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -126.6, *[0.0] * 118]
        second = [0.5, -0.125, 0.0]
        codes = [127, -127, 1, 0, 2, 2, 0, -2, 0, -127, *[0] * 118, 127, -32, 0]
        expected = struct.pack("<131b", *codes) + struct.pack("<2f", 1.0, np.float32(0.5) / np.float32(127))
        assert encoded(Codec.INT8, vector(*first, *second)) == expected

    @given(st.integers(0, 300), st.data())
    def test_codes_that_we_would_not_choose_are_decoded_too(self, elements: int, data: st.DataObject) -> None:
        codes = data.draw(st.binary(min_size=elements, max_size=elements))
        blocks = -(-elements // BLOCK)
        scales = data.draw(arrays("<f4", blocks, elements=st.just(0.0) | st.floats(2.0**-126, LARGEST_SCALE, width=32)))
        result = decoded(Codec.INT8, codes + scales.tobytes(), elements)
        by_definition = np.frombuffer(codes, np.int8).astype(np.float32) * np.repeat(scales, BLOCK)[:elements]
        assert np.array_equal(result, by_definition), "not what proto/link.proto says that the bytes mean"
        assert np.isfinite(result).all()


class TestAccuracy:
    @given(arrays(np.float32, st.integers(1, 400), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    def test_no_element_is_off_by_more_than_half_a_step(self, values: Vector) -> None:
        result = decoded(Codec.INT8, encoded(Codec.INT8, values), len(values))
        for first in range(0, len(values), BLOCK):
            block = slice(first, first + BLOCK)
            largest = float(np.abs(values[block]).max())
            off = np.abs(result[block].astype(np.float64) - values[block].astype(np.float64))
            assert off.max() <= largest / 254 * (1 + 1e-4) + 127 * 2.0**-126

    def test_the_largest_value_that_can_be_expressed(self) -> None:
        found = decoded(Codec.INT8, encoded(Codec.INT8, vector(LARGEST_VALUE, -LARGEST_VALUE, 1.0)), 3)
        assert found == pytest.approx([LARGEST_VALUE, -LARGEST_VALUE, 0.0])


class TestRefusals:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**128 * (1 - 2.0**-24), -LARGEST_VALUE * 1.002])
    @pytest.mark.parametrize("at", [0, 200, 259, INT8_SPAN + 5])
    def test_what_int8_cannot_express_is_not_encoded(self, bad: float, at: int) -> None:
        values = normal(max(260, at + 1))
        values[at] = bad
        with pytest.raises(StateError, match="finite"):
            encoded(Codec.INT8, values)

    @pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -1e-45, 1e-45, 1.1e-38, LARGEST_SCALE * 1.001])
    def test_impossible_scales_are_refused_and_nothing_is_touched(self, scale: float) -> None:
        data = bytes(130) + struct.pack("<2f", 1.0, np.float32(scale))
        out = np.ones(130, np.float32)
        with pytest.raises(ProtocolViolation, match="scale"):
            decode_into(Codec.INT8, memoryview(data), out)
        assert (out == 1.0).all()

    @pytest.mark.parametrize("codec", VECTOR_CODECS)
    def test_a_wrong_length_is_our_own_mistake(self, codec: Codec) -> None:
        room = memoryview(bytearray(encoded_bytes(codec, 10) + 1))
        for use in (lambda: encode_into(codec, normal(10), room), lambda: decode_into(codec, room, normal(10))):
            with pytest.raises(ValueError, match="10 elements are"):
                use()

    @pytest.mark.parametrize("values", [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
    def test_only_contiguous_float32_vectors_are_taken(self, values: Vector) -> None:
        with pytest.raises(ValueError, match="contiguous float32 vectors"):
            encode_into(Codec.NONE, values, memoryview(bytearray(16)))


@pytest.mark.parametrize("codec", VECTOR_CODECS)
def test_the_result_does_not_depend_on_the_number_of_threads(codec: Codec) -> None:
    values = normal(300_000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            data = encoded(codec, values)
            results.append((data, decoded(codec, data, len(values)).tobytes()))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]
