"""Unequal visits within bounds: how large a share of a data node's microbatches visits each stage, and which stages
each of them visits.

With equal visits the weakest stage sets the pace of all. A run whose manifest allows it (`stages.visit_ratio` above 1)
visits weak stages less: of all shares that sum to the stages per path, of which none is above 1 and the largest at most
`visit_ratio` times the smallest, those that let the most microbatches through per second, and of these the most equal
ones. The mean over a part's own visits keeps every stage's step right, however often it is visited.

Shares are whole visits in so many microbatches. Which microbatch visits what is systematic sampling (Madow, 1949): the
shares lie end to end on a line, and a microbatch visits the stages in whose intervals its point and all points one
microbatch further lie. So every stage is visited exactly as often as it should be in a period, and the sets of any
number are known without those before. Each data node deals its own; nobody has to agree about shares.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import PathRules, order_tree
from swarm.routing.stage_balance import legal_sets, most_lanes, ring_period, ring_stages
from swarm.vocabulary.types import Reasoned

FINENESS = 16
"""Microbatches over which shares are whole visits, at least: rounding moves a share by less than 1/16."""
LONGEST = 3
"""The period may be so many times as long where that lets weak stages be visited less: in 16 microbatches, of which
each visits 3 of 4 stages, no whole numbers come nearer to a ratio of 1.25 than 11 and 13; in 44 there are 28 and 35."""
WORTH_DEALING = 0.03
"""By so much the throughput must be expected to rise before shares change: measurements scatter by as much, and every
change makes the data nodes talk again."""
LEAST_SERVICE_S = 1e-9
ROUNDING = 1e-9
"""Of quotients that should be whole."""


@dataclass(frozen=True, slots=True)
class VisitShares:
    """How many of `of` microbatches in a row visit each stage after stage 0."""

    visits: tuple[int, ...]
    of: int

    @property
    def is_equal(self) -> bool:
        """Whether all stages are visited equally often."""
        return len(set(self.visits)) <= 1

    @property
    def per_path(self) -> int:
        """Stages that each microbatch visits."""
        return sum(self.visits) // self.of

    def share(self, stage: int) -> float:
        """Of the microbatches that visit a stage."""
        return self.visits[stage - 1] / self.of

    def rate(self, capacities: Sequence[float]) -> float:
        """Microbatches per second until the first stage is busy all the time.

        Args:
            capacities: visits per second that each stage after stage 0 can serve.
        """
        full = (capacity * self.of / visits for capacity, visits in zip(capacities, self.visits, strict=True) if visits)
        return min(full, default=math.inf)

    def stages_at(self, turn: int) -> tuple[int, ...]:
        """The stages visited by microbatch `turn`, in order. Equal shares are the ring of `stage_balance`."""
        if self.is_equal:
            return ring_stages(len(self.visits) + 1, self.per_path, turn)
        point, end, visited = turn * _stride(self.of) % self.of, 0, []
        for stage, visits in enumerate(self.visits, start=1):
            begin, end = end, end + visits
            # Whole numbers k with begin <= point + k x of < end: none or one, for visits is at most `of`.
            if -(-(end - point) // self.of) > -(-(begin - point) // self.of):
                visited.append(stage)
        return tuple(visited)


def capacities_of(costs: Costs) -> tuple[float, ...]:
    """Visits per second that the live replicas of each stage after stage 0 can serve together."""
    return tuple(
        math.fsum(1 / max(LEAST_SERVICE_S, costs.service_s(peer)) for peer in peers) for peers in costs.stages[1:]
    )


# ---- which shares ----------------------------------------------------------------------------------------------------


def equal_shares(rules: PathRules) -> VisitShares:
    """Those of a run whose visits are equal."""
    period = ring_period(rules)
    return VisitShares((period * rules.per_path // max(1, rules.skippable),) * rules.skippable, period)


@lru_cache(maxsize=128)
def share_period(rules: PathRules, microbatches: int | None = None) -> int | None:
    """Microbatches over which a data node's shares are whole visits, each with a lane of its own; None where visits are
    equal: by the rules, because nothing is skipped, or because no whole numbers of visits are within the ratio.

    Follows from the rules alone, so that all data nodes have equally many lanes.

    Args:
        microbatches: of an iteration of which the period must be a divisor; None where data nodes launch freely. Then
            it is a multiple of the ring's, so that equal shares are among those that can be dealt.
    """
    most, ring = most_lanes(rules), ring_period(rules)
    if rules.visit_ratio <= 1 or not 0 < rules.per_path < rules.skippable:
        return None
    if microbatches is None:
        shortest = ring * max(1, min(-(-FINENESS // ring), most // ring)) if ring <= most else most
        periods = range(shortest, max(shortest, min(most, LONGEST * FINENESS)) + 1, ring)
        period = min(periods, key=lambda of: (_least_share(rules, of), of))
    else:
        period = max(lanes for lanes in range(1, min(microbatches, most) + 1) if microbatches % lanes == 0)
    return period if _caps(rules, (math.inf,) * rules.skippable, period, 1.0) is not None else None


def _least_share(rules: PathRules, of: int) -> float:
    """Of `of` microbatches, those that a stage is visited by at least where all others are as often as the ratio
    allows; 1 where no whole numbers are within it."""
    others, total = rules.skippable - 1, of * rules.per_path
    fewest = (n for n in range(1, of + 1) if n + others * min(of, int(rules.visit_ratio * n * (1 + ROUNDING))) >= total)
    return next(fewest, of) / of


def best_shares(rules: PathRules, capacities: Sequence[float], of: int) -> Reasoned[VisitShares]:
    """The shares with the highest rate within the rules' ratio; of these the most equal ones.

    Args:
        capacities: visits per second that each stage after stage 0 can serve.
        of: a `share_period`.

    Raises:
        ValueError: no whole numbers of visits in so many microbatches are within the ratio.
    """
    free = _caps(rules, (math.inf,) * rules.skippable, of, 1.0)
    if free is None:
        raise ValueError(f"no visits of {rules.skippable} stages in {of} microbatches are within the ratio")
    even = VisitShares(_filled(free, of * rules.per_path, capacities), of)
    weakest = min(capacities)
    if weakest <= 0:
        return Reasoned(even, f"equal: stage {capacities.index(weakest) + 1} has nobody")
    # The rate is that at which some stage is just full with a whole number of visits: as a list, from low to high.
    rates = sorted({capacity * of / visits for capacity in capacities for visits in range(1, of + 1)})
    place = bisect_right(rates, False, key=lambda rate: _caps(rules, capacities, of, rate) is None)
    caps = _caps(rules, capacities, of, rates[place - 1]) if place else None
    best = even if caps is None else VisitShares(_filled(caps, of * rules.per_path, capacities), of)
    gain = best.rate(capacities) / even.rate(capacities)
    if gain <= 1 + ROUNDING:
        return Reasoned(even, "equal: no other shares let more microbatches through")
    full = min(range(len(capacities)), key=lambda k: capacities[k] / best.visits[k])
    why = f"stage {full + 1} is full first, with {best.visits[full]} visits in {of} microbatches"
    return Reasoned(best, f"{why}; {gain:.2f} times what equal visits let through")


def reconsidered(rules: PathRules, held: VisitShares, capacities: Sequence[float], of: int) -> Reasoned[VisitShares]:
    """The best shares of a period if they are WORTH_DEALING, else those that are held."""
    if min(capacities) <= 0:
        return Reasoned(held, "kept: a stage has nobody")
    best = best_shares(rules, capacities, of)
    gain = best.value.rate(capacities) / held.rate(capacities) - 1
    return best if gain >= WORTH_DEALING else Reasoned(held, f"kept: others would bring {max(0.0, gain):.1%}")


def _caps(rules: PathRules, capacities: Sequence[float], of: int, rate: float) -> list[int] | None:
    """The most visits of each stage in `of` microbatches at so many microbatches per second; None when shares within
    them would not sum up, or not be within the ratio."""
    total = of * rules.per_path
    caps = [int(min(of, capacity * of / rate * (1 + ROUNDING))) for capacity in capacities]
    # The largest may be so much above the smallest: the higher the floor, the more room there is.
    floor = min(*caps, total // len(caps))
    highest = min(of, int(rules.visit_ratio * floor * (1 + ROUNDING)))
    caps = [min(cap, highest) for cap in caps]
    return caps if floor >= 1 and sum(caps) >= total else None


def _filled(caps: Sequence[int], total: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """`total` visits as equal as the caps allow; what is left of the last layer goes to the strongest stages."""
    level = 0
    while sum(min(cap, level + 1) for cap in caps) <= total and level < max(caps):
        level += 1
    visits = [min(cap, level) for cap in caps]
    higher = sorted((k for k, cap in enumerate(caps) if cap > level), key=lambda k: (-capacities[k], k))
    for k in higher[: total - sum(visits)]:
        visits[k] += 1
    return tuple(visits)


@lru_cache(maxsize=128)
def _stride(of: int) -> int:
    """A step through `of` points that spreads any few steps in a row over all of them: its quotients in Euclid's
    algorithm are small (the multiples of a badly approximable number have low discrepancy)."""

    def largest_quotient(step: int) -> int:
        whole, part, largest = of, step, 0
        while part:
            largest, whole, part = max(largest, whole // part), part, whole % part
        return largest

    return min((s for s in range(1, of + 1) if math.gcd(s, of) == 1), key=lambda s: (largest_quotient(s), s))


# ---- which stages ----------------------------------------------------------------------------------------------------


def dealt_sets(rules: PathRules, shares: VisitShares, first: int = 0) -> list[frozenset[int]]:
    """The sets of stages for one period of lanes, each one possible to visit in a legal order.

    Args:
        first: with which turn it begins; another one for each data node, so that they are not all at the same stages.

    Raises:
        ValueError: see `stage_balance.legal_sets`.
    """
    return legal_sets(rules, [frozenset(shares.stages_at(first + k)) for k in range(shares.of)])


def first_deal(
    rules: PathRules, capacities: Sequence[float], period: int, first: int = 0
) -> tuple[Reasoned[VisitShares], list[frozenset[int]]]:
    """The best shares, and the sets of a period of lanes; equal ones where no legal orders make up the best.

    Raises:
        ValueError: no legal orders make up equal ones either.
    """
    shares = best_shares(rules, capacities, period)
    try:
        return shares, dealt_sets(rules, shares.value, first)
    except ValueError:
        even = best_shares(rules, [1.0] * len(capacities), period).value
        return Reasoned(even, "equal: too few orders are legal for other shares"), dealt_sets(rules, even, first)


def moved_sets(
    rules: PathRules, sets: Sequence[frozenset[int]], before: VisitShares, after: VisitShares
) -> list[frozenset[int]]:
    """Lanes by other shares: few of them exchange a stage, and what was traded with others stays as it is. A visit that
    no lane can take in a legal order stays where it is.
    """
    moved, touched = list(sets), Counter[int]()
    change = [new - old for old, new in zip(before.visits, after.visits, strict=True)]
    gives = [stage for stage, more in enumerate(change, start=1) for _ in range(-more)]
    takes = [stage for stage, more in enumerate(change, start=1) for _ in range(more)]
    for given, taken in zip(gives, takes, strict=True):
        # Where all lanes with the one stage visit the other too, a third stage goes between.
        ways = [((given, taken),), *(((given, other), (other, taken)) for other in range(1, rules.stages))]
        lanes = next((lanes for way in ways if (lanes := _along(rules, moved, touched, way)) is not None), {})
        for lane, stages in lanes.items():
            moved[lane] = stages
            touched[lane] += 1
    return moved


def _along(
    rules: PathRules, sets: Sequence[frozenset[int]], touched: Mapping[int, int], way: Sequence[tuple[int, int]]
) -> dict[int, frozenset[int]] | None:
    """New sets for some lanes, each giving one stage and taking another; None where some step has no lane. Lanes that
    were changed least come first, far from each other."""
    stride, found = _stride(len(sets)), dict[int, frozenset[int]]()
    lanes = sorted((k * stride % len(sets) for k in range(len(sets))), key=lambda k: touched.get(k, 0))
    for given, taken in way:
        for lane in lanes:
            stages = sets[lane]
            changed = stages - {given} | {taken}
            if lane not in found and given in stages and taken not in stages and order_tree(rules, changed):
                found[lane] = changed
                break
        else:
            return None
    return found
