"""Backward passes in parts: with deferred weight gradients, or block by block.

No peer waits for a linear layer's weight gradient, so `SplitDevice` computes the input's gradient first, and
`DeferredWeights` the products in idle time (zero-bubble schedules, Qi et al. 2024, arXiv:2401.10241). `BlockByBlock`
needs the graph of one block only, on devices with little memory (Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from node.model import passes
from node.model.blocks import Documents, Linear, Rotary
from node.model.device import device_errors
from node.model.optimizer import Accumulator, Addition
from node.model.optimizers.inner_rule import AtDeadline, Deferred, Submit
from node.model.packed import NarrowCopy
from node.model.parts import BlockStack
from node.model.passes import Around, Gradients, OneDevice, Visit
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import MicrobatchId, Reasoned

_CHUNK_OPERATIONS: Final = {"cpu": 1e8}
"""Operations of one chunk by kind of device, at most: 1 to 5 ms of one core."""
_ELSEWHERE: Final = 2e10
_LEAST_ROWS, _LEAST_TOKENS = 16, 64
"""Smallest chunk: a smaller one reads and adds more than it computes."""
_LARGEST: Final = torch.finfo(torch.float32).max


# ---- the first half: all gradients but those of linear layers' weights -----------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """A linear layer in a forward pass."""

    weight: int
    """Place of its weight among the part's parameters."""
    values: Tensor
    """Its input, which the graph holds, too."""
    output: GradientEdge


@dataclass(frozen=True, slots=True, eq=False)
class SplitVisit(Visit):
    """A visit whose linear layers were noted."""

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
    """Places and gradients of the parameters that are no linear layer's weight."""
    products: tuple[_Product, ...]

    @property
    def held_bytes(self) -> int:
        kept = [tensor for product in self.products for tensor in (product.values, product.gradients)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(storages.values())

    def is_bounded(self) -> Tensor:
        """Whether all gradients will be finite, a bool on the device."""
        # An element of a product is at most the product of the norms (Cauchy and Schwarz). Gradients for which that
        # exceeds float32 count as not finite.
        bound = _length([self.source, *(gradient for _, gradient in self.others)])
        if self.products:
            values = _length([product.values for product in self.products])
            bound = bound + values * _length([product.gradients for product in self.products])
        return bound < _LARGEST

    @torch.no_grad()
    def pieces(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Yields parts of the parameters' gradients: place, rows, and a summand for these."""
        for place, gradient in self.others:
            yield place, slice(None), gradient
        for product in self.products:
            for tokens, rows in product.pieces():
                yield product.weight, rows, product.gradients[tokens, rows].T @ product.values[tokens]

    def moved(self, places: int) -> SplitGradients:
        """The same of a part whose parameters come so many places later."""
        return SplitGradients(
            self.source,
            tuple((place + places, gradient) for place, gradient in self.others),
            tuple(_Product(each.weight + places, each.values, each.gradients) for each in self.products),
        )


def _length(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(tensors).float()


class Splitting(Protocol):
    """Passes whose backward pass can leave the weights of linear layers out."""

    def first_half(self, visit: Visit, gradient: Tensor) -> SplitGradients:
        """Computes the gradients of the visit's input and of all parameters but the linear layers' weights."""


class SplitDevice(OneDevice):
    """The passes of a part on one device, whose backward pass can leave the weights of linear layers out."""

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
        """Parameters that graphs refer to directly, not by a narrow copy."""

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
        """Computes the first half; frees the graph. No result shares memory with `gradient` or the visit's input."""
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


# ---- the second half: weight gradients in idle time ------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _PutOff:
    """The second half of one microbatch's backward pass."""

    microbatch: MicrobatchId
    tokens: int
    others: deque[tuple[int, Tensor]]
    """Gradients that are computed, but not added."""
    pieces: deque[tuple[_Product, slice, slice]]
    """Products that are not computed, with their tokens and rows."""
    held_bytes: int
    ended: Callable[[float | None], None]
    labels: int = 0
    """Predicted tokens; 0 for all."""
    begun: bool = False
    seconds: float = 0.0
    work: Deferred | None = None


class DeferredWeights:
    """The weight gradients that a replica has deferred. Used on the compute thread.

    Args:
        chosen: whether they are deferred, and why.
        passes: the passes that can be split; None if weights are not deferred.
        sums: get the gradients.
        submit: takes idle work.
    """

    def __init__(
        self, chosen: Reasoned[bool], passes: Splitting | None, sums: Accumulator, submit: Submit = AtDeadline
    ) -> None:
        self.chosen = chosen
        self.visits = 0
        self.held_bytes = 0
        """Memory of the inputs and gradients that are kept now."""
        self.peak_bytes = 0
        self._passes = passes
        self._sums = sums
        self._submit = submit
        self._waiting: dict[MicrobatchId, _PutOff] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def first_half(self, visit: Visit, gradient: Tensor) -> SplitGradients:
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
        """Promises the sums a microbatch's gradient, which is bounded. From now on it counts.

        Args:
            labels: predicted tokens; 0 for all.
            ended: called at the end with the seconds that it took; None if it was cancelled.
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
        """Computes all that was deferred. Without memory raises ResourceExhausted and keeps what has not been added."""
        for waiting in list(self._waiting.values()):
            self._finish(waiting)

    def cancel(self, microbatch: MicrobatchId) -> bool:
        """Takes a promise back if nothing of it has been added yet. Else adds the rest and returns False."""
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
        # A chunk that found no memory in idle time is tried again.
        assert waiting.work is not None
        waiting.work.cancel()
        deque(self._chunks(waiting), maxlen=0)

    def _chunks(self, waiting: _PutOff) -> Iterator[None]:
        """Goes on with the work of one microbatch. Frees the memory of what has been added."""
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


# ---- block by block --------------------------------------------------------------------------------------------------


class _Alone(nn.Module):
    """One block of a stack, with the rotary tables of all."""

    def __init__(self, block: nn.Module, rotary: Rotary) -> None:
        super().__init__()
        self.block = block
        self._rotary = (rotary,)  # a tuple, so that the tables are no part of this module

    def forward(self, hidden: Tensor, documents: Documents = ()) -> Tensor:
        angles = self._rotary[0](hidden.shape[1], documents, dtype=hidden.dtype)
        output: Tensor = self.block(hidden, angles, documents)
        return output


@dataclass(frozen=True, slots=True, eq=False)
class BlockVisit(Visit):
    """A visit of a stack: each block's input, and its graph or None."""

    documents: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    graphs: tuple[SplitVisit | None, ...]

    def kept(self) -> BlockVisit:
        """The part that backward needs: all but the result."""
        return replace(self, result=self.result.new_empty(0))


@dataclass(frozen=True, slots=True, eq=False)
class AddedGradients:
    """The gradient of a visit's input; those of the parameters have been added."""

    source: Tensor
    are_finite: Tensor
    """Whether all are, a bool on the device. If not, some have been added, all of them finite."""
    take_back: Callable[[], None]
    """Subtracts what has been added to the sums, up to rounding."""


class BlockByBlock:
    """The passes of a stack; see `node.model.passes.Passes`. Made once for a stack, to which it stays hooked."""

    def __init__(self, stack: BlockStack, hidden_type: torch.dtype) -> None:
        blocks = [_Alone(block, stack.rotary) for block in stack.model["layers"].children()]
        self.blocks = len(blocks)
        self._blocks = [SplitDevice(block, hidden_type) for block in blocks]
        self._firsts = [0, *accumulate(len(list(block.parameters())) for block in blocks)][:-1]

    def forward(
        self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext, graphs: int | None = None
    ) -> BlockVisit:
        """Computes the stack, keeping the graphs of the last `graphs` blocks; None for all."""
        without = 0 if graphs is None else self.blocks - graphs
        hidden, inputs, kept = source.detach(), [], list[SplitVisit | None]()
        for index, block in enumerate(self._blocks):
            inputs.append(hidden)
            visit = None if index < without else block.forward(hidden, documents, around)
            kept.append(visit)
            hidden = block.evaluate(hidden, documents) if visit is None else visit.result.detach()
        return BlockVisit(source, hidden, documents, tuple(inputs), tuple(kept))

    def backward(self, visit: Visit, gradient: Tensor) -> Gradients:
        assert isinstance(visit, BlockVisit)
        found: list[tuple[Tensor, ...]] = []
        for index in reversed(range(self.blocks)):
            gradients = self._blocks[index].backward(self._graph(visit, index), gradient)
            assert gradients.source is not None
            gradient = gradients.source
            found.append(gradients.parameters)
        return Gradients(gradient, tuple(each for parameters in reversed(found) for each in parameters))

    def first_half(self, visit: Visit, gradient: Tensor) -> SplitGradients:
        assert isinstance(visit, BlockVisit)
        halves: list[SplitGradients] = []
        for index in reversed(range(self.blocks)):
            half = self._blocks[index].first_half(self._graph(visit, index), gradient)
            gradient = half.source
            halves.append(half.moved(self._firsts[index]))
        others = tuple(each for half in halves for each in half.others)
        return SplitGradients(gradient, others, tuple(product for half in halves for product in half.products))

    def backward_into(self, sums: Accumulator, visit: Visit, gradient: Tensor, weight: int) -> AddedGradients:
        """Adds parameter gradients, scaled by `weight`, without registering the microbatch.

        Stops at the first block whose gradients may not be finite. Without memory, takes back what was added.
        """
        assert isinstance(visit, BlockVisit)
        added = [0]
        try:
            source, are_finite = self._add(sums, visit, gradient, weight, added)
        except BaseException:
            self._take_back(sums, visit, gradient, weight, added)
            raise
        return AddedGradients(source, are_finite, lambda: self._take_back(sums, visit, gradient, weight, added))

    def _take_back(self, sums: Accumulator, visit: BlockVisit, gradient: Tensor, weight: int, added: list[int]) -> None:
        """Computes the same again, as far as it came."""
        if added[0]:
            again = self.forward(visit.source, visit.documents, graphs=0)
            self._add(sums, again, gradient, -weight, [0], added[0])

    def _add(
        self, sums: Accumulator, visit: BlockVisit, gradient: Tensor, weight: int, added: list[int], most: int = 2**62
    ) -> tuple[Tensor, Tensor]:
        """Adds `most` pieces of gradients at most, and counts them in `added`."""
        are_finite = torch.ones((), dtype=torch.bool, device=gradient.device)
        for index in reversed(range(self.blocks)):
            half = self._blocks[index].first_half(self._graph(visit, index), gradient)
            gradient, are_finite = half.source, are_finite & half.is_bounded()
            for place, rows, piece in half.pieces():
                if added[0] == most:
                    return gradient, are_finite
                finite = torch.where(are_finite, piece, 0.0)
                sums.add_to(self._firsts[index] + place, rows, finite, weight)
                added[0] += 1
        return gradient, are_finite

    def _graph(self, visit: BlockVisit, index: int) -> SplitVisit:
        graph = visit.graphs[index]
        return self._blocks[index].forward(visit.inputs[index], visit.documents) if graph is None else graph

    def evaluate(self, source: Tensor, documents: tuple[int, ...]) -> Tensor:
        for block in self._blocks:
            source = block.evaluate(source, documents)
        return source

    def parameters_changed(self) -> None:
        for block in self._blocks:
            block.parameters_changed()

    def storages(self) -> set[int]:
        return {storage for block in self._blocks for storage in block.storages()}

    def weights(self) -> tuple[Tensor, ...]:
        return tuple(tensor for block in self._blocks for tensor in block.weights())
