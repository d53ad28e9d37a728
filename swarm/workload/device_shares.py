"""Shares of a microbatch's documents for the devices of one node, so that all are done at the same time.

Attention knows no more than a document, so devices that compute whole documents exchange nothing. Where that leaves
one waiting for another, the most costly documents are cut: every device gets a piece of a document's head and the
mirrored piece of its tail, which together cost just its share of the document, in tokens and in attention alike. The
pieces' keys and values then have to be exchanged, so as little is cut as helps.

Sources: WLB-LLM (arXiv:2503.17924) section 5, sharding by document and the choice between two shardings by their
predicted times; the longest first, Graham 1969 (doi:10.1137/0117039).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Final

from swarm.vocabulary.types import Reasoned

CUTTING: Final = 0.06
"""What a document costs more when it is cut, as a part of its cost: keys and values are exchanged in every block, both
ways, and every device waits for the slowest there. Measured with two processor cores
(`benchmarks/workload_devices.py`)."""
LEAST_PIECE: Final = 16
"""Tokens. A device that would get less of a head or tail gets nothing of it."""
EVEN: Final = 0.002
"""A largest load that is not more than this part above the mean is not lowered any more."""
EXCHANGED: Final = 32
"""Documents of a device that are looked at for an exchange: its shortest, which even out the most."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """The documents that each device computes alone, and those that all compute together."""

    whole: tuple[tuple[int, ...], ...]
    """For each device the indices of its documents, in rising order."""
    cut: tuple[int, ...]
    """Indices, in rising order."""
    shares: tuple[float, ...]
    """Of every cut document, for each device; together 1, or all 0 where nothing is cut."""
    loads: tuple[float, ...]
    """The predicted cost for each device."""

    @property
    def unevenness(self) -> float:
        """The largest load over the mean."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


def deal(costs: Sequence[float], devices: int, cutting: float = CUTTING) -> Reasoned[Dealing]:
    """Deals documents of these costs to so many equal devices.

    Args:
        costs: of each document, above 0; at least one.
        cutting: what cutting a document costs, as a part of its cost. Infinite where nothing can be cut.

    Returns:
        The dealing of the least predicted time; of equal ones that which cuts the least. The same for the same input.
    """
    found = deal_whole(costs, devices)
    uncut = found.unevenness
    if cutting < float("inf"):
        costliest = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
        for count in range(1, min(len(costs), devices) + 1):
            tried = _deal(costs, devices, frozenset(costliest[:count]), cutting)
            if max(tried.loads) < max(found.loads):
                found = tried
    if not found.cut:
        return Reasoned(found, f"whole documents, the largest share {uncut:.2f} of the mean")
    return Reasoned(found, f"{len(found.cut)} cut, else the largest share would be {uncut:.2f} of the mean")


def deal_whole(costs: Sequence[float], devices: int) -> Dealing:
    """Deals documents and cuts none."""
    return _deal(costs, devices, frozenset(), 0.0)


def deal_cut(costs: Sequence[float], devices: int, cutting: float = CUTTING) -> Dealing:
    """Cuts every document into equal shares (the paper's sharding by document)."""
    return _deal(costs, devices, frozenset(range(len(costs))), cutting)


def pieces(tokens: int, shares: Sequence[float]) -> tuple[tuple[range, ...], ...]:
    """For each device the tokens that it gets of a cut document: of the head, and of the tail in the opposite order.

    Together they are all tokens, once.
    """
    middle = tokens // 2
    ends = _ends(middle, shares)
    heads = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    tails = [range(tokens - head.stop, tokens - head.start) for head in heads]
    if tokens % 2:  # the token in the middle goes to the last device that has a piece
        last = max(index for index, head in enumerate(heads) if head)
        tails[last] = range(tails[last].start - 1, tails[last].stop)
    return tuple(
        (range(head.start, tail.stop),)
        if head and head.stop == tail.start
        else tuple(part for part in (head, tail) if part)
        for head, tail in zip(heads, tails, strict=True)
    )


def _deal(costs: Sequence[float], devices: int, cut: frozenset[int], cutting: float) -> Dealing:
    whole: list[list[int]] = [[] for _ in range(devices)]
    least = [(0.0, device) for device in range(devices)]
    heapify(least)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        if index in cut:
            continue
        load, device = least[0]
        whole[device].append(index)
        heapreplace(least, (load + costs[index], device))
    loads = [sum(costs[index] for index in held) for held in whole]
    if not cut:
        _exchange(whole, loads, costs)
        return Dealing(tuple(tuple(sorted(held)) for held in whole), (), (0.0,) * devices, tuple(loads))
    together = sum(costs[index] for index in sorted(cut)) * (1 + cutting)
    level = _level(loads, together)
    shares = [max(0.0, level - load) / together for load in loads]
    all_loads = tuple(load + share * together for load, share in zip(loads, shares, strict=True))
    return Dealing(tuple(tuple(sorted(held)) for held in whole), tuple(sorted(cut)), tuple(shares), all_loads)


def _exchange(whole: list[list[int]], loads: list[float], costs: Sequence[float]) -> None:
    """Moves or swaps documents between the fullest and the emptiest device as long as that lowers the larger load of
    the two; at most once for each document."""
    mean = sum(loads) / len(loads)
    for _ in costs:
        full = max(range(len(loads)), key=lambda device: loads[device])
        empty = min(range(len(loads)), key=lambda device: loads[device])
        if loads[full] <= (1 + EVEN) * mean:
            return
        wanted = (loads[full] - loads[empty]) / 2
        best: tuple[float, int, int | None] | None = None
        giving, taking = (sorted(whole[device], key=lambda index: costs[index])[:EXCHANGED] for device in (full, empty))
        ways = [(costs[given], given, None) for given in giving] + [
            (costs[given] - costs[taken], given, taken) for given in giving for taken in taking
        ]
        for gain, given, taken in ways:
            off = abs(wanted - gain)
            if 0 < gain < 2 * wanted and (best is None or off < best[0]):
                best = (off, given, taken)
        if best is None or best[0] >= wanted * (1 - 1e-9):
            return
        _, given, taken = best
        whole[full].remove(given)
        whole[empty].append(given)
        if taken is not None:
            whole[empty].remove(taken)
            whole[full].append(taken)
        for device in (full, empty):
            loads[device] = sum(costs[index] for index in whole[device])


def _level(loads: Sequence[float], more: float) -> float:
    """The level to which `more` fills up the emptiest of the loads."""
    rising = sorted(loads)
    for count in range(1, len(rising) + 1):
        level = (more + sum(rising[:count])) / count
        if count == len(rising) or level <= rising[count]:
            return level
    raise AssertionError("the loop ends with all of them")


def _ends(middle: int, shares: Sequence[float]) -> list[int]:
    """Where each device's piece of the head ends."""
    kept = [share if share * middle >= LEAST_PIECE else 0.0 for share in shares]
    if not any(kept):
        kept = [float(index == 0) for index in range(len(shares))]
    total, so_far, ends = sum(kept), 0.0, []
    for share in kept:
        so_far += share
        ends.append(round(middle * so_far / total))
    return ends
