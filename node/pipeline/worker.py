"""Passes of one replica on the compute thread: `HopWorker` for block stages, `DataWorker` for stage 0."""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn

from node.concurrency.compute_thread import DeviceThreads
from node.data.packing import Microbatch
from node.model.device import device_errors
from node.model.memory_need import require_memory
from node.model.moments import ORDINARY, Allowance
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures
from node.model.optimizers.inner_rule import AtDeadline, Submit
from node.model.passes import (
    Around,
    EmbeddingPart,
    HeadPart,
    HeadPasses,
    OneDevice,
    Passes,
    PassState,
    build_block_stack,
    build_embedding,
    build_head,
)
from node.model.residual import HIDDEN_TYPES, token_numbers
from node.observability.failpoints import crash_point
from node.pipeline.admission import hidden_tensor
from node.pipeline.device_passes import BlockByBlock, DeferredWeights, SplitDevice, body_passes, head_passes
from node.pipeline.runner import Job, MicrobatchRunner, Output
from protocol.codecs import Encoded, decode, encode, with_numbers, without_numbers
from protocol.codecs.blockwise import Expect, or_fails
from protocol.codecs.memory import ELEMENT_TYPES, buffer_for, to_device
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest, quadratic_share
from swarm.pipeline.compute_queue import puts_weights_off
from swarm.pipeline.custody import Started, Work
from swarm.vocabulary.errors import OutOfMemory, ProtocolViolation, StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, Path, PeerId, Reasoned
from swarm.workload.microbatch_sizes import Size, VisitCost

PROBES: Final = 3
SHARE_KEPT: Final = 0.9  # Part of the data nodes' tokens that is kept at each inner step
MOST_SHARES: Final = 16
_NOT_FINITE: Final = "the tensor has elements that are not finite"
_NO_TENSOR: Final = "the tensor is malformed, or it or a gradient computed from it is not finite"


def receive_buffers(device: torch.device) -> Callable[[int], memoryview]:
    """Returns a function that allocates a receive buffer of a given size, suited to copies to the device."""
    return partial(buffer_for, device=device)


def tensor_of(encoded: Encoded, device: torch.device) -> Tensor:
    """Decodes a tensor; an uncompressed one shares memory on the CPU. Raises ProtocolViolation if not finite."""
    tensor = _decoded(encoded, device, or_fails)
    if not are_finite(tensor):
        raise ProtocolViolation(_NOT_FINITE)
    return tensor


def _decoded(encoded: Encoded, device: torch.device, expect: Expect) -> Tensor:
    spec, kind = encoded.spec, ELEMENT_TYPES[encoded.spec.dtype]
    if spec.token_bytes:
        encoded, numbers = without_numbers(encoded)
        return torch.cat((_decoded(encoded, device, expect), to_device(numbers, device).to(kind)), -1)
    if spec.codec is Codec.NONE:
        return to_device(torch.frombuffer(encoded.data, dtype=kind).view(spec.shape), device)
    tensor = torch.empty(spec.shape, dtype=kind, device=device)
    decode(spec, encoded.data, tensor, expect)
    return tensor


def are_finite(tensor: Tensor) -> Tensor:
    """Tells whether all elements are finite, as a bool on the device. An overflowing sum counts as not finite."""
    return torch.isfinite(tensor.sum(dtype=torch.float32))


def relative_error(tensor: Tensor, encoded: Encoded) -> float:
    """Returns the relative error of an encoding in the Euclidean norm; 0 for a tensor of zeros."""
    exact, decoded = tensor.float(), tensor_of(encoded, tensor.device).float()
    lengths = torch.stack([torch.linalg.vector_norm(decoded - exact), torch.linalg.vector_norm(exact)])
    off, length = lengths.tolist()
    return off / length if length else 0.0


GRADIENT_AT_MOST: Final = 3.0  # Largest norm of a microbatch's gradient, in usual norms. A longer one is scaled down.
ALONE_AT_MOST: Final = 100.0  # With one data node, whose norms change by more early, or with few norms
FEW_NORMS: Final = 16
NORMS_KEPT: Final = 32  # Norms of each data node from which its median is computed


class GradientClip:
    """Limits each microbatch's gradient, so that no data node owns an inner step."""

    def __init__(self) -> None:
        self._norms: OrderedDict[PeerId, deque[float]] = OrderedDict()
        self._medians: dict[PeerId, float] = {}
        self._factors = Latest[MicrobatchId, Tensor | None](4096)
        self._unread: tuple[PeerId, Tensor] | None = None

    def clipped(self, microbatch: MicrobatchId, gradient: Tensor, labels: int = 0) -> Tensor:
        """Returns the gradient [rows, tokens, hidden], limited, again by the same factor. `labels` 0: all tokens."""
        if microbatch not in self._factors:
            if self._unread is not None:  # reading the last norm now, and not this one, keeps the device busy
                self._add(self._unread[0], self._unread[1].item())
            tokens = gradient[..., 0].numel()  # the norm of a mean falls with the root of the number of labels
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) * (tokens / math.sqrt(labels or tokens))
            self._unread = microbatch.data_node, norm.to("cpu", non_blocking=True)
            few = len(self._medians) < 2 or sum(map(len, self._norms.values())) < FEW_NORMS
            times = ALONE_AT_MOST if few else GRADIENT_AT_MOST
            # The median of the data nodes' medians: many microbatches of one count like few.
            limit = times * median_low(self._medians.values()) if self._medians else math.inf
            is_usual = gradient.device.type == "cpu" and bool(norm <= limit)
            self._factors[microbatch] = None if is_usual else torch.clamp(limit / norm, max=1.0)
        factor = self._factors[microbatch]
        return gradient if factor is None else gradient * factor.to(gradient.dtype)

    def _add(self, data_node: PeerId, norm: float) -> None:
        norms = self._norms.setdefault(data_node, deque(maxlen=NORMS_KEPT))
        norms.append(norm)
        self._medians[data_node] = median_low(norms)
        self._norms.move_to_end(data_node)
        if len(self._norms) > 64:  # data nodes
            del self._medians[self._norms.popitem(last=False)[0]]


class Wire:
    """Decoder of a worker's received tensors and encoder of its results. Runs on the compute thread."""

    def __init__(self, device: torch.device, token_bytes: int, vocabulary: int) -> None:
        self.device = device
        self._token_bytes, self._vocabulary = token_bytes, vocabulary
        self._clip = GradientClip()
        self.codec_s = 0.0  # Seconds spent encoding and decoding, including concurrent GPU work
        self._expected: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def start(self) -> None:
        self._expected.clear()

    def let_go(self) -> None:
        """Waits until the device has copied all received tensors, so that their receive buffers may be reused."""
        copied, self._copied = self._copied, None
        if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
            copied.synchronize()

    def received(self, tensor: Encoded | None, *, before_use: bool = False) -> Tensor:
        """Decodes a received tensor. Checks that it is finite: now on a CPU or with `before_use`, else in `output`."""
        assert tensor is not None, "custody requests no work before its tensors arrive"
        begun = time.perf_counter()
        if tensor.spec.token_bytes:  # check before a device looks the tokens up
            largest = int(token_numbers(without_numbers(tensor)[1]).max())
            if largest >= self._vocabulary:
                raise ProtocolViolation(f"token number {largest} is not below the vocabulary of {self._vocabulary}")
        received = _decoded(tensor, self.device, self.expect)
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.device))
        self.expect(are_finite(received), _NOT_FINITE)
        if before_use and self._expected:
            self._check(bool(torch.stack(self._expected).all()), _NO_TENSOR)
        self.codec_s += time.perf_counter() - begun
        return received

    def gradient(self, job: Job, *, before_use: bool = False) -> Tensor:
        """Decodes a received gradient like `received`, and clips it."""
        received = self.received(job.gradient, before_use=before_use)
        clipped = self._clip.clipped(job.key.microbatch, received, job.labels)
        return F.pad(clipped, (0, self._token_bytes)) if self._token_bytes else clipped

    def expect(self, holds: Tensor, fault: str) -> None:
        """Makes the job fail with `fault` unless the device bool `holds` is true: now on the CPU, else in `output`."""
        if self.device.type == "cpu":
            self._check(bool(holds), fault)
        else:
            self._expected.append(holds)

    def output(self, tensor: Tensor, job: Job, loss: float | None = None) -> Output:
        """Encodes a job's result. Raises ProtocolViolation if a condition passed to `expect` does not hold."""
        begun = time.perf_counter()
        channels = tensor.shape[-1] - self._token_bytes
        tensor, numbers = tensor.detach()[..., :channels].contiguous(), tensor.detach()[..., channels:]
        # Does not synchronise here: the encoding is copied later and waited for anyway.
        expected = torch.stack(self._expected).all().to("cpu", non_blocking=True) if self._expected else None
        encoded = encode(tensor, job.codec)
        if expected is not None:
            self._check(bool(expected), _NO_TENSOR)
        error = relative_error(tensor, encoded) if job.check_codec and encoded.spec.codec is job.codec else None
        if self._token_bytes and job.work is Work.FORWARD:
            encoded = with_numbers(encoded, numbers)
        self.codec_s += time.perf_counter() - begun
        return Output(encoded, loss, error=error)

    def _check(self, holds: bool, fault: str) -> None:
        self._expected.clear()
        if not holds:
            raise ProtocolViolation(fault)


# A gradient must flow through the weights that computed the output. After an inner step between forward and backward,
# that takes a copy of the old weights: weight stashing (Narayanan et al. 2019, "PipeDream", section 3.3). Without one,
# forward is recomputed with the new weights: one visit in five at a staleness of 1, for some per cent more loss.

Weights = tuple[Tensor, ...]


class WeightVersion:
    """Weights of a model part between two changes, to which the graphs of microbatches in flight refer."""

    def __init__(self, weights: Weights) -> None:
        self.visits = 0  # Visits in flight whose forward pass used this version
        self._weights: Weights | None = weights

    @property
    def is_there(self) -> bool:
        return self._weights is not None

    def refer_to(self, weights: Weights | None) -> None:
        self._weights = weights

    def __getitem__(self, place: int) -> Tensor:
        if self._weights is None:
            raise StateError("the weights of this graph were dropped")
        return self._weights[place]


@dataclass(frozen=True, slots=True)
class _Seen:
    place: int
    size: torch.Size
    stride: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    tensor: Tensor
    version: int


class WeightStash:
    """Older weights that microbatches in flight used in their forward pass: at most `most` copies, in `room` bytes."""

    def __init__(self, weights: Callable[[], Weights], most: int, room: int) -> None:
        self._up_to_date, self._weights = weights, weights()
        self._places = {_memory(tensor): place for place, tensor in enumerate(self._weights)}
        size = sum(tensor.nbytes for tensor in self._weights)
        # Weights are found in graphs by their memory, which must therefore be distinct.
        can_be_found = len(self._places) == len(self._weights) and size > 0
        self.copies = min(most, room // size) if can_be_found else 0
        self.bytes = self.copies * size
        self._unused: list[Weights] = []  # For reuse: the system would zero newly allocated memory at every step
        self._copies: dict[WeightVersion, Weights] = {}
        self.current = WeightVersion(self._weights)

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Makes graphs built within the block refer to the current weights, even after a step moved them to a copy."""
        version = self.current

        def pack(tensor: Tensor) -> _Seen | _Saved:
            place = self._places.get(_memory(tensor))
            if place is not None:
                return _Seen(place, tensor.shape, tensor.stride(), tensor.storage_offset())
            # Detach, because a node may save its own output, a reference cycle that is never collected.
            return _Saved(tensor.detach(), tensor._version)

        def unpack(saved: _Seen | _Saved) -> Tensor:
            if isinstance(saved, _Seen):
                return version[saved.place].detach().as_strided(saved.size, saved.stride, saved.offset)
            if saved.tensor._version != saved.version:
                raise StateError("a tensor of the graph was changed in place")
            return saved.tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @contextmanager
    def in_place(self, version: WeightVersion) -> Iterator[None]:
        """Puts the weights of `version`, which must be available, into the model part within the block."""
        copy = self._copies.get(version)
        if copy is None:
            yield
            return
        # Refresh narrow copies first. Later they would read the parameters of the other version.
        own = [tensor.data for tensor in self._up_to_date()]
        try:
            for tensor, kept in zip(self._weights, copy, strict=True):
                tensor.data = kept
            yield
        finally:
            for tensor, data in zip(self._weights, own, strict=True):
                tensor.data = data

    @torch.no_grad()
    def before_step(self) -> None:
        """Copies the current weights before an inner step, if microbatches in flight still need them."""
        version, copy = self.current, self._free_copy() if self.current.visits else None
        self._go_on_from(copy)
        if copy is not None:
            self._copies[version] = copy
            for kept, tensor in zip(copy, self._weights, strict=True):
                kept.copy_(tensor)

    def changed(self) -> None:
        self._go_on_from(None)

    def _go_on_from(self, copy: Weights | None) -> None:
        self.current.refer_to(copy)
        self.current = WeightVersion(self._weights)

    def done(self, version: WeightVersion) -> None:
        """Ends one microbatch's use of `version`; frees the version's copy after the last use."""
        version.visits -= 1
        if version.visits == 0 and version in self._copies:
            version.refer_to(None)
            self._unused.append(self._copies.pop(version))

    def _free_copy(self) -> Weights | None:
        if self._unused:
            return self._unused.pop()
        if self.copies == 0:
            return None
        if len(self._copies) == self.copies:  # its visit is delayed, and will be recomputed
            oldest = next(iter(self._copies))
            oldest.refer_to(None)
            return self._copies.pop(oldest)
        try:
            with device_errors():
                return tuple(torch.empty_like(tensor, requires_grad=False) for tensor in self._weights)
        except OutOfMemory:
            return None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class GraphBudget:
    """Memory budget for one replica's autograd graphs, in tokens. The first forward pass measures bytes per token."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._of_one: float | None = None
        self._kept = 0.0

    def forward(
        self, passes: Passes, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext
    ) -> tuple[Tensor, PassState | None, float]:
        """Runs a forward pass. Returns the output, the graph if kept, and the tokens to `release` afterwards."""
        tokens = of_tokens(source)
        if isinstance(passes, BlockByBlock):
            return self._blocks(passes, source, documents, around)
        if self._of_one is None:
            self._of_one = _measured(passes, source, documents) / tokens
        if self.take(tokens):
            visit = passes.forward(source, documents, around)
            return visit.result, visit, tokens
        return passes.evaluate(source, documents), None, 0.0

    def _blocks(
        self, passes: BlockByBlock, source: Tensor, documents: tuple[int, ...], around: Around
    ) -> tuple[Tensor, PassState | None, float]:
        if self._of_one is None:
            one_graph = partial(passes.forward, graphs=1)  # all blocks need the same, so measure one
            self._of_one = _measured(passes, source, documents, one_graph) * passes.blocks / of_tokens(source)
        of_block = of_tokens(source) / passes.blocks
        # Each block's input is kept in any case, and graphs of as many blocks as fit.
        inputs = passes.blocks * source.nbytes / self._of_one
        graphs = min(passes.blocks, math.floor((self._budget / self._of_one - self._kept - inputs) / of_block))
        share = inputs + graphs * of_block
        if graphs < 0 or not self.take(share):
            return passes.evaluate(source, documents), None, 0.0
        visit = passes.forward(source, documents, around, graphs)
        return visit.result, visit.kept(), share

    def take(self, tokens: float) -> bool:
        """Reserves memory for the graph of `tokens` tokens until `release`. Returns False if it does not fit."""
        fits = (self._kept + tokens) * (self._of_one or 0.0) <= self._budget
        self._kept += fits * tokens
        return fits

    def release(self, tokens: float) -> None:
        self._kept -= tokens


def of_tokens(hidden: Tensor) -> int:
    return hidden.shape[0] * hidden.shape[1]


def _measured(
    passes: Passes, source: Tensor, documents: tuple[int, ...], forward: Callable[..., PassState] | None = None
) -> int:
    """Runs a forward pass and returns the bytes that its graph keeps alive, without the parameters."""
    own = passes.storages()
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a node may save its own output, which would be a reference cycle

    def noted() -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    (forward or passes.forward)(source, documents, noted)
    return sum(seen.values())


class ReplicaWorker(ABC):
    """Base of `HopWorker` and `DataWorker` (`node.pipeline.runner.Worker`). `tensor` specifies hidden states."""

    def __init__(self, tensor: TensorSpec, device: torch.device, vocabulary: int = 0) -> None:
        self.tensor = tensor
        self.wire = Wire(device, tensor.token_bytes, vocabulary)
        self.accumulated = 0  # Microbatches whose gradients were added, including those before a resume
        self.accumulated_tokens = 0
        self.recomputed = 0  # Visits whose forward pass was recomputed

    def compute(self, job: Job) -> Output:
        """Runs a job. Raises ProtocolViolation for a non-finite tensor, StateError for an abandoned microbatch."""
        self.wire.start()
        with device_errors():
            return self._compute(job)

    @abstractmethod
    def _compute(self, job: Job) -> Output: ...

    def forget(self, ticket: int) -> None:
        self._drop(ticket)
        self.wire.let_go()

    @abstractmethod
    def _drop(self, ticket: int) -> None:
        """Frees the graph of the microbatch with this ticket."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """State of a microbatch between its forward and backward pass: the input, and the graph if it fit in memory."""

    source: Tensor
    visit: PassState | None
    weights: WeightVersion
    forward_s: float = 0.0
    share: float = 0.0


class HopWorker(ReplicaWorker):
    """Worker of one replica of a block module: passes, gradient sums and inner steps."""

    def __init__(
        self,
        part: nn.Module,
        accumulator: Accumulator,
        optimizer: InnerOptimizer,
        tensor: TensorSpec,
        device: torch.device,
        graph_budget_bytes: int,  # A quarter of it is for up to `stashed` copies of older weights
        *,
        quadratic_share: float = 0.0,  # Weight of squared document lengths in the cost; 0 for rows of one stream
        passes: Passes | None = None,
        deferred: DeferredWeights | None = None,
        stashed: int = 0,
        vocabulary: int = 0,  # Token numbers of hidden states are below it
    ) -> None:
        super().__init__(tensor, device, vocabulary)
        self.part = part
        self.passes = passes or OneDevice(part)
        self.optimizer = optimizer
        self.deferred = deferred or DeferredWeights(Reasoned(False, "not enabled"), None, accumulator)
        self._cost, self._quadratic_share = VisitCost(), quadratic_share
        self.unapplied = accumulator
        self._stash = WeightStash(self.passes.weights, stashed, graph_budget_bytes // 4)
        self._graphs = GraphBudget(graph_budget_bytes - self._stash.bytes)
        self._kept: dict[int, _Kept] = {}
        self._sources: dict[PeerId, float] = {}  # Tokens of each data node; older steps count less

    @property
    def shares(self) -> dict[str, float]:
        """Returns the data nodes' shares of the tokens in the last steps, of those with the most."""
        most, total = Counter(self._sources).most_common(MOST_SHARES), sum(self._sources.values())
        return {peer: round(tokens / total, 3) for peer, tokens in most}

    @property
    def speed(self) -> float:
        """Speed of both passes together, in tokens of cost per second; 0 before the first microbatch."""
        return self._cost.speed()

    def parameters_changed(self) -> None:
        """Records that something other than an inner step changed the parameters, such as an averaging round."""
        self._stash.changed()
        self.passes.parameters_changed()

    def step(self) -> StepFigures | None:
        if not self.optimizer.due:
            return None
        self.deferred.finish()
        self._stash.before_step()
        self._sources = {peer: SHARE_KEPT * tokens for peer, tokens in self._sources.items() if tokens >= 1}
        self.passes.parameters_changed()
        return self.optimizer.step()

    def _compute(self, job: Job) -> Output:
        if job.work is Work.REPLAY:  # a substitute has the input but no graph, so backward recomputes
            self._keep(job.ticket, self.wire.received(job.input), None)
        if job.work in (Work.BACKWARD, Work.REPLAY):
            return self._backward(job, self.wire.gradient(job))
        source = self.wire.received(job.input)
        if job.purpose is Purpose.EVALUATE:
            return self.wire.output(self.passes.evaluate(source, job.documents), job)
        return self._forward(job, source)

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

    def _keep(
        self, ticket: int, source: Tensor, visit: PassState | None, seconds: float = 0.0, share: float = 0.0
    ) -> None:
        self._drop(ticket)
        self._stash.current.visits += 1
        self._kept[ticket] = _Kept(source, visit, self._stash.current, seconds, share)

    def _drop(self, ticket: int) -> None:
        kept = self._kept.pop(ticket, None)
        if kept is not None:
            self._graphs.release(kept.share)
            self._stash.done(kept.weights)

    def _backward(self, job: Job, gradient: Tensor) -> Output:
        """Runs the backward pass. Recomputes a missing graph, and defers weight gradients if enabled."""
        kept = self._kept.pop(job.ticket, None)
        if kept is None:
            # An abandoned or repaired microbatch may be forgotten before its gradient arrives.
            raise StateError(f"microbatch {job.key.microbatch} is no longer held here")
        self._graphs.release(kept.share)
        begun, visit = time.perf_counter(), kept.visit
        size = Size(of_tokens(kept.source), job.documents)
        try:
            with self._stash.in_place(kept.weights):
                if visit is None or not kept.weights.is_there:
                    visit, kept = None, replace(kept, visit=None)  # frees the old graph before building a new one
                    visit = self._again(kept.source, job.documents)
                    self.recomputed += 1
                begun -= kept.forward_s
                # A deferred visit keeps its memory, so it needs a share of the graph budget.
                if self.deferred.chosen.value and self._graphs.take(size.tokens):
                    output = self._put_off(job, visit, gradient, size, begun)
                else:
                    output = self._add(job, visit, gradient, size, begun)
        finally:
            self._stash.done(kept.weights)
        crash_point("gradient added")
        return replace(output, step_due=self.optimizer.due)

    def _again(self, source: Tensor, documents: tuple[int, ...]) -> PassState:
        if isinstance(self.passes, BlockByBlock):
            return self.passes.forward(source, documents, graphs=0)
        return self.passes.forward(source, documents)

    def _add(self, job: Job, visit: PassState, gradient: Tensor, size: Size, begun: float) -> Output:
        microbatch, total = job.key.microbatch, self.unapplied
        if isinstance(self.passes, BlockByBlock):  # adds gradients as they are computed, to save memory
            is_new = not total.has(microbatch)
            found = self.passes.backward_into(total, visit, gradient, size.tokens if is_new else 0)
            try:
                self.wire.expect(found.are_finite, Addition.NOT_FINITE.value)
                output = self.wire.output(found.source, job)
            except BaseException:
                found.take_back()
                raise
            if is_new:
                total.promise(microbatch, size.tokens, job.labels)
            addition = Addition.ADDED if is_new else Addition.DUPLICATE
        else:
            gradients = self.passes.backward(visit, gradient)
            assert gradients.source is not None
            output = self.wire.output(gradients.source, job)  # encode before adding, as it may run out of memory
            addition = total.add(microbatch, size.tokens, gradients.parameters, job.labels)
        self._count(job, size.tokens, addition)
        self._timed(size, time.perf_counter() - begun)
        return output

    def _put_off(self, job: Job, visit: PassState, gradient: Tensor, size: Size, begun: float) -> Output:
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

    def retract(self, job: Job) -> bool:
        """Subtracts a microbatch's gradient, recomputed with current parameters, or cancels it if still deferred."""
        self.wire.start()
        with device_errors():
            source = self.wire.received(job.input)
            tokens, taken_back = of_tokens(source), self.deferred.cancel(job.key.microbatch)
            if not taken_back:
                visit = self.passes.forward(source, job.documents)
                gradients = self.passes.backward(visit, self.wire.gradient(job, before_use=True)).parameters
                taken_back = self.unapplied.retract(job.key.microbatch, tokens, gradients, job.labels)
        self.accumulated -= taken_back
        self.accumulated_tokens -= taken_back * tokens
        return taken_back

    def _timed(self, size: Size, seconds: float) -> None:
        self._cost.add(size.cost_with(self._quadratic_share), seconds)

    def _count(self, job: Job, tokens: int, addition: Addition) -> None:
        if addition is Addition.NOT_FINITE:
            raise ProtocolViolation(f"microbatch {job.key.microbatch}: {addition.value}")
        if addition is Addition.ADDED:
            self.accumulated += 1
            self.accumulated_tokens += tokens
            source = job.key.microbatch.data_node
            self._sources[source] = self._sources.get(source, 0.0) + tokens


@dataclass(frozen=True, slots=True, eq=False)
class StageZero:
    """Embedding and head of stage 0: each sums its gradients separately, but one optimizer steps both."""

    embedding: EmbeddingPart
    head: HeadPart
    embedding_sum: Accumulator
    head_sum: Accumulator
    optimizer: InnerOptimizer

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self.embedding, self.head)


class DataWorker(ReplicaWorker):
    """Worker of a data node's replica of stage 0: passes of the embedding, and of the head with its loss."""

    def __init__(
        self, stage: StageZero, tensor: TensorSpec, device: torch.device, embedding: Passes, head: HeadPasses
    ) -> None:
        super().__init__(tensor, device, stage.embedding.residual.section.vocabulary)
        self.stage = stage
        self._embedding = embedding
        self._head = head
        self.steps = 0  # Inner steps of this data node's microbatches, including those before a resume
        self.texts: dict[MicrobatchId, Microbatch] = {}  # In flight; written by the data node
        self.parameter_version = 0  # Number of parameter changes. Graphs of earlier versions are stale.
        self._visits: dict[int, tuple[PassState, int]] = {}

    def parameters_changed(self) -> None:
        """Records that something changed the parameters, such as an averaging round."""
        self.parameter_version += 1
        self._embedding.parameters_changed()
        self._head.parameters_changed()

    def step(self) -> StepFigures | None:
        if not self.stage.optimizer.due:
            return None
        self.parameters_changed()
        self.steps += 1
        return self.stage.optimizer.step()

    def retract(self, job: Job) -> bool:
        """Raises StateError: a data node adds gradients only of completed microbatches, so it never subtracts any."""
        raise StateError("a data node's gradients cannot be subtracted")

    def _drop(self, ticket: int) -> None:
        self._visits.pop(ticket, None)

    def _compute(self, job: Job) -> Output:
        text = self.texts.get(job.key.microbatch)
        if text is None:
            raise StateError(f"microbatch {job.key.microbatch} is no longer in flight")
        match job.work:
            case Work.FORWARD:
                return self._embed(job, text)
            case Work.LOSS:
                return self._loss(job, text)
            case Work.BACKWARD:
                return self._finish(job, text)
            case Work.REPLAY:
                raise StateError("a data node has no substitutes")

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
        gradient = self.wire.gradient(job, before_use=True)
        kept = self._visits.pop(job.ticket, None)
        if kept is None:
            raise StateError(f"microbatch {job.key.microbatch} has no forward pass here")
        visit, version = kept
        if version != self.parameter_version:
            visit = self._embedding.forward(text.tokens.to(self.wire.device), text.documents)
            self.recomputed += 1
        gradients = self._embedding.backward(visit, gradient)
        total = self.stage.embedding_sum
        if total.add(job.key.microbatch, text.size, gradients.parameters, text.scored) is Addition.NOT_FINITE:
            raise ProtocolViolation(f"microbatch {job.key.microbatch}: {Addition.NOT_FINITE.value}")
        self.accumulated += 1
        self.accumulated_tokens += text.size
        return Output(step_due=self.stage.optimizer.due)


def host_hop(
    manifest: Manifest,
    module: ModuleId,
    device: torch.device,
    graph_budget_bytes: int,
    allowance: Allowance = ORDINARY,
    threads: DeviceThreads | None = None,
    submit: Submit = AtDeadline,
) -> HopWorker:
    """Makes the worker of a module after stage 0, with initial weights. Raises ResourceExhausted if too large."""
    require_memory(manifest, (module,), device, allowance.slots, allowance.moments)
    with device_errors():
        part = build_block_stack(manifest, module).to(device)
        hidden_type = HIDDEN_TYPES[manifest.model.dtype]
        is_alone = threads is None or len(threads.devices) == 1
        if is_alone and device.type != "cpu" and hidden_type is torch.bfloat16:
            part.split_weights()
        total = Accumulator(part)
        optimizer = InnerOptimizer(manifest, module, [total], submit, allowance.moments)
        chosen = puts_weights_off(manifest.training.staleness, 1 if threads is None else len(threads.devices))
        split: SplitDevice | BlockByBlock | None = None
        if is_alone and device.type != "cpu":  # on a GPU memory is short, so keep one block's graph at a time
            split = BlockByBlock(part, hidden_type)
        elif is_alone and chosen.value:
            split = SplitDevice(part, hidden_type)
        passes = split or body_passes(part, threads, quadratic_share(manifest.model))
    share = quadratic_share(manifest.model) if manifest.packs_documents else 0.0
    deferred = DeferredWeights(chosen, split, total, submit)
    return HopWorker(
        part,
        total,
        optimizer,
        hidden_tensor(manifest),
        device,
        graph_budget_bytes,
        quadratic_share=share,
        passes=passes,
        deferred=deferred,
        stashed=manifest.training.staleness,
        vocabulary=manifest.model.vocabulary,
    )


def host_stage_zero(
    manifest: Manifest,
    device: torch.device,
    allowance: Allowance = ORDINARY,
    threads: DeviceThreads | None = None,
    submit: Submit = AtDeadline,
) -> DataWorker:
    """Makes the worker of a data node's stage 0, with initial weights. Raises ResourceExhausted if too large."""
    require_memory(manifest, (ModuleId(0),), device, allowance.slots, allowance.moments)
    with device_errors():
        embedding = build_embedding(manifest).to(device)
        head = build_head(manifest, embedding).to(device)
        sums = Accumulator(embedding), Accumulator(head)
        optimizer = InnerOptimizer(manifest, ModuleId(0), sums, submit, allowance.moments)
        stage = StageZero(embedding, head, *sums, optimizer)
        body, end = body_passes(embedding, threads, quadratic_share(manifest.model)), head_passes(head, threads)
    return DataWorker(stage, hidden_tensor(manifest), device, body, end)


def measure_speed(passes: Passes, manifest: Manifest, device: torch.device) -> float:
    """Measures the speed of a forward and backward pass here: the best of PROBES tries, the first warms up."""
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
            gradients.source.sum().item()  # synchronises with an asynchronous device
            fastest = min(fastest, time.perf_counter() - begun)
    return Size(tokens, documents).cost_with(share) / fastest


Signing = Callable[[MicrobatchId, Path, Purpose, float, tuple[int, ...], int], Path]
"""Signs a microbatch's path: purpose, lifetime in seconds, lengths of documents, labels (`Routes.signed`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Launches:
    """Launcher of this data node's microbatches. The worker keeps a microbatch's tokens until the microbatch ends."""

    worker: DataWorker
    runner: MicrobatchRunner
    sign: Signing
    tells_labels: bool = False  # Whether hops receive the number of labels of a training microbatch

    def launch(
        self, microbatch: MicrobatchId, text: Microbatch, path: Path, purpose: Purpose, lifetime_s: float
    ) -> None:
        self.worker.texts[microbatch] = text
        labels = text.scored if self.tells_labels and purpose is Purpose.TRAIN else 0
        path = self.sign(microbatch, path, purpose, lifetime_s, text.documents, labels)
        self.runner.handle(Started(microbatch, path, purpose, lifetime_s))

    def text_of(self, microbatch: MicrobatchId) -> Microbatch | None:
        """Returns the tokens of a microbatch; None if it is not in flight."""
        return self.worker.texts.get(microbatch)

    def end(self, microbatch: MicrobatchId) -> Microbatch | None:
        """Removes and returns the tokens of a microbatch; None if the microbatch ended before."""
        return self.worker.texts.pop(microbatch, None)

    def abandon(self, microbatch: MicrobatchId, detail: str) -> Microbatch | None:
        """Abandons a microbatch and returns its tokens; None if the microbatch ended before."""
        text = self.end(microbatch)
        self.runner.abandon(microbatch, detail)
        return text
