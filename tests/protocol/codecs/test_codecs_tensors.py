"""Codecs for tensors of any shape, float32 and bfloat16: bytes worked out by hand, error bounds, outliers."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from protocol.codecs import Encoded, decode, encode
from protocol.codecs.blockwise import SMALLEST_SCALE
from protocol.codecs.memory import ELEMENT_TYPES
from protocol.interfaces.tensor_spec import INT4_BLOCK, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

BLOCKWISE = [Codec.INT8, Codec.INT4]
LOSSY = [Codec.BF16, *BLOCKWISE, Codec.INT2]
VECTORS = [(size,) for size in (1, 63, 65, 129, 255 * 128 + 1, 16 * 255 * 128 + 65)]
SHAPES = [*VECTORS, (7, 9), (3, 5, 64), (2, 3, 5, 96), (1, 300_001)]
LARGE = (100, 1000)
RELATIVE_ERROR = {Codec.BF16: 2e-3, Codec.INT8: 7e-3, Codec.INT4: 0.11, Codec.INT2: 0.345}  # On normal numbers


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decoded(encoded: Encoded) -> Tensor:
    spec = encoded.spec
    out = torch.full(spec.shape, torch.nan, dtype=ELEMENT_TYPES[spec.dtype])
    decode(spec, memoryview(bytearray(encoded.data)), out)
    return out


def distance(values: Tensor, other: Tensor) -> float:
    exact = values.double()
    return float((other.double() - exact).norm() / exact.norm())


class TestFormat:
    def test_bf16_and_int4_worked_out_by_hand(self) -> None:
        values = numbers(1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, math.inf, 0.0)
        expected = struct.pack("<7H", 0x3F80, 0xC000, 0x3F80, 0x3F82, 0x7F80, 0x7F80, 0)
        assert encode(values, Codec.BF16).data == expected
        lower = [8.0, -7.0, 1.0, -1.0, 0.5, 1.5, -8.0, *[0.0] * 25]
        upper = [2.0, 3.0, *[0.0] * 30]
        codes = [0, 15, 7, 9, 8, 6, 15, *[8] * 25], [6, 5, *[8] * 30]
        tail, tail_codes = [-16.0, 2.0, 14.0], [0 | 15 << 4, 9]
        expected = bytes([low | high << 4 for low, high in zip(*codes, strict=True)] + tail_codes)
        expected += struct.pack("<2H", 0xBF80, 0x4000)
        assert encode(numbers(*lower, *upper, *tail), Codec.INT4).data == expected

    def test_int2_worked_out_by_hand(self) -> None:
        tail = [3.0, -1.0, 1.0, 1.0, -3.0]  # Two codes a quarter, and an unused last one
        expected = bytes([0b11_11_11_11] * 8 + [0b00_00_00_00] * 8)
        expected += bytes([3 | 2 << 2 | 0 << 4, 1 | 2 << 2]) + struct.pack("<2H", 0x3F80, 0x3F80)
        levels = numbers(*([3.0] * 8 + [-3.0] * 8) * 4, *tail)
        assert encode(levels, Codec.INT2).data.nbytes == len(expected)
        assert decoded(as_received(Codec.INT2, (69,), expected)).tolist() == levels.tolist()
        assert encode(numbers(*tail), Codec.INT2).data == expected[16:18] + expected[-2:]
        for scale in (0xBF80, 0x7F80, 0x7FC0, 0x0001):
            with pytest.raises(ProtocolViolation, match="scale"):
                decoded(as_received(Codec.INT2, (64,), bytes(16) + struct.pack("<H", scale)))

    @given(arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**60), 2.0**60, width=32)))
    def test_no_int2_encoding_is_longer_than_its_vector(self, array: np.ndarray) -> None:
        values = torch.from_numpy(array)
        assert float(decoded(encode(values, Codec.INT2)).double().norm()) <= float(values.double().norm()) * (1 + 2**-8)

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
        assert decoded(encoded)[:, 5].tolist() == [100.0, -50.0]

    def test_every_int4_code_means_what_the_format_says(self) -> None:
        data = bytes(code | (15 - code) << 4 for code in range(16)) * 2 + struct.pack("<H", 0xC040)
        expected = [(code - 8) * -3.0 for code in range(16)] * 2 + [(7 - code) * -3.0 for code in range(16)] * 2
        assert decoded(as_received(Codec.INT4, (64,), data)).tolist() == expected


def as_received(codec: Codec, shape: tuple[int, ...], data: bytes, outliers: int = 0) -> Encoded:
    return Encoded(TensorSpec(shape, encode(normal(1), Codec.NONE).spec.dtype, codec, outliers), memoryview(data))


class TestAccuracy:
    @pytest.mark.parametrize("codec", LOSSY)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("shape", "size"), [*((shape, 1.0) for shape in SHAPES), *((LARGE, size) for size in (1e-7, 1e-3, 1.0, 1e3))]
    )
    def test_any_tensor_comes_back(self, codec: Codec, dtype: torch.dtype, shape: tuple[int, ...], size: float) -> None:
        values = (normal(*shape) * size).to(dtype)
        encoded = encode(values, codec)
        assert encoded.spec == TensorSpec(shape, encoded.spec.dtype, codec)
        assert encoded.data.nbytes == encoded.spec.byte_length
        assert distance(values, decoded(encoded)) <= (1.0 if shape == LARGE else 1.5) * RELATIVE_ERROR[codec]

    @given(arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    def test_int4_is_off_by_half_a_step_and_by_one_at_the_far_end(self, array: np.ndarray) -> None:
        values = torch.from_numpy(array)
        off = (decoded(encode(values, Codec.INT4)).double() - values.double()).abs()
        for exact, wrong in zip(values.split(INT4_BLOCK), off.split(INT4_BLOCK), strict=True):
            step = exact.abs().max().double() / 8 * (1 + 2**-8) + 8 * SMALLEST_SCALE
            assert bool((wrong <= step * (1 + 2**-8)).all())
            assert bool((wrong[exact.abs() <= 7 * step] <= step * 0.51 + 8 * SMALLEST_SCALE).all())


class TestOutliers:
    @pytest.mark.parametrize("codec", BLOCKWISE)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_other_channels_are_as_exact_as_without(self, codec: Codec, dtype: torch.dtype) -> None:
        values = normal(4, 100, 256, dtype=dtype)
        values[..., 17] *= 60
        values[..., 101] *= 25
        encoded = encode(values, codec)
        result, rest = decoded(encoded), [channel for channel in range(256) if channel not in (17, 101)]
        assert encoded.spec.outliers == 2
        assert distance(values[..., rest], result[..., rest]) <= RELATIVE_ERROR[codec]
        assert torch.equal(result[..., [17, 101]], values[..., [17, 101]].bfloat16().to(dtype))

    def test_at_most_every_sixteenth_channel_is_sent_apart_the_largest_of_them(self) -> None:
        values = normal(64, 64)
        values[:, 10:20] *= 1000 * torch.arange(1, 11)
        before = values.clone()
        encoded = encode(values, Codec.INT8)
        assert torch.equal(values, before), "they are left as they are"
        numbers_sent = struct.unpack_from("<4H", encoded.data, 64 * 64 * 33 // 32)
        assert encoded.spec.outliers == 4
        assert list(numbers_sent) == sorted(numbers_sent)
        assert set(numbers_sent) <= set(range(13, 20))

    @pytest.mark.parametrize("codec", BLOCKWISE)
    @pytest.mark.parametrize("channels", [(64, 1), (3, 3), (5, 4), (0, 65535)])
    def test_impossible_channels_are_refused_and_touch_nothing(self, codec: Codec, channels: tuple[int, int]) -> None:
        values = normal(10, 64)
        values[:, 20] *= 100
        values[:, 40] *= 100
        encoded = encode(values, codec)
        data = bytearray(encoded.data)
        base = TensorSpec(encoded.spec.shape, encoded.spec.dtype, codec).byte_length
        struct.pack_into("<2H", data, base, *channels)
        out = torch.ones(10, 64)
        with pytest.raises(ProtocolViolation, match="ascending numbers"):
            decode(encoded.spec, memoryview(data), out)
        assert bool((out == 1).all())

    @pytest.mark.parametrize(("shape", "outliers"), [((64,), 1), ((4, 15), 1), ((4, 64), 5)])
    def test_more_channels_apart_than_are_allowed_make_no_tensor(self, shape: tuple[int, ...], outliers: int) -> None:
        assert as_received(Codec.INT8, shape, b"", outliers).spec.fault() is not None


class TestWiderCodecs:
    @pytest.mark.parametrize("codec", BLOCKWISE)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(("dtype", "wider"), [(torch.float32, Codec.BF16), (torch.bfloat16, Codec.NONE)])
    def test_what_is_not_finite_is_bfloat16(self, codec: Codec, bad: float, dtype: torch.dtype, wider: Codec) -> None:
        values = normal(1000, dtype=dtype)
        values[777] = bad
        encoded = encode(values, codec)
        assert encoded.spec.codec is wider
        assert torch.equal(decoded(encoded).bfloat16().view(torch.int16), values.bfloat16().view(torch.int16))

    @pytest.mark.parametrize("codec", BLOCKWISE)
    def test_a_nan_hides_no_channel(self, codec: Codec) -> None:
        """Neither in a channel that stands out nor beside one."""
        values = normal(64, 64)
        values[:, 7] *= 100
        for channel in (7, 8):
            one = values.clone()
            one[3, channel] = math.nan
            assert bool(decoded(encode(one, codec))[3, channel].isnan())


class TestMisuse:
    @pytest.mark.parametrize("codec", LOSSY)
    def test_wrong_lengths_and_forms_are_our_own_mistakes(self, codec: Codec) -> None:
        encoded = encode(normal(10, 20).round(), codec)
        assert encoded.spec.codec is codec
        data = bytearray(encoded.data)
        for wrong, out in (
            (data + b"\0", torch.empty(10, 20)),
            (data[:-1], torch.empty(10, 20)),
            (data, torch.empty(200)),
            (data, torch.empty(10, 20, dtype=torch.bfloat16)),
        ):
            with pytest.raises(ValueError, match="do not match"):
                decode(encoded.spec, memoryview(wrong), out)
