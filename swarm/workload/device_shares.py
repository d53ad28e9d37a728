"""Splits a microbatch's documents over the devices of one node, so that all finish at the same time.

Whole documents need no communication. If loads differ, the most expensive documents are cut. Each device gets a piece
of the head and the mirrored piece of the tail, which balances tokens and attention. Keys and values are exchanged.

Sources: sharding by document, WLB-LLM (arXiv:2503.17924) section 5; longest first, Graham (doi:10.1137/0117039).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Final

from swarm.vocabulary.types import Reasoned

CUTTING: Final = 0.06  # Relative extra cost of a cut document, for the exchange of keys and values in every block
LEAST_PIECE: Final = 16


@dataclass(frozen=True, slots=True)
class Dealing:
    """Assignment of a microbatch's documents: whole ones to single devices, cut ones to all devices."""

    whole: tuple[tuple[int, ...], ...]  # By device, ascending indices of documents
    cut: tuple[int, ...]
    shares: tuple[float, ...]  # Share of every cut document by device; the sum is 1, or all are 0
    loads: tuple[float, ...]

    @property
    def unevenness(self) -> float:
        return max(self.loads) * len(self.loads) / sum(self.loads)


def deal(costs: Sequence[float], devices: int, cutting: float = CUTTING) -> Reasoned[Dealing]:
    """Assigns documents to equal devices for the least predicted time. `cutting`: relative extra cost of a cut one."""
    found = deal_whole(costs, devices)
    uncut = found.unevenness
    if cutting < float("inf"):
        costliest = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
        for count in range(1, min(len(costs), devices) + 1):
            tried = _deal(costs, devices, frozenset(costliest[:count]), cutting)
            if max(tried.loads) < max(found.loads):
                found = tried
    if not found.cut:
        return Reasoned(found, f"whole documents; the largest load is {uncut:.2f} of the mean")
    return Reasoned(found, f"{len(found.cut)} cut; without that the largest load is {uncut:.2f} of the mean")


def deal_whole(costs: Sequence[float], devices: int) -> Dealing:
    return _deal(costs, devices, frozenset(), 0.0)


def pieces(tokens: int, shares: Sequence[float]) -> tuple[tuple[range, ...], ...]:
    """Returns each device's tokens of a cut document: a range of the head, and the mirrored range of the tail."""
    middle = tokens // 2
    ends = _ends(middle, shares)
    heads = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    tails = [range(tokens - head.stop, tokens - head.start) for head in heads]
    if tokens % 2:  # the middle token goes to the last device with a piece
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
        return Dealing(tuple(tuple(sorted(held)) for held in whole), (), (0.0,) * devices, tuple(loads))
    together = sum(costs[index] for index in sorted(cut)) * (1 + cutting)
    level = _level(loads, together)
    shares = [max(0.0, level - load) / together for load in loads]
    all_loads = tuple(load + share * together for load, share in zip(loads, shares, strict=True))
    return Dealing(tuple(tuple(sorted(held)) for held in whole), tuple(sorted(cut)), tuple(shares), all_loads)


def _level(loads: Sequence[float], more: float) -> float:
    rising = sorted(loads)
    for count in range(1, len(rising) + 1):
        level = (more + sum(rising[:count])) / count
        if count == len(rising) or level <= rising[count]:
            return level
    raise AssertionError("the loop ends with all of them")


def _ends(middle: int, shares: Sequence[float]) -> list[int]:
    kept = [share if share * middle >= LEAST_PIECE else 0.0 for share in shares]
    if not any(kept):
        kept = [float(index == 0) for index in range(len(shares))]
    total, so_far, ends = sum(kept), 0.0, []
    for share in kept:
        so_far += share
        ends.append(round(middle * so_far / total))
    return ends
