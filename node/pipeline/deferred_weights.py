"""Weight gradients that are put off: backward sends the gradient of its input on first, and the gradients of the linear
layers' weights, on which nobody waits before the inner step, are computed in idle time, at the latest inside that step.

A linear layer's weight gradient is the product of its output's gradient and its input, so these two are kept (they are
less than the visit's graph, whose place in memory they take), and are what they were whatever becomes of the parameters
meanwhile. The split is that of zero-bubble schedules (Qi et al. 2024, arXiv:2401.10241), without a schedule.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from node.model import passes
from node.model.blocks import Linear
from node.model.device import device_errors
from node.model.optimizer import Accumulator, Addition
from node.model.optimizers.inner_rule import AtDeadline, Deferred, Submit
from node.model.packed.narrow_copy import NarrowCopy
from node.model.passes import Around, Gradients, OneDevice, Visit
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import MicrobatchId, Reasoned

_CHUNK_OPERATIONS: Final = {"cpu": 1e8}
"""Of one chunk at most, by the kind of device: 1 to 5 ms of one core."""
_ELSEWHERE: Final = 2e10
_LEAST_ROWS, _LEAST_TOKENS = 16, 64
"""Of a chunk: with fewer, it reads and adds more than it computes."""
_LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """A linear layer in a forward pass."""

    weight: int
    """Which of the part's parameters."""
    values: Tensor
    """Its input, which the graph holds, too."""
    output: GradientEdge


@dataclass(frozen=True, slots=True, eq=False)
class SplitVisit(Visit):
    """A visit of which the linear layers were noted."""

    noted: tuple[_Noted, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """A weight gradient [outputs, inputs] that is to be computed."""

    weight: int
    values: Tensor
    """[tokens, inputs]"""
    gradients: Tensor
    """[tokens, outputs]"""

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Cuts it into chunks: tokens, and rows of the weight."""
        (tokens, inputs), outputs = self.values.shape, self.gradients.shape[1]
        most = _CHUNK_OPERATIONS.get(self.values.device.type, _ELSEWHERE) / (2 * inputs)
        length = min(tokens, max(_LEAST_TOKENS, int(most / _LEAST_ROWS)))
        width = min(outputs, max(_LEAST_ROWS, int(most / length)))
        for row in range(0, outputs, width):
            for token in range(0, tokens, length):
                yield slice(token, token + length), slice(row, row + width)


@dataclass(frozen=True, slots=True, eq=False)
class SplitGradients:
    """The first half of a backward pass, and what the second half needs."""

    source: Tensor
    others: tuple[tuple[int, Tensor], ...]
    """The gradients of the parameters that are no linear layer's weight, with their places."""
    products: tuple[_Product, ...]

    @property
    def held_bytes(self) -> int:
        """The memory of what is kept for the second half."""
        kept = [tensor for product in self.products for tensor in (product.values, product.gradients)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(storages.values())

    def is_bounded(self) -> Tensor:
        """Whether all gradients are finite, those that are to be computed included, a bool on the device: an element of
        a product is at most the product of the norms (Cauchy and Schwarz). What is so large that this exceeds float32
        counts as not finite.
        """
        bound = _length([self.source, *(gradient for _, gradient in self.others)])
        if self.products:
            values = _length([product.values for product in self.products])
            bound = bound + values * _length([product.gradients for product in self.products])
        return bound < _LARGEST

    @torch.no_grad()
    def pieces(self) -> Iterator[tuple[int, slice, Tensor]]:
        """The gradients of the parameters, of some rows each: which of the parameters, which rows, and a part of the
        sum that is their gradient."""
        for place, gradient in self.others:
            yield place, slice(None), gradient
        for product in self.products:
            for tokens, rows in product.pieces():
                yield product.weight, rows, product.gradients[tokens, rows].T @ product.values[tokens]


def _length(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(tensors).float()


def moved(half: SplitGradients, places: int) -> SplitGradients:
    """The same of a part whose parameters come so many places later."""
    return SplitGradients(
        half.source,
        tuple((place + places, gradient) for place, gradient in half.others),
        tuple(_Product(each.weight + places, each.values, each.gradients) for each in half.products),
    )


class Splitting(Protocol):
    """Passes whose backward pass can leave the weights of linear layers out."""

    def first_half(self, visit: Visit, gradient: Tensor) -> SplitGradients:
        """Computes the gradients of the visit's input and of all parameters but the linear layers' weights."""
        ...


class SplitDevice(OneDevice):
    """The passes of a part on the device where it is, whose backward pass can leave the weights of linear layers out.

    Made once for a part: it stays hooked to the part's linear layers. With hidden states narrower than float32 these
    share one narrow copy of their weights among all graphs.
    """

    def __init__(self, part: nn.Module, hidden_type: torch.dtype = torch.float32) -> None:
        super().__init__(part)
        places = {parameter: place for place, parameter in enumerate(part.parameters())}
        linears = [module for module in part.modules() if isinstance(module, Linear)]
        weights = {places[linear.weight] for linear in linears}
        self._others = [(place, parameter) for parameter, place in places.items() if place not in weights]
        self._noted: list[_Noted] | None = None
        for linear in linears:
            linear.register_forward_hook(partial(self._note, places[linear.weight]))
            if linear.narrow is None and hidden_type is not linear.weight.dtype:
                linear.narrow = NarrowCopy(linear.weight, hidden_type)
        self._copies = [linear.narrow for linear in linears if linear.narrow is not None]
        whole = [linear.weight for linear in linears if linear.narrow is None]
        self._read = [*whole, *(parameter for _, parameter in self._others)]
        """The parameters that are computed with themselves."""

    def _note(self, weight: int, linear: nn.Module, values: tuple[Tensor, ...], output: Tensor) -> None:
        if self._noted is not None:
            self._noted.append(_Noted(weight, values[0].detach(), get_gradient_edge(output)))

    def forward(self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext) -> SplitVisit:
        noted: list[_Noted] = []
        self._noted = noted
        try:
            visit = super().forward(source, documents, around)
        finally:
            self._noted = None
        return SplitVisit(visit.source, visit.result, tuple(noted))

    def backward(self, visit: Visit, gradient: Tensor) -> Gradients:
        if not self._copies:
            return super().backward(visit, gradient)
        half = self.first_half(visit, gradient)
        found = dict(half.others)
        for product in half.products:
            found[product.weight] = (product.gradients.T @ product.values).float()
        return Gradients(half.source, tuple(gradient for _, gradient in sorted(found.items(), key=itemgetter(0))))

    def parameters_changed(self) -> None:
        for copy in self._copies:
            copy.changed()

    def storages(self) -> set[int]:
        return super().storages() | {copy.storage for copy in self._copies}

    def weights(self) -> tuple[Tensor, ...]:
        return (*self._read, *(copy.fresh() for copy in self._copies))

    def first_half(self, visit: Visit, gradient: Tensor) -> SplitGradients:
        """Computes the gradients of the visit's input and of all parameters but the linear layers' weights; frees the
        graph. Of what is kept nothing shares the memory of `gradient` or of the visit's input, which others may write.
        """
        assert isinstance(visit, SplitVisit)
        foreign = {tensor.untyped_storage().data_ptr() for tensor in (gradient, visit.source)}

        def own(tensor: Tensor) -> Tensor:
            flat = tensor.flatten(0, -2)
            return flat.clone() if tensor.untyped_storage().data_ptr() in foreign else flat

        leaves = [get_gradient_edge(leaf) for leaf in (visit.source, *(parameter for _, parameter in self._others))]
        found = passes.gradients_of(visit, gradient, [*leaves, *(noted.output for noted in visit.noted)])
        source, small, outputs = found[0], found[1 : len(leaves)], found[len(leaves) :]
        return SplitGradients(
            source,
            tuple((place, each) for (place, _), each in zip(self._others, small, strict=True)),
            tuple(
                _Product(noted.weight, own(noted.values), own(each))
                for noted, each in zip(visit.noted, outputs, strict=True)
            ),
        )


@dataclass(slots=True, eq=False)
class _PutOff:
    """The second half of one microbatch's backward pass."""

    microbatch: MicrobatchId
    tokens: int
    others: deque[tuple[int, Tensor]]
    """What is computed already, but not added."""
    pieces: deque[tuple[_Product, slice, slice]]
    """What is not, each with its tokens and rows."""
    held_bytes: int
    ended: Callable[[float | None], None]
    labels: int = 0
    """Of the tokens; 0 where all are."""
    begun: bool = False
    """Whether something of it has been added."""
    seconds: float = 0.0
    work: Deferred | None = None


class DeferredWeights:
    """The weight gradients that a replica has put off. Used on the compute thread.

    Args:
        chosen: whether they are put off, and why. Where they are not, this only says so.
        passes: which can be split; None where weights are not put off.
        sums: get the gradients.
        submit: takes the work for idle time.
    """

    def __init__(
        self, chosen: Reasoned[bool], passes: Splitting | None, sums: Accumulator, submit: Submit = AtDeadline
    ) -> None:
        self.chosen = chosen
        self.visits = 0
        """Whose weight gradients were put off."""
        self.held_bytes = 0
        """Of the inputs and gradients that are kept now."""
        self.peak_bytes = 0
        self._passes = passes
        self._sums = sums
        self._submit = submit
        self._waiting: dict[MicrobatchId, _PutOff] = {}

    @property
    def waiting(self) -> int:
        """The visits whose weight gradients have not been computed yet."""
        return len(self._waiting)

    def first_half(self, visit: Visit, gradient: Tensor) -> SplitGradients:
        """Computes the first half of backward (`SplitDevice.first_half`), where weights are put off."""
        assert self._passes is not None
        return self._passes.first_half(visit, gradient)

    def put_off(
        self,
        microbatch: MicrobatchId,
        tokens: int,
        half: SplitGradients,
        ended: Callable[[float | None], None],
        labels: int = 0,
    ) -> Addition:
        """Promises the sums a microbatch's gradient, which is bounded, to be computed later; from now on it counts. Or
        says why not.

        Args:
            labels: how many of the tokens are; 0 for all.
            ended: called when nothing is kept any more, with the seconds that it took; None when it was cancelled.
        """
        if self._sums.has(microbatch):
            return Addition.DUPLICATE
        self._sums.promise(microbatch, tokens, labels)
        pieces = deque((product, *piece) for product in half.products for piece in product.pieces())
        waiting = _PutOff(microbatch, tokens, deque(half.others), pieces, half.held_bytes, ended, labels)
        self._waiting[microbatch] = waiting
        self.visits += 1
        self.held_bytes += waiting.held_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        chunks, name = self._chunks(waiting), f"weight gradients of {microbatch}"
        try:
            waiting.work = self._submit(chunks, name)
        except ResourceExhausted:
            waiting.work = AtDeadline(chunks, name)
        return Addition.ADDED

    def finish(self) -> None:
        """Computes all that was put off.

        Raises:
            ResourceExhausted: there is no memory for it; what has not been added is kept.
        """
        for waiting in list(self._waiting.values()):
            self._finish(waiting)

    def cancel(self, microbatch: MicrobatchId) -> bool:
        """Takes a promise back, if nothing of it has been added yet; else keeps it entirely, and says False. Errors as
        `finish`."""
        waiting = self._waiting.get(microbatch)
        if waiting is None:
            return False
        if waiting.begun:
            self._finish(waiting)
            return False
        assert waiting.work is not None
        waiting.work.cancel()
        self._sums.break_promise(microbatch, waiting.tokens, waiting.labels)
        self._end(waiting, None)
        return True

    def _finish(self, waiting: _PutOff) -> None:
        """Whatever became of it in idle time: a chunk that found no memory there is tried again."""
        assert waiting.work is not None
        waiting.work.cancel()
        deque(self._chunks(waiting), maxlen=0)

    def _chunks(self, waiting: _PutOff) -> Iterator[None]:
        """Goes on with the work of one microbatch. What has been added lets go of its memory."""
        while waiting.others:
            place, gradient = waiting.others[0]
            self._add(waiting, place, slice(None), gradient)
            waiting.others.popleft()
        while waiting.pieces:
            begun = time.perf_counter()
            product, tokens, rows = waiting.pieces[0]
            with torch.no_grad(), device_errors():
                gradient = product.gradients[tokens, rows].T @ product.values[tokens]
            self._add(waiting, product.weight, rows, gradient)
            waiting.pieces.popleft()
            waiting.seconds += time.perf_counter() - begun
            yield
        self._end(waiting, waiting.seconds)

    def _add(self, waiting: _PutOff, place: int, rows: slice, gradient: Tensor) -> None:
        with device_errors():
            self._sums.add_to(place, rows, gradient, waiting.tokens)
        waiting.begun = True

    def _end(self, waiting: _PutOff, seconds: float | None) -> None:
        del self._waiting[waiting.microbatch]
        self.held_bytes -= waiting.held_bytes
        waiting.others.clear()
        waiting.pieces.clear()
        waiting.ended(seconds)
