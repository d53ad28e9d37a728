"""The outer step against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from node.averaging.anchor.outer_step import OuterRule
from node.averaging.anchor.shared_vector import STRETCH
from tests.node.averaging.exchanging import vector


@pytest.mark.parametrize("elements", [1, STRETCH, 3 * STRETCH + 5])
def test_it_is_torchs_sgd_with_nesterov_momentum(elements: int) -> None:
    rule = OuterRule(0.7, 0.9)
    ours, momentum = vector(elements, 1), np.zeros(elements, np.float32)
    theirs = torch.from_numpy(ours.copy()).requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(20):
        gradient = vector(elements, 100 + step, 0.1)
        new = np.empty_like(ours), np.empty_like(momentum)
        rule.step(gradient, ours, momentum, *new)
        ours, momentum = new
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        torch.testing.assert_close(torch.from_numpy(ours), theirs.detach(), rtol=1e-6, atol=1e-6)


def test_every_operation_is_rounded_by_itself() -> None:
    """As written down in float32, one operation at a time: a fused multiply-add gives other last bits."""
    rule = OuterRule(0.7, 0.9)
    gradient, parameters, momentum = vector(1000, 1), vector(1000, 2), vector(1000, 3)
    new_parameters, new_momentum = np.empty_like(parameters), np.empty_like(momentum)
    rule.step(gradient, parameters, momentum, new_parameters, new_momentum)
    rate, mu = np.float32(0.7), np.float32(0.9)
    for i in range(1000):
        buffer = np.float32(np.float32(momentum[i] * mu) + gradient[i])
        update = np.float32(np.float32(np.float32(buffer * mu) + gradient[i]) * rate)
        assert new_momentum[i] == buffer
        assert new_parameters[i] == np.float32(parameters[i] - update)


def test_it_may_write_over_the_old_state() -> None:
    rule = OuterRule(0.7, 0.9)
    gradient, parameters, momentum = vector(100_000, 1), vector(100_000, 2), vector(100_000, 3)
    new = np.empty_like(parameters), np.empty_like(momentum)
    rule.step(gradient, parameters, momentum, *new)
    rule.step(gradient, parameters, momentum, parameters, momentum)
    np.testing.assert_array_equal(parameters, new[0])
    np.testing.assert_array_equal(momentum, new[1])
