"""SOAP is the paper's algorithm, computes the same whenever its refreshes are computed, and is not broken by any
gradient."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from node.model.optimizers.adamw import AdamW
from node.model.optimizers.inner_rule import AtDeadline, ParameterState
from node.model.optimizers.soap import RefreshClock, Soap
from protocol.manifest.manifest import InnerSection
from swarm.vocabulary.errors import ResourceExhausted

SHAPES = ((6, 10), (10, 6), (6, 6))


def section(**keys: Any) -> InnerSection:
    return InnerSection(name="soap", **{"refresh_steps": 4, "refresh_lag": 2, **keys})


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(gradient_of(shape, -1)) for shape in SHAPES]


def gradient_of(shape: tuple[int, ...], step: int) -> Tensor:
    numbers = torch.Generator().manual_seed(1000 * step + 31 * shape[0] + shape[1] + 10**6)
    return torch.randn(shape, generator=numbers) * torch.logspace(0, -2, shape[1])


class Lane:
    """Idle time that computes so many chunks of all that waits after each step."""

    def __init__(self, chunks: int = 0, refuses: bool = False) -> None:
        self.waiting: list[Iterator[None]] = []
        self.computed = 0
        self.cancelled = 0
        self._chunks, self._refuses = chunks, refuses

    def submit(self, work: Iterator[None], name: str) -> Handle:
        if self._refuses:
            raise ResourceExhausted("too much waits")
        self.waiting.append(work)
        return Handle(self, work, name)

    def idle(self) -> None:
        left = self._chunks
        for work in self.waiting:
            while left and next(work, self) is not self:
                left -= 1
                self.computed += 1


class Handle(AtDeadline):
    def __init__(self, lane: Lane, work: Iterator[None], name: str) -> None:
        super().__init__(work, name)
        self._lane = lane

    def cancel(self) -> None:
        self._lane.cancelled += 1
        super().cancel()


def trained(
    inner: InnerSection, steps: int, lane: Lane | None = None, own: list[nn.Parameter] | None = None
) -> tuple[list[nn.Parameter], Soap]:
    own, lane = own or parameters(), lane or Lane()
    optimizer = Soap(own, inner, lane.submit)
    for step in range(steps):
        move(optimizer, own, step)
        lane.idle()
    return own, optimizer


def move(optimizer: Soap, own: list[nn.Parameter], step: int) -> None:
    for parameter in own:
        parameter.grad = gradient_of(tuple(parameter.shape), step)
    optimizer.step(0.01)


@pytest.mark.parametrize("lane", [Lane(chunks=1), Lane(chunks=7), Lane(chunks=1000), Lane(refuses=True)])
def test_idle_time_changes_nothing_but_when_it_is_computed(lane: Lane) -> None:
    at_deadline, _ = trained(section(), 20)
    own, _ = trained(section(), 20, lane)
    assert all(torch.equal(mine, other) for mine, other in zip(own, at_deadline, strict=True))


def test_all_of_it_can_be_computed_in_idle_time() -> None:
    full, none = Lane(chunks=1000), Lane()
    trained(section(), 20, full)
    trained(section(), 20, none)
    assert full.computed > 3 * 4 * 3
    assert (none.computed, len(none.waiting)) == (0, len(full.waiting))
    assert all(next(work, None) is None for work in full.waiting)


def test_before_the_first_basis_it_is_adamw() -> None:
    inner = section(refresh_steps=100, refresh_lag=100)
    own, _ = trained(inner, 6)
    theirs = parameters()
    reference = AdamW(theirs, inner)
    for step in range(6):
        for parameter in theirs:
            parameter.grad = gradient_of(tuple(parameter.shape), step)
        reference.step(0.01)
    for mine, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_two_steps_with_a_basis_are_those_of_the_paper() -> None:
    """Against the algorithm written down again, in float64, with the eigenvectors that the optimizer found."""
    inner = section(weight_decay=0.0, refresh_steps=50, refresh_lag=1)
    own, optimizer = trained(inner, 1, own=[nn.Parameter(gradient_of((6, 10), -1))])
    mean, variance = torch.zeros(6, 10).double(), torch.zeros(6, 10).double()
    for step in (1, 2):
        before = own[0].detach().double()
        move(optimizer, own, step)
        bases = optimizer.states[own[0]].bases
        left, right = bases["left"].double(), bases["right"].double()
        gradient = gradient_of((6, 10), step).double()
        mean = inner.beta1 * mean + (1 - inner.beta1) * gradient
        variance = inner.beta2 * variance + (1 - inner.beta2) * (left.T @ gradient @ right) ** 2
        steered = (left.T @ mean @ right / (1 - inner.beta1**step)) / (variance / (1 - inner.beta2**step)).sqrt()
        torch.testing.assert_close(own[0].double(), before - 0.01 * left @ steered @ right.T, rtol=1e-4, atol=1e-5)


def test_statistics_are_means_of_the_gradients_products_and_bases_their_eigenvectors() -> None:
    inner = section(refresh_steps=4, refresh_lag=1)
    own, optimizer = trained(inner, 60, own=[nn.Parameter(gradient_of((6, 10), -1))])
    state = optimizer.states[own[0]]
    expected = torch.zeros(10, 10)
    for step in range(60):
        gradient = gradient_of((6, 10), step)
        expected = inner.beta2 * expected + (1 - inner.beta2) * gradient.T @ gradient
    torch.testing.assert_close(state.statistics["right"], expected)
    turned = state.bases["right"].T @ expected @ state.bases["right"]
    off = turned - turned.diag().diag()
    assert off.norm() < 0.2 * turned.norm()


def test_a_long_side_has_no_basis() -> None:
    own, optimizer = trained(section(largest_side=8), 12)
    sides = [set(optimizer.states[parameter].bases) for parameter in own]
    assert sides == [{"left"}, {"right"}, {"left", "right"}]
    assert all(parameter.isfinite().all() for parameter in own)


@pytest.mark.parametrize("lag", [1, 2, 4])
@pytest.mark.parametrize("at", range(1, 14))
def test_a_restored_state_goes_on_as_if_nothing_had_been(at: int, lag: int) -> None:
    whole, _ = trained(section(refresh_lag=lag), 20)
    own, optimizer = trained(section(refresh_lag=lag), at, Lane(chunks=2))
    other = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    resumed = Soap(other, section(refresh_lag=lag))
    for mine, parameter in zip(own, other, strict=True):
        saved = optimizer.exported(optimizer.states[mine])
        shapes = {slot: tuple(tensor.shape) for slot, tensor in saved.tensors.items()}
        assert shapes == resumed.slots(parameter, saved.steps)
        copies = ParameterState(saved.steps, {slot: tensor.clone() for slot, tensor in saved.tensors.items()})
        resumed.states[parameter] = resumed.restored(parameter, copies)
    for step in range(at, 20):
        move(resumed, other, step)
    assert all(torch.equal(mine, expected) for mine, expected in zip(other, whole, strict=True))


def test_starting_anew_gives_up_what_is_under_way() -> None:
    lane = Lane()
    _, optimizer = trained(section(), 1, lane)
    optimizer.clear()
    assert (lane.cancelled, optimizer.states) == (len(SHAPES), {})


@pytest.mark.parametrize("value", [0.0, 1e-25, 1.0, 1e25])
def test_no_gradient_breaks_a_step(value: float) -> None:
    """All alike: no direction, or one. Squares of the large ones overflow."""
    own = parameters()
    before = [parameter.detach().clone() for parameter in own]
    optimizer = Soap(own, section())
    for _ in range(12):
        for parameter in own:
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(0.01)
    for parameter, start in zip(own, before, strict=True):
        assert (parameter - start).abs().max() < 12 * 0.01 * 12


def test_a_refresh_that_fails_leaves_the_basis(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(AtDeadline):
        def finish(self) -> None:
            raise torch.OutOfMemoryError("none left")

    own = parameters()
    optimizer = Soap(own, section(), Failing)
    for step in range(8):
        move(optimizer, own, step)
    assert all(torch.equal(optimizer.states[p].bases["left"], torch.eye(len(p))) for p in own)
    assert "stays as it is" in caplog.text


@given(st.integers(1, 30), st.data())
def test_refreshes_come_at_their_pace_and_never_two_at_a_time(every: int, data: st.DataObject) -> None:
    lag, offset = data.draw(st.integers(1, every)), data.draw(st.integers(0, every - 1))
    clock = RefreshClock(every, lag, offset)
    begun = [step for step in range(1, 6 * every + 2) if clock.begun(step) == step]
    assert begun[0] == 1
    assert all(later - earlier >= lag for earlier, later in pairwise(begun))
    assert all(later - earlier == every for earlier, later in pairwise(begun[1:]))
    assert begun[1] <= lag + every
    assert all(clock.due(step) == clock.begun(step) + lag for step in range(1, 40))
