"""The passes of a stack of blocks on one device, block by block, for devices whose memory is dear.

Of a block whose graph is not kept only the input is, and backward computes the block again (Chen et al. 2016,
arXiv:1604.06174): so one graph of one block is all that backward ever needs. Its gradients are added where they are
wanted before the next block's are computed: they are never there as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from node.model.blocks import Documents, Rotary
from node.model.optimizer import Accumulator
from node.model.parts import BlockStack
from node.model.passes import Around, Gradients, Visit
from node.pipeline.deferred_weights import SplitDevice, SplitGradients, SplitVisit, moved


class _Alone(nn.Module):
    """One block of a stack, with the rotary tables of all."""

    def __init__(self, block: nn.Module, rotary: Rotary) -> None:
        super().__init__()
        self.block = block
        self._rotary = (rotary,)  # no part of this one

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
        """What of it backward needs: all but the result."""
        return replace(self, result=self.result.new_empty(0))


@dataclass(frozen=True, slots=True, eq=False)
class AddedGradients:
    """The gradient of a visit's input; those of the parameters have been added."""

    source: Tensor
    are_finite: Tensor
    """Whether all are: a bool on the device. If not, some have been added, all of them finite."""
    take_back: Callable[[], None]
    """Takes what has been added out of the sums again, up to rounding."""


class BlockByBlock:
    """The passes of a stack; see `node.model.passes.Passes`. Made once for a stack.

    Args:
        hidden_type: of the hidden states; if it is narrower than float32, all graphs share one copy of the weights.
    """

    def __init__(self, stack: BlockStack, hidden_type: torch.dtype) -> None:
        blocks = [_Alone(block, stack.rotary) for block in stack.model["layers"].children()]
        self.blocks = len(blocks)
        self._blocks = [SplitDevice(block, hidden_type) for block in blocks]
        self._firsts = [0, *accumulate(len(list(block.parameters())) for block in blocks)][:-1]

    def forward(
        self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext, graphs: int | None = None
    ) -> BlockVisit:
        """Computes the stack, keeping the graphs of so many blocks, the last ones; None for all."""
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
        """As `SplitDevice.first_half`, of all blocks."""
        assert isinstance(visit, BlockVisit)
        halves: list[SplitGradients] = []
        for index in reversed(range(self.blocks)):
            half = self._blocks[index].first_half(self._graph(visit, index), gradient)
            gradient = half.source
            halves.append(moved(half, self._firsts[index]))
        others = tuple(each for half in halves for each in half.others)
        return SplitGradients(gradient, others, tuple(product for half in halves for product in half.products))

    def backward_into(self, sums: Accumulator, visit: Visit, gradient: Tensor, weight: int) -> AddedGradients:
        """Computes the gradients, and adds those of the parameters, so many times, to the sums of an accumulator that
        is not to know of it yet. From where one is not surely finite on, none is added. When there is no memory, what
        has been added is taken back.
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
        """Adds so many pieces of gradients at most, and counts them in `added`."""
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
