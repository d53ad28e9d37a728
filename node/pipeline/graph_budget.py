"""The memory budget of kept autograd graphs: which visits keep theirs between forward and backward, and of how many
blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from node.model.passes import Around, Passes, Visit
from node.pipeline.block_passes import BlockByBlock


class GraphBudget:
    """The budget of one replica. How large graphs are for each token is measured at the first visit.

    What is taken of it is counted in tokens whose whole graph would take as much.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._of_one: float | None = None
        """Bytes for each token."""
        self._kept = 0.0
        """Tokens whose graphs are kept."""

    def forward(
        self, passes: Passes, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext
    ) -> tuple[Tensor, Visit | None, float]:
        """Computes the part on `source` [rows, tokens, hidden], and keeps of the graph what there is room for: all, or
        that of some blocks and the inputs of the others, or nothing. What is not kept is not built. `around`: what
        graphs are built within.

        Returns:
            The result, the visit if anything is kept of it, and what was taken of the budget for it, until `release`.
        """
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
    ) -> tuple[Tensor, Visit | None, float]:
        """The same, block by block. One block is enough to measure: all are alike."""
        if self._of_one is None:
            one_graph = partial(passes.forward, graphs=1)
            self._of_one = _measured(passes, source, documents, one_graph) * passes.blocks / of_tokens(source)
        of_block = of_tokens(source) / passes.blocks
        inputs = passes.blocks * source.nbytes / self._of_one
        graphs = min(passes.blocks, math.floor((self._budget / self._of_one - self._kept - inputs) / of_block))
        share = inputs + graphs * of_block
        if graphs < 0 or not self.take(share):
            return passes.evaluate(source, documents), None, 0.0
        visit = passes.forward(source, documents, around, graphs)
        return visit.result, visit.kept(), share

    def take(self, tokens: float) -> bool:
        """Takes room for the graph of so many tokens if it fits; then it is counted until `release`."""
        fits = (self._kept + tokens) * (self._of_one or 0.0) <= self._budget
        self._kept += fits * tokens
        return fits

    def release(self, tokens: float) -> None:
        self._kept -= tokens


def of_tokens(hidden: Tensor) -> int:
    """The number of tokens in [rows, tokens, hidden]."""
    return hidden.shape[0] * hidden.shape[1]


def _measured(
    passes: Passes, source: Tensor, documents: tuple[int, ...], forward: Callable[..., Visit] | None = None
) -> int:
    """The bytes of all tensors that a visit's graph holds on to, the parameters not counted. `forward` for another than
    that of the passes."""
    own = passes.storages()
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself may be the output of the very node that saves it: a cycle for ever

    def noted() -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    (forward or passes.forward)(source, documents, noted)
    return sum(seen.values())
