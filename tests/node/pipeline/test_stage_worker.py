"""A replica's arithmetic: the same gradients whether the graph was kept or not, each microbatch once, nothing from what
is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from node.model.optimizer import Accumulator, InnerOptimizer
from node.pipeline.admission import hidden_tensor
from node.pipeline.runner import Job, Output
from node.pipeline.tensor_io import tensor_of
from node.pipeline.worker import HopWorker
from protocol.codecs import Encoded, encode
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody_events import Key, Work
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, PeerId
from tests.node.network.small_swarm import CPU
from tests.node.small_manifest import small_manifest

MANIFEST = small_manifest()
TENSOR, TOKENS = hidden_tensor(MANIFEST), MANIFEST.microbatch_tokens
NO_GRAPHS, MANY_GRAPHS = 0, 2**20


class Part(nn.Sequential):
    """Layers to which documents are all one."""

    def forward(self, hidden: Tensor, documents: tuple[int, ...] = ()) -> Tensor:
        output: Tensor = super().forward(hidden)
        return output


class Stage:
    """A linear layer and a non-linearity, with messages for it."""

    def __init__(self, graph_budget_bytes: int, manifest: Manifest = MANIFEST, stashed: int = 0) -> None:
        torch.manual_seed(1)
        self.part = Part(nn.Linear(16, 16), nn.Tanh())
        self.sums = Accumulator(self.part)
        optimizer = InnerOptimizer(manifest.training, [self.sums])
        self.worker = HopWorker(self.part, self.sums, optimizer, TENSOR, CPU, graph_budget_bytes, stashed=stashed)

    def forward(self, number: int, purpose: Purpose = Purpose.TRAIN, ticket: int | None = None) -> Tensor:
        return self._compute(Work.FORWARD, number, source_of(number), purpose, ticket)

    def backward(self, number: int, gradient: Tensor | None = None, ticket: int | None = None) -> Tensor:
        gradient = source_of(number + 100) if gradient is None else gradient
        return self._compute(Work.BACKWARD, number, gradient, Purpose.TRAIN, ticket)

    def _compute(self, work: Work, number: int, incoming: Tensor, purpose: Purpose, ticket: int | None) -> Tensor:
        key = Key(MicrobatchId(PeerId("data"), number), 0)
        data, ticket = encode(incoming, Codec.NONE), number if ticket is None else ticket
        if work is Work.BACKWARD:
            job = Job(ticket, key, work, purpose, gradient=data)
        else:
            job = Job(ticket, key, work, purpose, data)
        return sent(self.worker.compute(job))

    def gradients(self) -> list[Tensor | None]:
        self.sums.hand_over_mean()
        return [parameter.grad for parameter in self.part.parameters()]


def sent(output: Output) -> Tensor:
    """As its receiver has it."""
    assert output.tensor is not None
    return tensor_of(Encoded(output.tensor.spec, memoryview(bytearray(output.tensor.data))), CPU)


def source_of(number: int) -> Tensor:
    return torch.randn(TENSOR.shape, generator=torch.Generator().manual_seed(number))


def expected(part: nn.Module, number: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input and of the parameters, by autograd alone."""
    source = source_of(number).requires_grad_()
    output = part(source)
    of_source, *rest = torch.autograd.grad(output, [source, *part.parameters()], source_of(number + 100))
    return output, of_source, list(rest)


@pytest.mark.parametrize("budget", [NO_GRAPHS, MANY_GRAPHS])
def test_the_gradients_are_autograds_with_and_without_the_graph(budget: int) -> None:
    stage = Stage(budget)
    output, of_source, of_parameters = expected(stage.part, 1)
    torch.testing.assert_close(stage.forward(1), output)
    torch.testing.assert_close(stage.backward(1), of_source)
    torch.testing.assert_close(stage.gradients(), of_parameters)
    assert stage.worker.recomputed == (budget == NO_GRAPHS)
    assert stage.worker.accumulated == 1
    assert stage.worker.speed.tokens_per_s > 0


def test_after_an_inner_step_backward_uses_the_new_weights() -> None:
    stage = Stage(MANY_GRAPHS)
    for number in (1, 2, 3):
        stage.forward(number)
    for number in (1, 2):
        stage.backward(number)
    assert stage.worker.step() is not None
    assert stage.worker.step() is None, "the step was taken by the first call"
    _, of_source, of_parameters = expected(stage.part, 3)
    torch.testing.assert_close(stage.backward(3), of_source)
    torch.testing.assert_close(stage.gradients(), of_parameters)
    assert stage.worker.recomputed == 1


@pytest.mark.parametrize("name", ["adamw", "soap", "muon"])
def test_the_order_of_a_steps_microbatches_changes_nothing(name: str) -> None:
    inner = {"name": name, "refresh_steps": 4, "refresh_lag": 2, "learning_rate": 0.02}
    one, other = (Stage(MANY_GRAPHS, small_manifest(training__inner=inner)) for _ in range(2))
    before = [parameter.detach().clone() for parameter in one.part.parameters()]
    for step in range(12):
        for stage, turn in ((one, 1), (other, -1)):
            for number in (2 * step, 2 * step + 1)[::turn]:
                stage.forward(number)
                stage.backward(number)
            assert stage.worker.step() is not None
    for mine, expected, start in zip(other.part.parameters(), one.part.parameters(), before, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
        assert (mine - start).abs().max() > 0.02


def test_a_step_is_due_when_its_tokens_are_there() -> None:
    stage = Stage(MANY_GRAPHS)
    stage.forward(1)
    stage.backward(1)
    assert stage.worker.step() is None
    stage.forward(2)
    stage.backward(2)
    figures = stage.worker.step()
    assert figures is not None
    assert figures.visits == (2,)


def test_graphs_are_kept_within_the_budget_and_let_go() -> None:
    probe = Stage(MANY_GRAPHS)
    probe.forward(0)
    of_one = probe.worker._graphs._of_one
    assert of_one is not None
    size = int(of_one * TOKENS)
    assert size >= TENSOR.byte_length, "the output of Tanh is held by the graph"
    stage = Stage(2 * size)
    for number in range(4):
        stage.forward(number)
    assert [kept.visit is not None for kept in stage.worker._kept.values()] == [True, True, False, False]
    stage.worker.forget(3)  # had no graph: nothing comes free
    stage.forward(4)
    stage.worker.forget(0)
    stage.worker.forget(0)
    stage.forward(5)
    stage.backward(1)
    stage.forward(6)
    held = {number for number, kept in stage.worker._kept.items() if kept.visit is not None}
    assert held == {5, 6}
    for number in range(7):
        stage.worker.forget(number)
    assert stage.worker._kept == {}
    assert stage.worker._graphs._kept == 0


def test_a_microbatch_that_comes_by_two_ways_adds_once_and_answers_twice() -> None:
    stage = Stage(MANY_GRAPHS)
    stage.forward(1, ticket=10)
    stage.forward(1, ticket=11)
    first = stage.backward(1, ticket=10)
    second = stage.backward(1, ticket=11)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(stage.gradients(), expected(stage.part, 1)[2])
    assert stage.worker.accumulated == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_adds_nothing(bad: float) -> None:
    stage = Stage(MANY_GRAPHS)
    stage.forward(1)
    gradient = torch.zeros(TENSOR.shape)
    gradient[0, 0, 0] = bad
    with pytest.raises(ProtocolViolation, match="not finite"):
        stage.backward(1, gradient)
    assert stage.gradients() == [None, None]
    assert stage.worker.accumulated == 0


def test_a_gradient_that_grows_beyond_all_numbers_is_refused() -> None:
    stage = Stage(MANY_GRAPHS)
    stage.forward(1)
    with pytest.raises(ProtocolViolation, match="not finite"):
        stage.backward(1, 3e37 * source_of(2).sign())
    assert stage.gradients() == [None, None]


def test_what_is_evaluated_is_not_kept() -> None:
    stage = Stage(MANY_GRAPHS)
    torch.testing.assert_close(stage.forward(1, Purpose.EVALUATE), expected(stage.part, 1)[0])
    assert stage.worker._kept == {}
    with pytest.raises(StateError, match="forgotten"):
        stage.backward(1)


def test_a_stand_in_computes_both_ways_in_one_with_the_same_gradients() -> None:
    stage = Stage(MANY_GRAPHS)
    _, of_source, of_parameters = expected(stage.part, 1)
    tensors = encode(source_of(1), Codec.NONE), encode(source_of(101), Codec.NONE)
    job = Job(1, Key(MicrobatchId(PeerId("data"), 1), 0), Work.REPLAY, Purpose.TRAIN, *tensors)
    torch.testing.assert_close(sent(stage.worker.compute(job)), of_source)
    torch.testing.assert_close(stage.gradients(), of_parameters)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_gradient_is_taken_back_whether_or_not_a_step_has_come_between(stepped: bool) -> None:
    stage = Stage(MANY_GRAPHS)
    numbers = (1, 2) if stepped else (1,)
    for number in numbers:
        stage.forward(number)
        stage.backward(number)
    if stepped:
        assert stage.worker.step() is not None
    expected_now = expected(stage.part, 1)[2]
    tensors = encode(source_of(1), Codec.NONE), encode(source_of(101), Codec.NONE)
    job = Job(9, Key(MicrobatchId(PeerId("data"), 1), 0), Work.BACKWARD, Purpose.TRAIN, *tensors)
    assert stage.worker.retract(job)
    assert not stage.worker.retract(job), "once"
    assert stage.worker.accumulated == len(numbers) - 1
    for total, gradient in zip(stage.sums.sums, expected_now, strict=True):
        taken_back = -TOKENS * gradient if stepped else torch.zeros_like(gradient)
        torch.testing.assert_close(total.float(), taken_back, atol=1e-4, rtol=1e-5)
