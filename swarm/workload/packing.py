"""Packs a block of documents into microbatches of equal cost, so that no expensive microbatch blocks a stage's queue.

The cost is tokens plus `quadratic_share` times the sum of squared document lengths. Documents that fit are not cut.

* Filling: the longest piece first, into the microbatch that will be cheapest when it is full. Then long pieces of cut
  documents are cut again.
* Order: a block starts with the cost at the end of the previous block.

Sources: packing by workload, WLB-LLM (arXiv:2503.17924) section 4; longest first, Graham (doi:10.1137/0117039).
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise, zip_longest
from typing import Final, NamedTuple

from swarm.vocabulary.types import MAX_DOCUMENTS

RATE_AGAIN: Final = 0.7  # Relative length after which the rate of the remaining documents is computed again
SHORTEST_CUT: Final = 16  # Pieces up to this many tokens are not cut to lower a cost


Chance = Callable[[int], Sequence[int]]  # Permutes 0..count-1


class DocumentPiece(NamedTuple):
    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Capacity:
    sequence: int
    tokens: int  # Most tokens of a microbatch; at least `sequence`
    quadratic_share: float  # Cost of attention, in tokens per squared token of a document

    def cost(self, length: int) -> float:
        return length + self.quadratic_share * length * length


@dataclass(slots=True)
class Bin:
    """A microbatch that is being filled with pieces of documents."""

    cost: float = 0.0
    tokens: int = 0
    pieces: list[int] = field(default_factory=list)
    aim: float = 0.0  # Wanted cost above the mean

    @property
    def beside(self) -> float:
        """Cost minus `aim`. This difference should be equal for all microbatches."""
        return self.cost - self.aim


class Filling:
    """Fills as few microbatches as possible with pieces of documents, but at least one per element of `aims`.

    `cut`: documents that may be cut further. `poured`: indices of their pieces that are assigned last. `aims`: wanted
    cost of each microbatch above the mean.
    """

    def __init__(
        self,
        pieces: Sequence[DocumentPiece],
        cut: Collection[int],
        poured: Collection[int],
        capacity: Capacity,
        aims: Sequence[float],
    ) -> None:
        self.pieces, self.poured = list(pieces), poured
        self._cut, self._capacity, self._costs = cut, capacity, cache(capacity.cost)
        self._lengths = [piece.stop - piece.start for piece in pieces]
        dealt = [index for index in range(len(pieces)) if index not in poured]
        longest_first = sorted(dealt, key=self._lengths.__getitem__, reverse=True)
        while True:
            self.bins = [Bin(aim=aim) for aim in aims]
            left = self._deal(longest_first)
            if len(self.bins) <= len(aims):
                break
            aims = [*aims, *[0.0] * (len(self.bins) - len(aims))]  # again, because the late ones have too little
        self._pour([*poured, *left])

    @property
    def mean(self) -> float:
        return math.fsum(found.cost for found in self.bins) / len(self.bins)

    @property
    def unevenness(self) -> float:
        return max(found.beside for found in self.bins) / self.mean

    def lower(self, bound: float) -> None:
        """Cuts documents that may be cut, until no microbatch costs more than the bound."""
        for found in [each for each in self.bins if each.beside > bound]:
            for index in sorted(found.pieces, key=lambda index: (-self._lengths[index], index)):
                if found.beside <= bound or self._lengths[index] <= SHORTEST_CUT or len(found.pieces) >= MAX_DOCUMENTS:
                    break
                if self.pieces[index].document in self._cut:
                    self._cut_for(found, index, found.beside - bound)

    def _deal(self, longest_first: Sequence[int]) -> list[int]:
        """Assigns pieces, adding microbatches for whole documents. Returns pieces of cut documents that do not fit."""
        bins, lengths, costs, most_tokens = self.bins, self._lengths, self._costs, self._capacity.tokens
        left_tokens, left_cost = sum(lengths), math.fsum(costs(length) for length in lengths)
        rate, rate_until = 0.0, max(lengths)  # Mean cost per remaining token
        open_ones: list[tuple[float, int]] = []  # Microbatches with room, by their cost when full
        too_full: list[tuple[int, int]] = []  # Microbatches too full for this length, most room first
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
            found, cost = bins[place], costs(length)
            found.pieces.append(index)
            found.cost += cost
            found.tokens += length
            left_tokens, left_cost = left_tokens - length, left_cost - cost
            if len(found.pieces) < MAX_DOCUMENTS:
                heappush(open_ones, (found.cost - found.aim - rate * found.tokens, place))
        return left

    def _pour(self, poured: Sequence[int]) -> None:
        """Fills all microbatches equally: adds the longest piece first, to the microbatch that will be cheapest."""
        if not poured:
            return
        tokens = sum(self._lengths[index] for index in poured)
        rate = math.fsum(self._costs(self._lengths[index]) for index in poured) / tokens
        full = -(-(sum(found.tokens for found in self.bins) + tokens) // len(self.bins))
        rests = [(-self._lengths[index], index) for index in poured]
        heapify(rests)
        open_ones = self._by_cost(rate, full)
        while rests:
            _, index = heappop(rests)
            if not open_ones:  # all others have MAX_DOCUMENTS
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
        """Returns a heap of (cost, index) of microbatches with space left. Cost: when full, minus a constant."""
        most = self._capacity.tokens if full is None else full
        heap = [
            (found.beside - rate * found.tokens, place)
            for place, found in enumerate(self.bins)
            if found.tokens < most and len(found.pieces) < MAX_DOCUMENTS
        ]
        heapify(heap)
        return heap

    def _take(self, found: Bin, index: int) -> None:
        found.pieces.append(index)
        found.cost += self._costs(self._lengths[index])
        found.tokens += self._lengths[index]

    def _cut_for(self, found: Bin, index: int, less: float) -> None:
        """Cuts a piece of `found` in two that cost `less` less, or in halves. Lengths x and y save 2xy of (x + y)^2."""
        length, squares = self._lengths[index], less / self._capacity.quadratic_share
        apart = math.isqrt(max(0, length * length - math.ceil(2 * squares)))
        found.cost -= self._costs(length)
        rest = self._cut_off(index, min(length - 1, max((length + 1) // 2, (length + apart) // 2)))
        found.pieces.append(rest)
        found.cost += self._costs(self._lengths[index]) + self._costs(self._lengths[rest])

    def _cut_off(self, index: int, kept: int) -> int:
        """Cuts a piece after `kept` tokens. Returns the index of the rest."""
        document, start, stop = self.pieces[index]
        self.pieces[index], self._lengths[index] = DocumentPiece(document, start, start + kept), kept
        self.pieces.append(DocumentPiece(document, start + kept, stop))
        self._lengths.append(stop - start - kept)
        return len(self.pieces) - 1


ENOUGH: Final = 1.012  # A worst run up to this is good enough to try no other order
ALIKE: Final = 0.004  # Relative cost difference up to which a slope has random order
LOW: Final = 0.03  # Microbatches this much cheaper than most are spread evenly over a slope
STRATA: Final = 8
_FAR_APART: Final = (0, 4, 2, 6, 1, 5, 3, 7)  # Neighbours come from distant strata


def worst_run(costs: Sequence[float], level: float = 0.0) -> float:
    """Returns the highest ratio of largest to mean cost in STRATA consecutive microbatches, after some of `level`."""
    if not costs:
        return 1.0
    before = [level] * (STRATA - 1) if level else []
    row = [*before, *costs]
    most = min(STRATA, len(row))
    return max(max(run) * most / math.fsum(run) for at in range(len(row) - most + 1) for run in (row[at : at + most],))


def in_turns(costs: Sequence[float], ranks: Sequence[int], level: float = 0.0) -> tuple[list[int], float]:
    """Orders microbatches so that any few consecutive ones have similar costs: the best of three orders.

    * Mixed: any STRATA consecutive microbatches contain one of each cost stratum.
    * Rising, or falling costs, from the level of the previous block, with very cheap ones spread evenly.

    `ranks`: a random permutation, to break ties. Returns also the mean of the last costs of a rising or falling order.
    """
    by_cost = sorted(range(len(costs)), key=lambda place: (costs[place], place))
    bounds = [round(stratum * len(costs) / STRATA) for stratum in range(STRATA + 1)]
    strata = [sorted(by_cost[low:high], key=lambda place: ranks[place]) for low, high in pairwise(bounds)]
    turns = [strata[stratum] for stratum in _FAR_APART]
    mixed = [place for turn in zip_longest(*turns) for place in turn if place is not None]
    if not level or worst_run([costs[place] for place in mixed], level) <= ENOUGH:
        return mixed, 0.0
    alike, low = ALIKE * math.fsum(costs) / len(costs), (1 - LOW) * costs[by_cost[bounds[1]]]
    main = sorted(
        (place for place in by_cost if costs[place] >= low),
        key=lambda place: (round(costs[place] / alike), ranks[place]),
    )
    few = sorted((place for place in by_cost if costs[place] < low), key=lambda place: ranks[place])
    rising, falling = _spread(main, few), _spread(main[::-1], few)
    best = min((mixed, rising, falling), key=lambda order: worst_run([costs[place] for place in order], level))
    last = [costs[place] for place in best if costs[place] >= low][-STRATA:]
    return best, 0.0 if best is mixed else math.fsum(last) / len(last)


def _spread(main: Sequence[int], few: Sequence[int]) -> list[int]:
    bounds = [round(part * len(main) / (len(few) + 1)) for part in range(len(few) + 2)]
    parts = [main[low:high] for low, high in pairwise(bounds)]
    return [place for part, one in zip_longest(parts, few) for place in (*part, *([] if one is None else [one]))]


EVEN_ENOUGH: Final = 1.012  # Badness up to which no second filling is tried
ABOVE: Final = 1.006  # Factor over the level above which costs are lowered
LOWERED: Final = 3  # Iterations for the mean after lowering
MOST_LOWERED: Final = 0.9  # Lowest level for lowering, over the mean, because pieces become short
BACK: Final = 0.1  # Share by which the level returns to the block's own cost
EMPTY: Final = 0.018  # Share of unused tokens without a penalty
EMPTY_COUNTS: Final = 3.0  # Weight of further unused tokens against unevenness
FEW_ENDS: Final = 0.02  # Share of tokens in ends of cut documents below which they cannot balance a block
UNEVEN: Final = 1.1  # Unevenness above which more microbatches are tried
MORE: Final = (1.06, 1.12, 1.18, 1.25)  # Factors on the fewest microbatches
FLAT: Final = 0.01  # Relative step between two blocks up to which no slope is tried
STEEPEST: Final = 0.2  # Largest relative step at the start of a block


@dataclass(frozen=True, slots=True)
class Packing:
    microbatches: tuple[tuple[DocumentPiece, ...], ...]  # In order, each with ascending pieces
    costs: tuple[float, ...]
    level: float  # Wanted cost at the start of the next block


def pack(
    lengths: Sequence[int], cut: Collection[int], capacity: Capacity, level: float = 0.0, chance: Chance = range
) -> Packing:
    """Packs documents into as few microbatches as possible, with costs as equal as possible. Deterministic.

    `cut`: indices of documents that are longer than the sequence, or the rest of a cut one. `level`: cost at the end of
    the previous block; 0 if unknown. `chance` returns a permutation of `range(n)`, which orders equal microbatches.
    """
    if not lengths:
        return Packing((), (), level)
    block = _Block(lengths, frozenset(cut), capacity, level)
    found, natural = block.fewest_filled()
    if found.unevenness > UNEVEN:
        found = block.more_filled() or found
    packing = _given_out(found, level, natural, chance)
    sloping = block.sloping(found) if level else None
    if sloping is not None:
        other = _given_out(sloping, level, natural, chance)
        packing = min((packing, other), key=lambda one: worst_run(one.costs, level))
    return packing


def _given_out(found: Filling, level: float, natural: float, chance: Chance) -> Packing:
    bins = [one for one in found.bins if one.pieces]
    costs = [one.cost for one in bins]
    turns, ends_at = in_turns(costs, chance(len(bins)), level)
    packed = [tuple(sorted(found.pieces[index] for index in bins[turn].pieces)) for turn in turns]
    if not ends_at:
        ends_at = min(found.mean, level + BACK * (natural - level)) if level else found.mean
    return Packing(tuple(packed), tuple(costs[turn] for turn in turns), ends_at)


class _Block:
    """Documents of one block. Documents that may be cut are in pieces of the longest allowed length."""

    def __init__(self, lengths: Sequence[int], cut: frozenset[int], capacity: Capacity, level: float) -> None:
        self._cut, self._capacity, self._level = cut, capacity, level
        self._tokens = sum(lengths)
        self._fewest = -(-self._tokens // capacity.tokens)
        longest = capacity.sequence - capacity.sequence // 64  # Room for other documents
        self._pieces = [
            DocumentPiece(index, start, min(start + step, length))
            for index, length in enumerate(lengths)
            for step in (longest if index in cut else length,)
            for start in range(0, length, step)
        ]
        self._ends = frozenset(
            index
            for index, piece in enumerate(self._pieces)
            if piece.document in cut and piece.stop - piece.start < longest
        )

    def fewest_filled(self) -> tuple[Filling, float]:
        """Fills the fewest microbatches, in two ways. Returns the better filling and its mean cost before `lower`."""
        tried = list[tuple[float, Filling, float]]()
        ends = sum(self._pieces[index].stop - self._pieces[index].start for index in self._ends)
        for poured in (frozenset[int](), self._ends)[: 1 + (ends >= FEW_ENDS * self._tokens)]:
            found = self._filled(poured, self._fewest)
            natural = found.mean
            found.lower(self._bound(found))
            tried.append((self._badness(found), found, natural))
            if tried[-1][0] <= EVEN_ENOUGH:
                break
        _, found, natural = min(tried, key=lambda one: one[0])
        return found, natural

    def more_filled(self) -> Filling | None:
        """Fills more microbatches, as few as make costs even. None if more microbatches do not help."""
        for share in MORE:
            found = self._filled(frozenset(), math.ceil(share * self._fewest))
            if found.unevenness <= (1 + UNEVEN) / 2:
                return found
        return None

    def sloping(self, flat: Filling) -> Filling | None:
        """Fills microbatches with costs from the previous block's to this block's. None if useless or impossible."""
        step = self._level - flat.mean
        step = math.copysign(min(abs(step), STEEPEST * flat.mean), step)
        if abs(step) <= FLAT * flat.mean:
            return None
        found = Filling(self._pieces, self._cut, flat.poured, self._capacity, slope(step, len(flat.bins)))
        if self._cut:
            found.lower(self._bound(found))
        return found if len(found.bins) == len(flat.bins) else None

    def _filled(self, poured: frozenset[int], count: int) -> Filling:
        return Filling(self._pieces, self._cut, poured, self._capacity, [0.0] * count)

    def _bound(self, found: Filling) -> float:
        """Returns the bound for `lower`: just above the resulting mean, or above the previous block's cost if less."""
        costs = [one.beside for one in found.bins]
        natural = mean = found.mean
        bound = math.inf
        for _ in range(LOWERED):
            bound = ABOVE * max(min(mean, self._level or mean), MOST_LOWERED * natural)
            mean = math.fsum(min(cost, bound) for cost in costs) / len(costs)
        return bound

    def _badness(self, found: Filling) -> float:
        """Rates a filling (1: best): largest over mean cost, with the previous block's; penalty for unused tokens."""
        level, mean, count = self._level or found.mean, found.mean, len(found.bins)
        empty = 1 - self._tokens / (count * self._capacity.tokens)
        uneven = max(level, *(one.cost for one in found.bins)) / min(level, mean)
        return uneven + (EMPTY_COUNTS * max(0.0, empty - EMPTY) if count > self._fewest else 0.0)


def slope(step: float, count: int) -> list[float]:
    """Returns each microbatch's wanted cost above the mean: falling from `step`, constant in the second half."""
    down = max(1, count // 2 // STRATA)
    aims = [step * max(-1 / 3, 1 - 4 / 3 * (place // STRATA + 0.5) / down) for place in range(count)]
    mean = math.fsum(aims) / count
    return [aim - mean for aim in aims]
