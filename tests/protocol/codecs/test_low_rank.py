"""LOW_RANK: bytes worked out by hand, what it finds of a matrix, and bytes that nobody should send."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.codecs import decode as decode_any
from protocol.codecs import encode_low_rank
from protocol.codecs.low_rank import LARGEST_ELEMENT, decode, encode, first_start
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.types import Codec


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(matrix: Tensor, rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out = torch.empty(
        TensorSpec(tuple(matrix.shape), DType.FLOAT32, Codec.LOW_RANK, rank=rank).byte_length, dtype=torch.uint8
    )
    return out, encode(matrix, out, rank, start)


def decoded(data: Tensor, *shape: int) -> Tensor:
    out = torch.full(shape, float("nan"))
    decode(data, out)
    return out


def octets(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bf16(*values: float) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in values)


class TestFormat:
    def test_worked_out_by_hand(self) -> None:
        """P [2, 2] and Q [3, 2], row by row: P Q^T."""
        data = octets(bf16(1, 2, 3, 4) + bf16(1, 0, 0, 1, 2, -1))
        assert decoded(data, 2, 3).tolist() == [[1, 2, 0], [3, 4, 2]]

    def test_a_matrix_of_one_column_times_one_row_is_met(self) -> None:
        column, row = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([4.0, -8.0, 0.5, 0.0])
        data, _ = encoded(torch.outer(column, row), 1)
        torch.testing.assert_close(decoded(data, 3, 4), torch.outer(column, row), rtol=0.01, atol=0.02)
        halves = data.view(torch.bfloat16).float()
        assert halves[:3].norm() == pytest.approx(1.0, abs=0.01)

    def test_the_first_start_follows_from_the_shape(self) -> None:
        assert torch.equal(first_start(30, 4), first_start(30, 4))
        assert not torch.equal(first_start(30, 4)[:, :3], first_start(30, 3))
        matrix = normal(20, 30)
        assert torch.equal(encoded(matrix, 4)[0], encoded(matrix, 4)[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_as_any_tensor(self, dtype: torch.dtype) -> None:
        values = normal(5, 6, 40).to(dtype)
        sent, start = encode_low_rank(values, 7)
        assert (sent.spec.rank, sent.spec.codec, len(sent.data)) == (7, Codec.LOW_RANK, 2 * 7 * (30 + 40))
        assert tuple(start.shape) == (40, 7)
        out = torch.empty_like(values)
        decode_any(sent.spec, sent.data, out)
        assert (out - values).float().norm() < values.float().norm()

    def test_decoding_is_the_sum_column_by_column_bit_for_bit(self) -> None:
        """In float64 every product and every sum of two is exact enough to round once, as it is defined."""
        data, _ = encoded(normal(70, 90), 5)
        halves = data.view(torch.bfloat16).double()
        left, right = halves[: 70 * 5].view(70, 5), halves[70 * 5 :].view(90, 5)
        total = torch.zeros(70, 90)
        for column in range(5):
            total = (total.double() + torch.outer(left[:, column], right[:, column])).float()
        assert torch.equal(decoded(data, 70, 90), total)

    def test_large_matrices_go_in_slices(self) -> None:
        data, _ = encoded(normal(300, 1000), 2)
        halves = data.view(torch.bfloat16).float()
        left, right = halves[:600].view(300, 2), halves[600:].view(1000, 2)
        torch.testing.assert_close(decoded(data, 300, 1000), left @ right.t(), rtol=1e-5, atol=1e-5)


class TestAccuracy:
    @pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e3])
    def test_a_matrix_of_low_rank_is_met_whatever_its_magnitude(self, scale: float) -> None:
        matrix = normal(60, 4) @ normal(4, 50, seed=1) * scale
        result = decoded(encoded(matrix, 4)[0], 60, 50)
        assert (result - matrix).norm() <= 0.01 * matrix.norm()

    def test_a_warm_start_finds_the_best_approximation(self) -> None:
        matrix = normal(60, 50) + 3 * normal(60, 3, seed=1) @ normal(3, 50, seed=2)
        best = torch.linalg.svdvals(matrix)[4:].norm()
        start: Tensor | None = None
        errors = []
        for _ in range(12):
            data, start = encoded(matrix, 4, start)
            errors.append((decoded(data, 60, 50) - matrix).norm())
        assert errors[-1] <= 1.05 * best
        assert errors[0] > errors[-1]

    def test_it_is_not_longer_than_the_matrix(self) -> None:
        for seed in range(10):
            matrix = normal(40, 30, seed=seed)
            assert decoded(encoded(matrix, 30)[0], 40, 30).norm() <= 1.01 * matrix.norm()

    def test_nothing_at_all(self) -> None:
        data, start = encoded(torch.zeros(20, 10), 3)
        assert not decoded(data, 20, 10).any()
        matrix = normal(20, 10)
        assert torch.equal(encoded(matrix, 3, start)[0], encoded(matrix, 3)[0])


class TestRefusals:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3e38])
    def test_what_cannot_be_expressed_is_not_encoded(self, bad: float) -> None:
        matrix = normal(20, 10)
        matrix[3, 4] = bad
        with pytest.raises(StateError, match="finite"):
            encoded(matrix, 3)

    def test_what_cannot_be_expressed_goes_as_bfloat16(self) -> None:
        matrix = normal(20, 10)
        matrix[3, 4] = float("nan")
        sent, _ = encode_low_rank(matrix, 3)
        assert sent.spec.codec is Codec.BF16

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
    def test_what_could_be_too_large_is_refused_and_nothing_is_touched(self, bad: float) -> None:
        data = octets(bf16(1, 2, 4, 1e20) + bf16(1, 0, 0, bad, 2, -1))
        out = torch.ones(2, 3)
        with pytest.raises(ProtocolViolation, match="too large"):
            decode(data, out)
        assert bool((out == 1).all())

    @given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.data())
    def test_any_bytes_decode_to_finite_numbers_or_are_refused(
        self, rows: int, columns: int, rank: int, data: st.DataObject
    ) -> None:
        size = 2 * rank * (rows + columns)
        junk = data.draw(st.binary(min_size=size, max_size=size))
        with suppress(ProtocolViolation):
            result = decoded(octets(junk), rows, columns)
            assert bool((result.abs() <= 1.01 * LARGEST_ELEMENT).all())

    def test_a_broken_start_is_the_encoders_own_mistake(self) -> None:
        with pytest.raises(StateError, match="finite"):
            encoded(normal(20, 10), 3, torch.full((10, 3), float("nan")))
