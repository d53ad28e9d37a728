"""AdamW with 8-bit moments trains as AdamW does, and goes on from what it has saved."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.optimizers import Task, measure
from node.model.optimizers.adamw import AdamW, EightBitAdamW
from node.model.optimizers.inner_rule import ParameterState
from node.model.packed import PART, SplitWeight
from node.model.shapes import EMBEDDING, HEAD, has_eight_bits
from protocol.manifest.manifest import InnerSection

INNER = InnerSection(weight_decay=0.1)


def gradient(shape: torch.Size, step: int) -> torch.Tensor:
    """Rows of unlike sizes, which stay unlike."""
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=numbers) * torch.logspace(-3, 0, shape[0])[:, None]


def moved(rule: AdamW | EightBitAdamW, parameter: nn.Parameter, first: int, count: int) -> None:
    for step in range(first, first + count):
        parameter.grad = gradient(parameter.shape, step)
        rule.step(1e-3)


def test_it_moves_a_matrix_nearly_as_float32_moments_do() -> None:
    torch.manual_seed(1)
    own = nn.Parameter(torch.randn(64, 96))
    before, theirs = own.detach().clone(), nn.Parameter(own.detach().clone())
    moved(EightBitAdamW([own], INNER), own, 0, 50)
    moved(AdamW([theirs], INNER), theirs, 0, 50)
    off = (own - theirs).norm() / (theirs - before).norm()
    assert off < 0.05
    assert off > 1e-4, "these are other moments"


def test_a_matrix_of_several_parts_is_moved_as_one() -> None:
    """The first step's moments are those of the gradient alone, so the step is float32's to the bit."""
    own = nn.Parameter(torch.randn(3, PART // 2 + 11))
    theirs = nn.Parameter(own.detach().clone())
    moved(rule := EightBitAdamW([own], INNER), own, 0, 1)
    moved(AdamW([theirs], INNER), theirs, 0, 1)
    assert torch.equal(own, theirs)
    assert rule.states[own].steps == 1


@pytest.mark.parametrize("kind", [AdamW, EightBitAdamW])
def test_split_weights_are_moved_as_plain_ones(kind: type[AdamW] | type[EightBitAdamW]) -> None:
    torch.manual_seed(2)
    plain = nn.Parameter(torch.randn(3, PART // 2 + 11))
    shell = nn.Parameter(torch.full((), math.nan).expand(plain.shape))
    one, other = kind([plain], INNER), kind([shell], INNER)
    other.packed = {shell: SplitWeight(plain.detach())}
    for rule, parameter in ((one, plain), (other, shell)):
        moved(rule, parameter, 0, 3)
    assert torch.equal(other.packed[shell].copied(), plain)
    assert one.exported(one.states[plain]).steps == other.exported(other.states[shell]).steps == 3


def test_it_goes_on_from_what_it_has_saved_to_the_bit() -> None:
    torch.manual_seed(3)
    own = nn.Parameter(torch.randn(64, 100))
    moved(rule := EightBitAdamW([own], INNER), own, 0, 5)
    saved = rule.exported(rule.states[own])
    assert saved.tensors == {}
    as_float32 = ParameterState(saved.steps, {slot: held.copied() for slot, held in saved.packed.items()})
    assert {slot: tuple(t.shape) for slot, t in as_float32.tensors.items()} == rule.slots(own, 5)
    again = nn.Parameter(own.detach().clone())
    other = EightBitAdamW([again], INNER)
    other.states[again] = other.restored(again, as_float32)
    moved(rule, own, 5, 5)
    moved(other, again, 5, 5)
    assert torch.equal(own, again)


def test_the_embedding_vectors_and_small_matrices_keep_float32() -> None:
    assert has_eight_bits(HEAD, (257, 64))
    assert has_eight_bits("model.layers.0.mlp.up_proj.weight", (64, 64))
    assert not has_eight_bits(EMBEDDING, (257, 64))
    assert not has_eight_bits("model.layers.0.mlp.up_proj.weight", (63, 64))
    assert not has_eight_bits("model.norm.weight", (8192,))


def test_a_model_learns_as_much(tmp_path: Path) -> None:
    """Of 200 steps with a seed, in the product's own parts."""
    for number in range(30):
        lines = (f"{number} plus {other} is {number + other}; " for other in range(number, number + 40))
        (tmp_path / f"{number}.txt").write_text("".join(lines))
    task = Task(200, 1, 64, 2, 192, 32, 4, microbatches=1, held_out_microbatches=4, source=f"path:{tmp_path}")
    plain, packed = (measure(task, arm, 1, 3e-3) for arm in ("adamw", "adamw 8bit"))
    assert plain["loss"] < 0.5 * plain["curve"][0][2], "it has learned something"
    assert packed["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert packed["loss"] != plain["loss"]
