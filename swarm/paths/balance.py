"""Equal visits without talking: which stages each data node's lanes visit, by convention.

Every stage's gradient is a mean over its visits; the stages learn at the same pace only if they are visited equally often (SkipPipe's quota). The skipped
stages move on like a ring over the lanes of all data nodes, in the order of their rank among the live ones: over any `skippable` lanes in a row every stage
is visited equally often. From there two data nodes may trade stages, one for one, which changes nothing of the sum; so equality holds at all times, whoever
dies in the middle of a trade, and needs no central party.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import gcd

from swarm.lane_messages import MAX_LANES, MAX_VISITS
from swarm.paths.rules import PathRules, order_tree

FREE_LANES = 24
"""Of all data nodes together, at least, when they launch as fast as they can."""


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

    When no number of lanes does it within the iteration, every microbatch is a lane of its own: then visits differ by at most one in an iteration and are
    equal over the ring's period. There are no more lanes than can be told in one message.
    """
    most = min(microbatches, _most_lanes(rules))
    for lanes in range(1, most + 1):
        if microbatches % lanes == 0 and data_nodes * lanes * rules.per_path % max(1, rules.skippable) == 0:
            return lanes
    return most


def free_lanes(rules: PathRules, data_nodes: int) -> int:
    """Lanes of each data node when each launches as fast as it can.

    Enough that it visits all stages equally often by itself, whatever the others do, and that all data nodes together have FREE_LANES: the lanes on a
    stage are shared out over its replicas, and a fast one may deserve several times what a slow one does.
    """
    period = max(1, rules.skippable) // gcd(max(1, rules.skippable), rules.per_path)
    most = max(1, _most_lanes(rules) // period) * period
    wanted = -(-FREE_LANES // max(1, data_nodes))
    return min(-(-wanted // period) * period, most, _most_lanes(rules))


def _most_lanes(rules: PathRules) -> int:
    """That can be told in one message."""
    return min(MAX_LANES, max(1, MAX_VISITS // max(1, rules.per_path)))


def fair_sets(rules: PathRules, count: int, first: int = 0) -> list[frozenset[int]]:
    """The ring's sets for `count` lanes, each one possible to visit in a legal order.

    A set that no order may visit (a ring gap wider than the forward jump) trades one stage with another lane of the list, so that the sum stays.

    Raises:
        ValueError: no trade helps; the rules allow too few orders for equal visits.
    """
    sets = [ring_set(rules, first + k) for k in range(count)]
    for k, stages in enumerate(sets):
        if not order_tree(rules, stages):
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
