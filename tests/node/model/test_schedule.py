"""The learning rate at the places that matter, and its shape between them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.model import optimizer
from node.model.blocks import Linear, packed_weights
from node.model.initialization import floats_of, parameters_of
from node.model.packed.eight_bit import BLOCK, EightBit, dynamic_map, eight_bit_bytes
from node.model.packed.split_weight import SplitWeight
from protocol.manifest.training import TrainingSection
from tests.node.small_manifest import small_manifest


def training(kind: str, warmup: int, total: int, final: float = 0.1, peak: float = 0.5) -> TrainingSection:
    schedule: dict[str, Any] = {"kind": kind, "warmup_steps": warmup, "total_steps": total, "final_ratio": final}
    return small_manifest(training__schedule=schedule, training__inner={"learning_rate": peak}).training


def learning_rate(section: TrainingSection, step: float) -> float:
    return optimizer.learning_rate(section, step * section.inner_tokens)


def test_it_rises_linearly_to_the_peak() -> None:
    section = training("cosine", 4, 100)
    assert [learning_rate(section, step) for step in (1, 2, 3, 4)] == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize(
    ("kind", "halfway", "end"), [("constant", 0.5, 0.5), ("linear", 0.275, 0.05), ("cosine", 0.275, 0.05)]
)
def test_it_falls_to_the_final_ratio_and_stays_there(kind: str, halfway: float, end: float) -> None:
    section = training(kind, 10, 110)
    assert learning_rate(section, 60) == pytest.approx(halfway)
    assert learning_rate(section, 110) == pytest.approx(end)
    assert learning_rate(section, 10_000) == pytest.approx(end)


def test_cosine_falls_slowly_first() -> None:
    assert learning_rate(training("cosine", 0, 100), 25) > learning_rate(training("linear", 0, 100), 25)


def test_without_warm_up_the_first_step_is_not_nothing() -> None:
    assert learning_rate(training("linear", 0, 100), 1) == pytest.approx(0.5 * (0.1 + 0.9 * 0.99))


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.integers(1, 200),
    st.floats(0, 1),
    st.integers(1, 400),
)
def test_it_never_leaves_its_bounds_and_never_rises_after_the_warm_up(
    kind: str, warmup: int, length: int, final: float, step: int
) -> None:
    section = training(kind, warmup, warmup + length, final)
    rate, following = learning_rate(section, step), learning_rate(section, step + 1)
    assert 0 <= rate <= 0.5 * (1 + 1e-12)
    assert (following > rate) == (step < warmup) or following == pytest.approx(rate)


CPU = torch.device("cpu")


def packed(values: Tensor, *, is_signed: bool) -> EightBit:
    held = EightBit(tuple(values.shape), CPU, is_signed=is_signed)
    held.store(values)
    return held


def spread(shape: tuple[int, ...], seed: int, *, is_signed: bool) -> Tensor:
    """Elements of sizes over six decades within each block, as moments are, and some zeros."""
    numbers = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=numbers) * 10 ** (-6 * torch.rand(shape, generator=numbers))
    values[torch.rand(shape, generator=numbers) < 0.05] = 0
    return values if is_signed else values.square()


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_values_are_those_of_the_paper(is_signed: bool) -> None:
    values = torch.tensor(dynamic_map(is_signed=is_signed), dtype=torch.float64)
    assert len(values) == 256
    assert bool((values.diff() > 0).all())
    assert values[-1] == 1
    top = values[(values > 0.1) & (values < 1)]
    assert len(top) == (64 if is_signed else 128), "the largest decade has as many as all others together"
    assert top.diff().max() == pytest.approx(0.9 / len(top)) == top.diff().min()
    assert values[values > 0].min() == pytest.approx(5.5e-7 if is_signed else 1e-7)
    assert (0 in values) == is_signed
    assert values.min() == (pytest.approx(-0.99297, abs=1e-5) if is_signed else pytest.approx(1e-7))


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("shape", [(64, 64), (5, 1000), (3, 7)])
def test_an_element_is_off_by_half_a_step_of_its_decade_at_most(shape: tuple[int, ...], is_signed: bool) -> None:
    values = spread(shape, 1, is_signed=is_signed)
    held = packed(values, is_signed=is_signed)
    back = held.copied()
    assert back.shape == values.shape
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: values.numel()]
    quotients, errors = (values.flatten() / scales).abs(), ((back - values).flatten() / scales).abs()
    for decade in range(7):
        inside = (quotients > 10.0 ** (decade - 7)) & (quotients <= 10.0 ** (decade - 6))
        steps = 2**decade if is_signed else 2 ** (decade + 1)
        half = 0.5 * 0.9 * 10.0 ** (decade - 6) / steps
        # Between the steps of two decades, and at the negative end, where there is no -1, it may be a little more.
        assert bool((errors[inside] <= 1.6 * half + 1e-9).all()), decade
    largest = quotients == 1
    assert bool(largest.any())
    assert bool((errors[largest] == 0).all()), "the largest of a block is kept exactly"


@pytest.mark.parametrize("is_signed", [True, False])
def test_what_was_unpacked_is_packed_to_the_same(is_signed: bool) -> None:
    once = packed(spread((300, 77), 2, is_signed=is_signed), is_signed=is_signed).copied()
    assert torch.equal(packed(once, is_signed=is_signed).copied(), once)


def test_a_variance_never_becomes_nothing() -> None:
    values = torch.full((2 * BLOCK,), 1e-12)
    values[0] = 1.0
    back = packed(values, is_signed=False).copied()
    assert float(back[1:BLOCK].min()) == pytest.approx(1e-7), "rounded up: what is divided by it moves too little"
    assert bool((back[BLOCK:] == values[BLOCK:]).all())
    assert bool((packed(torch.zeros(BLOCK), is_signed=False).copied() == 0).all())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_signed", [True, False])
def test_what_is_not_finite_is_seen_and_stays_in_its_block(wrong: float, is_signed: bool) -> None:
    values = spread((4, BLOCK), 3, is_signed=is_signed)
    values[1, 5] = wrong
    back = packed(values, is_signed=is_signed).copied()
    assert not bool(back[1].isfinite().any())
    clean = packed(values[[0, 2, 3]], is_signed=is_signed).copied()
    assert torch.equal(back[[0, 2, 3]], clean)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 3e38])
def test_sizes_at_the_ends_of_float32_come_back(size: float) -> None:
    values = torch.linspace(-1, 1, BLOCK).mul(size)
    back = packed(values, is_signed=True).copied()
    assert bool(back.isfinite().all())
    assert float((back - values).abs().max()) <= 0.02 * size + 2e-45


def test_parts_are_read_and_written_by_themselves() -> None:
    values = spread((6 * BLOCK + 100,), 4, is_signed=True)
    held, whole = EightBit((values.numel(),), CPU, is_signed=True), packed(values, is_signed=True)
    for part in held.parts(2 * BLOCK):
        held.write(part, values[part])
    for part in held.parts(3 * BLOCK):
        assert torch.equal(held.read(part), whole.copied()[part])
    with pytest.raises(AssertionError, match="where a block does"):
        held.read(slice(1, BLOCK))


@pytest.mark.parametrize("elements", [1, BLOCK, BLOCK + 1, 2**16])
def test_the_bytes_are_those_that_are_reckoned_with(elements: int) -> None:
    assert EightBit((elements,), CPU, is_signed=True).nbytes == eight_bit_bytes(elements)


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
