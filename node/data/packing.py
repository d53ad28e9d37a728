"""Packing of documents into microbatches. Loses and repeats no token. `model.attention` in the manifest selects one of:

`causal`: a single stream of documents, each followed by an end-of-document token. A row is the next `sequence` tokens,
with the same tokens shifted by one as labels. Rows are shuffled within blocks of about a million tokens.

`documents`: whole documents in microbatches of equal cost (`swarm.workload.packing`). A document t1..tn has the inputs
[end, t1..tn] and the labels [t1..tn, end]. Longer ones are cut to `sequence`: pieces start with the last token before.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.data.documents import UNSCORED, Fragment, StreamPosition, permutation
from node.data.tokenizers import Tokens
from node.experts.router import DocumentRouter, even_bias
from protocol.manifest.manifest import Manifest, document_cost, quadratic_share
from swarm.experts.routes import best_route, in_shares
from swarm.vocabulary.types import Affinity, Route
from swarm.workload.microbatch_sizes import Size
from swarm.workload.packing import Capacity, DocumentPiece, pack

BLOCK_TOKENS: Final = 2**20  # Tokens packed and shuffled together, approximately


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Position of a packer in the text, small enough for a checkpoint. Later positions are greater."""

    block: StreamPosition = field(default_factory=StreamPosition)
    taken: int = 0  # Rows, or microbatches of documents, already taken from the block
    level: float = 0.0  # Microbatch cost at the end of the previous block; 0 if unknown
    packing: int = field(default=1, compare=False)  # Version of the document packing


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Documents packed as tokens and labels, which pass through the model together."""

    tokens: Tensor  # Token ids, int64 [rows, sequence]
    labels: Tensor
    cost: float  # Compute cost in tokens, including attention (the manifest's `quadratic_share`)
    start: Cursor = field(default_factory=Cursor)  # Position from which a packer produces this microbatch first
    end: Cursor = field(default_factory=Cursor)  # Position from which a packer produces the next microbatch first
    documents: tuple[int, ...] = ()  # Tokens of each document in the only row. Empty with `attention = "causal"`
    route: Route = ()
    affinity: Affinity = ()  # Sum of the documents' router scores, to choose a substitute for an unserved expert

    @property
    def size(self) -> int:
        return self.tokens.numel()

    @property
    def scored(self) -> int:
        """Number of tokens that have a label: not all in conversations and in held-out text with routes."""
        return self.size if self.labels.min() >= 0 else int((self.labels >= 0).sum())

    def per_label(self, loss: float) -> float:
        """Converts `loss`, a mean over all tokens (from the head), to a mean over tokens that have a label."""
        return loss * self.size / self.scored

    @property
    def workload(self) -> Size:
        return Size(self.size, self.documents, self.cost)


@dataclass(frozen=True, slots=True, eq=False)
class _RowBlock:
    """Rows shuffled together, [rows, sequence], and the order in which they are used."""

    tokens: Tokens
    labels: Tokens
    order: npt.NDArray[np.int64]


class RowPacker:
    """Packer that cuts the stream of documents into microbatches of equal shape, one shuffled block at a time."""

    def __init__(
        self, manifest: Manifest, fragments: Iterator[Fragment], start: Cursor, *, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        """Takes `fragments` that begin at `start.block`."""
        self.cursor = start
        self._fragments = fragments
        self._rows, self._sequence = manifest.training.rows, manifest.model.sequence
        self._seed = manifest.seed
        self._cost = self._rows * document_cost(manifest.model, self._sequence)
        self._block_rows = max(1, block_tokens // (self._rows * self._sequence)) * self._rows
        self._pending: deque[Fragment] = deque()
        self._block: _RowBlock | None = None

    def next(self) -> Microbatch | None:
        if self._block is None:
            self._block = self._next_block()
        if self._block is None:
            return None
        block, start, taken = self._block, self.cursor, self.cursor.taken
        chosen = block.order[taken : taken + self._rows]
        if taken + self._rows < len(block.order):
            self.cursor = Cursor(start.block, taken + self._rows)
        else:  # the last label is the next block's first token
            self.cursor, self._block = Cursor(self._pending[0].start), None
        tokens, labels = (torch.from_numpy(of[chosen]) for of in (block.tokens, block.labels))
        return Microbatch(tokens, labels, self._cost, start, self.cursor)

    def _next_block(self) -> _RowBlock | None:
        """Reads and shuffles a block of rows, smaller at the end of the text; None after the last microbatch."""
        available = self._fill(self._block_rows * self._sequence + 1)  # one more, because labels are shifted by one
        microbatches = (available - 1) // (self._rows * self._sequence)
        if microbatches < 1:
            return None
        rows = min(self._block_rows, microbatches * self._rows)
        size = rows * self._sequence
        stream = np.concatenate([fragment.tokens for fragment in self._pending])
        labels = np.concatenate([fragment.labels for fragment in self._pending])
        self._drop(size)
        place = self.cursor.block
        return _RowBlock(
            stream[:size].reshape(rows, self._sequence),
            labels[1 : size + 1].reshape(rows, self._sequence),
            permutation(f"rows:{self._seed}:{place.epoch}:{place.position}:{place.offset}", rows),
        )

    def _fill(self, wanted: int) -> int:
        """Reads fragments until `wanted` tokens are buffered or the text ends. Returns how many are buffered."""
        available = sum(fragment.tokens.size for fragment in self._pending)
        while available < wanted:
            fragment = next(self._fragments, None)
            if fragment is None:
                break
            self._pending.append(fragment)
            available += fragment.tokens.size
        return available

    def _drop(self, count: int) -> None:
        """Removes the first `count` buffered tokens. At least one token remains."""
        while count >= self._pending[0].tokens.size:
            count -= self._pending.popleft().tokens.size
        self._pending[0] = _from(self._pending[0], count)


def _from(fragment: Fragment, count: int) -> Fragment:
    """Copies a fragment without its first `count` tokens, so that the original can be freed."""
    start = fragment.start
    tokens: Tokens = fragment.tokens[count:].copy()
    wanted = None if fragment.wanted is None else fragment.wanted[count:].copy()
    return Fragment(StreamPosition(start.epoch, start.position, start.offset + count), tokens, wanted=wanted)


BLOCK_MICROBATCHES: Final = 64  # Minimum of microbatches per block. Fewer cannot have equal costs without padding
MOST_MICROBATCHES: Final = 512  # Per block without experts, because the first microbatch waits for the whole block
ROUTED: Final = 4  # Factor on the block size with experts; in smaller blocks a route's share differs from the text's
MOST_DOCUMENTS: Final = 3000  # Documents per block, approximately. Packing time grows with each
UNEVEN: Final = 1.05  # Largest share of a block's tokens for one expert, relative to an equal share
PACKING: Final = 4  # Version of the packing. A cursor from another version restarts its block
FULL: Final = 0.995  # Fill level of a block, such that its documents fit into the planned microbatches


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """A document, or the rest of a cut one: the labels, and the input token before the first label."""

    before: int
    labels: Tokens
    is_rest: bool
    unscored: int  # Labels at the start without loss
    source: Fragment
    affinity: Affinity = ()
    wanted: Tokens | None = None

    def tokens_of(self, piece: DocumentPiece) -> Tokens:
        before = int(self.labels[piece.start - 1]) if piece.start else self.before
        return np.concatenate(([before], self.labels[piece.start : piece.stop - 1]))

    def labels_of(self, piece: DocumentPiece) -> Tokens:
        """Returns the labels of a piece of this document, UNSCORED for tokens without loss."""
        labels = self.labels if self.wanted is None else self.wanted
        unscored = min(piece.stop, max(piece.start, self.unscored))
        if unscored == piece.start:
            return labels[piece.start : piece.stop]
        return np.concatenate((np.full(unscored - piece.start, UNSCORED), labels[unscored : piece.stop]))

    def parted(self, tokens: int) -> "tuple[_Stretch, _Stretch]":
        before, wanted = int(self.labels[tokens - 1]), self.wanted
        now, rest = (None, None) if wanted is None else (wanted[:tokens], wanted[tokens:])
        unscored = max(0, self.unscored - tokens)
        return (
            replace(self, labels=self.labels[:tokens], wanted=now),
            _Stretch(before, self.labels[tokens:], True, unscored, self.source, wanted=rest),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Documents packed together, and for each microbatch in order, the pieces of documents in it."""

    stretches: list[_Stretch]
    turns: list[tuple[DocumentPiece, ...]]
    end: Cursor


def reading_position(block: StreamPosition) -> StreamPosition:
    """Returns the position from which to read a block: within a document, one token earlier (the first input)."""
    return StreamPosition(block.epoch, block.position, max(0, block.offset - 1))


def tokens_of_block(microbatch_tokens: int, *, routed: bool = False) -> int:
    block = max(BLOCK_TOKENS, BLOCK_MICROBATCHES * microbatch_tokens)
    if routed:
        return int(FULL * ROUTED * block)
    return int(FULL * min(block, MOST_MICROBATCHES * microbatch_tokens))


def tokens_of_last(taken: int, microbatch_tokens: int) -> int:
    """Returns how many more tokens fill the last microbatch of a block that has `taken` tokens."""
    return -taken % int(FULL * microbatch_tokens)


class DocumentPacker:
    """Packs fragments from `reading_position(start.block)` on into microbatches of whole documents."""

    def __init__(
        self,
        manifest: Manifest,
        fragments: Iterator[Fragment],
        start: Cursor,
        unscored: int = 0,  # Labels without loss at the start of each document
        router: DocumentRouter | None = None,
        uneven: float = UNEVEN,
    ) -> None:
        # Another version packs the block differently, so its position within the block has no meaning.
        taken = start.taken if start.packing == PACKING else 0
        self.cursor = replace(start, taken=taken, packing=PACKING)
        self._router, self._uneven = router, uneven
        self._model, self._seed = manifest.model, manifest.seed
        self._capacity = Capacity(manifest.model.sequence, manifest.microbatch_tokens, quadratic_share(manifest.model))
        self._block_tokens = tokens_of_block(manifest.microbatch_tokens, routed=manifest.stages.has_experts)
        self._enough_tokens = min(self._block_tokens, ROUTED * BLOCK_MICROBATCHES * manifest.microbatch_tokens)
        self._stretches = _stretches(fragments, unscored, manifest.data.beginning)
        self._waiting = deque[tuple[StreamPosition, _Stretch]]()
        self._block: _Block | None = None

    def next(self) -> Microbatch | None:
        if self._block is None:
            self._block = self._next_block()
        if self._block is None:
            return None
        block, start = self._block, self.cursor
        chosen = [(block.stretches[piece.document], piece) for piece in block.turns[start.taken]]
        if start.taken + 1 < len(block.turns):
            self.cursor = replace(start, taken=start.taken + 1)
        else:
            self.cursor, self._block = block.end, None
        documents = tuple(piece.stop - piece.start for _, piece in chosen)
        return Microbatch(
            _row([stretch.tokens_of(piece) for stretch, piece in chosen]),
            _row([stretch.labels_of(piece) for stretch, piece in chosen]),
            sum(document_cost(self._model, tokens) for tokens in documents),
            start,
            self.cursor,
            documents,
            best_route(chosen[0][0].affinity),
            _sum([stretch.affinity for stretch, _ in chosen]),
        )

    def _next_block(self) -> _Block | None:
        read, left, place = list[_Stretch](), self._block_tokens, self.cursor.block
        while (found := self._waiting.popleft() if self._waiting else next(self._stretches, None)) is not None:
            at, stretch = found
            # Do not mix epochs in a block that is large enough.
            if at.epoch > place.epoch and self._block_tokens - left >= self._enough_tokens:
                self._waiting.appendleft(found)
                return self._packed(read, at)
            if stretch.labels.size > left:  # it does not fit: take a part if it is cut anyway, and end the block
                if taken := self._taken_now(stretch, left):
                    now, later = stretch.parted(taken)
                    read.append(now)
                    found = StreamPosition(at.epoch, at.position, at.offset + taken), later
                self._waiting.appendleft(found)
                return self._packed(read, found[0])
            read.append(stretch)
            left -= stretch.labels.size
            if len(read) == MOST_DOCUMENTS:  # packing takes time, so now only fill the last microbatch
                left = min(left, tokens_of_last(self._block_tokens - left, self._capacity.tokens))
            place = StreamPosition(at.epoch, at.position + 1)
        return self._packed(read, place) if read else None

    def _taken_now(self, stretch: _Stretch, left: int) -> int:
        """Returns how many tokens of a long document to put into a block that has room for `left` tokens."""
        sequence = self._capacity.sequence
        if not self._is_cut(stretch) or 2 * left < sequence:  # only documents that are cut anyway may span two blocks
            return 0
        return left - left % sequence if left > sequence else left

    def _is_cut(self, stretch: _Stretch) -> bool:
        return stretch.is_rest or stretch.labels.size > self._capacity.sequence

    def _packed(self, stretches: list[_Stretch], end: StreamPosition) -> _Block:
        """Packs a block's documents, each route separately. Microbatches of all routes alternate and cost the same."""
        if self._router is not None:
            found = [self._router.affinity(of.source.name, of.source.opening) for of in stretches]
            found = _evened(found, [of.labels.size for of in stretches], self._uneven)
            stretches = [replace(of, affinity=affinity) for of, affinity in zip(stretches, found, strict=True)]
        of_routes: dict[Route, list[int]] = {}
        for index, stretch in enumerate(stretches):
            of_routes.setdefault(best_route(stretch.affinity), []).append(index)
        packed, levels = list[list[tuple[DocumentPiece, ...]]](), list[float]()
        for route, members in sorted(of_routes.items()):
            lengths = [stretches[index].labels.size for index in members]
            cut = [number for number, index in enumerate(members) if self._is_cut(stretches[index])]
            chance = self._chance(f":{route}" * bool(route))
            packing = pack(lengths, cut, self._capacity, self.cursor.level, chance)
            packed.append(
                [tuple(piece._replace(document=members[piece.document]) for piece in of) for of in packing.microbatches]
            )
            levels.append(packing.level)
        # Routes alternate in proportion to their microbatches, in random order.
        ranks = permutation(f"routes:{self._at}", len(packed)).tolist()
        given = [iter(packed[rank]) for rank in ranks]
        turns = [next(given[turn]) for turn in in_shares([len(packed[rank]) for rank in ranks])]
        return _Block(stretches, turns, Cursor(end, level=min(levels), packing=PACKING))

    def _chance(self, key: str) -> Callable[[int], list[int]]:
        """Returns a function that permutes 0..count-1, depending only on the block's start and `key`."""
        return lambda count: permutation(f"documents:{self._at}{key}", count).tolist()

    @property
    def _at(self) -> str:
        place = self.cursor.block
        return f"{self._seed}:{place.epoch}:{place.position}:{place.offset}"


Packer = RowPacker | DocumentPacker


def _stretches(
    fragments: Iterator[Fragment], unscored: int, beginning: int | None
) -> Iterator[tuple[StreamPosition, _Stretch]]:
    """Converts fragments to `_Stretch` objects, and yields each with the position of its first label."""
    for fragment in fragments:
        start, tokens, wanted = fragment.start, fragment.tokens, fragment.wanted
        # A rest and a document with a beginning start with the token before their first label.
        if start.offset or (tokens.size > 1 and tokens[0] == beginning):
            first = start.offset + 1
            left = None if wanted is None else wanted[1:]
            is_rest, unscored_left = start.offset > 0, max(0, unscored - first)
            rest = _Stretch(int(tokens[0]), tokens[1:], is_rest, unscored_left, fragment, wanted=left)
            yield StreamPosition(start.epoch, start.position, first), rest
        elif tokens.size:  # the end token, its last, is also the input before the first label
            yield start, _Stretch(int(tokens[-1]), tokens, False, unscored, fragment, wanted=wanted)


def _evened(affinities: list[Affinity], sizes: list[int], most: float) -> list[Affinity]:
    """Adds a bias per expert to all documents' scores, so that no expert gets much more of the block than others."""
    stages = [np.array(of_stage, dtype=np.int64) for of_stage in zip(*affinities, strict=True)]
    evened = [(scores + even_bias(scores, np.array(sizes), most)).tolist() for scores in stages]
    return [tuple(map(tuple, of_document)) for of_document in zip(*evened, strict=True)]


def _sum(affinities: list[Affinity]) -> Affinity:
    return tuple(tuple(map(sum, zip(*of_stage, strict=True))) for of_stage in zip(*affinities, strict=True))


def _row(parts: list[npt.NDArray[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).unsqueeze(0)
