"""Several devices compute what one device does: results, gradients and sums, whatever the documents are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from node.concurrency.device_threads import DeviceThreads
from node.model import passes
from node.model.parts import BlockStack, build_block_stack, build_embedding, build_head
from node.model.passes import Gradients, OneDevice, OneHead, Passes
from node.pipeline.device_passes import Copies, SeveralDevices, body_passes, head_passes
from swarm.vocabulary.types import ModuleId
from swarm.workload.device_shares import Dealing, deal_cut, deal_whole
from tests.node.small_manifest import small_manifest

CPU = torch.device("cpu")
SHARE = 1 / 300
MANIFEST = small_manifest(model__attention="documents", model__sequence=2048, training__inner_tokens=4096)
HIDDEN = MANIFEST.model.hidden
MICROBATCHES = [(700, 300, 90, 5), (1500,), (1501, 20), (40, 40, 40), (1,), (2, 1), (1200, 1200, 1199)]


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[DeviceThreads]:
    cores = torch.get_num_threads()
    with DeviceThreads([CPU] * request.param) as threads:
        yield threads
    torch.set_num_threads(cores)


def all_cut(costs: Sequence[float], devices: int, _: float) -> Dealing:
    return deal_cut(costs, devices)


def none_cut(costs: Sequence[float], devices: int, _: float) -> Dealing:
    return deal_whole(costs, devices)


def stack() -> BlockStack:
    return build_block_stack(MANIFEST, ModuleId(1))


def vectors(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both_passes(on: Passes, documents: tuple[int, ...], rows: int = 1) -> tuple[Tensor, Tensor, Gradients]:
    tokens = sum(documents) or 64
    source, gradient = (vectors(rows, tokens, HIDDEN, seed=seed) for seed in (1, 2))
    visit = on.forward(source, documents)
    return visit.result.detach(), on.evaluate(source, documents), on.backward(visit, gradient)


def assert_alike(found: tuple[Tensor, Tensor, Gradients], wanted: tuple[Tensor, Tensor, Gradients]) -> None:
    torch.testing.assert_close(found[:2], wanted[:2], atol=1e-5, rtol=1e-5)
    assert found[2].source is not None
    torch.testing.assert_close(found[2].source, wanted[2].source, atol=1e-5, rtol=1e-5)
    assert_sums_alike(found[2], wanted[2])


def assert_sums_alike(found: Gradients, wanted: Gradients) -> None:
    for sums, of_one in zip(found.parameters, wanted.parameters, strict=True):
        assert (sums - of_one).abs().max() <= 1e-5 * of_one.abs().max()


@pytest.mark.parametrize("documents", MICROBATCHES)
def test_documents_on_several_devices(threads: DeviceThreads, documents: tuple[int, ...]) -> None:
    part = stack()
    assert_alike(both_passes(body_passes(part, threads, SHARE), documents), both_passes(OneDevice(part), documents))


@pytest.mark.parametrize("choose", [all_cut, none_cut])
@pytest.mark.parametrize("documents", [(700, 300, 150), (1500,), (600, 601)])
def test_all_documents_cut_and_none(threads: DeviceThreads, documents: tuple[int, ...], choose: object) -> None:
    part = stack()
    several = SeveralDevices(Copies(part, threads), threads, SHARE, choose)  # type: ignore[arg-type]
    assert_alike(both_passes(several, documents), both_passes(OneDevice(part), documents))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_on_several_devices(threads: DeviceThreads, rows: int) -> None:
    part = stack()
    assert_alike(both_passes(body_passes(part, threads, SHARE), (), rows), both_passes(OneDevice(part), (), rows))


def test_an_embedding_with_blocks_of_its_own(threads: DeviceThreads) -> None:
    part = build_embedding(small_manifest(model__attention="documents", stages__blocks=(1, 1, 1)))
    documents = (9, 4, 3)
    tokens = torch.arange(16)[None]
    found, wanted = (on.forward(tokens, documents) for on in (body_passes(part, threads, SHARE), OneDevice(part)))
    torch.testing.assert_close(found.result, wanted.result.detach(), atol=1e-5, rtol=1e-5)
    gradient = torch.ones_like(found.result)
    of_found = body_passes(part, threads, SHARE).backward(found, gradient)
    assert of_found.source is None
    assert_sums_alike(of_found, passes.backward(part, wanted, gradient))


@pytest.mark.parametrize("shape", [(1, 37), (2, 16), (1, 1)])
def test_the_head_on_several_devices(threads: DeviceThreads, shape: tuple[int, int]) -> None:
    head = build_head(MANIFEST)
    hidden, labels = vectors(*shape, HIDDEN, seed=1), torch.arange(shape[0] * shape[1]).reshape(shape)
    several, one = head_passes(head, threads), OneHead(head)
    assert several.loss(hidden, labels) == pytest.approx(one.loss(hidden, labels), abs=1e-5)
    sums = [[torch.zeros_like(parameter, dtype=torch.float64) for parameter in head.parameters()] for _ in range(2)]
    found, wanted = several.loss_into(hidden, labels, sums[0], 7), one.loss_into(hidden, labels, sums[1], 7)
    assert found is not None
    assert wanted is not None
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    torch.testing.assert_close(found.source, wanted.source, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sums[0], sums[1], atol=7e-6, rtol=1e-5)
    for visit, own in ((found, sums[0]), (wanted, sums[1])):
        visit.take_back()
        assert not any(total.abs().max() > 1e-12 for total in own)


def test_devices_of_other_memory_follow_the_parameters(threads: DeviceThreads) -> None:
    part = stack()
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

    part = stack()
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
