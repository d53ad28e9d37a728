"""The arithmetic of a replica: the gradients of autograd whatever was kept, each microbatch once."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import Tensor, nn

from node.model.blocks import Linear
from node.model.optimizer import Accumulator, InnerOptimizer, inner_optimizer
from node.model.parts import build_block_stack
from node.model.passes import OneDevice
from node.pipeline.admission import hidden_tensor
from node.pipeline.device_passes import BlockByBlock
from node.pipeline.runner import Job, Output
from node.pipeline.worker import DataWorker, HopWorker, WeightStash, host_hop, host_stage_zero
from protocol.codecs import encode
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody_events import Key, Work
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.kit.hops import CPU, HopBench, sent
from tests.node.network.small_swarm import text_of
from tests.node.small_manifest import small_manifest

# ---- a stage of blocks -----------------------------------------------------------------------------------------------

MANIFEST = small_manifest()
TENSOR, TOKENS = hidden_tensor(MANIFEST), MANIFEST.microbatch_tokens
NO_GRAPHS, MANY_GRAPHS = 0, 2**20


class Part(nn.Sequential):
    def forward(self, hidden: Tensor, documents: tuple[int, ...] = ()) -> Tensor:
        output: Tensor = super().forward(hidden)
        return output


def mean_of(total: Accumulator) -> list[Tensor | None]:
    total.hand_over_mean()
    return [parameter.grad for parameter in total.parameters]


class Stage(HopBench):
    def __init__(self, graph_budget_bytes: int, manifest: Manifest = MANIFEST) -> None:
        torch.manual_seed(1)
        self.part = Part(nn.Linear(16, 16), nn.Tanh())
        self.total = Accumulator(self.part)
        optimizer = InnerOptimizer(manifest.training, [self.total])
        super().__init__(HopWorker(self.part, self.total, optimizer, TENSOR, CPU, graph_budget_bytes), manifest)

    def visit(self, number: int) -> None:
        self.forward(number)
        self.backward(number)

    def expected(self, number: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output, gradient of the input and of the parameters, by autograd alone."""
        source = self.source(number).requires_grad_()
        output = self.part(source)
        of_source, *rest = torch.autograd.grad(output, [source, *self.part.parameters()], self.gradient(number))
        return output, of_source, list(rest)


@pytest.mark.parametrize("budget", [NO_GRAPHS, MANY_GRAPHS])
def test_the_gradients_are_autograds_with_and_without_the_graph(budget: int) -> None:
    stage = Stage(budget)
    output, of_source, of_parameters = stage.expected(1)
    torch.testing.assert_close(stage.forward(1), output)
    torch.testing.assert_close(stage.backward(1), of_source)
    torch.testing.assert_close(mean_of(stage.total), of_parameters)
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
    _, of_source, of_parameters = stage.expected(3)
    torch.testing.assert_close(stage.backward(3), of_source)
    torch.testing.assert_close(mean_of(stage.total), of_parameters)
    assert stage.worker.recomputed == 1


@pytest.mark.parametrize("name", ["adamw", "soap", "muon"])
def test_the_order_of_a_steps_microbatches_changes_nothing(name: str) -> None:
    inner = {"name": name, "refresh_steps": 4, "refresh_lag": 2, "learning_rate": 0.02}
    one, other = (Stage(MANY_GRAPHS, small_manifest(training__inner=inner)) for _ in range(2))
    before = [parameter.detach().clone() for parameter in one.part.parameters()]
    for step in range(12):
        for stage, turn in ((one, 1), (other, -1)):
            for number in (2 * step, 2 * step + 1)[::turn]:
                stage.visit(number)
            assert stage.worker.step() is not None
    for mine, expected, start in zip(other.part.parameters(), one.part.parameters(), before, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
        assert (mine - start).abs().max() > 0.02


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
    torch.testing.assert_close(mean_of(stage.total), stage.expected(1)[2])
    assert stage.worker.accumulated == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e37])
def test_a_gradient_that_is_not_finite_or_grows_beyond_all_numbers_is_refused_and_adds_nothing(bad: float) -> None:
    stage = Stage(MANY_GRAPHS)
    stage.forward(1)
    gradient = bad * stage.source(2).sign() if math.isfinite(bad) else torch.zeros(TENSOR.shape)
    gradient[0, 0, 0] = bad
    with pytest.raises(ProtocolViolation, match="not finite"):
        stage.backward(1, gradient=gradient)
    assert mean_of(stage.total) == [None, None]
    assert stage.worker.accumulated == 0


def test_what_is_evaluated_is_not_kept() -> None:
    stage = Stage(MANY_GRAPHS)
    torch.testing.assert_close(stage.forward(1, purpose=Purpose.EVALUATE), stage.expected(1)[0])
    assert stage.worker._kept == {}
    with pytest.raises(StateError, match="forgotten"):
        stage.backward(1)


def test_a_stand_in_computes_both_ways_in_one_with_the_same_gradients() -> None:
    stage = Stage(MANY_GRAPHS)
    _, of_source, of_parameters = stage.expected(1)
    torch.testing.assert_close(stage.compute(Work.REPLAY, 1), of_source)
    torch.testing.assert_close(mean_of(stage.total), of_parameters)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_gradient_is_taken_back_whether_or_not_a_step_has_come_between(stepped: bool) -> None:
    stage = Stage(MANY_GRAPHS)
    numbers = (1, 2) if stepped else (1,)
    for number in numbers:
        stage.visit(number)
    if stepped:
        assert stage.worker.step() is not None
    expected_now = stage.expected(1)[2]
    assert stage.retract(1)
    assert not stage.retract(1), "once"
    assert stage.worker.accumulated == len(numbers) - 1
    for total, gradient in zip(stage.sums(), expected_now, strict=True):
        taken_back = -TOKENS * gradient if stepped else torch.zeros_like(gradient)
        torch.testing.assert_close(total.float(), taken_back, atol=1e-4, rtol=1e-5)


# ---- gradients of visits from before an inner step -------------------------------------------------------------------

PLENTY = 2**30
MODULE = ModuleId(1)


def manifest_with(staleness: int, **changes: object) -> Manifest:
    return small_manifest(training__staleness=staleness, training__inner={"learning_rate": 0.1}, **changes)


class Replica(HopBench):
    """A replica of two blocks. `passes`: of the whole, or block by block as on a card."""

    def __init__(self, staleness: int = 1, budget: int = PLENTY, dtype: str = "float32", passes: str = "whole") -> None:
        manifest = manifest_with(staleness, model__dtype=dtype)
        super().__init__(host_hop(manifest, MODULE, CPU, budget), manifest)
        if passes == "whole":
            return
        part = build_block_stack(manifest, MODULE)
        if passes == "split weights":
            part.split_weights()
        total, tensor = Accumulator(part), hidden_tensor(manifest)
        optimizer = inner_optimizer(manifest, MODULE, [total])
        blocks = BlockByBlock(part, self.dtype)
        self.worker = HopWorker(part, total, optimizer, tensor, CPU, budget, passes=blocks, stashed=staleness)

    def went(self, number: int) -> nn.Module:
        """Computes the forward; returns the module as it was then."""
        self.forward(number)
        return copy.deepcopy(self.worker.part)

    def came_back(self, number: int) -> list[Tensor]:
        """The gradients that are added, and that of the input as the last."""
        before = self.sums()
        output = self.backward(number)
        tokens = self.manifest.microbatch_tokens
        return [*((total - old) / tokens for total, old in zip(self.sums(), before, strict=True)), output]

    def step(self, number: int) -> None:
        while not self.worker.optimizer.due:
            self.forward(number)
            self.backward(number)
            number += 1
        assert self.worker.step() is not None

    def expected(self, part: nn.Module, number: int) -> list[Tensor]:
        source = self.source(number).requires_grad_()
        return list(torch.autograd.grad(part(source), [*part.parameters(), source], self.gradient(number)))


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all((f - w).abs().max() <= 0.02 * w.abs().max() for f, w in zip(found, wanted, strict=True))


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(f.float(), w.float(), atol=1e-5, rtol=1e-4) for f, w in zip(found, wanted, strict=True))


KINDS = [("float32", "whole"), ("bfloat16", "whole"), ("float32", "blocks"), ("bfloat16", "blocks")]


def size_of(replica: Replica) -> int:
    return sum(tensor.nbytes for tensor in replica.worker.passes.weights())


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize(("dtype", "passes"), [*KINDS, ("bfloat16", "split weights")])
def test_a_visit_from_before_an_inner_step_has_the_gradient_of_the_weights_of_then(
    dtype: str, passes: str, graphs: bool
) -> None:
    budget = PLENTY if graphs else 4 * size_of(Replica(dtype=dtype, passes=passes))
    replica, same_seed = Replica(1, budget, dtype, passes), Replica(1, PLENTY, dtype, passes)
    for each in (replica, same_seed):
        each.step(10)  # the first visit measures
        each.forward(1)
    wanted = same_seed.came_back(1)
    replica.step(20)
    others, weights = replica.worker.recomputed, [weight.clone() for weight in replica.worker.passes.weights()]
    assert close(replica.came_back(1), wanted)
    assert replica.worker.recomputed - others == (not graphs and passes == "whole")
    now = replica.worker.passes.weights()
    assert all(torch.equal(*pair) for pair in zip(now, weights, strict=True)), "those of now are in place again"


def test_a_copy_for_products_is_of_the_parameters_again() -> None:
    replica = Replica(dtype="bfloat16", passes="blocks")
    replica.step(10)
    replica.forward(1)
    replica.step(20)
    replica.backward(1)
    for linear in (module for module in replica.worker.part.modules() if isinstance(module, Linear)):
        assert torch.equal(linear.matrix(torch.bfloat16), linear.weight.bfloat16())


def test_no_more_versions_are_kept_than_the_staleness_and_those_the_newest() -> None:
    replica = Replica()
    replica.step(10)
    replica.forward(1)
    replica.step(20)
    second = replica.went(2)
    replica.step(30)
    assert same(replica.came_back(1), replica.expected(replica.worker.part, 1)), "held up: computed anew"
    assert same(replica.came_back(2), replica.expected(second, 2))
    assert replica.worker.recomputed == 1
    third = replica.went(3)
    replica.step(40)
    assert same(replica.came_back(3), replica.expected(third, 3))
    assert replica.worker.recomputed == 1


def test_a_visit_that_is_computed_twice_holds_its_version_once() -> None:
    replica = Replica()
    replica.step(10)
    for _ in range(2):
        replica.forward(1)
    replica.backward(1)
    assert replica.worker._stash.current.visits == 0
    assert replica.worker._graphs._kept == pytest.approx(0, abs=1e-9)


def test_copies_take_a_quarter_of_the_budget_at_most_before_graphs_do() -> None:
    size = size_of(Replica())
    assert Replica(budget=4 * size - 1).worker._stash.copies == 0
    for staleness, copies in ((1, 1), (2, 2), (3, 2)):
        worker = Replica(staleness, 8 * size).worker
        assert (worker._stash.copies, worker._stash.bytes) == (copies, copies * size)
        assert worker._graphs._budget == 8 * size - copies * size


def test_a_step_without_visits_under_way_copies_nothing() -> None:
    stash = WeightStash(OneDevice(build_block_stack(manifest_with(1), MODULE)).weights, 1, PLENTY)
    stash.before_step()
    assert stash._copies == {}
    made = []
    for _ in range(2):
        version = stash.current
        version.visits += 1
        stash.before_step()
        made.append(stash._copies[version][0].data_ptr())
        stash.done(version)
        assert not version.is_there
    assert made[0] == made[1], "the copy is used again"


def test_a_graph_whose_weights_or_tensors_have_changed_is_not_used() -> None:
    part = build_block_stack(manifest_with(1), MODULE)
    stash, passes = WeightStash(OneDevice(part).weights, 1, PLENTY), OneDevice(part)
    source = torch.randn(manifest_with(1).hidden_shape)
    lost = passes.forward(source, (), stash.saving)
    stash.changed()
    with pytest.raises(StateError, match="are gone"):
        passes.backward(lost, source)
    kept = passes.forward(source, (), stash.saving)
    kept.source.detach().add_(1.0)
    with pytest.raises(StateError, match="changed in place"):
        passes.backward(kept, torch.ones_like(source))


@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_is_that_of_one_version_whatever_comes_between(seed: int) -> None:
    """Visits, steps, other changes and visits that are forgotten, in any order."""
    chance = random.Random(seed)
    replica = Replica(staleness=chance.choice([1, 2]))
    replica.step(1)
    under_way: dict[int, nn.Module] = {}
    outcomes = {"then": 0, "now": 0}
    for number in range(100, 220):
        turn = chance.random()
        if turn < 0.45:
            under_way[number] = replica.went(number)
        elif turn < 0.85 and under_way:
            oldest = chance.choice(list(under_way))
            then, recomputed = under_way.pop(oldest), replica.worker.recomputed
            found, is_new = replica.came_back(oldest), replica.worker.recomputed > recomputed
            outcomes["now" if is_new else "then"] += 1
            assert same(found, replica.expected(replica.worker.part if is_new else then, oldest))
        elif turn < 0.88 and under_way:
            forgotten = chance.choice(list(under_way))
            del under_way[forgotten]
            replica.worker.forget(forgotten)
        elif turn < 0.91:
            with torch.no_grad():
                for parameter in replica.worker.part.parameters():
                    parameter.mul_(1.01)
            replica.worker.parameters_changed()
        if replica.worker.optimizer.due:
            replica.worker.step()
    assert min(outcomes.values()) > 0, outcomes
    for number in under_way:
        replica.worker.forget(number)
    assert replica.worker._stash._copies == {}


# ---- both ends of a path ---------------------------------------------------------------------------------------------


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
        forth, back = (None, data) if work is Work.BACKWARD else (data, None)
        return self.worker.compute(Job(ticket, Key(microbatch, position), work, purpose, forth, back))

    def embed(self, microbatch: MicrobatchId, purpose: Purpose = Purpose.TRAIN) -> Tensor:
        return sent(self.compute(microbatch, Work.FORWARD, None, purpose))

    def turn(self, microbatch: MicrobatchId) -> tuple[float, Tensor]:
        """Out and to the loss; the gradient as it comes back to the start."""
        turned = self.compute(microbatch, Work.LOSS, self.embed(microbatch) @ self.between)
        assert turned.loss is not None
        return turned.loss, sent(turned) @ self.between.T

    def there_and_back(self, microbatch: MicrobatchId) -> Output:
        return self.compute(microbatch, Work.BACKWARD, self.turn(microbatch)[1])

    def expected(self, microbatch: MicrobatchId) -> tuple[float, list[Tensor], list[Tensor]]:
        """Loss, and the gradients of the embedding and the head, by autograd alone."""
        stage, text = self.worker.stage, text_of(MANIFEST, microbatch.number)
        loss = stage.head(stage.embedding(text.tokens) @ self.between, text.labels)
        first, last = list(stage.embedding.parameters()), list(stage.head.parameters())
        gradients = torch.autograd.grad(loss, [*first, *last])
        return loss.item(), list(gradients[: len(first)]), list(gradients[len(first) :])


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
