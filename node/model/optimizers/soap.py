"""SOAP: Adam in the eigenbasis of Shampoo's statistics, refreshed with a fixed delay in steps.

The fixed delay keeps results independent of idle time. Eigenvectors are refined in chunks of a few milliseconds,
because LAPACK would block for a second on a side of 2048. Panels are orthogonalized twice (block Gram-Schmidt; Giraud
et al. 2005, https://doi.org/10.1007/s00211-005-0615-4).
"""

import logging
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from node.model.optimizers.inner_rule import AtDeadline, Deferred, InnerRule, ParameterState, Shape, Submit, zeros_of
from protocol.manifest.manifest import InnerSection
from swarm.vocabulary.errors import ResourceExhausted

_CHUNK_OPERATIONS: Final = {"cpu": 1e8}  # Floating point operations per chunk by device type: 1 to 5 ms on one core
_ELSEWHERE: Final = 5e9
# Narrower panels would read the whole matrix for little work.
_NARROWEST: Final = 8  # Minimum width of a panel, in columns
_SHIFT: Final = 1e-6  # Fraction of the largest eigenvalue added to all, to keep the vectors of null directions
_TOLERANCE: Final = 1e-3  # Largest accepted deviation of the basis from orthonormality


@dataclass(frozen=True, slots=True, eq=False)
class Eigenbasis:
    """Eigenvectors of one side's statistics, sorted by descending eigenvalue."""

    vectors: Tensor  # [side, side] with orthonormal columns
    order: Tensor  # [side] int64: column of the previous basis that each vector came from


def refined(statistics: Tensor, basis: Tensor, iterations: int = 1) -> Generator[None, None, Eigenbasis | None]:
    """Refines the eigenvectors `basis` of `statistics` by orthogonal iteration (arXiv:2409.11321, algorithm 4).

    Yields after each chunk of work. Both arguments are [side, side] float32 and stay unchanged. Returns None if
    `statistics` is zero or not finite, or the result is not orthonormal.
    """
    order = torch.arange(len(basis), device=basis.device)
    for _ in range(iterations):
        product, values = torch.empty_like(basis), basis.new_empty(len(basis))
        for columns in _panels(basis):
            torch.mm(statistics, basis[:, columns], out=product[:, columns])
            values[columns] = (basis[:, columns] * product[:, columns]).sum(0)
            yield
        largest = values.max().item()
        if not 0 < largest < math.inf:  # false for NaN as well
            return None
        turn = values.argsort(descending=True, stable=True)  # orthogonal iteration finds the largest first
        vectors = torch.empty_like(basis)
        for columns in _panels(basis):
            kept = turn[columns]
            panel = product[:, kept].div_(largest).add_(basis[:, kept], alpha=_SHIFT)
            vectors[:, columns] = yield from _orthonormal(panel, vectors[:, : columns.start])
        order, basis = order[turn], vectors
    error = torch.zeros((), device=basis.device)
    for columns in _panels(basis):
        products = basis.T @ basis[:, columns]
        products.diagonal(-columns.start).sub_(1)
        error = torch.maximum(error, products.abs().max())
        yield
    return Eigenbasis(basis, order) if error.item() <= _TOLERANCE else None


def _orthonormal(panel: Tensor, before: Tensor) -> Generator[None, None, Tensor]:
    """Orthonormalizes the columns of `panel` against each other and against the orthonormal columns `before`."""
    for _ in range(2 if before.shape[1] else 1):  # the second pass removes the rounding errors of the first
        rest = panel - before @ (before.T @ panel) if before.shape[1] else panel
        panel = torch.linalg.qr(rest).Q
        yield
    return panel


def _panels(matrix: Tensor) -> list[slice]:
    """Splits a matrix into panels of columns, such that a product of the matrix and a panel takes one chunk of time."""
    side = len(matrix)
    width = max(_NARROWEST, int(_CHUNK_OPERATIONS.get(matrix.device.type, _ELSEWHERE) / (4 * side**2)))
    return [slice(start, min(side, start + width)) for start in range(0, side, width)]


log = logging.getLogger(__name__)

SIDES: Final = ("left", "right")


@dataclass(frozen=True, slots=True)
class RefreshClock:
    """Schedule of one matrix's refreshes: they begin after step 1, then every `every` steps, shifted by `offset`."""

    every: int
    lag: int  # Steps from the start of a refresh to its use; at most `every`
    offset: int

    def begun(self, steps: int) -> int:
        """Returns the step after which the latest refresh of the eigenbases began, when `steps` steps are done."""
        latest = steps - (steps - self.offset) % self.every  # no refresh begins while the first one runs
        return latest if latest > self.lag else 1

    def due(self, steps: int) -> int:
        """Returns the step before which the bases of the latest refresh come into use."""
        return self.begun(steps) + self.lag

    def moments(self, steps: int) -> int:
        """Returns the number of gradients in the moments, which restart when the first refresh is applied."""
        return steps if steps <= self.lag else steps - self.lag


@dataclass(slots=True, eq=False)
class Refresh:
    """Computation of new eigenbases for one matrix, in progress."""

    statistics: Mapping[str, Tensor]  # Statistics by side, as they were at its start
    refined: dict[str, Eigenbasis | None] = field(default_factory=dict)
    work: Deferred | None = None


@dataclass(slots=True, eq=False)
class Preconditioned:
    """SOAP state of one matrix: moments, statistics and eigenbases, all float32."""

    steps: int
    mean: Tensor
    variance: Tensor  # Mean squared gradient in the eigenbasis
    statistics: dict[str, Tensor]  # Mean of G G^T (left) and G^T G (right)
    bases: dict[str, Tensor]  # Eigenvectors as columns, by side
    refresh: Refresh | None = None

    def rotated(self, matrix: Tensor) -> Tensor:
        if "left" in self.bases:
            matrix = self.bases["left"].T @ matrix
        return matrix @ self.bases["right"] if "right" in self.bases else matrix

    def rotated_back(self, matrix: Tensor) -> Tensor:
        if "left" in self.bases:
            matrix = self.bases["left"] @ matrix
        return matrix @ self.bases["right"].T if "right" in self.bases else matrix


class Soap(InnerRule[Preconditioned]):
    """SOAP (Vyas et al. 2024, arXiv:2409.11321, algorithm 3) with AdamW's weight decay, for matrices.

    Equals AdamW until the first refresh. A side longer than `largest_side` has no basis. `submit` schedules refreshes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], inner: InnerSection, submit: Submit = AtDeadline) -> None:
        super().__init__(parameters, inner)
        self._submit = submit
        every, lag, count = inner.refresh_steps, inner.refresh_lag, len(self.parameters)
        self._clocks = {
            # Refreshes of different matrices take turns, so that no step has all the work.
            parameter: RefreshClock(every, lag, index * every // count)
            for index, parameter in enumerate(self.parameters)
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._move(parameter, parameter.grad, rate)

    def clear(self) -> None:
        for state in self.states.values():
            if state.refresh is not None and state.refresh.work is not None:
                state.refresh.work.cancel()
        super().clear()

    def slots(self, parameter: nn.Parameter, steps: int) -> Mapping[str, Shape]:
        shape, clock = tuple(parameter.shape), self._clocks[parameter]
        kinds = ("statistics", "basis", "begun") if steps < clock.due(steps) else ("statistics", "basis")
        sides = based_sides(shape, self._inner.largest_side)
        square = {f"{kind}_{side}": (length, length) for side, length in sides.items() for kind in kinds}
        return {"exp_avg": shape, "exp_avg_sq": shape, **square}

    @staticmethod
    def state_bytes(shape: Shape, largest_side: int) -> int:
        """Returns the largest size of a matrix's SOAP state: two moments, and old and new statistics and bases."""
        squares = sum(length**2 for length in based_sides(shape, largest_side).values())
        return torch.float32.itemsize * (2 * math.prod(shape) + 4 * squares)

    def exported(self, state: Preconditioned) -> ParameterState:
        begun = {} if state.refresh is None else state.refresh.statistics
        kinds = {"statistics": state.statistics, "basis": state.bases, "begun": begun}
        square = {f"{kind}_{side}": tensor for kind, tensors in kinds.items() for side, tensor in tensors.items()}
        return ParameterState(state.steps, {"exp_avg": state.mean, "exp_avg_sq": state.variance, **square})

    def restored(self, parameter: nn.Parameter, saved: ParameterState) -> Preconditioned:
        tensors = saved.tensors
        by_kind = {
            kind: {side: tensors[f"{kind}_{side}"] for side in SIDES if f"{kind}_{side}" in tensors}
            for kind in ("statistics", "basis", "begun")
        }
        state = Preconditioned(
            saved.steps, tensors["exp_avg"], tensors["exp_avg_sq"], by_kind["statistics"], by_kind["basis"]
        )
        if by_kind["begun"]:
            state.refresh = self._begin(parameter, state, by_kind["begun"])
        return state

    def _move(self, parameter: nn.Parameter, gradient: Tensor, rate: float) -> None:
        inner, clock = self._inner, self._clocks[parameter]
        state = self.states.get(parameter) or self._fresh(parameter)
        self.states[parameter] = state
        state.steps += 1
        if state.refresh is not None and clock.due(state.steps - 1) == state.steps:
            _take_over(state, state.refresh)
        if state.steps == clock.lag + 1:  # the moments belong to the old basis, so they restart with the first refresh
            state.mean.zero_()
            state.variance.zero_()
        moments = clock.moments(state.steps)
        state.mean.lerp_(gradient, 1 - inner.beta1)
        rotated = state.rotated(gradient)
        state.variance.mul_(inner.beta2).addcmul_(rotated, rotated, value=1 - inner.beta2)
        deviation = state.variance.div(1 - inner.beta2**moments).sqrt_().add_(inner.epsilon)
        update = state.rotated_back(state.rotated(state.mean).div_(deviation))
        own_rate, decay = self.rate_and_decay(parameter, rate)
        with self.opened(parameter) as values:
            values.mul_(1 - own_rate * decay)
            values.add_(update, alpha=-own_rate / (1 - inner.beta1**moments))
        for side, statistics in state.statistics.items():
            squares = gradient @ gradient.T if side == "left" else gradient.T @ gradient
            statistics.lerp_(squares, 1 - inner.beta2)
        if clock.begun(state.steps) == state.steps:
            begun = {side: statistics.clone() for side, statistics in state.statistics.items()}
            state.refresh = self._begin(parameter, state, begun)

    def _fresh(self, parameter: nn.Parameter) -> Preconditioned:
        sides = based_sides(tuple(parameter.shape), self._inner.largest_side)
        return Preconditioned(
            0,
            zeros_of(parameter),
            zeros_of(parameter),
            {side: torch.zeros(length, length, device=parameter.device) for side, length in sides.items()},
            {side: torch.eye(length, device=parameter.device) for side, length in sides.items()},
        )

    def _begin(self, parameter: nn.Parameter, state: Preconditioned, begun: Mapping[str, Tensor]) -> Refresh:
        refresh = Refresh(begun)
        # The first basis is the identity, so it takes more iterations.
        iterations = 4 if self._clocks[parameter].begun(state.steps) == 1 else 1
        chunks, name = _refreshed(refresh, dict(state.bases), iterations), f"SOAP {tuple(parameter.shape)}"
        try:
            refresh.work = self._submit(chunks, name)
        except ResourceExhausted:
            refresh.work = AtDeadline(chunks, name)  # the idle queue is full: compute it at the deadline
        return refresh


def based_sides(shape: Shape, largest: int) -> dict[str, int]:
    return {side: length for side, length in zip(SIDES, shape, strict=True) if length <= largest}


def _refreshed(refresh: Refresh, bases: Mapping[str, Tensor], iterations: int) -> Iterator[None]:
    for side, statistics in refresh.statistics.items():
        refresh.refined[side] = yield from refined(statistics, bases[side], iterations)


def _take_over(state: Preconditioned, refresh: Refresh) -> None:
    """Completes a refresh and puts its eigenbases in use. A side whose refresh failed keeps its basis."""
    assert refresh.work is not None
    state.refresh = None
    try:
        refresh.work.finish()
    except (RuntimeError, MemoryError) as error:  # torch: out of memory, or LAPACK did not converge
        log.warning("keeping the old SOAP basis: %s", str(error)[:200])
    for dimension, side in enumerate(SIDES):  # sorting the eigenvectors permutes the axes of the variance
        found = refresh.refined.get(side)
        if found is not None:
            state.bases[side] = found.vectors
            state.variance = state.variance.index_select(dimension, found.order)
