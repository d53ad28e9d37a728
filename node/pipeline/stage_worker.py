"""The computations of a stage between the data node's two ends: one module, forward and backward. Runs on the compute
thread.

Makes the worker for the module that a node hosts: its parameters, its optimizer, its speed.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from node.concurrency.device_threads import DeviceThreads
from node.model.device import device_errors
from node.model.memory_need import require_room
from node.model.moments import ORDINARY, Allowance
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures, inner_optimizer
from node.model.optimizers.inner_rule import AtDeadline, Submit
from node.model.parts import HIDDEN_TYPES, build_block_stack
from node.model.passes import OneDevice, Passes, Visit
from node.observability.failpoints import crash_point
from node.pipeline.admission import hidden_tensor
from node.pipeline.block_passes import BlockByBlock
from node.pipeline.deferred_weights import DeferredWeights, SplitDevice
from node.pipeline.graph_budget import GraphBudget, of_tokens
from node.pipeline.runner import Job, Output
from node.pipeline.several_devices import body_passes
from node.pipeline.stashed_weights import WeightStash, WeightVersion
from node.pipeline.tensor_io import Wire
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from protocol.manifest.model import quadratic_share
from swarm.pipeline.compute_queue import puts_weights_off
from swarm.pipeline.custody_events import Work
from swarm.vocabulary.announcement import Speed
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import ModuleId, Reasoned
from swarm.workload.microbatch_sizes import Size
from swarm.workload.visit_cost import VisitCost

PROBES = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What backward will need. The graph is left out when memory is short, and of no use once the weights that it was
    computed with are gone."""

    source: Tensor
    visit: Visit | None
    weights: WeightVersion
    forward_s: float = 0.0
    share: float = 0.0
    """Of the budget for graphs."""


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
        deferred: the weight gradients that are put off; if it is not given, none are.
        stashed: versions of the weights to be kept for visits from before an inner step, at most, in a quarter of that
            memory.
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
        deferred: DeferredWeights | None = None,
        stashed: int = 0,
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
        self._cost = VisitCost(quadratic_share)
        self._accumulator = accumulator
        self._tensor = tensor
        self.wire = Wire(device)
        self._stash = WeightStash(self.passes.weights, stashed, graph_budget_bytes // 4)
        self._graphs = GraphBudget(graph_budget_bytes - self._stash.bytes)
        self._kept: dict[int, _Kept] = {}
        self.deferred = deferred or DeferredWeights(Reasoned(False, "not asked for"), None, accumulator)
        """The weight gradients that were put off."""

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
        """Does a job; see `node.pipeline.runner.Worker`. Raises ProtocolViolation for tensors that are not
        finite.
        """
        self.wire.start()
        with device_errors():
            return self._compute(job)

    def _compute(self, job: Job) -> Output:
        if job.work is Work.REPLAY:
            self._keep(job.ticket, self.wire.received(job.input), None)
        if job.work in (Work.BACKWARD, Work.REPLAY):
            return self._backward(job, self.wire.received(job.gradient))
        source = self.wire.received(job.input)
        if job.purpose is Purpose.EVALUATE:
            return self.wire.output(self.passes.evaluate(source, job.documents), job)
        return self._forward(job, source)

    def retract(self, job: Job) -> bool:
        """Takes a gradient back; see `node.pipeline.runner.Worker`. What is taken back is computed with the
        parameters of now: exactly what was added if they have not changed since the forward pass. Of what was put off
        and has not been added yet, the promise is withdrawn.
        """
        self.wire.start()
        with device_errors():
            source = self.wire.received(job.input)
            tokens, taken_back = of_tokens(source), self.deferred.cancel(job.key.microbatch)
            if not taken_back:
                visit = self.passes.forward(source, job.documents)
                gradients = self.passes.backward(visit, self.wire.received(job.gradient, before_use=True)).parameters
                taken_back = self._accumulator.retract(job.key.microbatch, tokens, gradients, job.labels)
        self.accumulated -= taken_back
        self.accumulated_tokens -= taken_back * tokens
        return taken_back

    def parameters_changed(self) -> None:
        """Notes that the parameters have changed otherwise than by an inner step; to be called by whoever
        changes them.
        """
        self._stash.changed()
        self.passes.parameters_changed()

    def forget(self, ticket: int) -> None:
        self._drop(ticket)
        self.wire.let_go()

    def _drop(self, ticket: int) -> None:
        kept = self._kept.pop(ticket, None)
        if kept is not None:
            self._graphs.release(kept.share)
            self._stash.done(kept.weights)

    def step(self) -> StepFigures | None:
        if not self.optimizer.due:
            return None
        self.deferred.finish()
        self._stash.before_step()
        self.passes.parameters_changed()
        return self.optimizer.step()

    def _forward(self, job: Job, source: Tensor) -> Output:
        begun = time.perf_counter()
        around = self._stash.saving if self._stash.copies else nullcontext
        result, visit, share = self._graphs.forward(self.passes, source, job.documents, around)
        try:
            output = self.wire.output(result, job)
        except BaseException:
            self._graphs.release(share)
            raise
        self._keep(job.ticket, source, visit, time.perf_counter() - begun, share)
        return output

    def _keep(self, ticket: int, source: Tensor, visit: Visit | None, seconds: float = 0.0, share: float = 0.0) -> None:
        self._drop(ticket)
        self._stash.current.visits += 1
        self._kept[ticket] = _Kept(source, visit, self._stash.current, seconds, share)

    def _backward(self, job: Job, gradient: Tensor) -> Output:
        kept = self._kept.pop(job.ticket, None)
        if kept is None:
            raise StateError(f"microbatch {job.key.microbatch} has been forgotten")
        self._graphs.release(kept.share)
        begun, visit = time.perf_counter(), kept.visit
        try:
            with self._stash.in_place(kept.weights):
                if visit is None or not kept.weights.is_there:
                    visit, kept = None, replace(kept, visit=None)  # lets go of the old graph before there is a new one
                    visit = self._again(kept.source, job.documents)
                    self.recomputed += 1
                output = self._half_or_whole(job, visit, gradient, kept.source, begun - kept.forward_s)
        finally:
            self._stash.done(kept.weights)
        crash_point("gradient added")
        return replace(output, step_due=self.optimizer.due)

    def _half_or_whole(self, job: Job, visit: Visit, gradient: Tensor, source: Tensor, begun: float) -> Output:
        size = Size(of_tokens(source), job.documents)
        if self.deferred.chosen.value and self._graphs.take(size.tokens):
            return self._half_backward(job, visit, gradient, size, begun)
        if isinstance(self.passes, BlockByBlock):
            return self._backward_in_place(self.passes, job, visit, gradient, size, begun)
        return self._whole_backward(job, visit, gradient, size, begun)

    def _whole_backward(self, job: Job, visit: Visit, gradient: Tensor, size: Size, begun: float) -> Output:
        gradients = self.passes.backward(visit, gradient)
        assert gradients.source is not None
        output = self.wire.output(gradients.source, job)  # before the gradient counts: it may fail for want of memory
        addition = self._accumulator.add(job.key.microbatch, size.tokens, gradients.parameters, job.labels)
        self._count(job, size.tokens, addition)
        self._timed(size, time.perf_counter() - begun)
        return output

    def _again(self, source: Tensor, documents: tuple[int, ...]) -> Visit:
        """Computes a visit again, for its backward pass."""
        if isinstance(self.passes, BlockByBlock):
            return self.passes.forward(source, documents, graphs=0)
        return self.passes.forward(source, documents)

    def _backward_in_place(
        self, passes: BlockByBlock, job: Job, visit: Visit, gradient: Tensor, size: Size, begun: float
    ) -> Output:
        """Adds the gradients to the sums as they are computed, where memory is dear."""
        microbatch, total = job.key.microbatch, self._accumulator
        is_new = not total.has(microbatch)
        found = passes.backward_into(total, visit, gradient, size.tokens if is_new else 0)
        try:
            self.wire.expect(found.are_finite, Addition.NOT_FINITE.value)
            output = self.wire.output(found.source, job)
        except BaseException:
            found.take_back()
            raise
        if is_new:
            total.promise(microbatch, size.tokens, job.labels)
        self._count(job, size.tokens, Addition.ADDED if is_new else Addition.DUPLICATE)
        self._timed(size, time.perf_counter() - begun)
        return output

    def _half_backward(self, job: Job, visit: Visit, gradient: Tensor, size: Size, begun: float) -> Output:
        """Puts the weight gradients off. What is kept for them is in the place of the graph, which has been taken."""

        def ended(seconds: float | None) -> None:
            self._graphs.release(size.tokens)
            if seconds is not None:
                self._timed(size, half_s + seconds)

        addition = None
        try:
            half = self.deferred.first_half(visit, gradient)
            self.wire.expect(half.is_bounded(), Addition.NOT_FINITE.value)
            output = self.wire.output(half.source, job)
            half_s = time.perf_counter() - begun
            addition = self.deferred.put_off(job.key.microbatch, size.tokens, half, ended, job.labels)
        finally:
            if addition is not Addition.ADDED:
                self._graphs.release(size.tokens)
        self._count(job, size.tokens, addition)
        return output

    def _timed(self, size: Size, seconds: float) -> None:
        self._cost.add(size.tokens, size.squares, len(size.documents), seconds)

    def _count(self, job: Job, tokens: int, addition: Addition) -> None:
        if addition is Addition.NOT_FINITE:
            raise ProtocolViolation(f"microbatch {job.key.microbatch}: {addition.value}")
        self.accumulated += addition is Addition.ADDED
        self.accumulated_tokens += (addition is Addition.ADDED) * tokens


def host_hop(
    manifest: Manifest,
    module: ModuleId,
    device: torch.device,
    graph_budget_bytes: int,
    allowance: Allowance = ORDINARY,
    threads: DeviceThreads | None = None,
    submit: Submit = AtDeadline,
) -> HopWorker:
    """Makes a replica of a module of stage 1 or above, with the run's initial weights.

    Args:
        allowance: what its peer lets it take.
        device: where its state is.
        threads: of all devices that compute; None where that is the only one.
        submit: takes what may be computed in idle time.

    Raises:
        ResourceExhausted: this machine has no room for it.
    """
    require_room(manifest, (module,), device, allowance.slots, allowance.moments)
    with device_errors():
        part = build_block_stack(manifest, module).to(device)
        hidden_type = HIDDEN_TYPES[manifest.model.dtype]
        is_alone = threads is None or len(threads.devices) == 1
        if is_alone and device.type != "cpu" and hidden_type is torch.bfloat16:
            part.split_weights()
        total = Accumulator(part)
        optimizer = inner_optimizer(manifest, module, [total], submit, allowance.moments)
        chosen = puts_weights_off(manifest.training.staleness, 1 if threads is None else len(threads.devices))
        split: SplitDevice | BlockByBlock | None = None
        if is_alone and device.type != "cpu":
            split = BlockByBlock(part, hidden_type)
        elif is_alone and chosen.value:
            split = SplitDevice(part, hidden_type)
        passes = split or body_passes(part, threads, quadratic_share(manifest.model))
    share = quadratic_share(manifest.model) if manifest.packs_documents else 0.0
    deferred = DeferredWeights(chosen, split, total, submit)
    tensor, stashed = hidden_tensor(manifest), manifest.training.staleness
    return HopWorker(part, total, optimizer, tensor, device, graph_budget_bytes, share, passes, deferred, stashed)


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
