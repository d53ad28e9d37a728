"""A hop's worker with the messages that come for it."""

import torch
from torch import Tensor

from node.model.residual import HIDDEN_TYPES, Residual
from node.pipeline.runner import Job, Output
from node.pipeline.worker import HopWorker, tensor_of
from protocol.codecs import Encoded, encode, with_numbers
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody import Key, Work
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, PeerId

CPU = torch.device("cpu")


def sent(output: Output) -> Tensor:
    """The output as its receiver has it."""
    assert output.tensor is not None
    return tensor_of(Encoded(output.tensor.spec, memoryview(bytearray(output.tensor.data))), CPU)


def hidden_states(manifest: Manifest, number: int, documents: tuple[int, ...] = ()) -> Tensor:
    """Hidden states that follow from the microbatch's number, with token numbers if the run has them."""
    model, generator = manifest.model, torch.Generator().manual_seed(number)
    shape = (1, sum(documents)) if documents else manifest.hidden_shape[:2]
    values = torch.randn((*shape, model.stream), generator=generator)
    return Residual(model, 0).begin(values, torch.randint(model.vocabulary, shape, generator=generator))


class HopBench:
    """A hop's worker, and messages for it whose tensors follow from the microbatch's number."""

    def __init__(self, worker: HopWorker, manifest: Manifest) -> None:
        self.worker, self.manifest = worker, manifest
        self.dtype = HIDDEN_TYPES[manifest.model.dtype]
        self.buffers: list[bytearray] = []

    def source(self, number: int, documents: tuple[int, ...] = ()) -> Tensor:
        return hidden_states(self.manifest, number, documents)

    def gradient(self, number: int, documents: tuple[int, ...] = ()) -> Tensor:
        """A gradient as it is received, without token numbers."""
        return self.source(number + 1000, documents)[..., : self.manifest.model.stream].contiguous()

    def job(
        self,
        work: Work,
        number: int,
        *,
        documents: tuple[int, ...] = (),
        purpose: Purpose = Purpose.TRAIN,
        ticket: int | None = None,
        gradient: Tensor | None = None,
        whole: bool = False,
    ) -> Job:
        """A job as it is received. `whole`: with both tensors."""
        key, forth, back = Key(MicrobatchId(PeerId("data"), number), 0), None, None
        if whole or work is not Work.BACKWARD:
            hidden, channels = self.source(number, documents), self.manifest.model.stream
            forth = self._received(hidden[..., :channels].contiguous(), hidden[..., channels:])
        if work is not Work.FORWARD:
            back = self._received(self.gradient(number, documents) if gradient is None else gradient)
        return Job(number if ticket is None else ticket, key, work, purpose, forth, back, documents)

    def _received(self, tensor: Tensor, numbers: Tensor | None = None) -> Encoded:
        encoded = encode(tensor, Codec.NONE)
        if numbers is not None and numbers.shape[-1]:
            encoded = with_numbers(encoded, numbers)
        self.buffers.append(bytearray(encoded.data))
        return Encoded(encoded.spec, memoryview(self.buffers[-1]))

    def compute(self, work: Work, number: int, **more: object) -> Tensor:
        return sent(self.worker.compute(self.job(work, number, **more)))  # type: ignore[arg-type]

    def forward(self, number: int, **more: object) -> Tensor:
        return self.compute(Work.FORWARD, number, **more)

    def backward(self, number: int, **more: object) -> Tensor:
        return self.compute(Work.BACKWARD, number, **more)

    def visit(self, *numbers: int, **more: object) -> None:
        """All of them forward, then all of them back."""
        for work in (Work.FORWARD, Work.BACKWARD):
            for number in numbers:
                self.compute(work, number, **more)

    def retract(self, number: int) -> bool:
        return self.worker.retract(self.job(Work.BACKWARD, number, whole=True))

    def sums(self) -> list[Tensor]:
        return [total.clone() for total in self.worker.unapplied.sums]
