"""A stack block by block computes what it computes as a whole, whatever is kept of its graph, and adds its gradients as
they are computed, all or none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from node.model.optimizer import Accumulator, inner_optimizer
from node.model.parts import BlockStack, build_block_stack
from node.model.passes import Gradients, OneDevice
from node.pipeline.admission import hidden_tensor
from node.pipeline.runner import Job
from node.pipeline.split_backward import BlockByBlock
from node.pipeline.worker import HopWorker
from protocol.codecs import encode
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody_events import Key, Work
from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.node.network.small_swarm import CPU
from tests.node.small_manifest import small_manifest

BLOCKS = 3
MODULE = ModuleId(1)
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
    """Result and gradients of the stack as one."""
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


class Peer:
    """A worker whose stack is computed block by block, and messages for it."""

    def __init__(self, budget: int, manifest: Manifest) -> None:
        self.manifest = manifest
        part = stack(manifest)
        self.sums = Accumulator(part)
        optimizer = inner_optimizer(manifest, MODULE, [self.sums])
        passes = BlockByBlock(part, torch.float32)
        self.worker = HopWorker(part, self.sums, optimizer, hidden_tensor(manifest), CPU, budget, passes=passes)

    def compute(self, number: int, work: Work, tensor: Tensor | None = None) -> None:
        key = Key(MicrobatchId(PeerId("data"), number), 0)
        data = encode(
            drawn(self.manifest, 2 * number + (work is Work.BACKWARD)) if tensor is None else tensor, Codec.NONE
        )
        forth, back = (None, data) if work is Work.BACKWARD else (data, None)
        self.worker.compute(Job(number, key, work, Purpose.TRAIN, forth, back))

    def visit(self, *numbers: int) -> None:
        for work in (Work.FORWARD, Work.BACKWARD):
            for number in numbers:
                self.compute(number, work)

    def totals(self) -> list[Tensor]:
        return [total.clone() for total in self.sums.sums]


@pytest.fixture(scope="module")
def graph_bytes() -> float:
    """Of a whole graph."""
    probe = Peer(2**30, manifest_of())
    probe.compute(1, Work.FORWARD)
    assert probe.worker._graphs._of_one is not None
    return probe.worker._graphs._of_one * manifest_of().microbatch_tokens


@pytest.mark.parametrize(("room", "recomputed"), [(0.0, 3), (0.1, 2), (0.25, 0), (0.7, 0), (1.8, 1), (4.0, 0)])
def test_as_many_graphs_are_kept_as_fit(graph_bytes: float, room: float, recomputed: int) -> None:
    """Room in whole graphs, for three visits: those that keep at least their blocks' inputs are not recomputed."""
    plenty, short = Peer(2**30, manifest_of()), Peer(int(room * graph_bytes), manifest_of())
    for peer in (plenty, short):
        peer.visit(1, 2, 3)
    for mine, theirs in zip(short.totals(), plenty.totals(), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.any()
    assert short.worker._graphs._kept == pytest.approx(0, abs=1e-9)
    assert plenty.worker.recomputed == 0
    assert short.worker.recomputed == recomputed


def test_a_gradient_that_overflows_is_refused_and_the_visit_counts_when_it_comes_whole() -> None:
    peer, other = Peer(2**30, manifest_of()), Peer(2**30, manifest_of())
    for each in (peer, other):
        each.compute(1, Work.FORWARD)
    with pytest.raises(ProtocolViolation, match="not finite"):
        peer.compute(1, Work.BACKWARD, torch.full(manifest_of().hidden_shape, 3e37))
    assert not peer.sums.has(MicrobatchId(PeerId("data"), 1))
    assert all(total.isfinite().all() for total in peer.totals())


def test_out_of_memory_after_the_gradients_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(2**30, manifest_of())
    peer.visit(1)
    before = peer.totals()
    peer.compute(2, Work.FORWARD)

    def failing(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(peer.worker.wire, "output", failing)
        with pytest.raises(ResourceExhausted):
            peer.compute(2, Work.BACKWARD)
    assert not peer.sums.has(MicrobatchId(PeerId("data"), 2))
    for total, was in zip(peer.totals(), before, strict=True):
        torch.testing.assert_close(total, was, rtol=0, atol=1e-10)
