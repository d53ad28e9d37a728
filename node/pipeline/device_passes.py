"""Forward and backward passes with deferred weight gradients, block by block, or on several devices.

Other peers only wait for the input's gradient. `SplitDevice` computes it first, and `DeferredWeights` computes the
weight gradients of linear layers in idle time (zero-bubble schedules, Qi et al. 2024, arXiv:2401.10241). `BlockByBlock`
keeps the graph of one block at a time, for devices with little memory (Chen et al. 2016, arXiv:1604.06174).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from node.concurrency.compute_thread import DeviceThreads
from node.model import passes
from node.model.blocks import Documents, Linear
from node.model.device import device_errors
from node.model.document_attention import CutDocuments, Exchange
from node.model.optimizer import Accumulator, Addition, are_finite, fold
from node.model.optimizers.inner_rule import AtDeadline, Deferred, Submit
from node.model.optimizers.packed import NarrowCopy
from node.model.passes import (
    Around,
    BlockStack,
    Gradients,
    HeadPart,
    HeadPasses,
    HeadVisit,
    OneDevice,
    OneHead,
    Passes,
    PassState,
)
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import MicrobatchId, Reasoned
from swarm.workload.device_shares import CUTTING, Dealing, deal, pieces

_CHUNK_OPERATIONS: Final = {"cpu": 1e8}  # Largest number of operations per chunk by device type: 1 to 5 ms on one core
_ELSEWHERE: Final = 2e10
_LEAST_ROWS, _LEAST_TOKENS = 16, 64  # Smallest chunk. Smaller ones spend more time on memory traffic than on computing.
_LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    weight: int  # Index of its weight among the part's parameters
    values: Tensor  # Input of the linear layer, which the graph holds too
    output: GradientEdge


@dataclass(frozen=True, slots=True, eq=False)
class SplitVisit(PassState):
    noted: tuple[_Noted, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """Weight gradient [outputs, inputs] of a linear layer, to be computed as a product of two kept matrices."""

    weight: int
    values: Tensor  # Inputs, [tokens, inputs]
    gradients: Tensor  # Gradients of the outputs, [tokens, outputs]

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Yields chunks of the matrix product, each as a slice of the tokens and a slice of the weight's rows."""
        (tokens, inputs), outputs = self.values.shape, self.gradients.shape[1]
        most = _CHUNK_OPERATIONS.get(self.values.device.type, _ELSEWHERE) / (2 * inputs)
        length = min(tokens, max(_LEAST_TOKENS, int(most / _LEAST_ROWS)))
        width = min(outputs, max(_LEAST_ROWS, int(most / length)))
        for row in range(0, outputs, width):
            for token in range(0, tokens, length):
                yield slice(token, token + length), slice(row, row + width)


@dataclass(frozen=True, slots=True, eq=False)
class SplitGradients:
    """Results of a backward pass without weight gradients of linear layers, and the inputs to compute these later."""

    source: Tensor
    others: tuple[tuple[int, Tensor], ...]  # Indices and gradients of all parameters except weights of linear layers
    products: tuple[_Product, ...]

    @property
    def held_bytes(self) -> int:
        kept = [tensor for product in self.products for tensor in (product.values, product.gradients)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(storages.values())

    def is_bounded(self) -> Tensor:
        """Tells, without computing the products, whether all gradients are surely finite: a bool on the device."""
        # By Cauchy-Schwarz, an element of a product is at most the product of the norms. Gradients count as not finite
        # if that bound overflows float32.
        bound = _length([self.source, *(gradient for _, gradient in self.others)])
        if self.products:
            values = _length([product.values for product in self.products])
            bound = bound + values * _length([product.gradients for product in self.products])
        return bound < _LARGEST

    @torch.no_grad()
    def pieces(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Yields parameter gradients in pieces to be added up: parameter index, rows, gradient of these rows."""
        for place, gradient in self.others:
            yield place, slice(None), gradient
        for product in self.products:
            for tokens, rows in product.pieces():
                yield product.weight, rows, product.gradients[tokens, rows].T @ product.values[tokens]

    def moved(self, places: int) -> "SplitGradients":
        """Returns a copy with an offset added to the parameter indices, as for one block of a stack."""
        return SplitGradients(
            self.source,
            tuple((place + places, gradient) for place, gradient in self.others),
            tuple(_Product(each.weight + places, each.values, each.gradients) for each in self.products),
        )


def _length(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(tensors).float()


class SplitDevice(OneDevice):
    """Passes on one device whose backward pass can leave weight gradients of linear layers for later."""

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
        self._read = [*whole, *(parameter for _, parameter in self._others)]  # Not by a narrow copy

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

    def backward(self, visit: PassState, gradient: Tensor) -> Gradients:
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

    def first_half(self, visit: PassState, gradient: Tensor) -> SplitGradients:
        """Computes gradients except weights of linear layers. Frees the graph; shares no memory with the inputs."""
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
    """Deferred weight gradients of one microbatch: gradients and matrix products that are not added yet."""

    microbatch: MicrobatchId
    tokens: int
    others: deque[tuple[int, Tensor]]  # Computed gradients that are not added yet
    pieces: deque[tuple[_Product, slice, slice]]  # Products to compute, with their tokens and rows
    held_bytes: int
    ended: Callable[[float | None], None]
    labels: int = 0  # Tokens with a label; 0 for all
    begun: bool = False
    seconds: float = 0.0
    work: Deferred | None = None


class DeferredWeights:
    """Queue of a replica's deferred weight gradients, computed in idle time. `passes` is None if none are deferred."""

    def __init__(
        self,
        chosen: Reasoned[bool],
        passes: "SplitDevice | BlockByBlock | None",
        sums: Accumulator,
        submit: Submit = AtDeadline,
    ) -> None:
        self.chosen = chosen
        self.visits = 0
        self.held_bytes = 0  # Memory of the inputs and gradients held now, in bytes
        self.peak_bytes = 0
        self._passes = passes
        self._sums = sums
        self._submit = submit
        self._waiting: dict[MicrobatchId, _PutOff] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def first_half(self, visit: PassState, gradient: Tensor) -> SplitGradients:
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
        """Defers the weight gradients that `half` still lacks. `ended` gets the compute seconds, None if cancelled."""
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
            waiting.work = AtDeadline(chunks, name)  # the idle queue is full: compute it at the deadline
        return Addition.ADDED

    def finish(self) -> None:
        """Computes all deferred gradients. If memory runs out, raises ResourceExhausted and keeps uncomputed ones."""
        for waiting in list(self._waiting.values()):
            self._finish(waiting)

    def cancel(self, microbatch: MicrobatchId) -> bool:
        """Cancels a microbatch's deferred gradient; False if none is deferred, or if it was begun and is now added."""
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
        assert waiting.work is not None  # a new iterator: a chunk that ran out of memory ended the old one
        waiting.work.cancel()
        deque(self._chunks(waiting), maxlen=0)

    def _chunks(self, waiting: _PutOff) -> Iterator[None]:
        """Computes and adds one microbatch's deferred gradients, one piece per iteration, and frees each piece."""
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


class _Alone(nn.Module):
    """One transformer block of a stack, callable alone because it refers to the stack's constant tables."""

    def __init__(self, block: nn.Module, stack: BlockStack) -> None:
        super().__init__()
        self.block = block
        self._tables = (stack.rotary, stack.residual)  # a tuple hides the tables from this module's state

    def forward(self, hidden: Tensor, documents: Documents = ()) -> Tensor:
        rotary, residual = self._tables
        angles = rotary(hidden.shape[1], documents, dtype=hidden.dtype)
        output: Tensor = self.block(hidden, angles, documents, stream=residual.stream(hidden))
        return output


@dataclass(frozen=True, slots=True, eq=False)
class BlockVisit(PassState):
    """Forward pass of a block stack: the input of each block, and the graph of each block or None."""

    documents: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    graphs: tuple[SplitVisit | None, ...]

    def kept(self) -> "BlockVisit":
        """Returns a copy without the stack's output, which the backward pass does not need."""
        return replace(self, result=self.result.new_empty(0))


@dataclass(frozen=True, slots=True, eq=False)
class AddedGradients:
    """Result of `BlockByBlock.backward_into`: the input's gradient. Parameter gradients are already in the sums."""

    source: Tensor
    are_finite: Tensor  # Whether all gradients are finite, a bool on the device. Otherwise only finite ones were added.
    take_back: Callable[[], None]  # Subtracts the added gradients again, up to rounding


class BlockByBlock:
    """Passes of a block stack with one block's graph at a time. Create one per stack: its hooks stay on the blocks."""

    def __init__(self, stack: BlockStack, hidden_type: torch.dtype) -> None:
        blocks = [_Alone(block, stack) for block in stack.model["layers"].children()]
        self.blocks = len(blocks)
        self._blocks = [SplitDevice(block, hidden_type) for block in blocks]
        self._firsts = [0, *accumulate(len(list(block.parameters())) for block in blocks)][:-1]

    def forward(
        self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext, graphs: int | None = None
    ) -> BlockVisit:
        """Runs all blocks forward and keeps the graphs of the last `graphs` blocks (None: all)."""
        without = 0 if graphs is None else self.blocks - graphs
        hidden, inputs, kept = source.detach(), [], list[SplitVisit | None]()
        for index, block in enumerate(self._blocks):
            inputs.append(hidden)
            visit = None if index < without else block.forward(hidden, documents, around)
            kept.append(visit)
            hidden = block.evaluate(hidden, documents) if visit is None else visit.result.detach()
        return BlockVisit(source, hidden, documents, tuple(inputs), tuple(kept))

    def backward(self, visit: PassState, gradient: Tensor) -> Gradients:
        assert isinstance(visit, BlockVisit)
        found: list[tuple[Tensor, ...]] = []
        for index in reversed(range(self.blocks)):
            gradients = self._blocks[index].backward(self._graph(visit, index), gradient)
            assert gradients.source is not None
            gradient = gradients.source
            found.append(gradients.parameters)
        return Gradients(gradient, tuple(each for parameters in reversed(found) for each in parameters))

    def first_half(self, visit: PassState, gradient: Tensor) -> SplitGradients:
        assert isinstance(visit, BlockVisit)
        halves: list[SplitGradients] = []
        for index in reversed(range(self.blocks)):
            half = self._blocks[index].first_half(self._graph(visit, index), gradient)
            gradient = half.source
            halves.append(half.moved(self._firsts[index]))
        others = tuple(each for half in halves for each in half.others)
        return SplitGradients(gradient, others, tuple(product for half in halves for product in half.products))

    def backward_into(self, sums: Accumulator, visit: PassState, gradient: Tensor, weight: int) -> AddedGradients:
        """Adds `weight` times the parameter gradients to `sums`, without registering the microbatch there."""
        assert isinstance(visit, BlockVisit)
        added = [0]
        try:
            source, are_finite = self._add(sums, visit, gradient, weight, added)
        except BaseException:  # such as too little memory
            self._take_back(sums, visit, gradient, weight, added)
            raise
        return AddedGradients(source, are_finite, lambda: self._take_back(sums, visit, gradient, weight, added))

    def _take_back(self, sums: Accumulator, visit: BlockVisit, gradient: Tensor, weight: int, added: list[int]) -> None:
        if added[0]:  # the same pieces come in the same order, so `added` tells how many to subtract
            again = self.forward(visit.source, visit.documents, graphs=0)
            self._add(sums, again, gradient, -weight, [0], added[0])

    def _add(
        self, sums: Accumulator, visit: BlockVisit, gradient: Tensor, weight: int, added: list[int], most: int = 2**62
    ) -> tuple[Tensor, Tensor]:
        """Adds at most `most` pieces of the parameter gradients to `sums` and counts these pieces in `added[0]`."""
        are_finite = torch.ones((), dtype=torch.bool, device=gradient.device)
        for index in reversed(range(self.blocks)):
            half = self._blocks[index].first_half(self._graph(visit, index), gradient)
            gradient, are_finite = half.source, are_finite & half.is_bounded()
            for place, rows, piece in half.pieces():
                if added[0] == most:
                    return gradient, are_finite
                finite = torch.where(are_finite, piece, 0.0)  # no synchronisation: after a bad block, zeros are added
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


Result = TypeVar("Result")

SHORTEST_CUT: Final = 512  # Tokens per device below which documents are not cut


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    places: Tensor  # Indices of its rows, or of its tokens if there is one row: int64 on the CPU
    documents: tuple[int, ...] | CutDocuments


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """Division of a microbatch among devices: the rows or tokens of each device; None for an idle device."""

    axis: int  # Axis of the indices: 0 for rows, 1 for tokens
    shares: tuple[_Share | None, ...]
    exchange: Exchange

    def part_of(self, whole: Tensor, rank: int, device: torch.device) -> Tensor:
        share = self.shares[rank]
        assert share is not None
        return whole.index_select(self.axis, share.places.to(whole.device)).to(device)

    def together(self, whole: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
        """Writes each device's result to its rows or tokens in `whole`, and returns `whole`."""
        for share, part in zip(self.shares, parts, strict=True):
            if share is not None and part is not None:
                whole.index_copy_(self.axis, share.places.to(whole.device), part.to(whole.device))
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class DealtVisit(PassState):
    dealt: _Dealt
    parts: tuple[PassState | None, ...]


class Copies:
    """Copies of a model part on several devices. Devices that share the first one's memory use the original."""

    def __init__(self, part: nn.Module, threads: DeviceThreads, copies: Sequence[nn.Module] | None = None) -> None:
        own, others = _device_of(part), threads.devices[1:]
        self._parts = [part, *(copies or (part if device == own else deepcopy(part).to(device) for device in others))]
        self._stale = False

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._parts)

    def changed(self) -> None:
        """Records that the original's parameters changed. The copies are updated on next use."""
        self._stale = True

    def fresh(self) -> Sequence[nn.Module]:
        """Returns the original and its copies, after updating the copies if the parameters changed."""
        if self._stale:
            self._stale = False
            first, *others = self._parts
            with torch.no_grad():
                for other in others:
                    if other is not first:
                        for new, parameter in zip(first.parameters(), other.parameters(), strict=True):
                            parameter.copy_(new)
        return self._parts


@dataclass(frozen=True, slots=True, eq=False)
class SeveralDevices:
    """Passes of a model part on several devices at once. `choose` assigns rows or documents to devices."""

    parts: Copies
    threads: DeviceThreads
    quadratic_share: float
    choose: Callable[[Sequence[float], int, float], Dealing] = lambda *given: deal(*given).value

    def forward(self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext) -> PassState:
        dealt = self._dealt(source, documents)

        def on(rank: int, part: nn.Module, share: _Share) -> PassState:
            own = dealt.part_of(source, rank, _device_of(part))
            return passes.forward(part, own, share.documents, around=around)

        visits = self._at_once(dealt, on)
        results = [None if visit is None else visit.result.detach() for visit in visits]
        return DealtVisit(source, _joined(dealt, source, results), dealt, tuple(visits))

    def backward(self, visit: PassState, gradient: Tensor) -> Gradients:
        assert isinstance(visit, DealtVisit)

        def on(rank: int, part: nn.Module, _: _Share) -> Gradients:
            own = visit.parts[rank]
            assert own is not None
            return passes.backward(part, own, visit.dealt.part_of(gradient, rank, _device_of(part)))

        found = self._at_once(visit.dealt, on)
        computed = [gradients for gradients in found if gradients is not None]
        sums = [_sum(of_one) for of_one in zip(*(gradients.parameters for gradients in computed), strict=True)]
        sources = [None if gradients is None else gradients.source for gradients in found]
        if computed[0].source is None:
            return Gradients(None, tuple(sums))
        return Gradients(_joined(visit.dealt, visit.source, sources), tuple(sums))

    def evaluate(self, source: Tensor, documents: tuple[int, ...]) -> Tensor:
        dealt = self._dealt(source, documents)

        def on(rank: int, part: nn.Module, share: _Share) -> Tensor:
            with torch.no_grad():
                result: Tensor = part(dealt.part_of(source, rank, _device_of(part)), share.documents)
            return result

        return _joined(dealt, source, self._at_once(dealt, on))

    def parameters_changed(self) -> None:
        self.parts.changed()

    def storages(self) -> set[int]:
        return {storage for part in self.parts for storage in passes.storages(part)}

    def weights(self) -> tuple[Tensor, ...]:
        return ()

    def _at_once(self, dealt: _Dealt, job: Callable[[int, nn.Module, _Share], Result]) -> list[Result | None]:
        def on(rank: int, part: nn.Module) -> Result | None:
            share = dealt.shares[rank]
            try:
                return None if share is None else job(rank, part, share)
            except BaseException:
                dealt.exchange.give_up()
                raise

        return self.threads.at_once([partial(on, rank, part) for rank, part in enumerate(self.parts.fresh())])

    def _dealt(self, source: Tensor, documents: tuple[int, ...]) -> _Dealt:
        """Divides a microbatch among devices by document lengths alone, so that a retraction repeats the division."""
        count = len(self.parts)
        exchange = Exchange(count)
        if not documents:
            rows = self.choose([1.0] * source.shape[0], count, float("inf")).whole
            return _Dealt(0, tuple(_Share(torch.tensor(own), ()) if own else None for own in rows), exchange)
        costs = [length + self.quadratic_share * length**2 for length in documents]
        found = self.choose(costs, count, CUTTING if max(documents) >= SHORTEST_CUT * count else float("inf"))
        starts = [0, *accumulate(documents)]
        cut = tuple(pieces(documents[index], found.shares) for index in found.cut)
        shares: list[_Share | None] = []
        for rank, own in enumerate(found.whole):
            spans = [range(starts[index], starts[index + 1]) for index in own] + [
                range(starts[index] + part.start, starts[index] + part.stop)
                for index, by_rank in zip(found.cut, cut, strict=True)
                for part in by_rank[rank]
            ]
            if not spans:
                shares.append(None)
                continue
            places = torch.cat([torch.arange(span.start, span.stop) for span in spans])
            whole = tuple(documents[index] for index in own)
            lengths = tuple(documents[index] for index in found.cut)
            shares.append(_Share(places, CutDocuments(rank, whole, lengths, cut, exchange) if cut else whole))
        return _Dealt(1, tuple(shares), exchange)


@dataclass(frozen=True, slots=True, eq=False)
class SeveralHeads:
    """Passes of the model's head on several devices, each with an equal share of the tokens."""

    _heads: Copies
    _threads: DeviceThreads

    def loss(self, hidden: Tensor, labels: Tensor) -> float:
        def on(head: nn.Module, own: Tensor, wanted: Tensor) -> float:
            with torch.no_grad():
                return float(head(own, wanted).item())

        return self._weighted(self._at_once(hidden, labels, on), labels)

    def loss_into(self, hidden: Tensor, labels: Tensor, sums: Sequence[Tensor], weight: int) -> HeadVisit | None:
        def on(head: nn.Module, own: Tensor, wanted: Tensor) -> tuple[float, Gradients]:
            visit = passes.forward(head, own, wanted)
            share = visit.result.new_tensor(wanted.numel() / labels.numel())
            return float(visit.result.item()), passes.backward(head, visit, share)

        found = self._at_once(hidden, labels, on)
        of_each = [gradients for _, gradients in found]
        total = [_sum(of_one) for of_one in zip(*(gradients.parameters for gradients in of_each), strict=True)]
        if not are_finite(total):
            return None
        if sums:
            fold(sums, total, weight)
        sources = [gradients.source.to(hidden.device) for gradients in of_each if gradients.source is not None]
        together = torch.cat(sources, dim=1).view_as(hidden)
        loss = self._weighted([loss for loss, _ in found], labels)
        return HeadVisit(loss, together, lambda: fold(sums, total, -weight))

    def parameters_changed(self) -> None:
        self._heads.changed()

    def _at_once(
        self, hidden: Tensor, labels: Tensor, job: Callable[[nn.Module, Tensor, Tensor], Result]
    ) -> list[Result]:
        """Runs `job` on all devices at once, each with its share of the tokens. Skips devices without tokens."""
        own = torch.tensor_split(hidden.flatten(0, 1).unsqueeze(0), len(self._heads), dim=1)
        wanted = torch.tensor_split(labels.flatten().unsqueeze(0), len(self._heads), dim=1)

        def on(head: nn.Module, own: Tensor, wanted: Tensor) -> Result | None:
            if not wanted.numel():
                return None
            return job(head, own.to(_device_of(head)), wanted.to(_device_of(head)))

        given = zip(self._heads.fresh(), own, wanted, strict=True)
        found = self._threads.at_once([partial(on, *of_one) for of_one in given])
        return [result for result in found if result is not None]

    def _weighted(self, losses: Sequence[float], labels: Tensor) -> float:
        counts = [part.numel() for part in torch.tensor_split(labels.flatten(), len(self._heads))]
        return sum(loss * count for loss, count in zip(losses, counts, strict=False)) / labels.numel()


def body_passes(part: nn.Module, threads: DeviceThreads | None, quadratic_share: float) -> Passes:
    """Makes the passes of an embedding or block stack. `part` is on the first device, copies are on the others."""
    if threads is None or len(threads.devices) == 1:
        return OneDevice(part)
    return SeveralDevices(Copies(part, threads), threads, quadratic_share)


def head_passes(head: HeadPart, threads: DeviceThreads | None) -> HeadPasses:
    """Makes the passes of the model's head. `head` is on the first device, copies are on the others."""
    if threads is None or len(threads.devices) == 1:
        return OneHead(head)
    return SeveralHeads(Copies(head, threads), threads)


def _device_of(part: nn.Module) -> torch.device:
    return next(part.parameters()).device


def _joined(dealt: _Dealt, like: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
    """Merges the devices' results in the microbatch's order: [rows, tokens, hidden] on the device of `like`."""
    of_one = next(part for part in parts if part is not None)
    room = torch.empty(*like.shape[:2], *of_one.shape[2:], dtype=of_one.dtype, device=like.device)
    return dealt.together(room, parts)


def _sum(gradients: Sequence[Tensor]) -> Tensor:
    """Sums the devices' gradients on the first one's device, always in the same order."""
    total = gradients[0]
    for more in gradients[1:]:
        total = total + more.to(total.device)
    return total
