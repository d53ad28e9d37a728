"""Both ends of a path: the loss and its gradients are those of one process, and only of text that is under way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from node.model.optimizer import Accumulator
from node.pipeline.runner import Job, Output
from node.pipeline.tensor_io import tensor_of
from node.pipeline.worker import DataWorker, host_stage_zero
from protocol.codecs import Encoded, encode
from swarm.pipeline.custody_events import Key, Work
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, PeerId
from tests.node.network.small_swarm import CPU, text_of
from tests.node.small_manifest import small_manifest

MANIFEST = small_manifest()


class Ends:
    """A data node's worker whose path is one matrix in between, so that what goes out and what comes back differ."""

    def __init__(self) -> None:
        self.worker: DataWorker = host_stage_zero(MANIFEST, CPU)
        width = MANIFEST.model.hidden
        self.between = torch.randn(width, width, generator=torch.Generator().manual_seed(9))

    def started(self, number: int) -> MicrobatchId:
        microbatch = MicrobatchId(PeerId("data"), number)
        self.worker.texts[microbatch] = text_of(MANIFEST, number)
        return microbatch

    def compute(
        self, microbatch: MicrobatchId, work: Work, incoming: Tensor | None = None, purpose: Purpose = Purpose.TRAIN
    ) -> Output:
        position = 1 if work is Work.LOSS else -1
        data = None if incoming is None else encode(incoming, Codec.NONE)
        ticket = 2 * microbatch.number + (position > 0)
        key = Key(microbatch, position)
        if work is Work.BACKWARD:
            return self.worker.compute(Job(ticket, key, work, purpose, gradient=data))
        return self.worker.compute(Job(ticket, key, work, purpose, data))

    def embed(self, microbatch: MicrobatchId, purpose: Purpose = Purpose.TRAIN) -> Tensor:
        return self.tensor(self.compute(microbatch, Work.FORWARD, None, purpose))

    def turn(self, microbatch: MicrobatchId) -> tuple[float, Tensor]:
        """Out and to the loss; the gradient as it comes back to the start."""
        turned = self.compute(microbatch, Work.LOSS, self.embed(microbatch) @ self.between)
        assert turned.loss is not None
        return turned.loss, self.tensor(turned) @ self.between.T

    def there_and_back(self, microbatch: MicrobatchId) -> Output:
        return self.compute(microbatch, Work.BACKWARD, self.turn(microbatch)[1])

    def tensor(self, output: Output) -> Tensor:
        assert output.tensor is not None
        return tensor_of(Encoded(output.tensor.spec, memoryview(bytearray(output.tensor.data))), CPU)

    def expected(self, microbatch: MicrobatchId) -> tuple[float, list[Tensor], list[Tensor]]:
        """Loss, and the gradients of the embedding and the head, by autograd alone."""
        stage, text = self.worker.stage, text_of(MANIFEST, microbatch.number)
        loss = stage.head(stage.embedding(text.tokens) @ self.between, text.labels)
        first, last = list(stage.embedding.parameters()), list(stage.head.parameters())
        gradients = torch.autograd.grad(loss, [*first, *last])
        return loss.item(), list(gradients[: len(first)]), list(gradients[len(first) :])


def mean_of(total: Accumulator) -> list[Tensor | None]:
    total.hand_over_mean()
    return [parameter.grad for parameter in total.parameters]


def test_loss_and_gradients_are_those_of_one_process() -> None:
    ends = Ends()
    microbatch = ends.started(1)
    loss, embedding, head = ends.expected(microbatch)
    measured, back = ends.turn(microbatch)
    assert measured == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(mean_of(ends.worker.stage.head_sum), head, rtol=1e-4, atol=1e-6)
    assert ends.worker.accumulated == 0, "it counts when both ends have been added"
    ends.compute(microbatch, Work.BACKWARD, back)
    torch.testing.assert_close(mean_of(ends.worker.stage.embedding_sum), embedding, rtol=1e-4, atol=1e-6)
    assert (ends.worker.accumulated, ends.worker.recomputed) == (1, 0)
    assert ends.worker._visits == {}


def test_after_an_inner_step_the_embedding_is_computed_again() -> None:
    ends = Ends()
    late, *others = (ends.started(number) for number in (1, 2, 3))
    _, back = ends.turn(late)
    due = [ends.there_and_back(microbatch).step_due for microbatch in others]
    assert due == [False, True]
    assert ends.worker.step() is not None
    assert ends.worker.step() is None
    assert ends.compute(late, Work.BACKWARD, back).step_due is False
    assert ends.worker.recomputed == 1
    weight = next(ends.worker.stage.embedding.parameters())
    source = ends.worker.stage.embedding(text_of(MANIFEST, 1).tokens)
    [expected] = torch.autograd.grad(source, [weight], back)
    [gradient, *_] = mean_of(ends.worker.stage.embedding_sum)
    torch.testing.assert_close(gradient, expected)


def test_the_same_microbatch_adds_once_at_each_end() -> None:
    ends = Ends()
    microbatch = ends.started(1)
    ends.there_and_back(microbatch)
    ends.there_and_back(microbatch)
    stage = ends.worker.stage
    assert (stage.embedding_sum.visits, stage.head_sum.visits) == (1, 1)


@pytest.mark.parametrize("work", [Work.LOSS, Work.BACKWARD])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_comes_back_not_finite_is_refused_and_adds_nothing(work: Work, bad: float) -> None:
    ends = Ends()
    microbatch = ends.started(1)
    ends.embed(microbatch)
    with pytest.raises(ProtocolViolation, match="not finite"):
        ends.compute(microbatch, work, torch.full(ends.worker.tensor.shape, bad))
    stage = ends.worker.stage
    assert (stage.embedding_sum.visits, stage.head_sum.visits, ends.worker.accumulated) == (0, 0, 0)


@pytest.mark.parametrize("work", list(Work))
def test_what_is_not_under_way_is_not_computed(work: Work) -> None:
    ends = Ends()
    with pytest.raises(StateError, match="not under way"):
        ends.compute(MicrobatchId(PeerId("data"), 1), work, torch.zeros(ends.worker.tensor.shape))


def test_what_is_evaluated_is_not_kept_and_adds_nothing() -> None:
    ends = Ends()
    microbatch = ends.started(1)
    hidden = ends.embed(microbatch, Purpose.EVALUATE) @ ends.between
    output = ends.compute(microbatch, Work.LOSS, hidden, Purpose.EVALUATE)
    assert output.loss == pytest.approx(ends.expected(microbatch)[0], abs=1e-5)
    assert output.tensor is None
    assert ends.worker._visits == {}
    with pytest.raises(StateError, match="nothing was kept"):
        ends.compute(microbatch, Work.BACKWARD, torch.zeros(ends.worker.tensor.shape))
    assert ends.worker.stage.head_sum.visits == 0


def test_forgetting_frees_the_visit() -> None:
    ends = Ends()
    ends.embed(ends.started(1))
    assert len(ends.worker._visits) == 1
    ends.worker.forget(2)
    ends.worker.forget(2)
    assert ends.worker._visits == {}
