"""Backward in parts adds the gradients of the whole, all or none, whenever they are computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from node.model.optimizer import Accumulator, inner_optimizer
from node.model.parts import BlockStack, build_block_stack
from node.model.passes import Gradients, OneDevice
from node.pipeline import device_passes
from node.pipeline.admission import hidden_tensor
from node.pipeline.device_passes import BlockByBlock, DeferredWeights, SplitDevice
from node.pipeline.tensor_io import tensor_of
from node.pipeline.worker import HopWorker, host_hop
from protocol.manifest.manifest import Manifest
from swarm.pipeline.compute_queue import ComputeQueue, IdleWork, puts_weights_off
from swarm.pipeline.custody_events import Work
from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Reasoned
from tests.kit.hops import CPU, HopBench
from tests.node.small_manifest import small_manifest

# ---- weight gradients that are put off -------------------------------------------------------------------------------

MODULE = ModuleId(1)
BUDGET = 2**24
ROOM_FOR_NO_WORK = 0


class Peer(HopBench):
    """A stage peer's worker and the queue before its device."""

    def __init__(self, manifest: Manifest | None = None, budget: int = BUDGET, idle_limit: int = 8) -> None:
        manifest = manifest or small_manifest()
        self.queue = ComputeQueue(limit=1, idle_limit=idle_limit)
        super().__init__(host_hop(manifest, MODULE, CPU, budget, submit=self.queue.submit), manifest)

    def idle_time(self, chunks: int | None = None) -> int:
        """Computes so many chunks, or all; returns how many there were."""
        count = 0
        while chunks is None or count < chunks:
            turn = self.queue.take(0.0)
            if turn is None:
                break
            assert isinstance(turn, IdleWork)
            turn.compute_chunk()
            count += 1
        return count


def inline(manifest: Manifest | None = None) -> Peer:
    peer = Peer(manifest)
    peer.worker.deferred = DeferredWeights(Reasoned(False, "for comparison"), None, peer.worker.unapplied)
    return peer


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


@pytest.mark.parametrize("changes", [{}, {"model__family": "qwen3"}, {"model__dtype": "bfloat16"}])
@pytest.mark.usefixtures("_small_chunks")
def test_the_sums_are_those_of_an_ordinary_backward(changes: dict[str, Any]) -> None:
    manifest = small_manifest(**changes)
    peer, other = Peer(manifest), inline(manifest)
    for number in (1, 2):
        for each in (peer, other):
            each.forward(number)
        assert torch.equal(peer.backward(number), other.backward(number))
    assert peer.worker.deferred.visits == 2
    assert other.worker.deferred.visits == 0
    assert peer.idle_time() > 2 * 4 * 7
    rounding = {"float32": 1e-5, "bfloat16": 0.05}[manifest.model.dtype]
    assert_same(peer.sums(), other.sums(), rounding * manifest.microbatch_tokens)
    assert peer.worker.accumulated == other.worker.accumulated == 2
    assert peer.worker.accumulated_tokens == other.worker.accumulated_tokens


def test_documents_are_masked_as_ever() -> None:
    manifest, documents = small_manifest(training__rows=1, model__attention="documents"), (5, 11)
    peer, other = Peer(manifest), inline(manifest)
    for each in (peer, other):
        each.forward(1, documents=documents)
        each.backward(1, documents=documents)
    peer.idle_time()
    assert_same(peer.sums(), other.sums(), 1e-5)


def test_the_first_half_leaves_out_half_of_the_products() -> None:
    manifest = small_manifest()
    part = host_hop(manifest, MODULE, CPU, 0).part
    split = SplitDevice(part)
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


def test_what_is_put_off_is_computed_in_the_step_that_needs_it() -> None:
    peer, other = Peer(), inline()
    for number in (1, 2):
        for each in (peer, other):
            each.forward(number)
            each.backward(number)
    peer.idle_time(3)
    assert peer.worker.deferred.waiting == 2
    assert peer.worker.step() is not None
    assert other.worker.step() is not None
    assert peer.worker.deferred.waiting == peer.worker.deferred.held_bytes == 0
    assert peer.idle_time() == 0
    for mine, theirs in zip(peer.worker.part.parameters(), other.worker.part.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)
    assert peer.worker.speed.tokens_per_s > 0


def test_where_no_work_is_taken_it_is_computed_in_the_step() -> None:
    peer = Peer(idle_limit=ROOM_FOR_NO_WORK)
    for number in (1, 2):
        peer.forward(number)
        peer.backward(number)
    assert peer.worker.deferred.waiting == 2
    assert peer.worker.step() is not None
    assert peer.worker.deferred.waiting == 0


def test_buffers_may_be_written_again_and_parameters_may_change_before_it_is_computed() -> None:
    peer, other = Peer(), inline()
    for each in (peer, other):
        each.forward(1)
        each.backward(1)
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
    for number in (1, 2):
        for each in (peer, other):
            each.forward(number)
            each.backward(number)
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
    other.forward(1)
    other.backward(1)
    for chunks in (0, None):
        peer.forward(1)
        peer.backward(1)
        peer.idle_time(chunks)
    assert_same(peer.sums(), other.sums(), 1e-5)
    assert peer.worker.accumulated == 1
    assert peer.worker.unapplied.visits == 1


@pytest.mark.parametrize("chunks", [0, 1, 4, None], ids=["waits", "begun", "half", "computed"])
def test_a_gradient_is_taken_back_at_any_time(chunks: int | None) -> None:
    peer = Peer()
    peer.forward(1)
    peer.backward(1)
    peer.idle_time(chunks)
    assert peer.retract(1)
    assert not peer.retract(1), "once"
    assert peer.idle_time() == 0
    assert peer.worker.accumulated == peer.worker.accumulated_tokens == peer.worker.unapplied.visits == 0
    assert peer.worker.deferred.waiting == peer.worker.deferred.held_bytes == 0
    for total in peer.sums():
        torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-4)
    assert peer.worker._graphs._kept == 0
    peer.forward(1)
    peer.backward(1)
    assert peer.worker.accumulated == 1, "afterwards it may be added again"


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e37])
def test_a_gradient_that_is_not_finite_leaves_no_trace(bad: float) -> None:
    peer = Peer()
    peer.forward(1)
    job = peer.job(Work.BACKWARD, 1)
    assert job.gradient is not None
    tensor_of(job.gradient, CPU).fill_(bad)
    with pytest.raises(ProtocolViolation, match="not finite"):
        peer.worker.compute(job)
    assert peer.worker.accumulated == peer.worker.unapplied.visits == peer.worker.deferred.waiting == 0
    peer.worker.forget(1)
    assert peer.worker._graphs._kept == 0
    assert peer.idle_time() == 0


def test_what_is_kept_has_the_place_of_the_graph() -> None:
    probe = Peer()
    probe.forward(1)
    of_one = probe.worker._graphs._of_one
    assert of_one is not None
    graph = int(of_one * probe.manifest.microbatch_tokens)
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
    peer.forward(4)
    peer.backward(4)
    assert deferred.visits == 3


def test_a_stand_ins_weights_are_put_off_too() -> None:
    peer, other = Peer(), inline()
    assert torch.equal(peer.compute(Work.REPLAY, 1), other.compute(Work.REPLAY, 1))
    assert peer.worker.deferred.waiting == 1
    peer.idle_time()
    assert_same(peer.sums(), other.sums(), 1e-5)


def test_weights_are_put_off_where_nothing_else_fills_idle_time() -> None:
    assert puts_weights_off(staleness=0, devices=1).value
    assert not puts_weights_off(staleness=1, devices=1).value
    assert not puts_weights_off(staleness=0, devices=2).value
    running_ahead = Peer(small_manifest(training__staleness=1))
    running_ahead.forward(1)
    running_ahead.backward(1)
    assert running_ahead.worker.deferred.waiting == 0
    assert "staleness of 1" in running_ahead.worker.deferred.chosen.reason


# ---- block by block --------------------------------------------------------------------------------------------------

BLOCKS = 3
GRAPHS = pytest.mark.parametrize("graphs", [None, 0, 1, 2, 3])
DOCUMENTS = pytest.mark.parametrize("documents", [(), (5, 3, 8)], ids=["rows", "documents"])


def manifest_of(**changes: object) -> Manifest:
    return small_manifest(stages={"blocks": [1, BLOCKS]}, **changes)


def stack(manifest: Manifest) -> BlockStack:
    return build_block_stack(manifest, MODULE)


def drawn(manifest: Manifest, number: int, documents: tuple[int, ...] = ()) -> Tensor:
    shape = (1, sum(documents), manifest.model.hidden) if documents else manifest.hidden_shape
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return tensor.to(torch.bfloat16 if manifest.model.dtype == "bfloat16" else torch.float32)


def whole(manifest: Manifest, documents: tuple[int, ...] = ()) -> tuple[Tensor, Gradients]:
    passes = OneDevice(stack(manifest))
    visit = passes.forward(drawn(manifest, 1, documents), documents)
    return visit.result, passes.backward(visit, drawn(manifest, 2, documents))


@DOCUMENTS
@GRAPHS
def test_both_passes_are_those_of_the_whole(graphs: int | None, documents: tuple[int, ...]) -> None:
    manifest = manifest_of()
    result, wanted = whole(manifest, documents)
    passes = BlockByBlock(stack(manifest), torch.float32)
    visit = passes.forward(drawn(manifest, 1, documents), documents, graphs=graphs)
    assert sum(graph is not None for graph in visit.graphs) == (BLOCKS if graphs is None else graphs)
    torch.testing.assert_close(visit.result, result)
    torch.testing.assert_close(passes.evaluate(drawn(manifest, 1, documents), documents), result)
    found = passes.backward(visit.kept(), drawn(manifest, 2, documents))
    torch.testing.assert_close(found.source, wanted.source)
    torch.testing.assert_close(found.parameters, wanted.parameters)


@DOCUMENTS
@GRAPHS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_added_and_taken_back(graphs: int | None, documents: tuple[int, ...], dtype: str) -> None:
    manifest = manifest_of(model__dtype=dtype)
    _, wanted = whole(manifest, documents)
    part = stack(manifest)
    sums, passes = Accumulator(part), BlockByBlock(part, drawn(manifest, 1).dtype)
    for total in sums.sums:
        total.fill_(0.5)
    visit = passes.forward(drawn(manifest, 1, documents), documents, graphs=graphs)
    found = passes.backward_into(sums, visit, drawn(manifest, 2, documents), 10)
    assert found.are_finite
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    for total, gradient in zip(sums.sums, wanted.parameters, strict=True):
        assert ((total - 0.5) / 10 - gradient).abs().max() <= tolerance * gradient.abs().max()
    found.take_back()
    assert all((total - 0.5).abs().max() <= 1e-12 for total in sums.sums)


def test_the_narrow_copy_follows_the_parameters() -> None:
    manifest = manifest_of(model__dtype="bfloat16")
    part = stack(manifest)
    passes = BlockByBlock(part, torch.bfloat16)
    source = drawn(manifest, 1)
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
    visit = passes.forward(drawn(manifest, 1), ())
    with pytest.raises(MemoryError):
        passes.backward_into(sums, visit, drawn(manifest, 2), 10)
    assert calls == 2 * failing - 1, "as many pieces were taken back as had been added"
    assert all(total.abs().max() <= 1e-12 for total in sums.sums)


class BlockPeer(HopBench):
    def __init__(self, budget: int = 2**30) -> None:
        manifest = manifest_of()
        part = stack(manifest)
        total, passes = Accumulator(part), BlockByBlock(part, torch.float32)
        optimizer = inner_optimizer(manifest, MODULE, [total])
        worker = HopWorker(part, total, optimizer, hidden_tensor(manifest), CPU, budget, passes=passes)
        super().__init__(worker, manifest)

    def visit(self, *numbers: int) -> None:
        for work in (Work.FORWARD, Work.BACKWARD):
            for number in numbers:
                self.compute(work, number)


@pytest.fixture(scope="module")
def graph_bytes() -> float:
    probe = BlockPeer()
    probe.forward(1)
    assert probe.worker._graphs._of_one is not None
    return probe.worker._graphs._of_one * manifest_of().microbatch_tokens


@pytest.mark.parametrize(("room", "recomputed"), [(0.0, 3), (0.1, 2), (0.25, 0), (0.7, 0), (1.8, 1), (4.0, 0)])
def test_as_many_graphs_are_kept_as_fit(graph_bytes: float, room: float, recomputed: int) -> None:
    """Room in whole graphs, for three visits: those that keep at least their blocks' inputs are not recomputed."""
    plenty, short = BlockPeer(), BlockPeer(int(room * graph_bytes))
    for peer in (plenty, short):
        peer.visit(1, 2, 3)
    for mine, theirs in zip(short.sums(), plenty.sums(), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.any()
    assert short.worker._graphs._kept == pytest.approx(0, abs=1e-9)
    assert plenty.worker.recomputed == 0
    assert short.worker.recomputed == recomputed


def test_a_gradient_that_overflows_is_refused() -> None:
    peer = BlockPeer()
    peer.forward(1)
    with pytest.raises(ProtocolViolation, match="not finite"):
        peer.backward(1, gradient=torch.full(manifest_of().hidden_shape, 3e37))
    assert not peer.worker.unapplied.has(MicrobatchId(PeerId("data"), 1))
    assert all(total.isfinite().all() for total in peer.sums())


def test_out_of_memory_after_the_gradients_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = BlockPeer()
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
