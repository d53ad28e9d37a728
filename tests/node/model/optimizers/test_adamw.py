"""The inner optimizer is PyTorch's AdamW to the bit."""

from __future__ import annotations

import torch
from torch import nn

from node.model.optimizers.adamw import AdamW
from protocol.manifest.manifest import InnerSection


def test_it_moves_parameters_as_pytorchs_own_class_does() -> None:
    torch.manual_seed(1)
    own = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 3))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    inner = InnerSection(weight_decay=0.1)
    groups = [
        {"params": [theirs[0], theirs[2]], "weight_decay": inner.weight_decay},
        {"params": [theirs[1]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(inner.beta1, inner.beta2), eps=inner.epsilon, fused=True)
    optimizer = AdamW(own, inner)
    for step in range(1, 6):
        for mine, other in zip(own, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        if step == 2:
            own[2].grad = theirs[2].grad = None
        for group in reference.param_groups:
            group["lr"] = 0.01 / step
        reference.step()
        optimizer.step(0.01 / step)
        for mine, other in zip(own, theirs, strict=True):
            assert torch.equal(mine, other)
    assert [optimizer.states[parameter].steps.item() for parameter in own] == [5, 5, 4]
