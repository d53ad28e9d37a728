"""Denormal numbers cost the compute threads no more time than others, and change nothing that replicas agree on."""

import numpy as np
import pytest
import torch

from node.averaging.anchor.outer_step import OuterRule
from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.device import flush_denormals, flushed_denormals, gradual_underflow
from node.pipeline.runner import Job
from node.pipeline.worker import host_hop
from protocol.codecs import Encoded, decode_into, encode, encode_into, encoded_bytes
from swarm.pipeline.custody import Key, Work
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.node.network.small_swarm import CPU
from tests.node.small_manifest import small_manifest

DENORMAL = 1e-40
LARGE = 2**17

needs_flushing = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush")


def torch_flushes() -> bool:
    """On this thread and on every worker of its, forwards and backwards."""
    values = torch.full((LARGE,), 1e-30, requires_grad=True)
    made = values * 1e-10
    (gradient,) = torch.autograd.grad(made.sum(), values, retain_graph=True)
    (tiny,) = torch.autograd.grad(made, values, torch.full((LARGE,), 1e-30))
    square = torch.full((256, 256), 1e-25)
    assert torch.all(gradient == 1e-10)
    flushed = [not made.any(), not tiny.any(), not (square @ square * 1e-3 * 1e10).any()]
    assert len(set(flushed)) == 1
    return flushed[0]


def numpy_flushes() -> bool:
    return not np.any(np.full(LARGE, 1e-30, np.float32) * np.float32(1e-10))


@needs_flushing
@pytest.mark.parametrize("name", ["compute", "averaging"])
async def test_both_compute_threads_flush_and_the_others_do_not(name: str) -> None:
    with ComputeThread(name=name) as thread:
        assert await thread.run(Priority.TRAIN, torch_flushes)
        assert await thread.run(Priority.TRAIN, numpy_flushes)
    assert not numpy_flushes()


@needs_flushing
@pytest.mark.parametrize(("inputs", "gradients"), [(1e-42, 1e-3), (1e-40, 1e-40), (0.02, 1e-40)])
async def test_a_hop_takes_what_is_next_to_nothing_for_nothing(inputs: float, gradients: float) -> None:
    """What costs fifty times as much when it is computed with is a zero before anything is multiplied by it."""
    manifest = small_manifest()
    usual = torch.randn(manifest.hidden_shape, generator=torch.Generator().manual_seed(0))

    def visit(source: torch.Tensor, gradient: torch.Tensor) -> list[bytes]:
        worker = host_hop(manifest, ModuleId(1), CPU, 1 << 30)
        key = Key(MicrobatchId(PeerId("data"), 1), 0)
        given = [(Work.FORWARD, source, None), (Work.BACKWARD, None, gradient)]
        outputs = [worker.compute(Job(1, key, w, Purpose.TRAIN, encoded(i), encoded(g))) for w, i, g in given]
        return [bytes(output.tensor.data) for output in outputs if output.tensor is not None]

    def encoded(tensor: torch.Tensor | None) -> Encoded | None:
        return None if tensor is None else encode(tensor.clone(), Codec.NONE)

    def flushed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.abs() < torch.finfo(torch.float32).tiny, 0.0, tensor)

    source, gradient = inputs * usual, gradients * usual
    with ComputeThread() as thread:
        hostile = await thread.run(Priority.TRAIN, lambda: visit(source, gradient))
        clean = await thread.run(Priority.TRAIN, lambda: visit(flushed(source), flushed(gradient)))
    assert len(hostile) == 2
    assert hostile == clean


@needs_flushing
def test_a_block_leaves_its_thread_as_it_was() -> None:
    with flushed_denormals():
        assert numpy_flushes()
        with gradual_underflow():
            assert not numpy_flushes()
        assert numpy_flushes()
        with flushed_denormals():
            pass
        assert numpy_flushes()
    assert not numpy_flushes()


def test_where_the_processor_cannot_it_is_said_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: False)
    flush_denormals()
    assert "cannot flush" in caplog.text


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.INT8, Codec.BF16, Codec.INT4])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
def test_codecs_make_no_denormals_of_ordinary_numbers_and_read_the_same_either_way(codec: Codec, size: float) -> None:
    values = (np.random.default_rng(1).standard_normal(4096) * size).astype(np.float32)
    seen = []
    for mode in (flushed_denormals, gradual_underflow):
        with mode():
            data, out = np.empty(encoded_bytes(codec, len(values)), np.uint8), np.empty_like(values)
            encode_into(codec, values, data.data)
            decode_into(codec, data.data, out)
        seen.append((data.tobytes(), out.tobytes()))
        assert not np.any((out != 0) & (np.abs(out) < np.finfo(np.float32).tiny))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("size", [DENORMAL, 1e-36, 1e-31])
def test_the_outer_step_is_the_same_on_every_machine_and_ends_in_no_denormals(size: float) -> None:
    generator = np.random.default_rng(2)
    gradient, momentum = ((generator.standard_normal(4096) * size).astype(np.float32) for _ in range(2))
    gradient[::2], momentum[1::3] = 1e-3, 1e-3
    parameters = generator.standard_normal(4096).astype(np.float32)
    seen = []
    for mode in (flushed_denormals, gradual_underflow):
        new_parameters, new_momentum = np.empty_like(parameters), np.empty_like(parameters)
        with mode():
            OuterRule(0.7, 0.9).step(gradient, parameters, momentum, new_parameters, new_momentum)
        assert not np.any((new_momentum != 0) & (np.abs(new_momentum) < 1e-32))
        seen.append((new_parameters.tobytes(), new_momentum.tobytes()))
    assert seen[0] == seen[1]


def test_the_momentum_of_what_nobody_moves_any_more_ends_before_it_is_denormal() -> None:
    rule, nothing = OuterRule(0.7, 0.9), np.zeros(8, np.float32)
    parameters, momentum = np.ones(8, np.float32), np.full(8, 1e-3, np.float32)
    for _ in range(1000):
        rule.step(nothing, parameters, momentum, parameters, momentum)
    assert np.all(np.abs(momentum) < 1e-29)
    assert np.all((momentum == 0) | (np.abs(momentum) > 1e-32))
