"""Filling of microbatches with the pieces of a block's documents, so that each has room for its own and all cost alike.

The longest piece first, each into the microbatch that will cost the least when the room beside it is filled with what
is still to come; so short documents even out what long ones left uneven. Where there is little short text, the ends of
documents that are cut anyway do that instead: they are poured in last, cut so that they fill what room there is. Then
the dearest microbatch exchanges documents with the cheapest, as long as that brings the two nearer to each other; and
what is dearer than a bound is made as cheap by cutting its long pieces once more, for two pieces cost less than one.

Source: the longest first, Graham 1969 (doi:10.1137/0117039).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from swarm.vocabulary.types import MAX_DOCUMENTS

RATE_AGAIN: Final = 0.7
"""When documents have become so much shorter, what is still to come is looked at anew."""
EXCHANGES: Final = 64
"""Of documents, that are looked for after all are dealt."""
OTHERS: Final = 4
"""Microbatches that are next to the dearest and to the cheapest, for where these two have nothing to exchange."""
EVEN: Final = 0.01
"""Costs no further apart than this part of the mean are equal."""
SHORTEST_CUT: Final = 16
"""Tokens. A piece that is no longer is not cut to make its microbatch cheaper."""


class Piece(NamedTuple):
    """A document, or a piece of one."""

    document: int
    """Its index."""
    start: int
    stop: int
    """Tokens of it."""


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
class Bin:
    """A microbatch in the making."""

    cost: float = 0.0
    tokens: int = 0
    pieces: list[int] = field(default_factory=list)
    """Indices."""
    aim: float = 0.0
    """How much more than the mean it is to cost."""

    @property
    def beside(self) -> float:
        """Its cost but for what it is to cost more than the others: that which is to be equal."""
        return self.cost - self.aim


class _Costs(dict[int, float]):
    """Of pieces by their tokens."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room

    def __missing__(self, length: int) -> float:
        found = self[length] = self._room.cost(length)
        return found


class Filling:
    """Microbatches that are filled with pieces, as few as they fit into but `count` at least.

    Args:
        pieces: what is to be dealt.
        cut: documents that may be cut further.
        poured: the indices of pieces that are poured in when all others are dealt; only of documents that may be cut.
        aims: how much more than the mean each of the microbatches is to cost; as many as there are to be, at least 1.
    """

    def __init__(
        self, pieces: Sequence[Piece], cut: Collection[int], poured: Collection[int], room: Room, aims: Sequence[float]
    ) -> None:
        self.pieces, self.poured = list(pieces), poured
        self._cut, self._room, self._costs = cut, room, _Costs(room)
        self._lengths = [piece.stop - piece.start for piece in pieces]
        dealt = [index for index in range(len(pieces)) if index not in poured]
        longest_first = sorted(dealt, key=self._lengths.__getitem__, reverse=True)
        while True:
            self.bins = [Bin(aim=aim) for aim in aims]
            left = self._deal(longest_first)
            if len(self.bins) <= len(aims):
                break
            aims = [*aims, *[0.0] * (len(self.bins) - len(aims))]  # all over again: the late ones have too little
        self._pour([*poured, *left])
        self._even_out()

    @property
    def mean(self) -> float:
        """The cost of a microbatch."""
        return math.fsum(found.cost for found in self.bins) / len(self.bins)

    @property
    def unevenness(self) -> float:
        """The largest cost over the mean."""
        return max(found.beside for found in self.bins) / self.mean

    def lower(self, bound: float) -> None:
        """Makes what costs more than the bound as cheap, as far as its documents may be cut."""
        dear = [found for found in self.bins if found.beside > bound]
        for found in dear:
            for index in sorted(found.pieces, key=lambda index: (-self._lengths[index], index)):
                if found.beside <= bound or self._lengths[index] <= SHORTEST_CUT or len(found.pieces) >= MAX_DOCUMENTS:
                    break
                if self.pieces[index].document in self._cut:
                    self._cut_for(found, index, found.beside - bound)
        if dear:
            self._even_out()

    # ---- dealing -----------------------------------------------------------------------------------------------------

    def _deal(self, longest_first: Sequence[int]) -> list[int]:
        """Deals pieces, to further microbatches where a whole document does not fit; returns what else does not."""
        bins, lengths, costs, most_tokens = self.bins, self._lengths, self._costs, self._room.tokens
        left_tokens, left_cost = sum(lengths), math.fsum(costs[length] for length in lengths)
        rate, rate_until = 0.0, max(lengths)
        """What a token of all that is still to come costs: a microbatch with little room will cost little more."""
        open_ones: list[tuple[float, int]] = []
        """Those that may have room, that which will cost the least first."""
        too_full: list[tuple[int, int]] = []
        """The others, those with the most room first: documents become shorter and fit again."""
        left = list[int]()
        for index in longest_first:
            length = lengths[index]
            if length <= rate_until:
                rate, rate_until = left_cost / left_tokens, int(RATE_AGAIN * length)
                open_ones, too_full = self._by_cost(rate), []
            while too_full and -too_full[0][0] >= length:
                _, place = heappop(too_full)
                heappush(open_ones, (bins[place].beside - rate * bins[place].tokens, place))
            while open_ones and most_tokens - bins[open_ones[0][1]].tokens < length:
                _, place = heappop(open_ones)
                heappush(too_full, (bins[place].tokens - most_tokens, place))
            if open_ones:
                _, place = heappop(open_ones)
            elif self.pieces[index].document in self._cut:
                left.append(index)
                continue
            else:
                bins.append(Bin())
                place = len(bins) - 1
            found, cost = bins[place], costs[length]
            found.pieces.append(index)
            found.cost += cost
            found.tokens += length
            left_tokens, left_cost = left_tokens - length, left_cost - cost
            if len(found.pieces) < MAX_DOCUMENTS:
                heappush(open_ones, (found.cost - found.aim - rate * found.tokens, place))
        return left

    def _pour(self, poured: Sequence[int]) -> None:
        """Fills all microbatches equally full, the longest piece into that which will cost the least; what has no room
        there goes on to the next."""
        if not poured:
            return
        tokens = sum(self._lengths[index] for index in poured)
        rate = math.fsum(self._costs[self._lengths[index]] for index in poured) / tokens
        full = -(-(sum(found.tokens for found in self.bins) + tokens) // len(self.bins))
        rests = [(-self._lengths[index], index) for index in poured]
        heapify(rests)
        open_ones = self._by_cost(rate, full)
        while rests:
            _, index = heappop(rests)
            if not open_ones:  # as many documents as may be are in all others
                self.bins.append(Bin())
                open_ones = [(0.0, len(self.bins) - 1)]
            _, place = heappop(open_ones)
            found = self.bins[place]
            if full - found.tokens < self._lengths[index]:
                rest = self._cut_off(index, full - found.tokens)
                heappush(rests, (-self._lengths[rest], rest))
            self._take(found, index)
            if found.tokens < full and len(found.pieces) < MAX_DOCUMENTS:
                heappush(open_ones, (found.beside - rate * found.tokens, place))

    def _by_cost(self, rate: float, full: int | None = None) -> list[tuple[float, int]]:
        """A heap of the microbatches that have room, by what they will cost but for a constant."""
        most = self._room.tokens if full is None else full
        heap = [
            (found.beside - rate * found.tokens, place)
            for place, found in enumerate(self.bins)
            if found.tokens < most and len(found.pieces) < MAX_DOCUMENTS
        ]
        heapify(heap)
        return heap

    def _take(self, found: Bin, index: int) -> None:
        found.pieces.append(index)
        found.cost += self._costs[self._lengths[index]]
        found.tokens += self._lengths[index]

    def _give(self, found: Bin, index: int) -> None:
        found.pieces.remove(index)
        found.cost -= self._costs[self._lengths[index]]
        found.tokens -= self._lengths[index]

    # ---- cutting -----------------------------------------------------------------------------------------------------

    def _cut_for(self, found: Bin, index: int, less: float) -> None:
        """Cuts a piece so that the two cost so much less than it did, or in halves if that is not enough: pieces of x
        and y tokens lack the 2 x y of the square of both."""
        length, squares = self._lengths[index], less / self._room.quadratic_share
        apart = math.isqrt(max(0, length * length - math.ceil(2 * squares)))
        found.cost -= self._costs[length]
        rest = self._cut_off(index, min(length - 1, max((length + 1) // 2, (length + apart) // 2)))
        found.pieces.append(rest)
        found.cost += self._costs[self._lengths[index]] + self._costs[self._lengths[rest]]

    def _cut_off(self, index: int, kept: int) -> int:
        """Keeps so many tokens of a piece, and returns the index of the rest."""
        document, start, stop = self.pieces[index]
        self.pieces[index], self._lengths[index] = Piece(document, start, start + kept), kept
        self.pieces.append(Piece(document, start + kept, stop))
        self._lengths.append(stop - start - kept)
        return len(self.pieces) - 1

    # ---- evening out -------------------------------------------------------------------------------------------------

    def _even_out(self) -> None:
        """The dearest one exchanges a document with the cheapest, or gives it one, whichever brings the two nearest to
        each other: as long as they are apart and there is such an exchange."""
        apart, tried = EVEN * self.mean, 0
        while tried < EXCHANGES:
            by_cost = sorted(self.bins, key=lambda found: found.beside)
            rich, poor = by_cost[-1], by_cost[0]
            pairs = [
                (rich, poor),
                *((rich, of) for of in by_cost[1:OTHERS]),
                *((of, poor) for of in by_cost[-OTHERS:-1]),
            ]
            for rich, poor in pairs:
                tried += rich.beside - poor.beside > apart
                best = self._exchange(rich, poor) if rich.beside - poor.beside > apart else None
                if best is not None:
                    break
            else:
                return
            _, given, taken = best
            moves = [(rich, poor, self._one_of(rich, given)), (poor, rich, self._one_of(poor, taken))]
            for gives, takes, index in moves:
                if index is not None:
                    self._give(gives, index)
                    self._take(takes, index)

    def _one_of(self, found: Bin, length: int) -> int | None:
        return next((index for index in found.pieces if self._lengths[index] == length), None)

    def _exchange(self, rich: Bin, poor: Bin) -> tuple[float, int, int] | None:
        """The best exchange: by how much it lowers the sum of squares, the length that is given, and that which is
        taken for it; 0 for none."""
        costs, gap, room = self._costs, rich.beside - poor.beside, self._room.tokens - poor.tokens
        ours, theirs = (sorted({self._lengths[index] for index in found.pieces}) for found in (rich, poor))
        best: tuple[float, int, int] | None = None
        for given in ours:
            least = given - room  # so long at least is what has to be given back, or there is no room
            place = bisect_left(theirs, costs[given] - gap / 2, key=costs.__getitem__)
            at = bisect_left(theirs, least)
            for taken in (0, *theirs[max(0, place - 1) : place + 1], *theirs[at : at + 1]):
                moved = costs[given] - (costs[taken] if taken else 0.0)
                may = taken >= least and (taken or len(poor.pieces) < MAX_DOCUMENTS)
                gain = 2 * moved * (gap - moved)
                if may and gain > 0 and (best is None or gain > best[0]):
                    best = gain, given, taken
        return best
