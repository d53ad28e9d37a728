"""The computations of a stage between the data node's two ends: one module, forward and backward. Runs on the compute
thread.

Makes the worker for the module that a node hosts: its parameters, its optimizer, its speed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from node.concurrency.device_threads import DeviceThreads
from node.model.device import device_errors
from node.model.memory_need import require_room
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures, inner_optimizer
from node.model.parts import HIDDEN_TYPES, build_block_stack
from node.model.passes import OneDevice, Passes, Visit
from node.observability.failpoints import crash_point
from node.pipeline.admission import hidden_tensor
from node.pipeline.interfaces import Job, Output
from node.pipeline.several_devices import body_passes
from node.pipeline.tensor_io import Wire
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from protocol.manifest.model import quadratic_share
from swarm.pipeline.custody_states import Work
from swarm.pipeline.ledger import DEFAULT_SLOTS
from swarm.vocabulary.announcement import Speed
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import ModuleId
from swarm.workload.microbatch_sizes import Size
from swarm.workload.visit_cost import VisitCost

PROBES = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What backward will need. The graph is left out when memory is short, and of no use once the parameters have
    changed."""

    source: Tensor
    visit: Visit | None
    version: int
    forward_s: float = 0.0


class HopWorker:
    """One replica of a module.

    Args:
        part: the module, on its device.
        optimizer: takes the inner steps; `accumulator` is its only one.
        tensor: of the hidden states.
        graph_budget_bytes: memory for autograd graphs kept between forward and backward; what does not fit is
            recomputed.
        quadratic_share: what attention costs by the manifest; 0 where microbatches are rows of one stream.
        passes: of the module, by the device it is on if none are given.
    """

    def __init__(
        self,
        part: nn.Module,
        accumulator: Accumulator,
        optimizer: InnerOptimizer,
        tensor: TensorSpec,
        device: torch.device,
        graph_budget_bytes: int,
        quadratic_share: float = 0.0,
        passes: Passes | None = None,
    ) -> None:
        self.part = part
        self.passes = passes or OneDevice(part)
        self.optimizer = optimizer
        self.accumulated = 0
        """Microbatches whose gradient has been added, those before the snapshot it was resumed from included."""
        self.accumulated_tokens = 0
        """Of these."""
        self.recomputed = 0
        """Visits whose forward pass had to be computed again for the backward pass."""
        self.parameter_version = 0
        """Grows whenever the parameters change; a graph kept from an earlier version is stale."""
        self._cost = VisitCost(quadratic_share)
        self._accumulator = accumulator
        self._tensor = tensor
        self.wire = Wire(device)
        self._graphs = GraphBudget(graph_budget_bytes)
        self._kept: dict[int, _Kept] = {}

    @property
    def speed(self) -> Speed:
        """The speed of forward and backward together; not known until the first microbatch has been through."""
        return self._cost.speed()

    @property
    def unapplied(self) -> Accumulator:
        """The accumulated microbatches that have not gone into an inner step yet."""
        return self._accumulator

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
            return self.wire.output(self.passes.evaluate(source, job.documents), job)
        return self._forward(job, source)

    def retract(self, job: Job) -> bool:
        """Takes a gradient back; see `node.pipeline.interfaces.Worker`. What is taken back is computed with the
        parameters of now: exactly what was added if they have not changed since.
        """
        with device_errors():
            visit = self.passes.forward(self.wire.received(job.input), job.documents)
            gradients = self.passes.backward(visit, self.wire.received(job.gradient)).parameters
        tokens = _tokens(visit.source)
        taken_back = self._accumulator.retract(job.key.microbatch, tokens, gradients)
        self.accumulated -= taken_back
        self.accumulated_tokens -= taken_back * tokens
        return taken_back

    def parameters_changed(self) -> None:
        """Notes that the parameters have changed otherwise than by an inner step; to be called by whoever
        changes them.
        """
        self.parameter_version += 1
        self.passes.parameters_changed()

    def forget(self, ticket: int) -> None:
        kept = self._kept.pop(ticket, None)
        if kept is not None and kept.visit is not None:
            self._graphs.release(_tokens(kept.source))

    def step(self) -> StepFigures | None:
        if not self.optimizer.due:
            return None
        self.parameters_changed()
        return self.optimizer.step()

    def _forward(self, job: Job, source: Tensor) -> Output:
        begun = time.perf_counter()
        visit = self._graphs.measure(self.passes, source, job.documents)
        keep = self._graphs.take(_tokens(source))
        output = self.wire.output(visit.result, job)
        seconds = time.perf_counter() - begun
        self._kept[job.ticket] = _Kept(source, visit if keep else None, self.parameter_version, seconds)
        return output

    def _backward(self, job: Job, gradient: Tensor) -> Output:
        kept = self._kept.get(job.ticket)
        if kept is None:
            raise StateError(f"microbatch {job.key.microbatch} has been forgotten")
        self.forget(job.ticket)
        begun = time.perf_counter()
        visit = kept.visit
        if visit is None or kept.version != self.parameter_version:
            visit = self.passes.forward(kept.source, job.documents)
            self.recomputed += 1
        gradients = self.passes.backward(visit, gradient)
        assert gradients.source is not None
        output = self.wire.output(gradients.source, job)  # before the gradient counts: it may fail for want of memory
        self._add(job, _tokens(kept.source), gradients.parameters)
        crash_point("gradient added")
        self._timed(Size(_tokens(kept.source), job.documents), kept.forward_s + time.perf_counter() - begun)
        return replace(output, step_due=self.optimizer.due)

    def _timed(self, size: Size, seconds: float) -> None:
        self._cost.add(size.tokens, size.squares, len(size.documents), seconds)

    def _add(self, job: Job, tokens: int, gradients: tuple[Tensor, ...]) -> None:
        addition = self._accumulator.add(job.key.microbatch, tokens, gradients)
        if addition is Addition.NOT_FINITE:
            raise ProtocolViolation(f"microbatch {job.key.microbatch}: {addition.value}")
        self.accumulated += addition is Addition.ADDED
        self.accumulated_tokens += (addition is Addition.ADDED) * tokens


class GraphBudget:
    """The memory budget of kept autograd graphs. How large they are for each token is measured at the first visit."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._of_one: float | None = None
        """Bytes for each token."""
        self._kept = 0
        """Tokens whose graphs are kept."""

    def measure(self, passes: Passes, source: Tensor, documents: tuple[int, ...]) -> Visit:
        """Computes the part on `source`, and the first time notes the bytes of all tensors that the graph holds on
        to."""
        if self._of_one is not None:
            return passes.forward(source, documents)
        own = passes.storages()
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        def noted() -> torch.autograd.graph.saved_tensors_hooks:
            return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

        visit = passes.forward(source, documents, noted)
        self._of_one = sum(seen.values()) / _tokens(source)
        return visit

    def take(self, tokens: int) -> bool:
        """Takes room for the graph of so many tokens if it fits; then it is counted until `release`."""
        fits = (self._kept + tokens) * (self._of_one or 0.0) <= self._budget
        self._kept += fits * tokens
        return fits

    def release(self, tokens: int) -> None:
        self._kept -= tokens


def host_hop(
    manifest: Manifest,
    module: ModuleId,
    device: torch.device,
    graph_budget_bytes: int,
    slots: int = DEFAULT_SLOTS,
    threads: DeviceThreads | None = None,
) -> HopWorker:
    """Makes a replica of a module of stage 1 or above, with the run's initial weights, for a peer with so many slots.

    Args:
        device: where its state is.
        threads: of all devices that compute; None where that is the only one.

    Raises:
        ResourceExhausted: this machine has no room for it.
    """
    require_room(manifest, (module,), device, slots)
    with device_errors():
        part = build_block_stack(manifest, module).to(device)
        total = Accumulator(part)
        optimizer = inner_optimizer(manifest, module, [total])
        passes = body_passes(part, threads, quadratic_share(manifest.model))
    share = quadratic_share(manifest.model) if manifest.packs_documents else 0.0
    return HopWorker(part, total, optimizer, hidden_tensor(manifest), device, graph_budget_bytes, share, passes)


def measure_speed(passes: Passes, manifest: Manifest, device: torch.device) -> Speed:
    """Measures the speed of forward and backward on this device: the best of a few, the first of which warms
    up.
    """
    source = torch.zeros(manifest.hidden_shape, dtype=HIDDEN_TYPES[manifest.model.dtype], device=device)
    tokens, longest = manifest.microbatch_tokens, manifest.model.sequence
    documents = (longest,) * manifest.training.rows if manifest.packs_documents else ()
    share = quadratic_share(manifest.model) if documents else 0.0
    fastest = float("inf")
    with device_errors():
        for _ in range(PROBES):
            begun = time.perf_counter()
            visit = passes.forward(source, documents)
            gradients = passes.backward(visit, torch.ones_like(visit.result))
            assert gradients.source is not None
            gradients.source.sum().item()  # waits for a device that works asynchronously
            fastest = min(fastest, time.perf_counter() - begun)
    return Speed((tokens + share * Size(tokens, documents).squares) / fastest, share)


def _tokens(hidden: Tensor) -> int:
    """The number of tokens in [rows, tokens, hidden]."""
    return hidden.shape[0] * hidden.shape[1]
