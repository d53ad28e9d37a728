"""A matrix in two halves is the matrix to the bit, and its upper half the nearest bfloat16 one."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from node.model.blocks import Linear, packed_weights
from node.model.initialization import floats_of, parameters_of
from node.model.packed import SplitWeight

SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.17549435e-38)


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def numbers() -> Tensor:
    """Any bits, special ones, and those half way between two bfloat16 numbers, next to even and to odd ones."""
    generator = torch.Generator().manual_seed(1)
    any_bits = torch.randint(-(2**31), 2**31, (65_536 - len(SPECIAL) - 4,), generator=generator).to(torch.int32)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808000 - 2**31, 0x3F818000 - 2**31]).to(torch.int32)
    return torch.cat([torch.tensor(SPECIAL), ties.view(torch.float32), any_bits.view(torch.float32)]).view(256, 256)


def test_every_number_comes_back_to_the_bit() -> None:
    matrix = numbers()
    split = SplitWeight(matrix)
    assert torch.equal(bits_of(split.copied()), bits_of(matrix))
    assert torch.equal(bits_of(split.unpacked()), bits_of(matrix))
    assert torch.equal(bits_of(split.read(slice(100, 1000))), bits_of(matrix).view(-1)[100:1000])
    split.write(slice(7, 11), torch.tensor([1.5, -2.25, 1 / 3, 1e-20]))
    assert split.copied().view(-1)[7:11].tolist() == torch.tensor([1.5, -2.25, 1 / 3, 1e-20]).tolist()
    assert torch.equal(bits_of(split.read(slice(11, 65_536))), bits_of(matrix).view(-1)[11:])


def test_the_upper_half_is_the_nearest_bfloat16_number() -> None:
    matrix = numbers()
    upper, cast = SplitWeight(matrix).fresh(), matrix.bfloat16()
    known = matrix.isfinite() & (bits_of(matrix) & 0xFFFF != 0x8000)
    assert bool(known.float().mean() > 0.9)
    assert torch.equal(upper.detach()[known], cast[known])
    ties = (bits_of(matrix) & 0xFFFF == 0x8000) & matrix.isfinite() & (matrix.abs() < 1e38)
    assert bool(ties.any())
    assert bool((upper.detach()[ties].float().abs() > matrix[ties].abs()).all())
    assert bool(upper.detach()[matrix.isinf()].isinf().all())


def test_a_graph_from_before_a_change_is_refused() -> None:
    split = SplitWeight(torch.randn(4, 8))
    old = torch.nn.functional.linear(torch.randn(3, 8).bfloat16().requires_grad_(), split.fresh()).float().sum()
    split.write(slice(0, 4), torch.zeros(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_a_layer_computes_and_learns_as_with_a_copy() -> None:
    layer = Linear(8, 4)
    torch.nn.init.normal_(layer.weight)
    other, values = copy.deepcopy(layer), torch.randn(3, 8).bfloat16()
    wanted = layer(values)
    layer.split()
    assert layer.weight.shape == other.weight.shape
    assert layer.weight.untyped_storage().nbytes() == 4
    assert bool(layer.weight.isnan().all()), "whoever reads the parameter itself is not given old numbers"
    assert torch.equal(layer(values), wanted)
    (found,) = torch.autograd.grad(layer(values).float().sum(), [layer.matrix(torch.bfloat16)])
    (expected,) = torch.autograd.grad(other(values).float().sum(), [other.weight])
    assert torch.equal(found.float(), expected)
    assert list(packed_weights(layer)) == [layer.weight]
    (held,) = floats_of(layer).values()
    assert isinstance(held, SplitWeight)
    assert torch.equal(held.copied(), parameters_of(other)["weight"])
