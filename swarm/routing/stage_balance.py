"""Equal visits without talking: which stages each data node's lanes visit, by convention.

Every stage's gradient is a mean over its visits; the stages learn at the same pace only if they are visited equally
often (SkipPipe's quota). The skipped stages move on like a ring over the lanes of all data nodes, in the order of their
rank among the live ones: over any `skippable` lanes in a row every stage is visited equally often. From there two data
nodes may trade stages, one for one, which changes nothing of the sum; so equality holds at all times, whoever dies in
the middle of a trade, and needs no central party.

In which order a data node takes its lanes: spread out, so that neither a peer nor a stage gets its share in one heap.

Over all lanes every stage has its equal share of the visits; this keeps it so over shorter stretches, as well as whole
numbers and the given lanes allow (a low-discrepancy sequence, by greedy choice).

Parts of a trained model that are run on purpose: which of its stages, when only so many of them are to be visited.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from math import gcd

from swarm.routing.path_rules import PathRules, order_tree
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.routing_messages import MAX_LANES, MAX_VISITS
from swarm.vocabulary.types import Hop

Lanes = tuple[tuple[Hop, ...], ...]
"""The standing routes of a data node's microbatches, taken in turn."""
FREE_ROUTES = 24
"""Of all data nodes together, at least, when they launch as fast as they can: the routes through a stage are shared out
over its replicas, and a fast one may deserve several times what a slow one does."""


def ring_stages(stages: int, per_path: int, turn: int) -> tuple[int, ...]:
    """The stages visited at place `turn` of the ring, in order, by paths through `per_path` of those after stage 0."""
    skippable, skips = stages - 1, stages - 1 - per_path
    skipped = {(turn * skips + k) % skippable for k in range(skips)}
    return tuple(stage for stage in range(1, stages) if stage - 1 not in skipped)


def ring_set(rules: PathRules, turn: int) -> frozenset[int]:
    """Likewise, in no order."""
    return frozenset(ring_stages(rules.stages, rules.per_path, turn))


def lanes_for(rules: PathRules, data_nodes: int, microbatches: int) -> int:
    """The fewest lanes per data node with which `microbatches` each visit every stage equally often.

    When no number of lanes does it within the iteration, every microbatch is a lane of its own: then visits differ by
    at most one in an iteration and are equal over the ring's period. There are no more lanes than can be told in one
    message.
    """
    most = min(microbatches, most_lanes(rules))
    for lanes in range(1, most + 1):
        if microbatches % lanes == 0 and data_nodes * lanes * rules.per_path % max(1, rules.skippable) == 0:
            return lanes
    return most


def free_lanes(rules: PathRules) -> int:
    """The fewest lanes of each data node when each launches as fast as it can: enough that it visits all stages equally
    often by itself, whatever the others do."""
    return min(ring_period(rules), most_lanes(rules))


def ring_period(rules: PathRules) -> int:
    """The fewest places of the ring in a row that visit all stages equally often."""
    return max(1, rules.skippable) // gcd(max(1, rules.skippable), rules.per_path)


def routes_each(rules: PathRules, data_nodes: int, lanes: int, microbatches: int | None) -> int:
    """How many routes of single microbatches each data node may tell, a multiple of its lanes.

    Those of an iteration, or as many as divide it into equal rounds; where each launches as fast as it can as many as
    make FREE_ROUTES of all data nodes together.
    """
    most = max(1, most_lanes(rules) // lanes)
    if microbatches is None:
        return lanes * min(most, -(-FREE_ROUTES // (lanes * max(1, data_nodes))))
    return lanes * max((n for n in range(1, most + 1) if microbatches % (n * lanes) == 0), default=1)


def most_lanes(rules: PathRules) -> int:
    """The number of lanes of one data node that can be told in one message."""
    return min(MAX_LANES, max(1, MAX_VISITS // max(1, rules.per_path)))


def fair_sets(rules: PathRules, count: int, first: int = 0) -> list[frozenset[int]]:
    """The ring's sets for `count` lanes, each one possible to visit in a legal order.

    Raises:
        ValueError: see `legal_sets`.
    """
    return legal_sets(rules, [ring_set(rules, first + k) for k in range(count)])


def legal_sets(rules: PathRules, sets: list[frozenset[int]]) -> list[frozenset[int]]:
    """The sets, each one possible to visit in a legal order.

    A set that no order may visit (a ring gap wider than the forward jump) trades one stage with another lane of the
    list, so that the sum stays.

    Raises:
        ValueError: no trade helps; the rules allow too few orders for such visits.
    """
    for k, stages in enumerate(sets):
        if stages and not order_tree(rules, stages):
            other, mine, theirs = _legal_trade(rules, sets, k)
            sets[k], sets[other] = mine, theirs
    return sets


def _legal_trade(rules: PathRules, sets: list[frozenset[int]], k: int) -> tuple[int, frozenset[int], frozenset[int]]:
    for other, theirs in enumerate(sets):
        for given in sorted(sets[k] - theirs):
            for taken in sorted(theirs - sets[k]):
                mine, yours = sets[k] - {given} | {taken}, theirs - {taken} | {given}
                if order_tree(rules, mine) and order_tree(rules, yours):
                    return other, mine, yours
    raise ValueError(f"no legal order visits the stages {sorted(sets[k])}, and no trade helps")


def visits(orders: Iterable[Iterable[int]]) -> Counter[int]:
    """How often each stage is visited."""
    return Counter(stage for order in orders for stage in order)


def spread(lanes: Sequence[tuple[Hop, ...]]) -> Lanes:
    """The lanes in a good order; the first one stays the first."""
    wanted = Counter(mark for lane in lanes for mark in _marks(lane))
    had: Counter[object] = Counter()
    left = list(range(len(lanes)))
    order: list[tuple[Hop, ...]] = []
    while left:
        share = (len(order) + 1) / len(lanes)

        def ahead(place: int, share: float = share) -> tuple[float, int]:
            """How far this lane's peers and stages would be ahead of their share."""
            return sum(had[mark] + 1 - wanted[mark] * share for mark in _marks(lanes[place])), place

        chosen = min(left, key=ahead) if order else 0
        left.remove(chosen)
        had.update(_marks(lanes[chosen]))
        order.append(lanes[chosen])
    return tuple(order)


def _marks(lane: tuple[Hop, ...]) -> tuple[object, ...]:
    return (*(hop.module for hop in lane), *(hop.peer for hop in lane))


def all_stages(stages: int) -> tuple[int, ...]:
    """A full path through a model of so many stages: all but stage 0, which is on every path and not listed."""
    return tuple(range(1, stages))


def spread_stages(rules: PathRules, shift: int = 0) -> tuple[int, ...]:
    """`rules.per_path` of the stages after stage 0, as evenly spread over the depth as whole numbers allow; the same
    for everybody.

    `shift` moves the choice on by so many stages, like a ring. Over `skippable` shifts, every stage is chosen equally
    often.
    """
    skippable = rules.skippable
    # Bresenham's line: stage i is visited where the multiple of per_path / skippable passes a whole number.
    return tuple(i + 1 for i in range(skippable) if (i + shift) * rules.per_path % skippable < rules.per_path)


def ring_of_subsets(rules: PathRules) -> tuple[tuple[int, ...], ...]:
    """All the different choices of `spread_stages`, in order of shift. Every stage is in equally many of them."""
    skippable = rules.skippable
    different = skippable // math.gcd(skippable, rules.per_path) if skippable else 1
    return tuple(spread_stages(rules, shift) for shift in range(different))


def chosen_subsets(stages: int, per_path: int | None, *, every: bool) -> tuple[tuple[int, ...], ...]:
    """The paths on which a model of so many stages is to be measured.

    Args:
        per_path: how many stages after stage 0 each visits; None for all of them.
        every: whether the whole ring of choices is asked for, and not only the first.

    Raises:
        ConfigError: there are not so many stages, or none was asked for.
    """
    if per_path is None:
        return (all_stages(stages),)
    if not min(1, stages - 1) <= per_path <= stages - 1:
        raise ConfigError(
            f"{per_path} stages per path were asked for; this run has {stages - 1} after stage 0",
            hint=f"Ask for 1 to {stages - 1}.",
        )
    rules = PathRules(stages, per_path)
    return ring_of_subsets(rules) if every else (spread_stages(rules),)
