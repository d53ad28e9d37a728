"""The sparse codecs: bytes worked out by hand, what is kept, and bytes that nobody should send."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from protocol.codecs import decode, encode
from protocol.codecs.top_k import LARGEST_LEVEL, TOP_K_2, TOP_K_4, TopK
from protocol.interfaces.tensor_spec import KEPT, PLACE_LOW_BITS, SPARSE_CHUNK, DType, SparseChunk, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.types import Codec

BOTH = pytest.mark.parametrize("codec", [TOP_K_4, TOP_K_2], ids=lambda codec: codec.codec.name)
LENGTHS = [1, 2, 31, 32, 33, 100, 4095, 4096, 4097, 7 * 4096, 8 * 4096 + 1, 100_000]
RUN = 2**PLACE_LOW_BITS
CODE_BITS = {Codec.TOP_K_4: 4, Codec.TOP_K_2: 2}
ELEMENTS_FOR_TWO = {Codec.TOP_K_4: 40, Codec.TOP_K_2: 32}  # A chunk as short as this sends two of them


def kept_of(codec: TopK, elements: int) -> int:
    return SparseChunk(elements, codec.codec).kept


def size_of(codec: TopK, elements: int) -> int:
    return TensorSpec((elements,), DType.FLOAT32, codec.codec).byte_length


def encoded(codec: TopK, values: Tensor) -> Tensor:
    out = torch.full((size_of(codec, len(values)),), 255, dtype=torch.uint8)
    codec.encode(values, out)
    return out


def decoded(codec: TopK, data: Tensor | bytes, elements: int) -> Tensor:
    out = torch.full((elements,), float("nan"))
    octets = torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data
    codec.decode(octets, out)
    return out


def round_trip(codec: TopK, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), len(values))


def normal(elements: int, scale: float = 1.0, seed: int = 0) -> Tensor:
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


class TestFormat:
    def test_four_bits_worked_out_by_hand(self) -> None:
        """Three of 64 elements. The levels are 1 and 50: 50 = 1 + 49 (7/7)^2, -5 = -(1 + 49 (2/7)^2)."""
        values = torch.zeros(64)
        values[3], values[40], values[41] = 50.0, -5.0, 1.0
        low = 3 | 8 << 4 | 9 << 8
        high = 1 << 0 | 1 << (2 + 1) | 1 << (2 + 2)
        codes = 7 | (8 + 2) << 4 | 0 << 8
        expected = bf16(1.0) + bf16(50.0) + low.to_bytes(2, "little") + bytes([high]) + codes.to_bytes(2, "little")
        assert bytes(encoded(TOP_K_4, values).tolist()) == expected
        assert torch.equal(decoded(TOP_K_4, expected, 64), values)

    def test_two_bits_worked_out_by_hand(self) -> None:
        """Magnitudes 1 and 3 are near each other, 10 and 12 are: levels 2 and 11."""
        values = torch.zeros(4096)
        few, many = [1.0, -3.0], [10.0, -12.0]
        places = list(range(0, 512, 2))
        numbers = [(few + many)[index % 4] for index in range(256)]
        values[places] = torch.tensor(numbers)
        codes = [[0, 2, 1, 3][index % 4] for index in range(256)]
        expected = bf16(2.0) + bf16(11.0) + places_of(places, 4096) + packed(codes, 2)
        assert bytes(encoded(TOP_K_2, values).tolist()) == expected
        assert decoded(TOP_K_2, expected, 4096)[:8].tolist() == [2, 0, -2, 0, 11, 0, -11, 0]

    @BOTH
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_any_tensor_goes_and_comes(self, codec: TopK, dtype: torch.dtype) -> None:
        values = normal(6 * 2500).to(dtype).view(6, 2500)
        sent = encode(values, codec.codec)
        assert sent.spec.codec is codec.codec
        out = torch.empty_like(values)
        decode(sent.spec, sent.data, out)
        assert torch.equal(out.view(-1).float(), round_trip(codec, values.view(-1)).to(dtype).float())


class TestWhatIsKept:
    @BOTH
    @pytest.mark.parametrize("elements", LENGTHS)
    def test_the_largest_of_each_chunk_and_nothing_else(self, codec: TopK, elements: int) -> None:
        values = normal(elements)
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
        values = normal(50 * SPARSE_CHUNK, scale)
        result = round_trip(codec, values)
        there = result != 0
        assert int(there.sum()) == 50 * KEPT[codec.codec]
        assert (result - values)[there].norm() <= limit * values[there].norm()

    def test_the_error_stays_small_beside_a_far_larger_element(self) -> None:
        values = normal(SPARSE_CHUNK)
        values[7] = 60.0
        result = round_trip(TOP_K_4, values)
        there = result != 0
        assert result[7] == pytest.approx(60.0, rel=0.004)
        there[7] = False
        assert (result - values)[there].norm() <= 0.25 * values[there].norm()

    @BOTH
    def test_it_is_not_longer_than_what_was_encoded(self, codec: TopK) -> None:
        for seed in range(20):
            values = normal(SPARSE_CHUNK, seed=seed) ** (1 + seed % 4)
            assert round_trip(codec, values).norm() <= 1.01 * values.norm()

    @BOTH
    def test_fewer_elements_than_could_be_sent_and_what_vanishes_becomes_zero(self, codec: TopK) -> None:
        values = torch.zeros(2 * SPARSE_CHUNK)
        values[5000] = -3.0
        result = round_trip(codec, values)
        assert result.nonzero().flatten().tolist() == [5000]
        assert result[5000] == pytest.approx(-3.0, rel=0.004)
        assert not round_trip(codec, torch.full((SPARSE_CHUNK,), 1e-40)).any()

    @given(arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    def test_four_bits_are_never_farther_off_than_half_a_level(self, values: np.ndarray) -> None:  # type: ignore[type-arg]
        x = torch.from_numpy(values)
        result = round_trip(TOP_K_4, x).double()
        kept = x.abs().topk(kept_of(TOP_K_4, len(x))).values.double()
        gap = float(kept.max() - kept.min())
        off = (result - x.double()).abs()[result != 0]
        assert not len(off) or float(off.max()) <= gap * 13 / 98 + 0.005 * float(kept.max()) + 1e-37


class TestRefusals:
    @BOTH
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**127])
    @pytest.mark.parametrize("at", [0, 4095, 8 * 4096 + 3])
    def test_what_cannot_be_expressed_is_not_encoded(self, codec: TopK, bad: float, at: int) -> None:
        values = normal(9 * SPARSE_CHUNK)
        values[at] = bad
        with pytest.raises(StateError, match="finite"):
            encoded(codec, values)

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
        data = encoded(codec, normal(5000))
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
            ([5, 5], "ascend"),
            ([9, 5], "ascend"),
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
            assert decoded(codec, data, elements).nonzero().flatten().tolist() == places
        else:
            with pytest.raises(ProtocolViolation, match=complaint):
                decoded(codec, data, elements)

    @BOTH
    def test_places_beyond_the_end_of_a_shorter_chunk_are_refused(self, codec: TopK) -> None:
        data = bf16(1.0) + bf16(2.0) + places_of([2], 1) + packed([0], CODE_BITS[codec.codec])
        with pytest.raises(ProtocolViolation, match="exceed its 2 elements"):
            decoded(codec, data, 2)
