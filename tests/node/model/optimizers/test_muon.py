"""Muon is PyTorch's, in float32, and no matrix breaks it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from node.model.optimizers.muon import Muon, orthogonalized
from protocol.manifest.manifest import InnerSection

INNER = InnerSection(name="muon", weight_decay=0.1)


def test_it_moves_matrices_as_pytorchs_own_class_does_up_to_its_bfloat16() -> None:
    torch.manual_seed(1)
    own = [nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40, 24))]
    before = [parameter.detach().clone() for parameter in own]
    theirs = [nn.Parameter(parameter.clone()) for parameter in before]
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    optimizer = Muon(own, INNER)
    for step in range(5):
        for mine, other in zip(own, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        if step == 2:
            own[1].grad = theirs[1].grad = None
        reference.step()
        optimizer.step(0.01)
    for mine, other, start in zip(own, theirs, before, strict=True):
        moved = (mine - start).norm()
        assert (mine - other).norm() < 0.03 * moved
    assert [optimizer.states[parameter].steps for parameter in own] == [5, 4]


@pytest.mark.parametrize("shape", [(8, 8), (8, 30), (30, 8)])
def test_singular_values_come_near_1(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert values.min() > 0.6
    assert values.max() < 1.25
    torch.testing.assert_close(orthogonalized(matrix.T.contiguous()), orthogonalized(matrix).T)


@pytest.mark.parametrize("matrix", [torch.zeros(3, 5), torch.full((3, 5), 1e-30), torch.full((3, 5), 1e15)])
def test_a_degenerate_gradient_moves_within_bounds(matrix: torch.Tensor) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = Muon([parameter], INNER)
    parameter.grad = matrix
    optimizer.step(0.1)
    assert (parameter - 0.99).abs().max() <= 0.1 * 0.2 * 5**0.5 * 1.25
