"""A hop on any device, with messages for it whose tensors follow from their numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from node.model.moments import ORDINARY, Allowance
from node.pipeline.runner import Job, Output
from node.pipeline.tensor_io import tensor_of
from node.pipeline.worker import HopWorker, host_hop
from protocol.codecs import Encoded, encode
from protocol.codecs.host_memory import buffer_for
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody_events import Key, Work
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId

Allocate = Callable[[int], memoryview]
CPU: Final = torch.device("cpu")
MANY_GRAPHS: Final = 2**30
HAS_OUTLIER: Final = 3
STANDS_OUT: Final = 5


def sent(output: Output) -> Tensor:
    """As its receiver has it."""
    assert output.tensor is not None
    return tensor_of(Encoded(output.tensor.spec, memoryview(bytearray(output.tensor.data))), CPU)


def source_of(manifest: Manifest, number: int) -> Tensor:
    kind = torch.bfloat16 if manifest.model.dtype == "bfloat16" else torch.float32
    source = torch.randn(manifest.hidden_shape, generator=torch.Generator().manual_seed(number))
    if number % 100 == HAS_OUTLIER:
        source[..., STANDS_OUT] *= 40
    return source.to(kind)


def arrived(encoded: Encoded, allocate: Allocate) -> Encoded:
    """As it lies in a receive buffer."""
    buffer = allocate(encoded.data.nbytes)
    buffer[:] = encoded.data
    return Encoded(encoded.spec, buffer)


class Hop:
    """A replica of module 1, with messages for it."""

    def __init__(
        self,
        manifest: Manifest,
        device: torch.device,
        codec: Codec,
        budget: int = MANY_GRAPHS,
        allowance: Allowance = ORDINARY,
        allocate: Allocate | None = None,
    ) -> None:
        self.manifest, self.codec = manifest, codec
        self._allocate = allocate or partial(buffer_for, device=device)
        self.worker: HopWorker = host_hop(manifest, ModuleId(1), device, budget, allowance)

    def job(self, number: int, work: Work, purpose: Purpose = Purpose.TRAIN) -> Job:
        key = Key(MicrobatchId(PeerId("data"), number), 0)
        there = self._message(number) if work is not Work.BACKWARD else None
        back = self._message(number + 100) if work is not Work.FORWARD else None
        return Job(number, key, work, purpose, there, back, codec=self.codec)

    def _message(self, number: int) -> Encoded:
        return arrived(encode(source_of(self.manifest, number), self.codec), self._allocate)

    def compute(self, number: int, work: Work, purpose: Purpose = Purpose.TRAIN) -> Tensor:
        return sent(self.worker.compute(self.job(number, work, purpose)))
