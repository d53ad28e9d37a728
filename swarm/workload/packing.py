"""Packing of a block's documents into microbatches of equal cost.

What a microbatch costs is its tokens and the squares of its documents' (`quadratic_share`). Where one costs more than
the others the whole pipeline waits for it, so a block of many microbatches is packed at once: the longest document
first, each into the microbatch that will cost the least when the room beside it is filled with what is still to come.
Then the dearest one exchanges documents with the cheapest, as long as that brings the two nearer to each other.

Documents that fit are never cut. Those that have to be cut anyway are cut into pieces of such a length that the
microbatches of this block cost as much as those of the block before: blocks differ in how much of them is long
documents, and a window of microbatches that reaches from one into the next would see the step. Shorter pieces also
leave room beside them for short documents, where four pieces as long as may be would fill a microbatch.

The paper's outlier queues even out the microbatches of one step; between steps the cost varies more than without. Here
stages are queues and not barriers, so every microbatch has to be like the next.

Sources: WLB-LLM (arXiv:2503.17924) section 4, packing by workload; the longest first, Graham 1969
(doi:10.1137/0117039).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise, zip_longest
from typing import Final, NamedTuple

from swarm.vocabulary.types import MAX_DOCUMENTS

EVEN_ENOUGH: Final = 1.012
"""The largest cost over the mean, of this block and the one before, at which no other length of pieces is tried."""
PIECE_SHARES: Final = (0.96, 0.93, 0.9, 0.875)
"""Of the sequence: lengths of pieces that are tried beside the longest and that which costs as the block before."""
SHORTEST_SHARE: Final = 0.8
USUAL_SHARE: Final = 0.93
"""Of pieces of a block before which there is none."""
BACK_TO_USUAL: Final = 0.1
"""How much of the way the level goes back with each block to what pieces of the usual length would cost."""
EMPTY: Final = 0.018
"""The part of the room that may be left empty before it counts against a packing..."""
EMPTY_COUNTS: Final = 3.0
"""... so many times as much as a difference of costs."""
MOST_PIECES: Final = 3000
"""When so many have been packed, in one try or several, no further one is made: some milliseconds."""
UNEVEN: Final = 1.1
"""The largest cost over the mean from which on more microbatches are tried, so that those with long documents need not
be filled up with short ones: what they leave empty costs nothing."""
MORE: Final = (1.06, 1.12, 1.18, 1.25)
"""Times as many as are needed."""
RATE_AGAIN: Final = 0.7
"""When documents have become so much shorter, what is still to come is looked at anew."""
EXCHANGES: Final = 16
"""Of documents, after all are dealt."""
EVEN: Final = 0.01
"""Costs no further apart than this part of the mean are equal."""
STRATA: Final = 8
_FAR_APART: Final = (0, 4, 2, 6, 1, 5, 3, 7)
"""Neighbours in the order are of strata that are not."""


class Piece(NamedTuple):
    """A document, or a piece of one."""

    document: int
    """Its index."""
    start: int
    stop: int
    """Tokens of it."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Microbatches of one block."""

    microbatches: tuple[tuple[Piece, ...], ...]
    """The pieces of each, in rising order."""
    costs: tuple[float, ...]
    level: float
    """What microbatches of the next block should cost."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a run's microbatches have room for."""

    sequence: int
    """The most tokens of a document, or a piece of one."""
    tokens: int
    """The most tokens of a microbatch; at least `sequence`."""
    quadratic_share: float
    """The cost of attention, in tokens for each square of a document's tokens."""

    def cost(self, length: int) -> float:
        return length + self.quadratic_share * length * length


@dataclass(slots=True)
class _Bin:
    """A microbatch in the making."""

    cost: float = 0.0
    tokens: int = 0
    pieces: list[int] = field(default_factory=list)
    """Indices."""


def longest_piece(sequence: int) -> int:
    """The tokens of a piece of a document that has to be cut, at most. A little less than may be: as many as fit into a
    microbatch would leave no room beside them, and be dearer than anything else."""
    return sequence - sequence // 64


def pack(lengths: Sequence[int], cut: Collection[int], room: Room, level: float = 0.0) -> Packing:
    """Packs documents into as few microbatches as they fit into, of costs as equal as can be.

    Args:
        lengths: tokens of each document, at least 1.
        cut: the indices of those that are cut: all that are longer than the sequence, and the rests of such.
        level: what microbatches of the block before cost; 0 where that is not known.

    Returns:
        The same on every machine.
    """
    if not lengths:
        return Packing((), (), level)
    block = _Block(lengths, frozenset(cut), room)
    best: tuple[float, list[Piece], list[_Bin]] | None = None
    tried = 0
    for longest in block.piece_lengths(level):
        pieces = block.cut_to(longest)
        bins = _dealt_to_all(pieces, room, block.fewest)
        badness = block.badness(bins, level)
        if best is None or badness < best[0]:
            best = badness, pieces, bins
        tried += len(pieces)
        if badness <= EVEN_ENOUGH or tried >= MOST_PIECES:
            break
    assert best is not None, "there is always a length to try"
    _, pieces, bins = best
    if _unevenness(bins) > UNEVEN:
        bins = _with_more(pieces, room, bins)
    bins = [found for found in bins if found.pieces]
    packed = tuple(tuple(sorted(pieces[index] for index in found.pieces)) for found in bins)
    return Packing(packed, tuple(found.cost for found in bins), block.next_level(bins, level))


class _Block:
    """A block's documents, and what they cost when those that are cut have pieces of a certain length."""

    def __init__(self, lengths: Sequence[int], cut: frozenset[int], room: Room) -> None:
        self._lengths, self._cut, self._room = lengths, cut, room
        self._tokens = sum(lengths)
        self.fewest = -(-self._tokens // room.tokens)
        self._uncut = math.fsum(room.cost(length) for index, length in enumerate(lengths) if index not in cut)

    def piece_lengths(self, level: float) -> Iterator[int]:
        """The lengths of pieces that are to be tried, the likeliest first, each once."""
        sequence = self._room.sequence
        longest, usual = longest_piece(sequence), max(1, int(USUAL_SHARE * sequence))
        first = self._length_for(level) if level else usual
        yield first
        if not self._cut:
            return
        others = [longest, *(max(1, int(share * sequence)) for share in PIECE_SHARES)]
        yield from (length for length in dict.fromkeys(others) if length != first)

    def cut_to(self, longest: int) -> list[Piece]:
        """The documents, those that are cut in pieces of `longest` tokens and what is left."""
        return [
            Piece(index, start, min(start + step, length))
            for index, length in enumerate(self._lengths)
            for step in (longest if index in self._cut else length,)
            for start in range(0, length, step)
        ]

    def badness(self, bins: Sequence[_Bin], level: float) -> float:
        """The largest cost over the mean, both of this block and the one before; more where room is left empty."""
        mean = math.fsum(found.cost for found in bins) / len(bins)
        empty = 1 - self._tokens / (len(bins) * self._room.tokens)
        uneven = max(level, *(found.cost for found in bins)) / min(level or mean, mean)
        return uneven + (EMPTY_COUNTS * max(0.0, empty - EMPTY) if len(bins) > self.fewest else 0.0)

    def next_level(self, bins: Sequence[_Bin], level: float) -> float:
        """What microbatches of the next block should cost: as this block's, or the one's before if those are cheaper,
        for long pieces can be made shorter but short documents not longer."""
        mean = math.fsum(found.cost for found in bins) / len(bins)
        usual = self._mean(max(1, int(USUAL_SHARE * self._room.sequence)))
        return min(mean, level + BACK_TO_USUAL * (usual - level)) if level else mean

    def _length_for(self, level: float) -> int:
        """The length of pieces with which microbatches cost so much, as nearly as may be."""
        low, high = max(1, int(SHORTEST_SHARE * self._room.sequence)), longest_piece(self._room.sequence)
        while low < high:
            middle = (low + high + 1) // 2
            if self._mean(middle) <= level:
                low = middle
            else:
                high = middle - 1
        return low

    def _mean(self, longest: int) -> float:
        """The mean cost of a microbatch where pieces have this length."""
        whole_pieces = 0
        rests = list[float]()
        for index in self._cut:
            count, rest = divmod(self._lengths[index], longest)
            whole_pieces += count
            rests.append(self._room.cost(rest))
        return (self._uncut + whole_pieces * self._room.cost(longest) + math.fsum(rests)) / self.fewest


# ---- dealing ---------------------------------------------------------------------------------------------------------


def _with_more(pieces: Sequence[Piece], room: Room, fewest: list[_Bin]) -> list[_Bin]:
    """As few more microbatches as make costs even, or those there are if nothing does."""
    for share in MORE:
        bins = _dealt_to_all(pieces, room, math.ceil(share * len(fewest)))
        if _unevenness(bins) <= (1 + UNEVEN) / 2:
            return bins
    return fewest


def _dealt_to_all(pieces: Sequence[Piece], room: Room, count: int) -> list[_Bin]:
    """Deals all pieces to so many microbatches, or as few more as they fit into, and evens them out."""
    lengths = [piece.stop - piece.start for piece in pieces]
    costs = {length: room.cost(length) for length in set(lengths)}
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while True:
        bins = _dealt(lengths, costs, longest_first, room.tokens, count)
        if len(bins) <= count:
            _even_out(bins, lengths, costs, room.tokens)
            return bins
        count = len(bins)  # all over again: those that were opened late have too little


def _unevenness(bins: Sequence[_Bin]) -> float:
    """The largest cost over the mean."""
    return max(found.cost for found in bins) * len(bins) / math.fsum(found.cost for found in bins)


def _dealt(
    lengths: Sequence[int], costs: dict[int, float], longest_first: Sequence[int], most_tokens: int, count: int
) -> list[_Bin]:
    """Deals all pieces to so many microbatches, and to further ones where they do not fit."""
    bins = [_Bin() for _ in range(count)]
    left_tokens, left_cost = sum(lengths), math.fsum(costs[length] for length in lengths)
    rate, rate_until = 0.0, lengths[longest_first[0]]
    """What a token of all that is still to come costs: a microbatch with little room will cost little more."""
    open_ones: list[tuple[float, int]] = []
    """Those that may have room, that which will cost the least first."""
    too_full: list[tuple[int, int]] = []
    """The others, those with the most room first: documents become shorter and fit again."""
    for index in longest_first:
        length = lengths[index]
        if length <= rate_until:
            rate, rate_until = left_cost / left_tokens, int(RATE_AGAIN * length)
            may_take = (place for place, found in enumerate(bins) if len(found.pieces) < MAX_DOCUMENTS)
            open_ones = [(bins[place].cost - rate * bins[place].tokens, place) for place in may_take]
            heapify(open_ones)
            too_full = []
        while too_full and -too_full[0][0] >= length:
            _, place = heappop(too_full)
            heappush(open_ones, (bins[place].cost - rate * bins[place].tokens, place))
        while open_ones and most_tokens - bins[open_ones[0][1]].tokens < length:
            _, place = heappop(open_ones)
            heappush(too_full, (bins[place].tokens - most_tokens, place))
        if open_ones:
            _, place = heappop(open_ones)
        else:
            bins.append(_Bin())
            place = len(bins) - 1
        found = bins[place]
        _take(found, index, length, costs[length])
        left_tokens, left_cost = left_tokens - length, left_cost - costs[length]
        if len(found.pieces) < MAX_DOCUMENTS:
            heappush(open_ones, (found.cost - rate * found.tokens, place))
    return bins


def _take(found: _Bin, index: int, length: int, cost: float) -> None:
    found.pieces.append(index)
    found.cost += cost
    found.tokens += length


# ---- evening out -----------------------------------------------------------------------------------------------------


def _even_out(bins: Sequence[_Bin], lengths: Sequence[int], costs: dict[int, float], most_tokens: int) -> None:
    """The dearest one exchanges a document with the cheapest, or gives it one, whichever brings the two nearest to each
    other: as long as they are apart and there is such an exchange."""
    mean = math.fsum(found.cost for found in bins) / len(bins)
    for _ in range(EXCHANGES):
        rich, poor = max(bins, key=lambda found: found.cost), min(bins, key=lambda found: found.cost)
        if rich.cost - poor.cost <= EVEN * mean:
            return
        best = _exchange(rich, _sorts(rich, lengths), poor, _sorts(poor, lengths), costs, most_tokens)
        if best is None:
            return
        _, given, taken = best
        for gives, takes, length in ((rich, poor, given), (poor, rich, taken)):
            if length:
                index = next(index for index in gives.pieces if lengths[index] == length)
                gives.pieces.remove(index)
                gives.cost -= costs[length]
                gives.tokens -= length
                _take(takes, index, length, costs[length])


def _sorts(found: _Bin, lengths: Sequence[int]) -> list[int]:
    """The lengths that its documents have, each once."""
    return sorted({lengths[index] for index in found.pieces})


def _exchange(
    rich: _Bin, ours: list[int], poor: _Bin, theirs: list[int], costs: dict[int, float], most_tokens: int
) -> tuple[float, int, int] | None:
    """The best exchange: by how much it lowers the sum of squares, the length that is given, and that which is taken
    for it; 0 for none."""
    gap, room = rich.cost - poor.cost, most_tokens - poor.tokens
    best: tuple[float, int, int] | None = None
    for given in ours:
        least = given - room  # so long at least is what has to be given back, or there is no room
        place = bisect_left(theirs, costs[given] - gap / 2, key=costs.__getitem__)
        for taken in (0, *theirs[max(0, place - 1) : place + 1], *theirs[(at := bisect_left(theirs, least)) : at + 1]):
            moved = costs[given] - (costs[taken] if taken else 0.0)
            may = taken >= least and (taken or len(poor.pieces) < MAX_DOCUMENTS)
            gain = 2 * moved * (gap - moved)
            if may and gain > 0 and (best is None or gain > best[0]):
                best = gain, given, taken
    return best


# ---- the order -------------------------------------------------------------------------------------------------------


def in_turns(costs: Sequence[float], ranks: Sequence[int]) -> list[int]:
    """The order in which microbatches are given out: of any STRATA in a row one is of the cheapest, one of the next,
    and so on, so that no short stretch costs more than another.

    Args:
        ranks: a permutation by chance, which decides among those of one stratum.
    """
    by_cost = sorted(range(len(costs)), key=lambda place: (costs[place], place))
    bounds = [round(stratum * len(costs) / STRATA) for stratum in range(STRATA + 1)]
    strata = [sorted(by_cost[low:high], key=lambda place: ranks[place]) for low, high in pairwise(bounds)]
    turns = [strata[stratum] for stratum in _FAR_APART]
    return [place for turn in zip_longest(*turns) for place in turn if place is not None]
