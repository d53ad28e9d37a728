"""Microbatches of text, and what packs them: `node.data.row_packer` cuts one stream into rows,
`node.data.document_packer` keeps documents whole. The manifest's `model.attention` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from torch import Tensor

from node.data.documents import Place
from swarm.vocabulary.types import Affinity, Route
from swarm.workload.microbatch_sizes import Size

BLOCK_TOKENS: Final = 2**20
"""Tokens that are packed and shuffled together, about."""


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A packer's position, in a few numbers that a checkpoint can hold. Later ones are greater."""

    block: Place = field(default_factory=Place)
    """Where the current block begins."""
    taken: int = 0
    """Rows of it, or microbatches of documents, that have been given out."""
    level: float = 0.0
    """What microbatches of documents cost in the block before; 0 where that is not known."""
    packing: int = field(default=1, compare=False)
    """The way in which documents are packed; those who wrote no such number packed in the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """A packed microbatch, the unit of work."""

    tokens: Tensor
    """int64 [rows, sequence]."""
    labels: Tensor
    """int64 [rows, sequence]: the token that follows each; UNSCORED where none is to be predicted."""
    cost: float
    """In tokens, attention included (`quadratic_share` of the manifest)."""
    start: Cursor = field(default_factory=Cursor)
    """A packer started here gives this microbatch first."""
    end: Cursor = field(default_factory=Cursor)
    """A packer started here gives the one after this first."""
    documents: tuple[int, ...] = ()
    """Tokens of each document, in order; together all of the one row. Empty where rows are cut from a stream
    (`attention = "causal"`)."""
    route: Route = ()
    """Of all its documents."""
    affinity: Affinity = ()
    """The sum of its documents' scores, by which another expert is chosen where its own is not served."""

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.tokens.numel()

    @property
    def scored(self) -> int:
        """The number of tokens that are predicted: all, but in held-out text of a run with experts, and in
        conversations."""
        return self.size if self.labels.min() >= 0 else int((self.labels >= 0).sum())

    def per_label(self, loss: float) -> float:
        """The mean over what is predicted, of a loss that is the mean over all tokens, as the head gives it."""
        return loss * self.size / self.scored

    @property
    def workload(self) -> Size:
        """What it asks of those who compute it."""
        return Size(self.size, self.documents, self.cost)


class Packer(Protocol):
    """Packs documents into microbatches, in the order in which they come."""

    cursor: Cursor
    """Of the next microbatch: a packer started there gives the same ones from there on."""

    def next(self) -> Microbatch | None:
        """The next microbatch, or None when the documents have ended."""
        ...
