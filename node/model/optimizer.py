"""Gradient accumulation and the inner optimizer step, for `solo` and for replicas in a swarm."""

import enum
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from node.model.blocks import packed_weights
from node.model.device import copied
from node.model.moments import MomentType, moments_of
from node.model.optimizers.adamw import AdamW, EightBitAdamW
from node.model.optimizers.inner_rule import FLOAT_BYTES, AtDeadline, InnerRule, ParameterState, Submit, zeros_of
from node.model.optimizers.muon import Muon
from node.model.optimizers.soap import Soap
from node.model.shapes import demand_of, has_eight_bits, is_block_matrix, writes
from protocol.manifest.manifest import InnerSection, Manifest, ScheduleSection, TrainingSection
from swarm.pipeline.in_flight import staleness_at
from swarm.vocabulary.errors import SkipstoneError, StateError
from swarm.vocabulary.types import MicrobatchId, ModuleId
from swarm.workload.microbatch_sizes import StepRule

Tensors = Mapping[str, Tensor]  # Float32 tensors on the CPU, by parameter name
REMEMBERED_STEPS: Final = 64  # Inner steps whose microbatch ids are remembered. A microbatch retried later is refused.
# Adam's second moment is noisy until it has seen some gradients.
RAMP_STEPS: Final = 10  # Inner steps in which a fresh optimizer reaches the scheduled learning rate


@dataclass(frozen=True, slots=True, eq=False)
class InnerState:
    steps: int
    parameters: Mapping[str, ParameterState]  # CPU state by name, of the parameters that have been stepped


def learning_rate(training: TrainingSection, tokens: float) -> float:
    """Returns the learning rate after `tokens` of the run: linear warm-up, then constant or decay to `final_ratio`."""
    warmup, total = training.schedule_tokens
    peak = training.inner.learning_rate
    if tokens < warmup:
        return peak * tokens / warmup
    return peak * _ratio(training.schedule, (tokens - warmup) / (total - warmup))


def _ratio(schedule: ScheduleSection, progress: float) -> float:
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, progress)
    remaining = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.final_ratio + (1 - schedule.final_ratio) * remaining


class Addition(enum.Enum):
    ADDED = "added"
    DUPLICATE = "this microbatch has been added before"
    NOT_FINITE = "the gradient has elements that are not finite"


class Accumulator:
    """Sum of the gradients of one model part since the last inner step. Adds each microbatch only once."""

    def __init__(self, part: nn.Module) -> None:
        self.parameters = tuple(part.parameters())
        self.names = tuple(name for name, _ in part.named_parameters())
        self.packed = packed_weights(part)
        self.visits = 0  # Microbatches added since the last step, minus those retracted
        self.tokens = 0  # Tokens of these microbatches. Negative if more were retracted than added.
        self.labels = 0
        # In float64 the sum does not depend on the order of microbatches, so that a swarm agrees with a single process.
        # A GPU has less memory and adds in no fixed order anyway.
        types = (torch.float64 if p.device.type == "cpu" else p.dtype for p in self.parameters)
        shapes = zip(self.parameters, types, strict=True)
        self.sums = tuple(torch.zeros(p.shape, dtype=dtype, device=p.device) for p, dtype in shapes)
        self._current: set[MicrobatchId] = set()
        self._recent: deque[set[MicrobatchId]] = deque(maxlen=REMEMBERED_STEPS)

    def has(self, microbatch: MicrobatchId) -> bool:
        """Tells whether the microbatch is in the current gradient sum, or was in one of the latest steps."""
        return microbatch in self._current or self.has_applied(microbatch)

    def has_applied(self, microbatch: MicrobatchId) -> bool:
        return any(microbatch in step for step in self._recent)

    def add(self, microbatch: MicrobatchId, tokens: int, gradients: Sequence[Tensor], labels: int = 0) -> Addition:
        """Adds a microbatch's gradients, in parameter order: all or none. `labels` 0: every token is a label."""
        if self.has(microbatch):
            return Addition.DUPLICATE
        if not are_finite(gradients):
            return Addition.NOT_FINITE
        fold(self.sums, gradients, tokens)
        self.promise(microbatch, tokens, labels)
        return Addition.ADDED

    def promise(self, microbatch: MicrobatchId, tokens: int, labels: int = 0) -> None:
        """Counts a microbatch whose gradients the caller adds later, before the next step, to `sums` or by `add_to`."""
        self._current.add(microbatch)
        self._count(1, tokens, labels)

    def break_promise(self, microbatch: MicrobatchId, tokens: int, labels: int = 0) -> None:
        """Undoes `promise` for a microbatch. Call it only before a gradient of the microbatch was added."""
        self._current.remove(microbatch)
        self._count(-1, tokens, labels)

    def add_to(self, place: int, rows: slice, gradient: Tensor, tokens: int) -> None:
        """Adds a finite gradient of some rows of parameter `place`, for a microbatch counted by `promise`."""
        self.sums[place][rows].add_(gradient, alpha=tokens)  # computes in the wider dtype

    def retract(self, microbatch: MicrobatchId, tokens: int, gradients: Sequence[Tensor], labels: int = 0) -> bool:
        """Subtracts a microbatch's gradients, even after a step. Returns False if the microbatch is not remembered."""
        # The microbatch may be in the current sum, or in an earlier one.
        added = next((ids for ids in (self._current, *self._recent) if microbatch in ids), None)
        if added is None or not are_finite(gradients):
            return False
        fold(self.sums, gradients, -tokens)
        added.remove(microbatch)
        self._count(-1, tokens, labels)
        return True

    def _count(self, visits: int, tokens: int, labels: int) -> None:
        self.visits += visits
        self.tokens += visits * tokens
        self.labels += visits * (labels or tokens)

    def hand_over_mean(self) -> None:
        """Adds the mean gradient per label to each parameter's `.grad`. Tied embeddings get the means of both parts."""
        if self.tokens <= 0 or self.labels <= 0:  # more was retracted than added, so there is no mean
            return
        # Sums of the parameter's dtype become the gradients in place. Allocate the others before any sum is divided, so
        # that running out of memory changes nothing.
        means = [
            total if total.dtype is parameter.dtype else torch.empty_like(total, dtype=parameter.dtype)
            for parameter, total in zip(self.parameters, self.sums, strict=True)
        ]
        for parameter, total, mean in zip(self.parameters, self.sums, means, strict=True):
            total.div_(self.labels)
            if mean is not total:
                mean.copy_(total)
            parameter.grad = mean if parameter.grad is None else parameter.grad.add_(mean)

    def start_over(self) -> None:
        """Sets the gradient sum to zero after a step. Remembers the ids of the microbatches in the old sum."""
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.grad = None
            total.zero_()
        self._recent.append(self._current)
        self._current = set()
        self.visits = self.tokens = self.labels = 0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Microbatches, tokens, gradient norm and learning rate of one inner step, for logs and metrics."""

    step: int
    visits: tuple[int, ...]
    tokens: int  # Tokens of the part with the most
    gradient_norm: float  # Norm of the module's mean gradient before clipping
    learning_rate: float


class InnerOptimizer:
    """Optimizer of a module's float32 parameters: the manifest's rule for block matrices, AdamW for all others."""

    def __init__(
        self,
        manifest: Manifest,
        module: ModuleId,
        accumulators: Sequence[Accumulator],
        submit: Submit = AtDeadline,  # Schedules work for idle time
        moments: MomentType = MomentType.FLOAT32,
    ) -> None:
        training = manifest.training
        self.steps = 0
        self.tokens = 0  # Tokens of all replicas of the module, which drive the learning rate schedule
        self.replicas = 1  # Replicas of the module, assumed to be as fast as this one since the last round
        self._rule = StepRule(manifest.step_tokens(module), manifest.microbatch_tokens)
        self._demand = demand_of(manifest, module)  # Share of the run's tokens for this module
        self._ramp = RAMP_STEPS
        self._training = training
        self._accumulators = tuple(accumulators)
        # With tied embeddings both parts of stage 0 share one matrix, so remove duplicates.
        self._parameters = list(dict.fromkeys(p for accumulator in accumulators for p in accumulator.parameters))
        self.moments = moments_of(training.inner, moments)
        # Bytes of optimizer state on the compute device once every parameter was stepped
        named, kept = _names(accumulators).items(), self.moments.value
        self.state_bytes = sum(optimizer_bytes(training, name, tuple(p.shape), kept) for p, name in named)
        self.rules = _rules(training.inner, accumulators, submit, self.moments.value)
        # The two matrices of each block that add to hidden states share one rate, and decay as all others (CompleteP,
        # arXiv:2505.01618). In a new model they begin at zero: at the full rate they would soon drown small embeddings.
        slow = 1.0 if manifest.start else 1 / (2 * sum(manifest.stages.blocks))
        rates = {parameter: slow for parameter, name in named if writes(name)}
        packed = {p: held for each in self._accumulators for p, held in each.packed.items()}
        for rule in self.rules:
            rule.rates, rule.packed = rates, packed
        # By how much parameters are ahead of the steps taken, where gradients come late (weight prediction: SpecTrain,
        # arXiv:1809.02839, with the last change for the next one)
        self._ahead: dict[nn.Parameter, Tensor] = {}
        self.before_step: Callable[[], None] = lambda: None  # A replica that is alone applies its outer step here
        self.before_change: Callable[[], None] = lambda: None  # So that a copy in progress can finish

    @property
    def due(self) -> bool:
        return all(self._rule.is_complete(accumulator.tokens) for accumulator in self._accumulators)

    def step(self) -> StepFigures:
        """Updates all parameters with the mean gradient. Raises SkipstoneError if no microbatch was added."""
        visits = tuple(accumulator.visits for accumulator in self._accumulators)
        if not any(visits):
            raise SkipstoneError("an inner step needs at least one microbatch")
        self.before_step()
        self.before_change()
        tokens = max(accumulator.tokens for accumulator in self._accumulators)
        for parameter in self._parameters:
            parameter.grad = None
        for accumulator in self._accumulators:
            accumulator.hand_over_mean()
        # Both parts of stage 0 share one norm.
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._training.inner.clip_norm)
        self.steps += 1
        # The schedule follows the tokens of the whole module, and all replicas are assumed equally fast.
        self.tokens += max(0, tokens) * self.replicas
        self._ramp = min(RAMP_STEPS, self._ramp + 1)
        rate = learning_rate(self._training, self.tokens / self._demand) * (self._ramp / RAMP_STEPS)
        self._step(rate)
        for accumulator in self._accumulators:
            accumulator.start_over()
        return StepFigures(self.steps, visits, tokens, norm.item(), rate)

    @torch.no_grad()
    def _step(self, rate: float) -> None:
        training = self._training
        late = staleness_at(self.steps, training.staleness, training.staleness_steps)
        steps_ahead = training.inner.look_ahead * min(4, late)  # farther was never measured
        opened = [(parameter, rule) for rule in self.rules for parameter in rule.parameters if steps_ahead]
        changes, self._ahead = self._ahead, {}  # if a step fails, nothing is taken back in the next one
        for parameter, rule in opened:
            place = changes.setdefault(parameter, zeros_of(parameter))
            with rule.opened(parameter) as values:
                values.copy_(torch.sub(values, place, out=place))  # both are where the last step ended
        for rule in self.rules:
            rule.step(rate)
        for parameter, rule in opened:
            place = changes[parameter]
            with rule.opened(parameter) as values:
                values.add_(torch.sub(values, place, out=place).mul_(steps_ahead))
        self._ahead = changes

    def export_state(self, names: Mapping[str, Tensor]) -> InnerState:
        """Copies the optimizer state to the CPU, keyed by the module's parameter names (`parameters_of`)."""
        shared = self.shared_state(names)
        return InnerState(shared.steps, {name: _copy(state) for name, state in shared.parameters.items()})

    def shared_state(self, names: Mapping[str, Tensor]) -> InnerState:
        """Returns the optimizer state on its device, keyed like `export_state`, not copied: steps change it."""
        states = {weight: rule.exported(state) for rule in self.rules for weight, state in rule.states.items()}
        named = self._named(names).items()
        return InnerState(self.steps, {name: states[weight] for name, weight in named if weight in states})

    def moved(self, names: Mapping[str, Tensor]) -> frozenset[str]:
        return frozenset(self._named(names))

    def import_state(self, names: Mapping[str, Tensor], saved: InnerState) -> None:
        """Restores an exported optimizer state. Raises StateError, changing nothing, if module or rule differ."""
        named = self._named(names)
        rules = {parameter: rule for rule in self.rules for parameter in rule.parameters}
        for name, state in saved.parameters.items():
            if name not in named or not _fits(state, rules[named[name]], named[name]):
                raise StateError("the saved optimizer state belongs to another model or another inner.name")
        self.before_change()
        self.steps = saved.steps
        self._forget()
        for name, state in saved.parameters.items():
            parameter, rule = named[name], rules[named[name]]
            tensors = {slot: t.to(parameter.device, parameter.dtype, copy=True) for slot, t in state.tensors.items()}
            rule.states[parameter] = rule.restored(parameter, ParameterState(state.steps, tensors))

    def _named(self, names: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """Maps names to this optimizer's parameters, by data pointers because the tensors in `names` are detached."""
        own = {parameter.data_ptr(): parameter for parameter in self._parameters}
        return {name: own[tensor.data_ptr()] for name, tensor in names.items() if tensor.data_ptr() in own}

    def start_anew(self, steps: int, tokens: int) -> None:
        """Resets moments and counters after the parameters were replaced, and ramps the learning rate up again."""
        self.before_change()
        self.steps, self.tokens = steps, tokens
        self._ramp = 0
        self._forget()

    def _forget(self) -> None:
        self._ahead.clear()
        for rule in self.rules:
            rule.clear()


def _rules(
    inner: InnerSection, accumulators: Sequence[Accumulator], submit: Submit, moments: MomentType
) -> tuple[InnerRule[Any], ...]:
    """Returns the optimizer rules of a module. Each parameter belongs to one of them."""
    names = _names(accumulators)
    matrices = {parameter: None for parameter, name in names.items() if is_block_matrix(name, tuple(parameter.shape))}
    others = [parameter for parameter in names if parameter not in matrices]
    if inner.name == "soap":
        return AdamW(others, inner), Soap(tuple(matrices), inner, submit)
    if inner.name == "muon":
        return AdamW(others, inner), Muon(tuple(matrices), inner)
    if moments is MomentType.EIGHT_BIT:
        packed = {p: None for p, name in names.items() if has_eight_bits(name, tuple(p.shape))}
        return AdamW([p for p in names if p not in packed], inner), EightBitAdamW(tuple(packed), inner)
    return (AdamW([*matrices, *others], inner),)


def _names(accumulators: Sequence[Accumulator]) -> dict[nn.Parameter, str]:
    """Returns each parameter's name. A tied embedding has the name of the embedding, not of the head."""
    names: dict[nn.Parameter, str] = {}
    for accumulator in accumulators:
        for name, parameter in zip(accumulator.names, accumulator.parameters, strict=True):
            names.setdefault(parameter, name)
    return names


def optimizer_bytes(training: TrainingSection, name: str, shape: tuple[int, ...], moments: MomentType) -> int:
    """Returns the bytes of optimizer state for one parameter on the compute device."""
    inner, is_ahead = training.inner, training.inner.look_ahead * training.staleness > 0
    ahead = FLOAT_BYTES * math.prod(shape) * is_ahead
    if moments_of(inner, moments).value is MomentType.EIGHT_BIT and has_eight_bits(name, shape):
        return ahead + EightBitAdamW.state_bytes(shape)
    if inner.name == "adamw" or not is_block_matrix(name, shape):
        return ahead + AdamW.state_bytes(shape)
    return ahead + (Muon.state_bytes(shape) if inner.name == "muon" else Soap.state_bytes(shape, inner.largest_side))


def _copy(state: ParameterState) -> ParameterState:
    unpacked = {slot: packed.copied() for slot, packed in state.packed.items()}
    return ParameterState(state.steps, {slot: copied(tensor) for slot, tensor in state.tensors.items()} | unpacked)


def _fits(state: ParameterState, rule: InnerRule[Any], parameter: nn.Parameter) -> bool:
    shapes = {slot: tuple(tensor.shape) for slot, tensor in state.tensors.items()}
    return state.steps > 0 and shapes == rule.slots(parameter, state.steps)


@torch.no_grad()
def fold(sums: Sequence[Tensor], gradients: Sequence[Tensor], weight: int) -> None:
    """Adds `weight` times the gradients to the sums. Allocates all memory before the first addition."""
    if not sums:
        return
    if all(total.dtype is gradient.dtype for total, gradient in zip(sums, gradients, strict=True)):
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient, alpha=weight)
        return
    # One buffer, as large as the largest sum, widens each gradient in turn.
    room = sums[0].new_empty(max(total.numel() for total in sums))
    for total, gradient in zip(sums, gradients, strict=True):
        total.add_(room[: total.numel()].view_as(total).copy_(gradient), alpha=weight)


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Tells whether all elements of the gradients are finite. Returns False too if their norm overflows float32."""
    return math.isfinite(torch.nn.utils.get_total_norm(gradients).item())
