"""Loss and head in one pass: the loss and every gradient are those of the whole logits, whatever the pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from node.model import head_loss
from node.model.head_loss import IGNORED, HeadSum, SummedLoss, loss_alone, loss_and_gradient
from node.model.parts import build_embedding, build_head
from node.model.passes import OneHead
from tests.node.small_manifest import small_manifest

POSITIONS, VOCABULARY, WIDTH = 37, 300, 48
PIECES = pytest.mark.parametrize("positions_at_once", [1, 5, 36, 37, 1000])


class Head:
    """Hidden states, a matrix and labels, of which some are not predicted; and what autograd says of them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.hidden = torch.randn(POSITIONS, WIDTH, generator=numbers).to(dtype)
        self.matrix = torch.randn(VOCABULARY, WIDTH, generator=numbers)
        self.labels = torch.randint(0, VOCABULARY, (POSITIONS,), generator=numbers)
        self.labels[3::7] = IGNORED

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """The summed loss and its gradients for hidden states and matrix, from all logits at once."""
        hidden, matrix = self.hidden.clone().requires_grad_(), self.matrix.clone().requires_grad_()
        logits = F.linear(hidden, matrix.to(hidden.dtype)).float()
        loss = F.cross_entropy(logits, self.labels, reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, [hidden, matrix])


def off(found: Tensor, wanted: Tensor) -> float:
    """How far it is off, of the largest element."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@PIECES
@pytest.mark.parametrize("sums", [torch.float32, torch.float64])
@pytest.mark.parametrize("strip", [1, 7 * WIDTH, 2**22])
def test_the_gradients_are_those_of_all_logits_at_once(
    positions_at_once: int, sums: torch.dtype, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "STRIP", strip)
    head = Head()
    before = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(6)).to(sums)
    total = before.clone()
    at_once = positions_at_once * VOCABULARY
    loss, of_hidden = loss_and_gradient(head.hidden, head.matrix, head.labels, at_once, HeadSum(total, 3.0))
    wanted, plain_of_hidden, of_matrix = head.plain()
    assert off(loss, wanted) <= 1e-6
    assert off(of_hidden, plain_of_hidden) <= 1e-5
    assert off((total - before) / 3, of_matrix) <= 1e-5
    assert off(loss_alone(head.hidden, head.matrix, head.labels, at_once), wanted) <= 1e-6


@PIECES
def test_autograd_gets_the_same(positions_at_once: int) -> None:
    head = Head()
    hidden, matrix = head.hidden.clone().requires_grad_(), head.matrix.clone().requires_grad_()
    at_once = positions_at_once * VOCABULARY
    loss = SummedLoss.apply(hidden, matrix, head.labels, at_once) * 0.25  # type: ignore[no-untyped-call]
    found = torch.autograd.grad(loss, [hidden, matrix])
    wanted, *gradients = head.plain()
    assert off(loss.detach(), wanted * 0.25) <= 1e-6
    assert all(off(mine, plain * 0.25) <= 1e-5 for mine, plain in zip(found, gradients, strict=True))


def test_bfloat16_products_and_a_float32_loss() -> None:
    head = Head(torch.bfloat16)
    total = torch.zeros_like(head.matrix)
    narrow = head.matrix.to(torch.bfloat16)
    loss, of_hidden = loss_and_gradient(head.hidden, narrow, head.labels, 5 * VOCABULARY, HeadSum(total, 1.0))
    wanted, plain_of_hidden, of_matrix = head.plain()
    assert loss.dtype is torch.float32
    assert of_hidden.dtype is torch.bfloat16
    assert off(loss, wanted) <= 1e-5
    assert off(of_hidden, plain_of_hidden) <= 0.01
    assert off(total, of_matrix) <= 0.01


@contextmanager
def no_memory_at(piece: int) -> Iterator[None]:
    """Lets the product of that piece, counted from 1, find no memory for its gradient."""
    add, pieces = head_loss._Rooms.add, 0

    def failing(self: head_loss._Rooms, of_logits: Tensor, hidden: Tensor) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == piece:
            raise MemoryError
        add(self, of_logits, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss._Rooms, "add", failing)
        yield


@pytest.mark.parametrize("piece", [1, 4, 8])
def test_without_memory_nothing_counts_by_halves(piece: int) -> None:
    head = Head()
    before = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    total = before.clone()
    with no_memory_at(piece), pytest.raises(MemoryError):
        loss_and_gradient(head.hidden, head.matrix, head.labels, 5 * VOCABULARY, HeadSum(total, 3.0))
    assert (total - before).abs().max() <= 1e-12


@pytest.mark.parametrize("tied", [False, True])
def test_a_data_nodes_head_adds_the_mean_gradients(tied: bool) -> None:
    manifest = small_manifest(model__tied_embeddings=tied)
    embedding = build_embedding(manifest)
    head = build_head(manifest, embedding)
    hidden = torch.randn(*manifest.hidden_shape, generator=torch.Generator().manual_seed(4), requires_grad=True)
    labels = torch.arange(hidden[..., 0].numel()).reshape(hidden.shape[:2]) % 257
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in head.parameters()]
    found = OneHead(head).loss_into(hidden.detach(), labels, sums, 10)
    assert found is not None
    logits = head.logits(hidden)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    of_hidden, *of_parameters = torch.autograd.grad(loss, [hidden, *head.parameters()])
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert off(found.source, of_hidden) <= 1e-5
    assert all(off(mine / 10, plain) <= 1e-5 for mine, plain in zip(sums, of_parameters, strict=True))
    untouched = [total.clone() for total in sums]
    again = OneHead(head).loss_into(hidden.detach(), labels, (), 10)
    assert again is not None
    assert torch.equal(again.source, found.source)
    assert all(torch.equal(total, before) for total, before in zip(sums, untouched, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e37])
def test_a_head_that_may_overflow_adds_nothing(value: float) -> None:
    manifest = small_manifest()
    head = build_head(manifest)
    passes = OneHead(head)
    hidden = torch.randn(*manifest.hidden_shape, generator=torch.Generator().manual_seed(4))
    labels = torch.zeros(hidden.shape[:2], dtype=torch.int64)
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in head.parameters()]
    with torch.no_grad():
        head.lm_head.weight[256, 3] = value
    assert passes.loss_into(hidden, labels, sums, 10) is None
    assert not any(total.any() for total in sums)
    with torch.no_grad():
        head.lm_head.weight[256, 3] = 0.01
    passes.parameters_changed()
    assert passes.loss_into(hidden, labels, sums, 10) is not None
    assert all(total.any() for total in sums)


def test_a_bfloat16_head_follows_its_matrix() -> None:
    manifest = small_manifest(model__dtype="bfloat16")
    head = build_head(manifest)
    passes = OneHead(head)
    hidden = torch.randn(*manifest.hidden_shape, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    labels = torch.zeros(hidden.shape[:2], dtype=torch.int64)
    before = passes.loss_into(hidden, labels, (), 1)
    for parameter in head.parameters():
        parameter.data.mul_(1.5)  # which torch does not count, as a fused optimizer's writes
    passes.parameters_changed()
    after, fresh = passes.loss_into(hidden, labels, (), 1), passes.loss(hidden, labels)
    assert before is not None
    assert after is not None
    assert after.loss == pytest.approx(fresh, rel=1e-6)
    assert after.loss != pytest.approx(before.loss, rel=1e-6)
