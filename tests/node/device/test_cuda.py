"""A hop on a real card: its gradients and steps are the CPU's. Run with `pytest -m cuda` where there is one."""

from typing import Final

import pytest
import torch

from node.model.document_attention import document_attention
from node.model.moments import Allowance, MomentType
from node.observability.events import Step
from node.solo.trainer import train_solo
from protocol.codecs import decode, encode
from protocol.codecs.memory import buffer_for
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import Codec
from tests.node.device.every_job import Hop, arrived
from tests.node.small_manifest import small_manifest

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

STEPS = 20
CARD: Final = torch.device("cuda")
ERRORS: Final = {Codec.BF16: 2e-3, Codec.INT8: 7e-3, Codec.INT4: 0.11}


def trained(manifest: Manifest, device: torch.device) -> torch.Tensor:
    hop, number = Hop(manifest, device, Codec.NONE), 0
    for _ in range(STEPS):
        while not hop.worker.optimizer.due:
            number += 1
            hop.visit(number)
        assert hop.worker.step() is not None
    return torch.cat([parameter.detach().cpu().flatten() for parameter in hop.worker.part.parameters()])


def test_twenty_steps_are_those_of_the_cpu() -> None:
    manifest = small_manifest(training__inner={"learning_rate": 1e-3})
    here, there = trained(manifest, torch.device("cpu")), trained(manifest, torch.device("cuda"))
    assert (here - there).norm() / here.norm() <= 1e-4


@pytest.mark.parametrize(("moments", "resident", "peak"), [("float32", 16.5, 17.5), ("8bit", 10.5, 12.5)])
def test_bytes_a_parameter(moments: str, resident: float, peak: float) -> None:
    table = {"vocabulary": 257, "hidden": 1024, "heads": 8, "kv_heads": 4, "feed_forward": 2816, "sequence": 16}
    manifest = small_manifest(
        model={**table, "dtype": "bfloat16"}, stages={"blocks": [1, 8]}, training__rows=1, training__inner_tokens=16
    )
    warm_up = Hop(small_manifest(model__dtype="bfloat16"), CARD, Codec.NONE)  # cuBLAS takes 32 MiB for each thread
    warm_up.visit(0)
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    hop = Hop(manifest, CARD, Codec.NONE, allowance=Allowance(moments=MomentType(moments)))
    for number in range(2):
        hop.visit(number)
        assert hop.worker.step() is not None
    count = sum(parameter.numel() for parameter in hop.worker.part.parameters())
    assert (requested("current") - before) / count <= resident
    assert (requested("peak") - before) / count <= peak


def requested(when: str) -> int:
    """Bytes asked of the allocator, whose own rounding is 0.7 bytes a parameter with matrices of 11 MiB."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


def with_outliers() -> torch.Tensor:
    values = torch.randn(4, 100, 256, generator=torch.Generator().manual_seed(0))
    values[..., [17, 101]] *= 60
    return values


@pytest.mark.parametrize("codec", ERRORS)
def test_an_encoding_from_the_card_is_read_by_the_cpu_and_the_other_way_round(codec: Codec) -> None:
    values = with_outliers()
    here, there = encode(values, codec), encode(values.to(CARD), codec)
    assert there.spec == here.spec
    for encoded, device in ((here, CARD), (there, torch.device("cpu"))):
        out = torch.empty_like(values, device=device)
        message = arrived(encoded, lambda size, device=device: buffer_for(size, device))
        decode(message.spec, message.data, out)
        assert (out.cpu() - values).norm() / values.norm() <= ERRORS[codec]


@pytest.mark.parametrize("codec", ERRORS)
def test_what_is_not_finite_is_bfloat16(codec: Codec) -> None:
    values = with_outliers()
    values[1, 2, 3] = torch.nan
    assert encode(values.to(CARD), codec).spec.codec is Codec.BF16


def test_receive_buffers_and_encodings_are_pinned() -> None:
    assert torch.frombuffer(buffer_for(1000, CARD), dtype=torch.uint8).is_pinned()
    for codec in (Codec.NONE, *ERRORS):
        assert torch.frombuffer(encode(with_outliers().to(CARD), codec).data, dtype=torch.uint8).is_pinned()


@pytest.mark.parametrize("codec", [Codec.NONE, *ERRORS])
def test_a_received_tensor_is_not_waited_for_and_its_buffer_may_be_written_when_it_was_let_go(codec: Codec) -> None:
    hop = Hop(small_manifest(), CARD, codec)
    message = arrived(encode(torch.randn(256, 4096), codec), lambda size: buffer_for(size, CARD))
    wanted = torch.empty(256, 4096)
    decode(message.spec, message.data, wanted)
    wire = hop.worker.wire
    wire.start()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # whoever waits fails
    try:
        torch.cuda._sleep(10**8)
        received = wire.received(message)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wire.let_go()
    message.data[:] = bytes(len(message.data))
    assert torch.allclose(received.cpu(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_within_documents_is_that_of_the_cpu(dtype: torch.dtype, error: float, kv_heads: int) -> None:
    documents, generator = (100, 7, 300, 105), torch.Generator().manual_seed(1)
    tokens, heads, head = sum(documents), 4, 32
    shapes = [(1, heads, tokens, head), (1, kv_heads, tokens, head), (1, kv_heads, tokens, head)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    gradient = torch.randn(shapes[0], generator=generator)

    def found(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        sources = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
        result = document_attention(*sources, documents)
        found = [result, *torch.autograd.grad(result, sources, gradient.to(device, dtype))]
        return [tensor.detach().cpu().float() for tensor in found]

    for here, there in zip(found(torch.device("cpu"), torch.float32), found(CARD, dtype), strict=True):
        assert (there - here).norm() / here.norm() <= error


@pytest.mark.parametrize(
    ("inner", "moments"), [("adamw", "float32"), ("adamw", "8bit"), ("soap", "float32"), ("muon", "float32")]
)
def test_a_whole_model_learns_as_on_the_cpu(inner: str, moments: str) -> None:
    manifest = small_manifest(model__hidden=64, training__inner={"name": inner, "learning_rate": 3e-3})

    def losses(device: torch.device) -> list[float]:
        events: list[object] = []
        train_solo(manifest, steps=STEPS, device=device, on_event=events.append, moments=MomentType(moments))
        return [event.loss for event in events if isinstance(event, Step)]

    here, there = losses(torch.device("cpu")), losses(CARD)
    assert here[-1] < here[0]
    assert there == pytest.approx(here, rel=2e-3)
