"""The arithmetic of a replica: gradients are autograd's, whatever was kept, put off, cut or spread over devices."""

import copy
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from node.concurrency.compute_thread import DeviceThreads
from node.model import passes
from node.model.optimizer import Accumulator, InnerOptimizer
from node.model.passes import (
    BlockStack,
    Gradients,
    OneDevice,
    OneHead,
    Passes,
    build_block_stack,
    build_embedding,
    build_head,
)
from node.pipeline import device_passes
from node.pipeline.admission import hidden_tensor
from node.pipeline.device_passes import (
    BlockByBlock,
    Copies,
    DeferredWeights,
    SeveralDevices,
    SplitDevice,
    body_passes,
    head_passes,
)
from node.pipeline.runner import Job, Output
from node.pipeline.worker import DataWorker, HopWorker, WeightStash, host_hop, host_stage_zero
from protocol.codecs import encode
from protocol.manifest.manifest import Manifest
from swarm.pipeline.compute_queue import ComputeQueue, puts_weights_off
from swarm.pipeline.custody import Key, Work
from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId, Reasoned
from swarm.workload.device_shares import CUTTING, Dealing, _deal, deal_whole
from tests.kit.hops import CPU, HopBench, hidden_states, sent
from tests.node.network.small_swarm import text_of
from tests.node.small_manifest import small_manifest

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
        optimizer = InnerOptimizer(manifest, ModuleId(0), [self.total])
        super().__init__(HopWorker(self.part, self.total, optimizer, TENSOR, CPU, graph_budget_bytes), manifest)

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
    assert stage.worker.speed > 0


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
    size = int(probe.worker._graphs._of_one * TOKENS)
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
    assert {number for number, kept in stage.worker._kept.items() if kept.visit is not None} == {5, 6}
    for number in range(7):
        stage.worker.forget(number)
    assert stage.worker._kept == {}
    assert stage.worker._graphs._kept == 0


def test_a_microbatch_that_comes_by_two_ways_adds_once_and_answers_twice() -> None:
    stage = Stage(MANY_GRAPHS)
    stage.forward(1, ticket=10)
    stage.forward(1, ticket=11)
    first = stage.backward(1, ticket=10)
    torch.testing.assert_close(first, stage.backward(1, ticket=11))
    torch.testing.assert_close(mean_of(stage.total), stage.expected(1)[2])
    assert stage.worker.accumulated == 1


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


PLENTY = 2**30
MODULE = ModuleId(1)


def manifest_with(staleness: int, **changes: object) -> Manifest:
    return small_manifest(training__staleness=staleness, training__inner={"learning_rate": 0.1}, **changes)


class Replica(HopBench):
    """A replica of two blocks. `passes`: of the whole, or block by block as on a card."""

    def __init__(
        self, staleness: int = 1, budget: int = PLENTY, dtype: str = "float32", passes: str = "whole", **changes: object
    ) -> None:
        manifest = manifest_with(staleness, model__dtype=dtype, **changes)
        super().__init__(host_hop(manifest, MODULE, CPU, budget), manifest)
        if passes == "whole":
            return
        part = build_block_stack(manifest, MODULE)
        if passes == "split weights":
            part.split_weights()
        total, tensor = Accumulator(part), hidden_tensor(manifest)
        optimizer = InnerOptimizer(manifest, MODULE, [total])
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
            self.visit(number)
            number += 1
        assert self.worker.step() is not None

    def expected(self, part: nn.Module, number: int) -> list[Tensor]:
        source = self.source(number).requires_grad_()
        return list(torch.autograd.grad(part(source), [*part.parameters(), source], self.gradient(number)))


def close(found: Sequence[Tensor], wanted: Sequence[Tensor], share: float = 0.02) -> bool:
    return all((f - w).abs().max() <= share * w.abs().max() for f, w in zip(found, wanted, strict=True))


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(f.float(), w.float(), atol=1e-5, rtol=1e-4) for f, w in zip(found, wanted, strict=True))


KINDS = [("float32", "whole"), ("bfloat16", "whole"), ("float32", "blocks"), ("bfloat16", "blocks")]


def size_of(replica: Replica) -> int:
    return sum(tensor.nbytes for tensor in replica.worker.passes.weights())


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize(("dtype", "passes"), [*KINDS, ("bfloat16", "split weights")])
def test_a_visit_from_before_a_step_has_the_gradient_of_its_weights(dtype: str, passes: str, graphs: bool) -> None:
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


def test_a_step_copies_nothing_without_visits_in_flight_and_at_most_a_quarter_of_the_budget() -> None:
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
    size = size_of(Replica())
    assert Replica(budget=4 * size - 1).worker._stash.copies == 0
    for staleness, copies in ((1, 1), (2, 2), (3, 2)):
        worker = Replica(staleness, 8 * size).worker
        assert (worker._stash.copies, worker._stash.bytes) == (copies, copies * size)
        assert worker._graphs._budget == 8 * size - copies * size


def test_a_graph_whose_weights_or_tensors_have_changed_is_not_used() -> None:
    part = build_block_stack(manifest_with(1), MODULE)
    stash, passes = WeightStash(OneDevice(part).weights, 1, PLENTY), OneDevice(part)
    source = torch.randn(manifest_with(1).hidden_shape)
    lost = passes.forward(source, (), stash.saving)
    stash.changed()
    with pytest.raises(StateError, match="were dropped"):
        passes.backward(lost, source)
    kept = passes.forward(source, (), stash.saving)
    kept.source.detach().add_(1.0)
    with pytest.raises(StateError, match="changed in place"):
        passes.backward(kept, torch.ones_like(source))


@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_is_that_of_one_version_whatever_comes_between(seed: int) -> None:
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


def test_after_an_inner_step_the_embedding_is_computed_again_but_a_microbatch_adds_once_at_each_end() -> None:
    ends = Ends()
    late, *others = (ends.started(number) for number in (1, 2, 3))
    _, back = ends.turn(late)
    assert [ends.there_and_back(microbatch).step_due for microbatch in others] == [False, True]
    assert ends.worker.step() is not None
    assert ends.worker.step() is None
    assert ends.compute(late, Work.BACKWARD, back).step_due is False
    assert ends.worker.recomputed == 1
    weight = next(ends.worker.stage.embedding.parameters())
    [expected] = torch.autograd.grad(ends.worker.stage.embedding(text_of(MANIFEST, 1).tokens), [weight], back)
    [gradient, *_] = mean_of(ends.worker.stage.embedding_sum)
    torch.testing.assert_close(gradient, expected)
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
    with pytest.raises(StateError, match="no longer in flight"):
        ends.compute(MicrobatchId(PeerId("data"), 1), work, torch.zeros(ends.worker.tensor.shape))


def test_what_is_evaluated_is_not_kept_and_adds_nothing() -> None:
    ends = Ends()
    microbatch = ends.started(1)
    hidden = ends.embed(microbatch, Purpose.EVALUATE) @ ends.between
    output = ends.compute(microbatch, Work.LOSS, hidden, Purpose.EVALUATE)
    assert output.loss == pytest.approx(ends.expected(microbatch)[0], abs=1e-5)
    assert output.tensor is None
    assert ends.worker._visits == {}
    with pytest.raises(StateError, match="has no forward pass here"):
        ends.compute(microbatch, Work.BACKWARD, torch.zeros(ends.worker.tensor.shape))
    assert ends.worker.stage.head_sum.visits == 0


def narrow_bench() -> HopBench:
    manifest = small_manifest(model__residual=5, model__token_rank=3)
    return HopBench(host_hop(manifest, MODULE, CPU, BUDGET), manifest)


def test_a_hop_of_a_narrow_residual_stream_hands_token_numbers_on_as_they_are() -> None:
    """Also when it recomputes and when it takes a gradient back; a gradient has none."""
    bench = narrow_bench()
    source = bench.source(1)
    output = bench.worker.compute(replace(bench.job(Work.FORWARD, 1), codec=Codec.INT8))
    assert output.tensor.spec == replace(hidden_tensor(bench.manifest), codec=Codec.INT8)
    found = sent(output)
    assert torch.equal(found[..., 5:], source[..., 5:])
    assert close([found[..., :5]], [bench.worker.part(source)[..., :5].detach()])
    of_source = bench.backward(1)
    assert of_source.shape == bench.gradient(1).shape
    bench.worker.deferred.finish()
    sums = bench.sums()
    assert torch.equal(bench.compute(Work.REPLAY, 1, ticket=2), of_source), "a repeated microbatch adds nothing"
    assert all(torch.equal(*pair) for pair in zip(bench.sums(), sums, strict=True))
    assert bench.retract(1)
    assert all(total.abs().max() < 1e-9 for total in bench.sums())


@pytest.mark.parametrize("number", [257, 65_535])
def test_a_token_number_outside_the_vocabulary_is_refused(number: int) -> None:
    bench = narrow_bench()
    job = bench.job(Work.FORWARD, 1)
    job.input.data[-2:] = number.to_bytes(2, "little")
    with pytest.raises(ProtocolViolation, match=f"token number {number} is not below the vocabulary of 257"):
        bench.worker.compute(job)


BUDGET = 2**24
ROOM_FOR_NO_WORK = 0


class Peer(HopBench):
    """A stage peer's worker and the queue before its device."""

    def __init__(self, manifest: Manifest | None = None, budget: int = BUDGET, idle_limit: int = 8) -> None:
        manifest = manifest or small_manifest()
        self.queue = ComputeQueue(limit=1, idle_limit=idle_limit)
        super().__init__(host_hop(manifest, MODULE, CPU, budget, submit=self.queue.submit), manifest)

    def idle_time(self, chunks: int | None = None) -> int:
        count = 0
        while (chunks is None or count < chunks) and (turn := self.queue.take(0.0)) is not None:
            turn.compute_chunk()
            count += 1
        return count


def inline(manifest: Manifest | None = None) -> Peer:
    peer = Peer(manifest)
    peer.worker.deferred = DeferredWeights(Reasoned(False, "for comparison"), None, peer.worker.unapplied)
    return peer


def train_alike(*peers: Peer, numbers: Sequence[int] = (1,)) -> None:
    for number in numbers:
        for peer in peers:
            peer.visit(number)


def assert_same(one: list[Tensor], other: list[Tensor], tolerance: float = 1e-9) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert any(total.abs().max() > 0 for total in one)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a matrix, with some rows and some tokens each."""
    monkeypatch.setattr(device_passes, "_CHUNK_OPERATIONS", {"cpu": 1})
    monkeypatch.setattr(device_passes, "_LEAST_ROWS", 5)
    monkeypatch.setattr(device_passes, "_LEAST_TOKENS", 12)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__family": "qwen3"},
        {"model__dtype": "bfloat16"},
        {"model__attention": "documents", "training__rows": 1, "training__inner_tokens": 32},
    ],
)
@pytest.mark.usefixtures("_small_chunks")
def test_the_sums_are_those_of_an_ordinary_backward(changes: dict[str, Any]) -> None:
    manifest = small_manifest(**changes)
    peer, other, documents = Peer(manifest), inline(manifest), (5, 11) if manifest.training.rows == 1 else ()
    for number in (1, 2):
        for each in (peer, other):
            each.forward(number, documents=documents)
        assert torch.equal(peer.backward(number, documents=documents), other.backward(number, documents=documents))
    assert peer.worker.deferred.visits == 2
    assert other.worker.deferred.visits == 0
    assert peer.idle_time() > 2 * 4 * 7
    rounding = {"float32": 1e-5, "bfloat16": 0.05}[manifest.model.dtype]
    assert_same(peer.sums(), other.sums(), rounding * manifest.microbatch_tokens)
    assert peer.worker.accumulated == other.worker.accumulated == 2
    assert peer.worker.accumulated_tokens == other.worker.accumulated_tokens


def test_the_first_half_leaves_out_half_of_the_products() -> None:
    manifest = small_manifest()
    split = SplitDevice(host_hop(manifest, MODULE, CPU, 0).part)
    source = torch.randn(manifest.hidden_shape)
    operations = {}
    for name in ("first half", "whole"):
        visit = split.forward(source, ())
        with FlopCounterMode(display=False) as counter:
            if name == "whole":
                split.backward(visit, source)
            else:
                half = split.first_half(visit, source)
        operations[name] = counter.get_total_flops()
    products = sum(2 * each.values.numel() * each.gradients.shape[1] for each in half.products)
    assert operations["whole"] - operations["first half"] == products > 0.3 * operations["whole"]


@pytest.mark.parametrize("idle_limit", [8, ROOM_FOR_NO_WORK])
def test_what_is_put_off_is_computed_in_the_step_that_needs_it(idle_limit: int) -> None:
    peer, other = Peer(idle_limit=idle_limit), inline()
    train_alike(peer, other, numbers=(1, 2))
    peer.idle_time(3)
    assert peer.worker.deferred.waiting == 2
    assert peer.worker.step() is not None
    assert other.worker.step() is not None
    assert peer.worker.deferred.waiting == peer.worker.deferred.held_bytes == 0
    assert peer.idle_time() == 0
    for mine, theirs in zip(peer.worker.part.parameters(), other.worker.part.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)
    assert peer.worker.speed > 0


def test_buffers_may_be_written_again_and_parameters_may_change_before_it_is_computed() -> None:
    peer, other = Peer(), inline()
    train_alike(peer, other)
    for buffer in peer.buffers:
        buffer[:] = bytes(len(buffer))
    with torch.no_grad():
        for parameter in peer.worker.part.parameters():
            parameter.mul_(3)
    peer.worker.parameters_changed()
    peer.idle_time()
    assert_same(peer.sums(), other.sums(), 1e-5)


@pytest.mark.parametrize("when", ["in idle time", "in the step"])
def test_where_there_is_no_memory_nothing_is_lost_or_added_twice(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, other = Peer(), inline()
    train_alike(peer, other, numbers=(1, 2))
    peer.idle_time(2)
    add_to, calls = peer.worker.unapplied.add_to, []

    def failing(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        add_to(*given)

    monkeypatch.setattr(peer.worker.unapplied, "add_to", failing)
    if when == "in idle time":
        peer.idle_time()
        assert peer.worker.deferred.waiting == 1, "the other one was not hindered"
    else:
        with pytest.raises(ResourceExhausted):
            peer.worker.step()
    peer.worker.deferred.finish()
    assert_same(peer.sums(), other.sums(), 1e-5)
    assert peer.worker.step() is not None
    assert peer.worker.deferred.waiting == peer.worker._graphs._kept == 0


def test_a_microbatch_that_comes_twice_counts_once_computed_or_not() -> None:
    peer, other = Peer(), inline()
    other.visit(1)
    for chunks in (0, None):
        peer.visit(1)
        peer.idle_time(chunks)
    assert_same(peer.sums(), other.sums(), 1e-5)
    assert peer.worker.accumulated == 1
    assert peer.worker.unapplied.visits == 1


@pytest.mark.parametrize("chunks", [0, 1, 4, None], ids=["waits", "begun", "half", "computed"])
def test_a_gradient_is_taken_back_at_any_time(chunks: int | None) -> None:
    peer = Peer()
    peer.visit(1)
    peer.idle_time(chunks)
    assert peer.retract(1)
    assert not peer.retract(1), "once"
    assert peer.idle_time() == 0
    assert peer.worker.accumulated == peer.worker.accumulated_tokens == peer.worker.unapplied.visits == 0
    assert peer.worker.deferred.waiting == peer.worker.deferred.held_bytes == 0
    for total in peer.sums():
        torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-4)
    assert peer.worker._graphs._kept == 0
    peer.visit(1)
    assert peer.worker.accumulated == 1, "afterwards it may be added again"


def test_what_is_kept_has_the_place_of_the_graph() -> None:
    probe = Peer()
    probe.forward(1)
    graph = int(probe.worker._graphs._of_one * probe.manifest.microbatch_tokens)
    probe.backward(1)
    assert 0 < probe.worker.deferred.held_bytes <= graph
    peer = Peer(budget=2 * graph)
    for number in (1, 2, 3):
        peer.forward(number)
    for number in (1, 2, 3):
        peer.backward(number)
    deferred = peer.worker.deferred
    assert (deferred.visits, deferred.waiting) == (2, 2), "the third had no room, so it was computed at once"
    assert deferred.peak_bytes <= 2 * graph
    peer.idle_time()
    assert deferred.held_bytes == peer.worker._graphs._kept == 0
    peer.visit(4)
    assert deferred.visits == 3


def test_weights_are_put_off_where_nothing_else_fills_idle_time_those_of_a_substitute_too() -> None:
    assert puts_weights_off(staleness=0, devices=1).value
    assert not puts_weights_off(staleness=1, devices=1).value
    assert not puts_weights_off(staleness=0, devices=2).value
    running_ahead = Peer(small_manifest(training__staleness=1))
    running_ahead.visit(1)
    assert running_ahead.worker.deferred.waiting == 0
    assert "staleness of 1" in running_ahead.worker.deferred.chosen.reason
    peer, other = Peer(), inline()
    assert torch.equal(peer.compute(Work.REPLAY, 1), other.compute(Work.REPLAY, 1))
    assert peer.worker.deferred.waiting == 1
    peer.idle_time()
    assert_same(peer.sums(), other.sums(), 1e-5)


BLOCKS = 3
GRAPHS = pytest.mark.parametrize("graphs", [None, 0, 1, 2, 3])
DOCUMENTS = pytest.mark.parametrize("documents", [(), (5, 3, 8)], ids=["rows", "documents"])


def manifest_of(**changes: object) -> Manifest:
    return small_manifest(stages={"blocks": [1, BLOCKS]}, **changes)


def stack(manifest: Manifest) -> BlockStack:
    return build_block_stack(manifest, MODULE)


def whole(manifest: Manifest, documents: tuple[int, ...] = ()) -> tuple[Tensor, Gradients]:
    passes = OneDevice(stack(manifest))
    visit = passes.forward(hidden_states(manifest, 1, documents), documents)
    return visit.result, passes.backward(visit, hidden_states(manifest, 2, documents))


@DOCUMENTS
@GRAPHS
@pytest.mark.parametrize("residual", [0, 5])
def test_both_passes_are_those_of_the_whole(graphs: int | None, documents: tuple[int, ...], residual: int) -> None:
    manifest = manifest_of(model__residual=residual, model__token_rank=residual and 3)
    result, wanted = whole(manifest, documents)
    passes = BlockByBlock(stack(manifest), torch.float32)
    visit = passes.forward(hidden_states(manifest, 1, documents), documents, graphs=graphs)
    assert sum(graph is not None for graph in visit.graphs) == (BLOCKS if graphs is None else graphs)
    torch.testing.assert_close(visit.result, result)
    torch.testing.assert_close(passes.evaluate(hidden_states(manifest, 1, documents), documents), result)
    found = passes.backward(visit.kept(), hidden_states(manifest, 2, documents))
    torch.testing.assert_close(found.source, wanted.source)
    torch.testing.assert_close(found.parameters, wanted.parameters)


@DOCUMENTS
@GRAPHS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_added_and_taken_back(graphs: int | None, documents: tuple[int, ...], dtype: str) -> None:
    manifest = manifest_of(model__dtype=dtype)
    _, wanted = whole(manifest, documents)
    part = stack(manifest)
    sums, passes = Accumulator(part), BlockByBlock(part, hidden_states(manifest, 1).dtype)
    for total in sums.sums:
        total.fill_(0.5)
    visit = passes.forward(hidden_states(manifest, 1, documents), documents, graphs=graphs)
    found = passes.backward_into(sums, visit, hidden_states(manifest, 2, documents), 10)
    assert found.are_finite
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert close([(total - 0.5) / 10 for total in sums.sums], wanted.parameters, tolerance)
    found.take_back()
    assert all((total - 0.5).abs().max() <= 1e-12 for total in sums.sums)


def test_the_narrow_copy_follows_the_parameters() -> None:
    manifest = manifest_of(model__dtype="bfloat16")
    part = stack(manifest)
    passes = BlockByBlock(part, torch.bfloat16)
    source = hidden_states(manifest, 1)
    passes.forward(source, ())
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.mul_(1.5)
    passes.parameters_changed()
    fresh = BlockByBlock(part, torch.bfloat16)
    assert torch.equal(passes.forward(source, ()).result, fresh.forward(source, ()).result)


@pytest.mark.parametrize("failing", [1, 7, 20])
def test_without_memory_nothing_counts_by_halves(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of()
    part = stack(manifest)
    sums, passes = Accumulator(part), BlockByBlock(part, torch.float32)
    add, calls = sums.add_to, 0

    def add_to(place: int, rows: slice, gradient: Tensor, tokens: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise MemoryError
        add(place, rows, gradient, tokens)

    monkeypatch.setattr(sums, "add_to", add_to)
    visit = passes.forward(hidden_states(manifest, 1), ())
    with pytest.raises(MemoryError):
        passes.backward_into(sums, visit, hidden_states(manifest, 2), 10)
    assert calls == 2 * failing - 1, "as many pieces were taken back as had been added"
    assert all(total.abs().max() <= 1e-12 for total in sums.sums)


def block_peer(budget: int = PLENTY) -> Replica:
    return Replica(0, budget, passes="blocks", stages={"blocks": [1, BLOCKS]})


@pytest.fixture(scope="module")
def graph_bytes() -> float:
    probe = block_peer()
    probe.forward(1)
    return probe.worker._graphs._of_one * manifest_of().microbatch_tokens


@pytest.mark.parametrize(("room", "recomputed"), [(0.0, 3), (0.1, 2), (0.25, 0), (0.7, 0), (1.8, 1), (4.0, 0)])
def test_as_many_graphs_are_kept_as_fit(graph_bytes: float, room: float, recomputed: int) -> None:
    """Room in whole graphs, for three visits: those that keep at least their blocks' inputs are not recomputed."""
    plenty, short = block_peer(), block_peer(int(room * graph_bytes))
    for peer in (plenty, short):
        peer.visit(1, 2, 3)
    for mine, theirs in zip(short.sums(), plenty.sums(), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.any()
    assert short.worker._graphs._kept == pytest.approx(0, abs=1e-9)
    assert plenty.worker.recomputed == 0
    assert short.worker.recomputed == recomputed


@pytest.mark.parametrize("made", [lambda: Stage(MANY_GRAPHS), Peer, block_peer], ids=["whole", "put off", "by blocks"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e37])
def test_a_gradient_that_is_not_finite_or_overflows_leaves_no_trace(bad: float, made: Callable[[], HopBench]) -> None:
    peer = made()
    peer.forward(1)
    gradient = bad * peer.source(2).sign() if math.isfinite(bad) else torch.zeros_like(peer.source(2))
    gradient[0, 0, 0] = bad
    with pytest.raises(ProtocolViolation, match="not finite"):
        peer.backward(1, gradient=gradient)
    worker = peer.worker
    assert worker.accumulated == worker.unapplied.visits == worker.deferred.waiting == 0
    assert all(total.abs().max() <= 1e-12 for total in peer.sums())
    worker.forget(1)
    assert worker._graphs._kept == pytest.approx(0, abs=1e-9)


def test_out_of_memory_after_the_gradients_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = block_peer()
    peer.visit(1)
    before = peer.sums()
    peer.forward(2)

    def failing(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(peer.worker.wire, "output", failing)
        with pytest.raises(ResourceExhausted):
            peer.backward(2)
    assert not peer.worker.unapplied.has(MicrobatchId(PeerId("data"), 2))
    for total, was in zip(peer.sums(), before, strict=True):
        torch.testing.assert_close(total, was, rtol=0, atol=1e-10)


SHARE = 1 / 300
OF_DOCUMENTS = small_manifest(model__attention="documents", model__sequence=2048, training__inner_tokens=4096)
HIDDEN = OF_DOCUMENTS.model.hidden
MICROBATCHES = [(700, 300, 90, 5), (1500,), (1501, 20), (40, 40, 40), (1,), (2, 1), (1200, 1200, 1199)]


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[DeviceThreads]:
    cores = torch.get_num_threads()
    with DeviceThreads([CPU] * request.param) as threads:
        yield threads
    torch.set_num_threads(cores)


def vectors(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both_passes(on: Passes, documents: tuple[int, ...], rows: int = 1) -> tuple[Tensor, Tensor, Gradients]:
    tokens = sum(documents) or 64
    source, gradient = (vectors(rows, tokens, HIDDEN, seed=seed) for seed in (1, 2))
    visit = on.forward(source, documents)
    return visit.result.detach(), on.evaluate(source, documents), on.backward(visit, gradient)


def assert_alike(found: tuple[Tensor, Tensor, Gradients], wanted: tuple[Tensor, Tensor, Gradients]) -> None:
    torch.testing.assert_close(found[:2], wanted[:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2].source, wanted[2].source, atol=1e-5, rtol=1e-5)
    assert close(found[2].parameters, wanted[2].parameters, 1e-5)


@pytest.mark.parametrize(("documents", "rows"), [*((each, 1) for each in MICROBATCHES), ((), 1), ((), 2), ((), 5)])
def test_documents_and_rows_on_several_devices(threads: DeviceThreads, documents: tuple[int, ...], rows: int) -> None:
    part = stack(OF_DOCUMENTS)
    several = body_passes(part, threads, SHARE)
    assert_alike(both_passes(several, documents, rows), both_passes(OneDevice(part), documents, rows))


@pytest.mark.parametrize("deal", [lambda costs, n: _deal(costs, n, frozenset(range(len(costs))), CUTTING), deal_whole])
@pytest.mark.parametrize("documents", [(700, 300, 150), (1500,), (600, 601)])
def test_all_documents_cut_and_none(
    threads: DeviceThreads, documents: tuple[int, ...], deal: Callable[[Sequence[float], int], Dealing]
) -> None:
    part = stack(OF_DOCUMENTS)
    several = SeveralDevices(Copies(part, threads), threads, SHARE, lambda costs, devices, _: deal(costs, devices))
    assert_alike(both_passes(several, documents), both_passes(OneDevice(part), documents))


def test_token_numbers_on_several_devices(threads: DeviceThreads) -> None:
    sizes = {"model__residual": 5, "model__token_rank": 3, "model__attention": "documents", "model__sequence": 2048}
    manifest, documents = small_manifest(**sizes, training__inner_tokens=4096), (1500, 300, 7)
    part, (states, gradient) = stack(manifest), (hidden_states(manifest, each, documents) for each in (1, 2))
    several, one = body_passes(part, threads, SHARE), OneDevice(part)
    found, wanted = several.forward(states, documents), one.forward(states, documents)
    torch.testing.assert_close(found.result, wanted.result.detach(), atol=1e-5, rtol=1e-5)
    ours, theirs = several.backward(found, gradient), one.backward(wanted, gradient)
    torch.testing.assert_close(ours.source, theirs.source, atol=1e-5, rtol=1e-5)
    assert close(ours.parameters, theirs.parameters, 1e-5)


def test_an_embedding_with_blocks_of_its_own(threads: DeviceThreads) -> None:
    part = build_embedding(small_manifest(model__attention="documents", stages__blocks=(1, 1, 1)))
    documents = (9, 4, 3)
    tokens = torch.arange(16)[None]
    found, wanted = (on.forward(tokens, documents) for on in (body_passes(part, threads, SHARE), OneDevice(part)))
    torch.testing.assert_close(found.result, wanted.result.detach(), atol=1e-5, rtol=1e-5)
    gradient = torch.ones_like(found.result)
    of_found = body_passes(part, threads, SHARE).backward(found, gradient)
    assert of_found.source is None
    assert close(of_found.parameters, passes.backward(part, wanted, gradient).parameters, 1e-5)


@pytest.mark.parametrize("shape", [(1, 37), (2, 16), (1, 1)])
def test_the_head_on_several_devices(threads: DeviceThreads, shape: tuple[int, int]) -> None:
    head = build_head(OF_DOCUMENTS)
    hidden, labels = vectors(*shape, HIDDEN, seed=1), torch.arange(shape[0] * shape[1]).reshape(shape)
    several, one = head_passes(head, threads), OneHead(head)
    assert several.loss(hidden, labels) == pytest.approx(one.loss(hidden, labels), abs=1e-5)
    sums = [[torch.zeros_like(parameter, dtype=torch.float64) for parameter in head.parameters()] for _ in range(2)]
    found, wanted = several.loss_into(hidden, labels, sums[0], 7), one.loss_into(hidden, labels, sums[1], 7)
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    torch.testing.assert_close(found.source, wanted.source, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sums[0], sums[1], atol=7e-6, rtol=1e-5)
    for visit, own in ((found, sums[0]), (wanted, sums[1])):
        visit.take_back()
        assert not any(total.abs().max() > 1e-12 for total in own)


def test_devices_of_other_memory_follow_the_parameters(threads: DeviceThreads) -> None:
    part = stack(OF_DOCUMENTS)
    others = [copy.deepcopy(part) for _ in threads.devices[1:]]
    several = SeveralDevices(Copies(part, threads, others), threads, SHARE)
    documents = (700, 300, 300)
    assert_alike(both_passes(several, documents), both_passes(OneDevice(part), documents))
    with torch.no_grad():
        for parameter in part.parameters():
            parameter *= 1.5
    several.parameters_changed()
    assert_alike(both_passes(several, documents), both_passes(OneDevice(part), documents))


def test_a_device_that_fails_ends_the_wait_of_the_others_and_the_next_visit_works(threads: DeviceThreads) -> None:
    class Failing(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part, self.fails = part, True

        def forward(self, *given: object) -> object:
            if self.fails:
                raise torch.OutOfMemoryError("no memory on this one")
            return self.part(*given)

    part = stack(OF_DOCUMENTS)
    failing = Failing(part)
    several = SeveralDevices(Copies(part, threads, [part] * (len(threads.devices) - 2) + [failing]), threads, SHARE)
    source = vectors(1, 1600, HIDDEN, seed=1)
    with pytest.raises(torch.OutOfMemoryError, match="no memory on this one"):
        several.forward(source, (1600,))
    failing.fails = False
    assert several.forward(source, (1600,)).result.shape == source.shape


def test_threads_end_with_their_node() -> None:
    before = threading.active_count()
    with DeviceThreads([CPU, CPU]) as threads:
        assert threads.at_once([lambda: 1, lambda: 2]) == [1, 2]
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
