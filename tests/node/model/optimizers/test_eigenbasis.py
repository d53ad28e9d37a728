"""Refined bases are orthonormal and come to the eigenvectors, whatever the matrix; each chunk is small."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from node.model.optimizers import soap
from node.model.optimizers.soap import Eigenbasis, refined


def result_of(statistics: Tensor, basis: Tensor | None = None, iterations: int = 1) -> tuple[Eigenbasis | None, int]:
    """The result and the number of chunks."""
    work, chunks = refined(statistics, torch.eye(len(statistics)) if basis is None else basis, iterations), 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, chunks
        chunks += 1


def statistics_of(side: int, decay: float = 4.0) -> Tensor:
    numbers = torch.Generator().manual_seed(side)
    turn = torch.linalg.qr(torch.randn(side, side, generator=numbers)).Q
    return turn @ torch.diag(torch.logspace(0, -decay, side)) @ turn.T


@pytest.mark.parametrize("width", [8, 13, 1000])
def test_iterations_come_to_the_eigenvectors(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soap, "_CHUNK_OPERATIONS", {"cpu": 4 * 40**2 * width})
    statistics = statistics_of(40)
    found, chunks = result_of(statistics, iterations=30)
    assert found is not None
    vectors = found.vectors
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(40), rtol=0, atol=1e-5)
    values = torch.linalg.eigvalsh(statistics).flip(0)
    torch.testing.assert_close((vectors.T @ statistics @ vectors).diag(), values, rtol=0.02, atol=1e-5)
    assert chunks >= 40 // width


def test_the_order_says_where_a_vector_comes_from() -> None:
    found, _ = result_of(torch.diag(torch.tensor([1.0, 9.0, 4.0])))
    assert found is not None
    assert found.order.tolist() == [1, 2, 0]
    torch.testing.assert_close(found.vectors.abs(), torch.eye(3)[:, [1, 2, 0]], rtol=0, atol=1e-5)


def test_one_iteration_is_a_product_and_a_qr_decomposition() -> None:
    statistics, basis = (
        statistics_of(20, decay=1.0),
        torch.linalg.eigh(statistics_of(20, decay=1.0) + 0.01).eigenvectors,
    )
    found, _ = result_of(statistics, basis)
    assert found is not None
    expected = torch.linalg.qr(statistics.double() @ basis.double()[:, found.order]).Q
    torch.testing.assert_close(found.vectors.abs().double(), expected.abs(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("rank", [1, 3])
def test_what_has_few_directions_keeps_the_others_orthonormal(
    rank: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soap, "_CHUNK_OPERATIONS", {"cpu": 1})
    few = torch.randn(50, rank, generator=torch.Generator().manual_seed(5))
    found, _ = result_of(few @ few.T * scale, iterations=3)
    assert found is not None
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(50), rtol=0, atol=1e-3)
    largest = few.T @ found.vectors[:, :rank]
    torch.testing.assert_close(largest.norm(), few.norm(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_a_matrix_that_says_nothing_gives_nothing(value: float) -> None:
    assert result_of(torch.full((30, 30), value))[0] is None
