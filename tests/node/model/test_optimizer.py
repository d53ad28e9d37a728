"""Accumulation counts each microbatch once; the inner step is AdamW on the mean, checked against arithmetic done by
hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from node.model.optimizer import REMEMBERED_STEPS, Accumulator, Addition, InnerOptimizer
from swarm.vocabulary.errors import SkipstoneError
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.node.small_manifest import small_manifest


class TwoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
        self.vector = nn.Parameter(torch.tensor([1.0, 1.0]))


def microbatch(number: int) -> MicrobatchId:
    return MicrobatchId(PeerId("a"), number)


def gradients(value: float) -> tuple[Tensor, Tensor]:
    return torch.full((2, 2), value), torch.full((2,), -value)


def optimizer(*accumulators: Accumulator, **inner: Any) -> InnerOptimizer:
    section = {"learning_rate": 0.1, "weight_decay": 0.2, **inner}
    schedule = {"kind": "constant", "warmup_steps": 0, "total_steps": 1}
    return InnerOptimizer(small_manifest(training__inner=section, training__schedule=schedule).training, accumulators)


def mean_of(accumulator: Accumulator) -> list[Tensor | None]:
    accumulator.hand_over_mean()
    return [parameter.grad for parameter in accumulator.parameters]


@given(st.lists(st.integers(0, 5), max_size=20))
def test_each_microbatch_counts_once_whatever_is_repeated(numbers: list[int]) -> None:
    accumulator = Accumulator(TwoParameters())
    additions = [accumulator.add(microbatch(number), 32, gradients(float(number))) for number in numbers]
    distinct = set(numbers)
    assert additions.count(Addition.ADDED) == accumulator.visits == len(distinct)
    assert additions.count(Addition.DUPLICATE) == len(numbers) - len(distinct)
    assert accumulator.tokens == 32 * len(distinct)
    matrix, vector = mean_of(accumulator)
    if not distinct:
        assert matrix is None
        assert vector is None
        return
    mean = sum(distinct) / len(distinct)
    torch.testing.assert_close(matrix, torch.full((2, 2), mean))
    torch.testing.assert_close(vector, torch.full((2,), -mean))


def test_a_step_is_the_mean_over_labels_however_many_each_microbatch_has() -> None:
    """Each gradient is of a mean over 32 tokens, so 1/32 of the sum over its labels."""
    accumulator = Accumulator(TwoParameters())
    for number, (labels, each) in enumerate([(4, 2.0), (20, 5.0), (1, 7.0)]):
        accumulator.add(microbatch(number), 32, gradients(each * labels / 32), labels)
    accumulator.add(microbatch(3), 32, gradients(9.0), 8)
    assert accumulator.retract(microbatch(3), 32, gradients(9.0), 8)
    accumulator.promise(microbatch(4), 32, 16)
    accumulator.break_promise(microbatch(4), 32, 16)
    assert (accumulator.tokens, accumulator.labels) == (96, 25)
    torch.testing.assert_close(mean_of(accumulator)[0], torch.full((2, 2), (4 * 2.0 + 20 * 5.0 + 7.0) / 25))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(bad: float) -> None:
    accumulator = Accumulator(TwoParameters())
    accumulator.add(microbatch(0), 32, gradients(2.0))
    matrix, vector = gradients(1.0)
    vector[1] = bad
    assert accumulator.add(microbatch(1), 32, (matrix, vector)) is Addition.NOT_FINITE
    assert (accumulator.visits, accumulator.tokens) == (1, 32)
    assert not accumulator.has(microbatch(1))
    torch.testing.assert_close(mean_of(accumulator)[0], torch.full((2, 2), 2.0))


def test_the_gradients_handed_in_are_not_kept_or_changed() -> None:
    accumulator = Accumulator(TwoParameters())
    mine = gradients(1.0)
    accumulator.add(microbatch(0), 1, mine)
    accumulator.add(microbatch(1), 1, gradients(3.0))
    assert torch.equal(mine[0], torch.ones(2, 2))


def test_microbatches_of_recent_steps_are_still_known_and_old_ones_forgotten() -> None:
    accumulator = Accumulator(TwoParameters())
    inner = optimizer(accumulator)
    for number in range(REMEMBERED_STEPS + 1):
        accumulator.add(microbatch(number), 1, gradients(1.0))
        inner.step()
    assert accumulator.add(microbatch(REMEMBERED_STEPS), 1, gradients(1.0)) is Addition.DUPLICATE
    assert accumulator.has(microbatch(1))
    assert not accumulator.has(microbatch(0))
    assert accumulator.visits == 0


def test_two_steps_follow_the_formulas() -> None:
    part = TwoParameters()
    accumulator = Accumulator(part)
    inner = optimizer(accumulator, clip_norm=0.5)
    value, first, second = 1.0, 0.0, 0.0
    for step, gradient in enumerate((-3.0, 0.1), start=1):
        accumulator.add(microbatch(step), 1, gradients(gradient))
        inner.step()
        norm = abs(gradient) * math.sqrt(6)
        clipped = -gradient * min(1.0, 0.5 / (norm + 1e-6))  # the vector's gradient
        first = 0.9 * first + 0.1 * clipped
        second = 0.95 * second + 0.05 * clipped**2
        value -= 0.1 * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.95**step)) + 1e-8)
        assert part.vector[0].item() == pytest.approx(value, abs=1e-6)


def test_two_parts_have_their_own_visits_and_are_clipped_as_one() -> None:
    embedding, head = TwoParameters(), TwoParameters()
    accumulators = Accumulator(embedding), Accumulator(head)
    inner = optimizer(*accumulators, clip_norm=1e9)
    accumulators[0].add(microbatch(0), 64, gradients(4.0))
    assert not inner.due
    for number in range(2):
        accumulators[1].add(microbatch(number), 32, gradients(4.0))
    assert inner.due
    figures = inner.step()
    assert figures.visits == (1, 2)
    assert figures.gradient_norm == pytest.approx(4.0 * math.sqrt(12))
    assert not inner.due
    assert torch.equal(embedding.matrix, head.matrix)


def test_a_part_without_visits_does_not_move() -> None:
    embedding, head = TwoParameters(), TwoParameters()
    accumulators = Accumulator(embedding), Accumulator(head)
    accumulators[1].add(microbatch(0), 64, gradients(1.0))
    before = embedding.matrix.detach().clone()
    optimizer(*accumulators).step()
    assert torch.equal(embedding.matrix, before)


def test_a_step_without_any_visit_is_a_mistake() -> None:
    with pytest.raises(SkipstoneError):
        optimizer(Accumulator(TwoParameters())).step()


def test_what_is_taken_back_before_the_step_leaves_no_trace_and_may_come_again() -> None:
    accumulator = Accumulator(TwoParameters())
    accumulator.add(microbatch(0), 32, gradients(2.0))
    accumulator.add(microbatch(1), 32, gradients(5.0))
    assert accumulator.retract(microbatch(1), 32, gradients(5.0))
    assert (accumulator.visits, accumulator.tokens) == (1, 32)
    assert not accumulator.retract(microbatch(1), 32, gradients(5.0)), "once"
    assert accumulator.add(microbatch(1), 32, gradients(4.0)) is Addition.ADDED
    torch.testing.assert_close(mean_of(accumulator)[0], torch.full((2, 2), 3.0))


def test_what_is_taken_back_after_the_step_makes_the_next_one_smaller() -> None:
    accumulator = Accumulator(TwoParameters())
    inner = optimizer(accumulator)
    accumulator.add(microbatch(0), 32, gradients(2.0))
    inner.step()
    assert accumulator.retract(microbatch(0), 32, gradients(2.0))
    assert (accumulator.visits, accumulator.tokens) == (-1, -32)
    assert mean_of(accumulator)[0] is None
    accumulator.add(microbatch(1), 32, gradients(3.0))
    accumulator.add(microbatch(2), 32, gradients(7.0))
    assert (accumulator.visits, accumulator.tokens) == (1, 32)
    torch.testing.assert_close(mean_of(accumulator)[0], torch.full((2, 2), 8.0))
