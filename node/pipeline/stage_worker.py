"""The computations of a stage between the data node's two ends: one module, forward and backward. Runs on the compute
thread.

Makes the worker for the module that a node hosts: its parameters, its optimizer, its speed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from node.model.device import device_errors
from node.model.memory_need import require_room
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures
from node.model.parts import HIDDEN_TYPES, build_block_stack
from node.model.passes import Visit, backward, forward
from node.observability.failpoints import crash_point
from node.pipeline.admission import hidden_tensor
from node.pipeline.interfaces import Job, Output
from node.pipeline.tensor_io import Wire
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody_states import Work
from swarm.pipeline.ledger import DEFAULT_SLOTS
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.ewma import Ewma
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import ModuleId

PROBES = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What backward will need. The graph is left out when memory is short, and of no use once the parameters have
    changed."""

    source: Tensor
    visit: Visit | None
    version: int


class HopWorker:
    """One replica of a module.

    Args:
        part: the module, on its device.
        optimizer: takes the inner steps; `accumulator` is its only one.
        tensor: of the hidden states.
        tokens: of one microbatch.
        graph_budget_bytes: memory for autograd graphs kept between forward and backward; what does not fit is
            recomputed.
    """

    def __init__(
        self,
        part: nn.Module,
        accumulator: Accumulator,
        optimizer: InnerOptimizer,
        tensor: TensorSpec,
        tokens: int,
        device: torch.device,
        graph_budget_bytes: int,
    ) -> None:
        self.part = part
        self.optimizer = optimizer
        self.accumulated = 0
        """Microbatches whose gradient has been added, those before the snapshot it was resumed from included."""
        self.recomputed = 0
        """Visits whose forward pass had to be computed again for the backward pass."""
        self.parameter_version = 0
        """Grows whenever the parameters change; a graph kept from an earlier version is stale."""
        self._forward_s = 0.0
        self._speed = Ewma()
        self._accumulator = accumulator
        self._tensor = tensor
        self._tokens = tokens
        self.wire = Wire(device)
        self._graphs = GraphBudget(graph_budget_bytes)
        self._kept: dict[int, _Kept] = {}

    @property
    def tokens_per_s(self) -> float:
        """The smoothed speed of forward and backward together; 0 until the first microbatch has been through."""
        return self._speed.mean

    @property
    def unapplied(self) -> int:
        """The number of accumulated microbatches that have not gone into an inner step yet."""
        return self._accumulator.visits

    @property
    def tensor(self) -> TensorSpec:
        return self._tensor

    def compute(self, job: Job) -> Output:
        """Does a job; see `node.pipeline.interfaces.Worker`. Raises ProtocolViolation for tensors that are not
        finite.
        """
        with device_errors():
            return self._compute(job)

    def _compute(self, job: Job) -> Output:
        if job.work is Work.REPLAY:
            self._kept[job.ticket] = _Kept(self.wire.received(job.input), None, self.parameter_version)
        if job.work in (Work.BACKWARD, Work.REPLAY):
            return self._backward(job, self.wire.received(job.gradient))
        source = self.wire.received(job.input)
        if job.purpose is Purpose.EVALUATE:
            with torch.no_grad():
                return self.wire.output(self.part(source), job)
        return self._forward(job, source)

    def retract(self, job: Job) -> bool:
        """Takes a gradient back; see `node.pipeline.interfaces.Worker`. What is taken back is computed with the
        parameters of now: exactly what was added if they have not changed since.
        """
        with device_errors():
            visit = forward(self.part, self.wire.received(job.input))
            gradients = backward(self.part, visit, self.wire.received(job.gradient)).parameters
        taken_back = self._accumulator.retract(job.key.microbatch, self._tokens, gradients)
        self.accumulated -= taken_back
        return taken_back

    def parameters_changed(self) -> None:
        """Notes that the parameters have changed otherwise than by an inner step; to be called by whoever
        changes them.
        """
        self.parameter_version += 1

    def forget(self, ticket: int) -> None:
        kept = self._kept.pop(ticket, None)
        if kept is not None and kept.visit is not None:
            self._graphs.release()

    def step(self) -> StepFigures | None:
        if not self.optimizer.due:
            return None
        self.parameters_changed()
        return self.optimizer.step()

    def _forward(self, job: Job, source: Tensor) -> Output:
        begun = time.perf_counter()
        visit = self._graphs.measure(self.part, source)
        keep = self._graphs.take()
        self._kept[job.ticket] = _Kept(source, visit if keep else None, self.parameter_version)
        output = self.wire.output(visit.result, job)
        self._forward_s = time.perf_counter() - begun
        return output

    def _backward(self, job: Job, gradient: Tensor) -> Output:
        kept = self._kept.get(job.ticket)
        if kept is None:
            raise StateError(f"microbatch {job.key.microbatch} has been forgotten")
        self.forget(job.ticket)
        begun = time.perf_counter()
        visit = kept.visit
        if visit is None or kept.version != self.parameter_version:
            visit = forward(self.part, kept.source)
            self.recomputed += 1
        gradients = backward(self.part, visit, gradient)
        assert gradients.source is not None
        output = self.wire.output(gradients.source, job)  # before the gradient counts: it may fail for want of memory
        self._add(job, gradients.parameters)
        crash_point("gradient added")
        self._timed(self._forward_s + time.perf_counter() - begun)
        return replace(output, step_due=self.optimizer.due)

    def _timed(self, seconds: float) -> None:
        self._speed.add(self._tokens / max(1e-9, seconds))

    def _add(self, job: Job, gradients: tuple[Tensor, ...]) -> None:
        addition = self._accumulator.add(job.key.microbatch, self._tokens, gradients)
        if addition is Addition.NOT_FINITE:
            raise ProtocolViolation(f"microbatch {job.key.microbatch}: {addition.value}")
        self.accumulated += addition is Addition.ADDED


class GraphBudget:
    """The memory budget of kept autograd graphs. The size of one is measured at the first visit."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._size: int | None = None
        self._kept = 0

    def measure(self, part: nn.Module, source: Tensor) -> Visit:
        """Computes the part on `source`, and the first time notes the bytes of all tensors that the graph holds on
        to."""
        if self._size is not None:
            return forward(part, source)
        own = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            visit = forward(part, source)
        self._size = sum(seen.values())
        return visit

    def take(self) -> bool:
        """Takes room for one more graph if it fits; then it is counted until `release`."""
        fits = (self._kept + 1) * (self._size or 0) <= self._budget
        self._kept += fits
        return fits

    def release(self) -> None:
        self._kept -= 1


def host_hop(
    manifest: Manifest, module: ModuleId, device: torch.device, graph_budget_bytes: int, slots: int = DEFAULT_SLOTS
) -> HopWorker:
    """Makes a replica of a module of stage 1 or above, with the run's initial weights, for a peer with so many slots.

    Raises:
        ResourceExhausted: this machine has no room for it.
    """
    require_room(manifest, (module,), device, slots)
    with device_errors():
        part = build_block_stack(manifest, module).to(device)
        total = Accumulator(part)
        optimizer = InnerOptimizer(manifest.training, [total])
    tensor, tokens = hidden_tensor(manifest), manifest.microbatch_tokens
    return HopWorker(part, total, optimizer, tensor, tokens, device, graph_budget_bytes)


def measure_speed(part: nn.Module, manifest: Manifest, device: torch.device) -> float:
    """Measures tokens per second of forward and backward on this device: the best of a few, the first of which warms
    up.
    """
    source = torch.zeros(manifest.hidden_shape, dtype=HIDDEN_TYPES[manifest.model.dtype], device=device)
    fastest = float("inf")
    with device_errors():
        for _ in range(PROBES):
            begun = time.perf_counter()
            visit = forward(part, source)
            gradients = backward(part, visit, torch.ones_like(visit.result))
            assert gradients.source is not None
            gradients.source.sum().item()  # waits for a device that works asynchronously
            fastest = min(fastest, time.perf_counter() - begun)
    return manifest.microbatch_tokens / fastest
