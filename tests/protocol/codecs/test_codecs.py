"""Codecs against bytes worked out by hand, against their own promises, and against bytes that nobody should send."""

from __future__ import annotations

import hashlib
import math
import struct
import tracemalloc
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from protocol.codecs import Encoded, decode, decode_into, encode, encode_into, encoded_bytes, host_memory, outliers
from protocol.codecs import byte_planes as planes
from protocol.codecs.blockwise import INT4, INT8, SMALLEST_SCALE, Blockwise
from protocol.codecs.byte_planes import SLICE_BYTES
from protocol.codecs.host_memory import buffer_for, to_device, to_host
from protocol.codecs.top_k import LARGEST_LEVEL, TOP_K_2, TOP_K_4, TopK
from protocol.codecs.views import DTYPES, ELEMENT_TYPES, Vector, octets_of
from protocol.interfaces.tensor_spec import (
    BLOCK,
    INT4_BLOCK,
    KEPT,
    PLACE_LOW_BITS,
    SPARSE_CHUNK,
    DType,
    SparseChunk,
    TensorSpec,
    blocks_of,
    most_outliers,
)
from protocol.transport.buffer_pool import BufferPool
from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted, StateError
from swarm.vocabulary.types import Codec
from tests.fuzz.decoding import Received, check, damaged, honest_encoding, received

INT8_SPAN = 16 * 255 * BLOCK
LARGEST_SCALE, LARGEST_VALUE = INT8.largest_scale, INT8.largest_value
VECTOR_CODECS = [codec for codec in Codec if codec is not Codec.PLANES]
LENGTHS = [1, 127, 128, 129, 255, 256, 255 * 128 - 1, 255 * 128, 255 * 128 + 1, INT8_SPAN, INT8_SPAN + 1, 1_100_001]


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


def by_definition(data: bytes | bytearray, elements: int) -> Vector:
    codes = np.frombuffer(data, np.int8, elements).astype(np.float32)
    scales = np.frombuffer(data, "<f4", offset=elements)
    return codes * np.repeat(scales, BLOCK)[:elements]


class TestFormat:
    def test_int8_worked_out_by_hand(self) -> None:
        first = [127.0, -127.0, 1.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -126.6, *[0.0] * 118]
        second = [0.5, -0.125, 0.0]
        codes = [127, -127, 1, 0, 2, 2, 0, -2, 0, -127, *[0] * 118, 127, -32, 0]
        expected = struct.pack("<131b", *codes) + struct.pack("<2f", 1.0, np.float32(0.5) / np.float32(127))
        assert encoded(Codec.INT8, vector(*first, *second)) == expected

    def test_none_is_the_elements(self) -> None:
        assert encoded(Codec.NONE, vector(1.0, -2.5, 0.0)) == struct.pack("<3f", 1.0, -2.5, 0.0)

    @pytest.mark.parametrize(("elements", "size"), [(0, 0), (1, 5), (128, 132), (129, 137), (2**20, 2**20 * 33 // 32)])
    def test_sizes(self, elements: int, size: int) -> None:
        assert encoded_bytes(Codec.INT8, elements) == size
        assert encoded_bytes(Codec.NONE, elements) == 4 * elements

    @pytest.mark.parametrize("elements", LENGTHS)
    def test_decoding_is_code_times_scale_bit_for_bit(self, elements: int) -> None:
        data = encoded(Codec.INT8, normal(elements))
        assert np.array_equal(decoded(Codec.INT8, data, elements), by_definition(data, elements))

    @given(st.integers(0, 300), st.data())
    def test_codes_that_we_would_not_choose_are_decoded_too(self, elements: int, data: st.DataObject) -> None:
        codes = data.draw(st.binary(min_size=elements, max_size=elements))
        blocks = -(-elements // BLOCK)
        scales = data.draw(arrays("<f4", blocks, elements=st.just(0.0) | st.floats(2.0**-126, LARGEST_SCALE, width=32)))
        encoding = codes + scales.tobytes()
        result = decoded(Codec.INT8, encoding, elements)
        assert np.array_equal(result, by_definition(encoding, elements))
        assert np.isfinite(result).all()


class TestAccuracy:
    @pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e3])
    def test_the_relative_error_does_not_depend_on_the_magnitude(self, scale: float) -> None:
        values = normal(100_000, scale)
        error = decoded(Codec.INT8, encoded(Codec.INT8, values), len(values)) - values
        assert np.linalg.norm(error) <= 7e-3 * np.linalg.norm(values)

    @given(arrays(np.float32, st.integers(1, 400), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    def test_no_element_is_off_by_more_than_half_a_step(self, values: Vector) -> None:
        result = decoded(Codec.INT8, encoded(Codec.INT8, values), len(values))
        for first in range(0, len(values), BLOCK):
            block = slice(first, first + BLOCK)
            largest = float(np.abs(values[block]).max())
            off = np.abs(result[block].astype(np.float64) - values[block].astype(np.float64))
            assert off.max() <= largest / 254 * (1 + 1e-4) + 127 * 2.0**-126

    @given(arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32)))
    def test_none_keeps_every_bit(self, values: Vector) -> None:
        data = encoded(Codec.NONE, values)
        assert data == values.tobytes()
        assert decoded(Codec.NONE, data, len(values)).tobytes() == values.tobytes()

    def test_blocks_that_vanish_become_zeros_and_others_stay(self) -> None:
        values = np.concatenate(
            [np.full(128, 1e-40, np.float32), np.full(128, 1e-30, np.float32), np.zeros(5, np.float32)]
        )
        result = decoded(Codec.INT8, encoded(Codec.INT8, values), len(values))
        assert not result[:128].any()
        assert result[128:256] == pytest.approx(1e-30, rel=1e-6)
        assert not result[256:].any()

    def test_the_largest_value_that_can_be_expressed(self) -> None:
        values = vector(LARGEST_VALUE, -LARGEST_VALUE, 1.0)
        assert decoded(Codec.INT8, encoded(Codec.INT8, values), 3) == pytest.approx(
            [LARGEST_VALUE, -LARGEST_VALUE, 0.0]
        )


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
    """The result must not depend on the threads either; that the time does not cannot be tested here."""
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


BLOCKWISE = [Codec.INT8, Codec.INT4]
TENSOR_TYPES = st.sampled_from([DType.FLOAT32, DType.BFLOAT16])
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
    spec = TensorSpec(shape, draw(TENSOR_TYPES), codec, draw(st.integers(0, most)))
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
@given(shape=SHAPES, dtype=TENSOR_TYPES, damage=st.binary(max_size=12))
def test_damaged_encodings(codec: Codec, shape: tuple[int, ...], dtype: DType, damage: bytes) -> None:
    honest = honest_encoding(TensorSpec(shape, dtype, codec))
    taken = check(Received(honest.spec, damaged(bytes(honest.data), damage)))
    assert taken or damage


LOSSY = [Codec.BF16, *BLOCKWISE]
TENSOR_SHAPES = [
    (1,),
    (63,),
    (65,),
    (129,),
    (255 * 128 + 1,),
    (16 * 255 * 128 + 65,),
    (7, 9),
    (3, 5, 64),
    (2, 3, 5, 96),
    (1, 300_001),
]
RELATIVE_ERROR = {Codec.BF16: 2e-3, Codec.INT8: 7e-3, Codec.INT4: 0.11}


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def normal_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decoded_tensor(encoded: Encoded) -> Tensor:
    spec = encoded.spec
    out = torch.full(spec.shape, torch.nan, dtype=ELEMENT_TYPES[spec.dtype])
    decode(spec, memoryview(bytearray(encoded.data)), out)
    return out


def distance(values: Tensor, other: Tensor) -> float:
    exact = values.double()
    return float((other.double() - exact).norm() / exact.norm())


class TestTensorFormat:
    def test_bf16_worked_out_by_hand(self) -> None:
        values = numbers(1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, math.inf, 0.0)
        expected = struct.pack("<7H", 0x3F80, 0xC000, 0x3F80, 0x3F82, 0x7F80, 0x7F80, 0)
        assert encode(values, Codec.BF16).data == expected

    def test_int4_worked_out_by_hand(self) -> None:
        lower = [8.0, -7.0, 1.0, -1.0, 0.5, 1.5, -8.0, *[0.0] * 25]
        upper = [2.0, 3.0, *[0.0] * 30]
        codes = [0, 15, 7, 9, 8, 6, 15, *[8] * 25], [6, 5, *[8] * 30]
        tail, tail_codes = [-16.0, 2.0, 14.0], [0 | 15 << 4, 9]
        expected = bytes([low | high << 4 for low, high in zip(*codes, strict=True)] + tail_codes)
        expected += struct.pack("<2H", 0xBF80, 0x4000)
        assert encode(numbers(*lower, *upper, *tail), Codec.INT4).data == expected

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_channels_apart_worked_out_by_hand(self, dtype: torch.dtype) -> None:
        values = torch.ones(2, 32, dtype=dtype)
        values[:, 5] = numbers(100.0, -50.0)
        codes = [127] * 32
        codes[5] = 0
        expected = bytes(codes * 2) + struct.pack("<f", np.float32(1.0) / np.float32(127))
        expected += struct.pack("<3H", 5, 0x42C8, 0xC248)
        encoded = encode(values, Codec.INT8)
        assert encoded.data == expected
        assert encoded.spec.outliers == 1
        assert decoded_tensor(encoded)[:, 5].tolist() == [100.0, -50.0]

    def test_every_int4_code_means_what_the_format_says(self) -> None:
        data = bytes(code | (15 - code) << 4 for code in range(16)) * 2 + struct.pack("<H", 0xC040)
        expected = [(code - 8) * -3.0 for code in range(16)] * 2 + [(7 - code) * -3.0 for code in range(16)] * 2
        assert decoded_tensor(as_received(Codec.INT4, (64,), data)).tolist() == expected

    @pytest.mark.parametrize(
        ("codec", "shape", "outliers", "size"),
        [
            (Codec.BF16, (3, 5), 0, 30),
            (Codec.INT8, (129,), 0, 129 + 8),
            (Codec.INT4, (64,), 0, 34),
            (Codec.INT4, (65,), 0, 33 + 4),
            (Codec.INT4, (2, 3, 64), 4, 6 * 34 + 4 * 2 * (1 + 6)),
            (Codec.INT8, (2, 3, 64), 4, 384 + 3 * 4 + 4 * 2 * (1 + 6)),
        ],
    )
    def test_lengths(self, codec: Codec, shape: tuple[int, ...], outliers: int, size: int) -> None:
        spec = TensorSpec(shape, encode(normal_tensor(1), Codec.NONE).spec.dtype, codec, outliers)
        assert spec.fault() is None
        assert spec.byte_length == size


def as_received(codec: Codec, shape: tuple[int, ...], data: bytes, outliers: int = 0) -> Encoded:
    return Encoded(
        TensorSpec(shape, encode(normal_tensor(1), Codec.NONE).spec.dtype, codec, outliers), memoryview(data)
    )


class TestTensorAccuracy:
    @pytest.mark.parametrize("codec", LOSSY)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", TENSOR_SHAPES)
    def test_any_shape_comes_back(self, codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        values = normal_tensor(*shape, dtype=dtype)
        encoded = encode(values, codec)
        assert encoded.spec == TensorSpec(shape, encoded.spec.dtype, codec)
        assert encoded.data.nbytes == encoded.spec.byte_length
        assert distance(values, decoded_tensor(encoded)) <= 1.5 * RELATIVE_ERROR[codec]

    @pytest.mark.parametrize("codec", LOSSY)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 1e3])
    def test_the_relative_error_does_not_depend_on_the_magnitude(
        self, codec: Codec, dtype: torch.dtype, size: float
    ) -> None:
        values = (normal_tensor(100, 1000) * size).to(dtype)
        assert distance(values, decoded_tensor(encode(values, codec))) <= RELATIVE_ERROR[codec]

    @pytest.mark.parametrize("codec", BLOCKWISE)
    def test_bfloat16_is_encoded_as_the_same_numbers_in_float32_are(self, codec: Codec) -> None:
        values = normal_tensor(70, 515, dtype=torch.bfloat16)
        values[:, 3] *= 60
        assert encode(values, codec).data == encode(values.float(), codec).data

    @given(arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    def test_int4_is_off_by_half_a_step_and_by_one_at_the_far_end(self, array: np.ndarray) -> None:
        values = torch.from_numpy(array)
        off = (decoded_tensor(encode(values, Codec.INT4)).double() - values.double()).abs()
        for exact, wrong in zip(values.split(INT4_BLOCK), off.split(INT4_BLOCK), strict=True):
            step = exact.abs().max().double() / 8 * (1 + 2**-8) + 8 * SMALLEST_SCALE
            assert bool((wrong <= step * (1 + 2**-8)).all())
            near = exact.abs() <= 7 * step
            assert bool((wrong[near] <= step * 0.51 + 8 * SMALLEST_SCALE).all())


class TestOutliers:
    @pytest.mark.parametrize("codec", BLOCKWISE)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_other_channels_are_as_exact_as_without(self, codec: Codec, dtype: torch.dtype) -> None:
        values = normal_tensor(4, 100, 256, dtype=dtype)
        values[..., 17] *= 60
        values[..., 101] *= 25
        encoded = encode(values, codec)
        result, rest = (decoded_tensor(encoded), [channel for channel in range(256) if channel not in (17, 101)])
        assert encoded.spec.outliers == 2
        assert distance(values[..., rest], result[..., rest]) <= RELATIVE_ERROR[codec]
        assert torch.equal(result[..., [17, 101]], values[..., [17, 101]].bfloat16().to(dtype))

    def test_at_most_every_sixteenth_channel_is_sent_apart_the_largest_of_them(self) -> None:
        values = normal_tensor(64, 64)
        values[:, 10:20] *= 1000 * torch.arange(1, 11)
        encoded = encode(values, Codec.INT8)
        numbers_sent = struct.unpack_from("<4H", encoded.data, 64 * 64 * 33 // 32)
        assert encoded.spec.outliers == 4
        assert list(numbers_sent) == sorted(numbers_sent)
        assert set(numbers_sent) <= set(range(13, 20))

    def test_vectors_have_no_channels(self) -> None:
        values = normal_tensor(1024)
        values[5] = 1e4
        assert encode(values, Codec.INT8).spec.outliers == 0

    def test_the_values_are_left_as_they_are(self) -> None:
        values = normal_tensor(64, 64)
        values[:, 7] *= 100
        before = values.clone()
        encode(values, Codec.INT8)
        assert torch.equal(values, before)

    @pytest.mark.parametrize("codec", BLOCKWISE)
    @pytest.mark.parametrize("channels", [(64, 1), (3, 3), (5, 4), (0, 65535)])
    def test_impossible_channel_numbers_are_refused_and_nothing_is_touched(
        self, codec: Codec, channels: tuple[int, int]
    ) -> None:
        values = normal_tensor(10, 64)
        values[:, 20] *= 100
        values[:, 40] *= 100
        encoded = encode(values, codec)
        data = bytearray(encoded.data)
        base = TensorSpec(encoded.spec.shape, encoded.spec.dtype, codec).byte_length
        struct.pack_into("<2H", data, base, *channels)
        out = torch.ones(10, 64)
        with pytest.raises(ProtocolViolation, match="rising order"):
            decode(encoded.spec, memoryview(data), out)
        assert bool((out == 1).all())

    @pytest.mark.parametrize(("shape", "outliers"), [((64,), 1), ((4, 15), 1), ((4, 64), 5)])
    def test_more_channels_apart_than_are_allowed_make_no_tensor(self, shape: tuple[int, ...], outliers: int) -> None:
        assert as_received(Codec.INT8, shape, b"", outliers).spec.fault() is not None


class TestWiderCodecs:
    @pytest.mark.parametrize("codec", BLOCKWISE)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_float32_that_is_not_finite_goes_as_bf16(self, codec: Codec, bad: float) -> None:
        values = normal_tensor(1000)
        values[777] = bad
        encoded = encode(values, codec)
        assert encoded.spec.codec is Codec.BF16
        assert torch.equal(decoded_tensor(encoded).nan_to_num(7.0), values.bfloat16().float().nan_to_num(7.0))

    @pytest.mark.parametrize("codec", BLOCKWISE)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_bfloat16_that_is_not_finite_goes_as_it_is(self, codec: Codec, bad: float) -> None:
        values = normal_tensor(1000, dtype=torch.bfloat16)
        values[777] = bad
        encoded = encode(values, codec)
        assert encoded.spec.codec is Codec.NONE
        assert torch.equal(decoded_tensor(encoded).view(torch.int16), values.view(torch.int16))

    @pytest.mark.parametrize("codec", BLOCKWISE)
    def test_a_nan_hides_no_channel(self, codec: Codec) -> None:
        """Neither in a channel that stands out nor beside one."""
        values = normal_tensor(64, 64)
        values[:, 7] *= 100
        for channel in (7, 8):
            one = values.clone()
            one[3, channel] = math.nan
            assert bool(decoded_tensor(encode(one, codec))[3, channel].isnan())


class TestMisuse:
    @pytest.mark.parametrize("codec", LOSSY)
    def test_wrong_lengths_and_forms_are_our_own_mistakes(self, codec: Codec) -> None:
        encoded = encode(normal_tensor(10, 20), codec)
        data = bytearray(encoded.data)
        for wrong, out in (
            (data + b"\0", torch.empty(10, 20)),
            (data[:-1], torch.empty(10, 20)),
            (data, torch.empty(200)),
            (data, torch.empty(10, 20, dtype=torch.bfloat16)),
        ):
            with pytest.raises(ValueError, match="do not go with"):
                decode(encoded.spec, memoryview(wrong), out)


CPU = torch.device("cpu")


def test_on_the_cpu_nothing_is_copied() -> None:
    octets = torch.arange(9, dtype=torch.uint8)
    assert to_host(octets).data_ptr() == to_device(octets, CPU).data_ptr() == octets.data_ptr()


def test_without_a_gpu_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(size_bytes: int) -> None:
        raise AssertionError("nothing is to be pinned")

    monkeypatch.setattr(host_memory, "_pinned", pinned)
    assert isinstance(buffer_for(9, CPU).obj, bytearray)


def test_where_the_system_has_no_pinned_memory_left_it_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **given: object) -> torch.Tensor:
        assert given["pin_memory"]
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host_memory.torch, "empty", empty)
    assert isinstance(buffer_for(9, torch.device("cuda")).obj, bytearray)


def test_a_pool_reuses_the_memory_that_it_was_given() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        made.append(size_bytes)
        return np.zeros(size_bytes, np.uint8).data

    pool = BufferPool(100, 2, allocate)
    first, second = pool.take(), pool.take()
    with pytest.raises(ResourceExhausted):
        pool.take()
    first[:3] = b"abc"
    pool.give_back(first[:50])
    again = pool.take()
    assert (len(again), bytes(again[:3]), made) == (100, b"abc", [100, 100])
    assert second.nbytes == 100


BOTH = pytest.mark.parametrize("codec", [TOP_K_4, TOP_K_2], ids=lambda codec: codec.codec.name)
TOP_K_LENGTHS = [1, 2, 31, 32, 33, 100, 4095, 4096, 4097, 7 * 4096, 8 * 4096 + 1, 100_000]
RUN = 2**PLACE_LOW_BITS
CODE_BITS = {Codec.TOP_K_4: 4, Codec.TOP_K_2: 2}
ELEMENTS_FOR_TWO = {Codec.TOP_K_4: 40, Codec.TOP_K_2: 32}


def kept_of(codec: TopK, elements: int) -> int:
    return SparseChunk(elements, codec.codec).kept


def size_of(codec: TopK, elements: int) -> int:
    return TensorSpec((elements,), DType.FLOAT32, codec.codec).byte_length


def encoded_top_k(codec: TopK, values: Tensor) -> Tensor:
    out = torch.full((size_of(codec, len(values)),), 255, dtype=torch.uint8)
    codec.encode(values, out)
    return out


def decoded_top_k(codec: TopK, data: Tensor | bytes, elements: int) -> Tensor:
    out = torch.full((elements,), float("nan"))
    octets = torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data
    codec.decode(octets, out)
    return out


def round_trip(codec: TopK, values: Tensor) -> Tensor:
    return decoded_top_k(codec, encoded_top_k(codec, values), len(values))


def normal_vector(elements: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * scale


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def packed(numbers: list[int], width: int) -> bytes:
    """Numbers of `width` bits, the lowest bit of each first."""
    total = sum(number << (width * index) for index, number in enumerate(numbers))
    return total.to_bytes(-(-len(numbers) * width // 8), "little")


def places_of(places: list[int], elements: int) -> bytes:
    low = packed([place % RUN for place in places], PLACE_LOW_BITS)
    high = sum(1 << (place // RUN + index) for index, place in enumerate(places))
    return low + high.to_bytes(-(-(len(places) + -(-elements // RUN)) // 8), "little")


class TestTopKFormat:
    def test_four_bits_worked_out_by_hand(self) -> None:
        """Three of 64 elements. The levels are 1 and 50: 50 = 1 + 49 (7/7)^2, -5 = -(1 + 49 (2/7)^2)."""
        values = torch.zeros(64)
        values[3], values[40], values[41] = 50.0, -5.0, 1.0
        low = 3 | 8 << 4 | 9 << 8
        high = 1 << 0 | 1 << (2 + 1) | 1 << (2 + 2)
        codes = 7 | (8 + 2) << 4 | 0 << 8
        expected = bf16(1.0) + bf16(50.0) + low.to_bytes(2, "little") + bytes([high]) + codes.to_bytes(2, "little")
        assert bytes(encoded_top_k(TOP_K_4, values).tolist()) == expected
        assert torch.equal(decoded_top_k(TOP_K_4, expected, 64), values)

    def test_two_bits_worked_out_by_hand(self) -> None:
        """Magnitudes 1 and 3 are near each other, 10 and 12 are: levels 2 and 11."""
        values = torch.zeros(4096)
        few, many = [1.0, -3.0], [10.0, -12.0]
        places = list(range(0, 512, 2))
        numbers = [(few + many)[index % 4] for index in range(256)]
        values[places] = torch.tensor(numbers)
        codes = [[0, 2, 1, 3][index % 4] for index in range(256)]
        expected = bf16(2.0) + bf16(11.0) + places_of(places, 4096) + packed(codes, 2)
        assert bytes(encoded_top_k(TOP_K_2, values).tolist()) == expected
        assert decoded_top_k(TOP_K_2, expected, 4096)[:8].tolist() == [2, 0, -2, 0, 11, 0, -11, 0]

    @BOTH
    @pytest.mark.parametrize("elements", TOP_K_LENGTHS)
    def test_lengths(self, codec: TopK, elements: int) -> None:
        length = 0
        for start in range(0, elements, SPARSE_CHUNK):
            here = min(SPARSE_CHUNK, elements - start)
            count = -(-here * KEPT[codec.codec] // SPARSE_CHUNK)
            bits = (count * 4, count + -(-here // 16), count * CODE_BITS[codec.codec])
            length += 4 + sum(-(-number // 8) for number in bits)
        assert size_of(codec, elements) == length

    @pytest.mark.parametrize("codec", [Codec.TOP_K_4, Codec.TOP_K_2])
    def test_at_least_sixty_times_smaller(self, codec: Codec) -> None:
        assert TensorSpec((2**20,), DType.FLOAT32, codec).byte_length * 60 <= 2**22

    @BOTH
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_any_tensor_goes_and_comes(self, codec: TopK, dtype: torch.dtype) -> None:
        values = normal_vector(6 * 2500).to(dtype).view(6, 2500)
        sent = encode(values, codec.codec)
        assert isinstance(sent, Encoded)
        assert sent.spec.codec is codec.codec
        out = torch.empty_like(values)
        decode(sent.spec, sent.data, out)
        assert torch.equal(out.view(-1).float(), round_trip(codec, values.view(-1)).to(dtype).float())

    def test_what_cannot_be_expressed_goes_as_bfloat16(self) -> None:
        values = normal_vector(5000)
        values[17] = float("inf")
        assert encode(values, Codec.TOP_K_4).spec.codec is Codec.BF16


class TestWhatIsKept:
    @BOTH
    @pytest.mark.parametrize("elements", TOP_K_LENGTHS)
    def test_the_largest_of_each_chunk_and_nothing_else(self, codec: TopK, elements: int) -> None:
        values = normal_vector(elements)
        result = round_trip(codec, values)
        for chunk, there in zip(values.split(SPARSE_CHUNK), result.split(SPARSE_CHUNK), strict=True):
            largest = chunk.abs().topk(kept_of(codec, len(chunk))).indices.sort().values
            assert torch.equal(there.nonzero().flatten(), largest)
            assert torch.equal(there[largest].sign(), chunk[largest].sign())

    @pytest.mark.parametrize(("codec", "limit"), [(TOP_K_4, 0.03), (TOP_K_2, 0.1)])
    @pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e3])
    def test_the_error_of_what_is_kept_does_not_depend_on_the_magnitude(
        self, codec: TopK, limit: float, scale: float
    ) -> None:
        values = normal_vector(50 * SPARSE_CHUNK, scale)
        result = round_trip(codec, values)
        there = result != 0
        assert int(there.sum()) == 50 * KEPT[codec.codec]
        assert (result - values)[there].norm() <= limit * values[there].norm()

    def test_the_error_stays_small_beside_a_far_larger_element(self) -> None:
        values = normal_vector(SPARSE_CHUNK)
        values[7] = 60.0
        result = round_trip(TOP_K_4, values)
        there = result != 0
        assert result[7] == pytest.approx(60.0, rel=0.004)
        there[7] = False
        assert (result - values)[there].norm() <= 0.25 * values[there].norm()

    @BOTH
    def test_it_is_not_longer_than_what_was_encoded(self, codec: TopK) -> None:
        """Members declare the length of their pseudo-gradient, and rounding may add 1 %
        (`node.averaging.exchange.reduction`)."""
        for seed in range(20):
            values = normal_vector(SPARSE_CHUNK, seed=seed) ** (1 + seed % 4)
            assert round_trip(codec, values).norm() <= 1.01 * values.norm()

    @BOTH
    def test_fewer_elements_than_could_be_sent(self, codec: TopK) -> None:
        values = torch.zeros(2 * SPARSE_CHUNK)
        values[5000] = -3.0
        result = round_trip(codec, values)
        assert result.nonzero().flatten().tolist() == [5000]
        assert result[5000] == pytest.approx(-3.0, rel=0.004)

    @BOTH
    def test_what_vanishes_becomes_zero(self, codec: TopK) -> None:
        assert not round_trip(codec, torch.full((SPARSE_CHUNK,), 1e-40)).any()

    @BOTH
    def test_equal_elements(self, codec: TopK) -> None:
        result = round_trip(codec, torch.full((SPARSE_CHUNK,), -0.5))
        assert result[result != 0].tolist() == [-0.5] * KEPT[codec.codec]

    @given(arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    def test_four_bits_are_never_farther_off_than_half_a_level(self, values: np.ndarray) -> None:  # type: ignore[type-arg]
        x = torch.from_numpy(values)
        result = round_trip(TOP_K_4, x).double()
        kept = x.abs().topk(kept_of(TOP_K_4, len(x))).values.double()
        gap = float(kept.max() - kept.min())
        off = (result - x.double()).abs()[result != 0]
        assert not len(off) or float(off.max()) <= gap * 13 / 98 + 0.005 * float(kept.max()) + 1e-37


class TestTopKRefusals:
    @BOTH
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**127])
    @pytest.mark.parametrize("at", [0, 4095, 8 * 4096 + 3])
    def test_what_cannot_be_expressed_is_not_encoded(self, codec: TopK, bad: float, at: int) -> None:
        values = normal_vector(9 * SPARSE_CHUNK)
        values[at] = bad
        with pytest.raises(StateError, match="finite"):
            encoded_top_k(codec, values)

    @BOTH
    @pytest.mark.parametrize(
        ("lowest", "highest"),
        [
            (1.0, np.nan),
            (np.nan, 1.0),
            (1.0, np.inf),
            (-1.0, 1.0),
            (2.0, 1.0),
            (1e-40, 1.0),
            (1.0, LARGEST_LEVEL * 1.1),
        ],
    )
    def test_impossible_levels_are_refused_and_nothing_is_touched(
        self, codec: TopK, lowest: float, highest: float
    ) -> None:
        data = encoded_top_k(codec, normal_vector(5000))
        data[-size_of(codec, 5000 - SPARSE_CHUNK) :][:4] = torch.frombuffer(
            bytearray(bf16(lowest) + bf16(highest)), dtype=torch.uint8
        )
        out = torch.ones(5000)
        with pytest.raises(ProtocolViolation, match=r"level|scale"):
            codec.decode(data, out)
        assert bool((out == 1).all())

    @BOTH
    @pytest.mark.parametrize(
        ("places", "complaint"),
        [
            ([5, 20], None),
            ([5], "does not have 2"),
            ([5, 6, 20], "does not have 2"),
            ([5, 5], "rise"),
            ([9, 5], "rise"),
        ],
    )
    def test_places_must_rise_and_be_as_many_as_there_are(
        self, codec: TopK, places: list[int], complaint: str | None
    ) -> None:
        elements = ELEMENTS_FOR_TWO[codec.codec]
        low = packed([place % RUN for place in (places + places)[:2]], PLACE_LOW_BITS)
        high = sum(1 << (place // RUN + index) for index, place in enumerate(places)).to_bytes(1, "little")
        data = bf16(1.0) + bf16(2.0) + low + high + packed([0, 1], CODE_BITS[codec.codec])
        if complaint is None:
            assert decoded_top_k(codec, data, elements).nonzero().flatten().tolist() == places
        else:
            with pytest.raises(ProtocolViolation, match=complaint):
                decoded_top_k(codec, data, elements)

    @BOTH
    def test_places_beyond_the_end_of_a_shorter_chunk_are_refused(self, codec: TopK) -> None:
        data = bf16(1.0) + bf16(2.0) + places_of([2], 1) + packed([0], CODE_BITS[codec.codec])
        with pytest.raises(ProtocolViolation, match="leave its 2 elements"):
            decoded_top_k(codec, data, 2)


CODECS: Final[dict[Codec, Blockwise]] = {Codec.INT8: INT8, Codec.INT4: INT4}
SIZES: Final = st.sampled_from([0.0, -0.0, 1e-45, 2.0**-126, 1e-3, 0.5, 1.0, -1.0, 1.5, 2.5, 40.0, 1e4, 2.0**100])
DIGESTS: Final = {
    Codec.INT8: "acb3898e4fb2de5954306dac61fe92fc692ad921ad25b6c46a22fd585ff7f068",
    Codec.INT4: "0b7afc8416abcecca8c3040fbfd853559ca4033c2d4b08dfa905e36ef570e694",
}


def corpus() -> list[Tensor]:
    """Made of whole numbers, so that it is the same everywhere."""
    made = []
    for seed, shape in enumerate([(1,), (129,), (3, 5), (7, 64), (2, 40, 96), (1, 300, 515), (40_000,)]):
        numbers = np.random.default_rng(seed).integers(-(2**20), 2**20, shape)
        plain = torch.from_numpy(numbers.astype(np.float32) / 2**18)
        few, many = plain.clone(), plain.clone()
        few[..., ::50] *= 60
        many[..., 3:23] = 1000 * torch.arange(1, many[..., 3:23].shape[-1] + 1)
        made += [plain, few, many, plain * 2.0**-130, plain.round(), torch.zeros_like(plain)]
    return made + [each.bfloat16() for each in made]


def encoded_there(values: Tensor, codec: Codec) -> tuple[bytes, int] | None:
    """None where the codec cannot express it."""
    spec = TensorSpec(tuple(values.shape), DTYPES[values.dtype], codec)
    try:
        spec, octets = outliers.encode_without_waiting(values, spec, CODECS[codec])
    except StateError:
        return None
    return octets.numpy().tobytes(), spec.outliers


def check_same(values: Tensor, codec: Codec) -> None:
    here, there = encode(values, codec), encoded_there(values, codec)
    if here.spec.codec is not codec:
        assert there is None
        return
    assert there is not None
    data, apart = there
    assert apart == here.spec.outliers
    assert len(data) == here.spec.byte_length
    assert data == here.data


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_are_those_that_there_have_always_been(codec: Codec) -> None:
    digest = hashlib.sha256()
    for values in corpus():
        digest.update(encode(values, codec).data)
    assert digest.hexdigest() == DIGESTS[codec]


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_are_those_of_the_cpu(codec: Codec) -> None:
    found = [encode(values, codec).spec.outliers for values in corpus()]
    assert {0, 2, 4, 6, 11, 20} <= set(found), "there are some of every kind"
    for values in corpus():
        check_same(values, codec)


@pytest.mark.parametrize("codec", CODECS)
@given(
    values=arrays(np.float32, st.tuples(st.integers(1, 70), st.integers(1, 70)), elements=SIZES),
    factors=st.lists(st.sampled_from([1.0, 9.0, 100.0, math.inf, math.nan, 2.0**127]), max_size=9),
    is_wide=st.booleans(),
)
def test_the_bytes_are_those_of_the_cpu_whatever_is_encoded(
    codec: Codec, values: np.ndarray, factors: list[float], is_wide: bool
) -> None:
    tensor = torch.from_numpy(values).clone()
    for channel, factor in enumerate(factors[: tensor.shape[1]]):
        tensor[:, -channel - 1] *= factor
    check_same(tensor if is_wide else tensor.bfloat16(), codec)


def test_of_too_many_equal_channels_the_first_are_taken() -> None:
    values = torch.ones(64, 64)
    values[:, 10:20] = 100.0
    found, count = outliers.find_without_looking(values)
    assert (found.tolist(), count.item()) == ([10, 11, 12, 13], 4)


@pytest.mark.parametrize("codec", CODECS)
def test_faults_of_what_was_received_can_be_looked_at_later(codec: Codec) -> None:
    values = torch.linspace(-1.0, 1.0, 64 * 64).view(64, 64).clone()
    values[:, [20, 40]] = 500.0
    encoded = encode(values, codec)
    base = TensorSpec(encoded.spec.shape, encoded.spec.dtype, codec).byte_length
    scale = slice(base - (2 if codec is Codec.INT4 else 4), base)
    whole, no_scale, no_channel, no_order = (bytearray(encoded.data) for _ in range(4))
    no_scale[scale] = b"\xff" * (scale.stop - scale.start)
    no_channel[base + 2 : base + 4] = b"\xff\xff"
    no_order[base : base + 2] = no_order[base + 2 : base + 4]
    for data, holds in ((whole, True), (no_scale, False), (no_channel, False), (no_order, False)):
        found: list[bool] = []
        decode(
            encoded.spec, memoryview(data), torch.empty(64, 64), lambda each, _, found=found: found.append(bool(each))
        )
        assert all(found) is holds
        if not holds:
            with pytest.raises(ProtocolViolation):
                decode(encoded.spec, memoryview(data), torch.empty(64, 64))


WIDTHS = {torch.float32: 4, torch.bfloat16: 2}
PLANE_DTYPES = st.sampled_from(list(WIDTHS))


def normal_planes(elements: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(dtype)


def of_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    return octets_of(memoryview(bytearray(data))).view(dtype)


def bytes_of(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


def decoded_planes(data: bytes, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((elements,), 7.0, dtype=dtype)
    planes.decode(octets_of(memoryview(bytearray(data))), out)
    return out


def encoded_planes(values: Tensor) -> bytes:
    data = planes.encode(values)
    assert data is not None
    return data.numpy().tobytes()


def put_together(bodies: Sequence[bytes], lengths: Sequence[int] | None = None) -> bytes:
    """An encoding as the module's docstring describes it."""
    lengths = [len(body) for body in bodies] if lengths is None else lengths
    return struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(bodies)


def frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=3, **options).compress(content)


class TestPlanesFormat:
    def test_an_encoding_put_together_by_hand(self) -> None:
        """Stored planes: 1.0 is 3f800000, -2.0 is c0000000, and the smallest subnormal is 00000001."""
        body = [b"\0\0\1", b"\0\0\0", b"\x80\0\0", b"\x3f\xc0\0"]
        assert decoded_planes(put_together(body), 3).tolist() == [1.0, -2.0, 2.0**-149]
        halves = [b"\x80\0\1", b"\x3f\xc0\0"]
        assert decoded_planes(put_together(halves), 3, torch.bfloat16).tolist() == [1.0, -2.0, 2.0**-133]

    def test_a_frame_written_out_byte_by_byte(self) -> None:
        """RFC 8878."""
        run = bytes.fromhex("28b52ffd 20 64") + ((100 << 3) | (1 << 1) | 1).to_bytes(3, "little") + b"\x3f"
        mantissa = bytes(range(100))
        expected = [struct.unpack("<f", bytes([0, 0, low, 0x3F]))[0] for low in mantissa]
        zeros = run[:-1] + b"\0"
        assert decoded_planes(put_together([zeros, zeros, mantissa, run]), 100).tolist() == expected

    @given(PLANE_DTYPES, st.sampled_from([-1, 0, 1]), st.sampled_from([1, 2]), st.integers(0, 2**32))
    def test_what_is_encoded_is_as_described(self, dtype: torch.dtype, more: int, slices: int, seed: int) -> None:
        values = normal_planes(slices * SLICE_BYTES // WIDTHS[dtype] + more, dtype, seed)
        encoding, width, at = encoded_planes(values), WIDTHS[dtype], 0
        rows = np.frombuffer(bytes_of(values), np.uint8).reshape(-1, width)
        expected = [
            rows[first : first + SLICE_BYTES // width, byte].tobytes()
            for first in range(0, len(rows), SLICE_BYTES // width)
            for byte in range(width)
        ]
        lengths = struct.unpack_from(f"<{len(expected)}I", encoding)
        at = 4 * len(lengths)
        for length, plane in zip(lengths, expected, strict=True):
            body = encoding[at : at + length]
            assert plane == (body if length == len(plane) else zstandard.decompress(body))
            at += length
        assert at == len(encoding) < len(values) * width


class TestRoundTrip:
    @given(PLANE_DTYPES, st.binary(max_size=600), st.integers(1, 40))
    def test_every_bit_comes_back(self, dtype: torch.dtype, pattern: bytes, times: int) -> None:
        """Any bits at all: NaN with a payload, infinities, subnormals, zeros of both signs."""
        width = WIDTHS[dtype]
        values = of_bytes(pattern[: len(pattern) // width * width] * times, dtype)
        data = planes.encode(values)
        if data is None:
            return
        assert data.dtype is torch.uint8
        assert data.numel() < values.numel() * width
        out = torch.zeros_like(values)
        planes.decode(data, out)
        assert bytes_of(out) == bytes_of(values)

    @pytest.mark.parametrize("dtype", WIDTHS)
    @pytest.mark.parametrize("slices", [0, 1, 3])
    @pytest.mark.parametrize("more", [-1, 0, 1, 4096])
    def test_at_the_borders_of_slices(self, dtype: torch.dtype, slices: int, more: int) -> None:
        elements = slices * SLICE_BYTES // WIDTHS[dtype] + more
        if elements <= 0:
            return
        values = normal_planes(elements, dtype)
        data = planes.encode(values)
        if data is None:
            assert elements == 1
        else:
            out = torch.empty_like(values)
            planes.decode(data, out)
            assert bytes_of(out) == bytes_of(values)

    @pytest.mark.parametrize("dtype", WIDTHS)
    @pytest.mark.parametrize(
        "bits", ["7fc00001", "7f800001", "ff800000", "7f800000", "80000000", "00000001", "ffffffff"]
    )
    def test_special_values(self, dtype: torch.dtype, bits: str) -> None:
        value = bytes.fromhex(bits)[: WIDTHS[dtype]][::-1]
        values = of_bytes(value * 1000, dtype)
        assert bytes_of(decoded_planes(encoded_planes(values), 1000, dtype)) == bytes_of(values)

    def test_a_plane_of_which_only_a_part_repeats(self) -> None:
        values = torch.cat([torch.zeros(100_000), normal_planes(100_000), torch.ones(100_000)])
        assert torch.equal(decoded_planes(encoded_planes(values), len(values)), values)

    def test_it_does_not_matter_where_in_memory_an_encoding_stands(self) -> None:
        values = normal_planes(10_000)
        memory = octets_of(memoryview(bytearray(b"x" + encoded_planes(values))))
        out = torch.empty_like(values)
        planes.decode(memory[1:], out)
        assert torch.equal(out, values)


class TestShorter:
    @pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1.15), (torch.bfloat16, 1.4)])
    def test_weights_shrink(self, dtype: torch.dtype, ratio: float) -> None:
        values = normal_planes(2**20, dtype)
        assert values.numel() * WIDTHS[dtype] / len(encoded_planes(values)) >= ratio

    @pytest.mark.parametrize("dtype", WIDTHS)
    @pytest.mark.parametrize("elements", [0, 1, 2, 100, 300_000])
    def test_noise_is_not_encoded(self, dtype: torch.dtype, elements: int) -> None:
        noise = np.random.default_rng(0).bytes(elements * WIDTHS[dtype])
        assert planes.encode(of_bytes(noise, dtype)) is None


class TestAsACodec:
    @pytest.mark.parametrize("dtype", WIDTHS)
    def test_through_the_common_entrance(self, dtype: torch.dtype) -> None:
        values = normal_planes(60_000, dtype).view(3, 4, 5000)
        sent = encode(values, Codec.PLANES)
        assert sent.spec.codec is Codec.PLANES
        assert sent.spec.fault() is None
        assert sent.spec.compressed_bytes == sent.data.nbytes < sent.spec.raw_bytes
        out = torch.zeros_like(values)
        decode(sent.spec, sent.data, out)
        assert torch.equal(out, values)

    def test_what_does_not_shrink_goes_as_it_is(self) -> None:
        noise = of_bytes(np.random.default_rng(1).bytes(4000), torch.float32)
        sent = encode(noise, Codec.PLANES)
        assert sent.spec == TensorSpec((1000,), DType.FLOAT32)
        assert bytes(sent.data) == bytes_of(noise)

    def test_another_length_than_was_announced_is_our_own_mistake(self) -> None:
        spec = TensorSpec((1000,), DType.FLOAT32, Codec.PLANES, compressed_bytes=100)
        with pytest.raises(ValueError, match="do not go with"):
            decode(spec, memoryview(bytes(99)), torch.empty(1000, dtype=ELEMENT_TYPES[DType.FLOAT32]))


ELEMENTS = 2000
ZEROS = bytes(ELEMENTS)
SKIPPABLE = struct.pack("<II", 0x184D2A50, 12) + b"nothing here"
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(ZEROS)
DICTIONARY = zstandard.ZstdCompressionDict(b"some words that occur" * 20, dict_type=zstandard.DICT_TYPE_RAWCONTENT)

FORGED: dict[str, bytes] = {
    "a bomb": frame(bytes(10**9 // 50)),
    "a bomb of which the header lies": frame(bytes(2**20)).replace(
        frame(bytes(2**20))[:9], frame(ZEROS)[:4] + b"\x60" + struct.pack("<H", ELEMENTS - 256), 1
    ),
    "a frame of less": frame(ZEROS[1:]),
    "a frame of more": frame(ZEROS + b"\0"),
    "a frame that declares no size": UNSIZED,
    "two frames": frame(ZEROS[:1000]) + frame(ZEROS[1000:]),
    "a frame and more": frame(ZEROS) + b"\0",
    "a frame and an empty one": frame(ZEROS) + frame(b""),
    "a frame cut off": frame(ZEROS)[:-1],
    "a skippable frame": SKIPPABLE,
    "a skippable frame before": SKIPPABLE + frame(ZEROS),
    "no frame": b"no frame",
    "a single byte": b"\x28",
    "a header alone": frame(ZEROS)[:5],
}


class TestPlanesRefusals:
    @pytest.mark.parametrize("body", FORGED.values(), ids=FORGED.keys())
    @pytest.mark.parametrize("place", [0, 3])
    def test_forged_bodies(self, body: bytes, place: int) -> None:
        bodies = [frame(ZEROS)] * 4
        assert not decoded_planes(put_together(bodies), ELEMENTS).any()
        bodies[place] = body
        with pytest.raises(ProtocolViolation):
            decoded_planes(put_together(bodies), ELEMENTS)

    @pytest.mark.parametrize(
        "lengths",
        [
            (0, 0, 0, 0),
            (2000, 2000, 2000, 1999),
            (2000, 2000, 2000, 2001),
            (2**32 - 1, 1, 6000, 2000),
            (4000, 0, 2000, 2000),
        ],
    )
    def test_lengths_that_do_not_add_up_or_exceed_a_plane(self, lengths: tuple[int, ...]) -> None:
        with pytest.raises(ProtocolViolation, match="length"):
            decoded_planes(put_together([bytes(8000)], lengths), ELEMENTS)

    @pytest.mark.parametrize("dtype", WIDTHS)
    def test_every_truncation_and_every_addition(self, dtype: torch.dtype) -> None:
        data = encoded_planes(normal_planes(500, dtype))
        for size in range(len(data)):
            with pytest.raises(ProtocolViolation):
                decoded_planes(data[:size], 500, dtype)
        with pytest.raises(ProtocolViolation):
            decoded_planes(data + b"\0", 500, dtype)

    @pytest.mark.parametrize("elements", [499, 501, 10**6])
    def test_another_number_of_elements(self, elements: int) -> None:
        with pytest.raises(ProtocolViolation):
            decoded_planes(encoded_planes(normal_planes(500)), elements)

    @given(PLANE_DTYPES, st.data())
    def test_a_damaged_encoding_is_a_violation_or_a_complete_result(
        self, dtype: torch.dtype, data: st.DataObject
    ) -> None:
        encoding = bytearray(encoded_planes(normal_planes(500, dtype)))
        for _ in range(data.draw(st.integers(1, 4))):
            encoding[data.draw(st.integers(0, len(encoding) - 1))] = data.draw(st.integers(0, 255))
        self.decode_if_possible(bytes(encoding), dtype)

    @given(PLANE_DTYPES, st.binary(max_size=300))
    def test_any_bytes_are_a_violation_or_a_complete_result(self, dtype: torch.dtype, data: bytes) -> None:
        self.decode_if_possible(data, dtype)

    @staticmethod
    def decode_if_possible(data: bytes, dtype: torch.dtype) -> None:
        """What does not raise has written every element: over whatever was there before it gives the same."""
        results = []
        for before in (0.0, 7.0):
            out = torch.full((500,), before, dtype=dtype)
            try:
                planes.decode(octets_of(memoryview(bytearray(data))), out)
            except ProtocolViolation:
                return
            results.append(bytes_of(out))
        assert results[0] == results[1]

    def test_a_frame_that_needs_a_dictionary(self) -> None:
        body = zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(b"some words that occur" * 95)
        with pytest.raises(ProtocolViolation):
            decoded_planes(put_together([body] * 4), 21 * 95)


class TestBounds:
    def test_a_bomb_is_refused_before_memory_is_taken(self) -> None:
        bomb = put_together([frame(bytes(64 * 2**20))] * 4)
        out = torch.empty(len(bomb))
        assert peak_bytes(bomb, out, refused=True) < 2**16

    @pytest.mark.parametrize("dtype", WIDTHS)
    def test_decoding_takes_the_memory_of_one_slice_however_many_there_are(self, dtype: torch.dtype) -> None:
        values = normal_planes(8 * SLICE_BYTES // WIDTHS[dtype], dtype)
        assert peak_bytes(encoded_planes(values), torch.empty_like(values), refused=False) < 2.5 * SLICE_BYTES


def peak_bytes(encoding: bytes, out: Tensor, *, refused: bool) -> int:
    """The most that the interpreter and numpy held while decoding."""
    data = octets_of(memoryview(bytearray(encoding)))
    tracemalloc.start()
    try:
        planes.decode(data, out)
        assert not refused
    except ProtocolViolation:
        assert refused
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak
