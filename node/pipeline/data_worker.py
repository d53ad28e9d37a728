"""The computations of a data node at both ends of a path: embedding, and norm, head and loss. Runs on the compute
thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from node.concurrency.device_threads import DeviceThreads
from node.data.packing import Microbatch
from node.model.device import device_errors
from node.model.memory_need import require_room
from node.model.moments import ORDINARY, Allowance
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures, inner_optimizer
from node.model.optimizers.inner_rule import AtDeadline, Submit
from node.model.parts import EmbeddingPart, HeadPart, build_embedding, build_head
from node.model.passes import HeadPasses, Passes, Visit
from node.pipeline.admission import hidden_tensor
from node.pipeline.interfaces import Job, Output
from node.pipeline.several_devices import body_passes, head_passes
from node.pipeline.tensor_io import Wire
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from protocol.manifest.model import quadratic_share
from swarm.pipeline.custody_states import Work
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import MicrobatchId, ModuleId


def host_stage_zero(
    manifest: Manifest,
    device: torch.device,
    allowance: Allowance = ORDINARY,
    threads: DeviceThreads | None = None,
    submit: Submit = AtDeadline,
) -> DataWorker:
    """Makes a data node's replica of stage 0, with the run's initial weights. The rest and what it
    raises: as `host_hop`."""
    require_room(manifest, (ModuleId(0),), device, allowance.slots, allowance.moments)
    with device_errors():
        embedding = build_embedding(manifest).to(device)
        head = build_head(manifest, embedding).to(device)
        sums = Accumulator(embedding), Accumulator(head)
        optimizer = inner_optimizer(manifest, ModuleId(0), sums, submit, allowance.moments)
        stage = StageZero(embedding, head, *sums, optimizer)
        body, end = body_passes(embedding, threads, quadratic_share(manifest.model)), head_passes(head, threads)
    return DataWorker(stage, hidden_tensor(manifest), device, body, end)


@dataclass(frozen=True, slots=True, eq=False)
class StageZero:
    """The two parts of stage 0, which count their visits apart but step together."""

    embedding: EmbeddingPart
    head: HeadPart
    embedding_sum: Accumulator
    head_sum: Accumulator
    optimizer: InnerOptimizer

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """All that its rounds average."""
        return (self.embedding, self.head)


class DataWorker:
    """One data node's replica of stage 0.

    Args:
        tensor: of the hidden states.
        device: the first one.
        embedding, head: the passes of its two parts.
    """

    def __init__(
        self, stage: StageZero, tensor: TensorSpec, device: torch.device, embedding: Passes, head: HeadPasses
    ) -> None:
        self.stage = stage
        self._embedding = embedding
        self._head = head
        self.accumulated = 0
        """Microbatches whose gradients have been added at both ends, those before the snapshot it was resumed from
        included."""
        self.accumulated_tokens = 0
        """Of these."""
        self.steps = 0
        """Inner steps of this data node's own microbatches, those before the snapshot it was resumed from included."""
        self.recomputed = 0
        self.texts: dict[MicrobatchId, Microbatch] = {}
        """Of the microbatches under way. The data node puts them in and takes them out; here they are only read."""
        self.parameter_version = 0
        """Grows whenever the parameters change; a graph kept from an earlier version is stale."""
        self._tensor = tensor
        self.wire = Wire(device)
        self._visits: dict[int, tuple[Visit, int]] = {}

    @property
    def tensor(self) -> TensorSpec:
        return self._tensor

    def compute(self, job: Job) -> Output:
        """Does a job; see `node.pipeline.interfaces.Worker`.

        Raises:
            ProtocolViolation: what came back is not finite.
            StateError: the microbatch has been given up meanwhile.
        """
        self.wire.start()
        with device_errors():
            return self._compute(job)

    def _compute(self, job: Job) -> Output:
        text = self.texts.get(job.key.microbatch)
        if text is None:
            raise StateError(f"microbatch {job.key.microbatch} is not under way any more")
        match job.work:
            case Work.FORWARD:
                return self._embed(job, text)
            case Work.LOSS:
                return self._loss(job, text)
            case Work.BACKWARD:
                return self._finish(job, text)
            case Work.REPLAY:
                raise StateError("nobody stands in for a data node")

    def retract(self, job: Job) -> bool:
        """Raises StateError: a data node's own gradients count when the microbatch completes, and it knows of no other
        copy.
        """
        raise StateError("a data node takes no gradient back")

    def parameters_changed(self) -> None:
        """Notes that the parameters have changed otherwise than by an inner step; to be called by whoever
        changes them.
        """
        self.parameter_version += 1
        self._embedding.parameters_changed()
        self._head.parameters_changed()

    def forget(self, ticket: int) -> None:
        self._visits.pop(ticket, None)
        self.wire.let_go()

    def step(self) -> StepFigures | None:
        if not self.stage.optimizer.due:
            return None
        self.parameters_changed()
        self.steps += 1
        return self.stage.optimizer.step()

    def _embed(self, job: Job, text: Microbatch) -> Output:
        tokens = text.tokens.to(self.wire.device)
        if job.purpose is Purpose.EVALUATE:
            return self.wire.output(self._embedding.evaluate(tokens, text.documents), job)
        visit = self._embedding.forward(tokens, text.documents)
        self._visits[job.ticket] = (visit, self.parameter_version)
        return self.wire.output(visit.result, job)

    def _loss(self, job: Job, text: Microbatch) -> Output:
        hidden = self.wire.received(job.input, before_use=True)
        labels = text.labels.to(self.wire.device)
        if job.purpose is Purpose.EVALUATE:
            return Output(loss=self._head.loss(hidden, labels))
        total, microbatch = self.stage.head_sum, job.key.microbatch
        is_new = not total.has(microbatch)
        found = self._head.loss_into(hidden, labels, total.sums if is_new else (), text.size)
        if found is None:
            raise ProtocolViolation(f"microbatch {microbatch}: {Addition.NOT_FINITE.value}")
        try:
            output = self.wire.output(found.source, job, found.loss)
        except BaseException:
            found.take_back()
            raise
        if is_new:
            total.promise(microbatch, text.size, text.scored)
        return output

    def _finish(self, job: Job, text: Microbatch) -> Output:
        gradient = self.wire.received(job.gradient, before_use=True)
        kept = self._visits.pop(job.ticket, None)
        if kept is None:
            raise StateError(f"of microbatch {job.key.microbatch} nothing was kept to go back from")
        visit, version = kept
        if version != self.parameter_version:
            visit = self._embedding.forward(text.tokens.to(self.wire.device), text.documents)
            self.recomputed += 1
        gradients = self._embedding.backward(visit, gradient)
        self._add(self.stage.embedding_sum, job, text, gradients.parameters)
        self.accumulated += 1
        self.accumulated_tokens += text.size
        return Output(step_due=self.stage.optimizer.due)

    def _add(self, total: Accumulator, job: Job, text: Microbatch, gradients: tuple[Tensor, ...]) -> None:
        addition = total.add(job.key.microbatch, text.size, gradients, text.scored)
        if addition is Addition.NOT_FINITE:
            raise ProtocolViolation(f"microbatch {job.key.microbatch}: {addition.value}")
