"""A hop on a real card: its gradients and steps are the CPU's. Run with `pytest -m cuda` where there is one."""

from __future__ import annotations

import pytest
import torch

from node.model.moments import Allowance, MomentType
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody_states import Work
from swarm.vocabulary.types import Codec
from tests.node.device.hop_messages import Hop
from tests.node.small_manifest import small_manifest

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

STEPS = 20


def trained(manifest: Manifest, device: torch.device) -> torch.Tensor:
    """The parameters after so many inner steps, float32 on the CPU."""
    hop, number = Hop(manifest, device, Codec.NONE), 0
    for _ in range(STEPS):
        while not hop.worker.optimizer.due:
            number += 1
            hop.compute(number, Work.FORWARD)
            hop.compute(number, Work.BACKWARD)
        assert hop.worker.step() is not None
    return torch.cat([parameter.detach().cpu().flatten() for parameter in hop.worker.part.parameters()])


def test_twenty_steps_are_those_of_the_cpu() -> None:
    manifest = small_manifest(training__inner={"learning_rate": 1e-3})
    here, there = trained(manifest, torch.device("cpu")), trained(manifest, torch.device("cuda"))
    assert (here - there).norm() / here.norm() <= 1e-4


@pytest.mark.parametrize(("moments", "resident", "peak"), [("float32", 16.5, 17.5), ("8bit", 10.5, 12.0)])
def test_bytes_a_parameter(moments: str, resident: float, peak: float) -> None:
    table = {"vocabulary": 257, "hidden": 1024, "heads": 8, "kv_heads": 4, "feed_forward": 2816, "sequence": 16}
    manifest = small_manifest(
        model={**table, "dtype": "bfloat16"}, stages={"blocks": [1, 8]}, training__rows=1, training__inner_tokens=16
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hop = Hop(manifest, torch.device("cuda"), Codec.NONE, allowance=Allowance(moments=MomentType(moments)))
    for number in range(2):
        hop.compute(number, Work.FORWARD)
        hop.compute(number, Work.BACKWARD)
        assert hop.worker.step() is not None
    count = sum(parameter.numel() for parameter in hop.worker.part.parameters())
    assert (torch.cuda.memory_allocated() - before) / count <= resident
    assert (torch.cuda.max_memory_allocated() - before) / count <= peak
