"""Whether microbatches could wait for each other in a circle, by the routes of all lanes.

A microbatch holds a slot of every peer that it has visited, and waits only at a peer that can run out of slots (a
crowded one). So who waits in a circle holds a crowded peer and waits for one that comes later on its way: an arrow from
the first to the second. Without a circle of arrows nobody waits for ever. A lane that goes up the stages only has
arrows up; a circle needs one that steps back. Every data node looks whether a step back of its own lane closes a
circle; if so, it walks that lane in the order of the stages. All others may do the same: so their lanes count in both
orders.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.vocabulary.types import PeerId

Arrows = dict[PeerId, set[PeerId]]


def in_order(route: PeerRoute, stage_of: Mapping[PeerId, int]) -> PeerRoute:
    """The same peers without a step back. Legal whenever some order of these stages is: when they are sorted, no jump
    is wider than before."""
    return tuple(sorted(route, key=lambda peer: stage_of[peer]))


def closes_a_circle(
    route: PeerRoute, others: Iterable[PeerRoute], stage_of: Mapping[PeerId, int], crowded: Callable[[PeerId], bool]
) -> bool:
    """Whether a step back on this route may be part of a circle.

    Args:
        others: the routes of all other lanes; peers without a stage are passed over.
        crowded: whether a peer can run out of slots.
    """
    own = [peer for peer in route if crowded(peer)]
    back = [
        (later, earlier)
        for k, later in enumerate(own)
        for earlier in own[k + 1 :]
        if stage_of[later] > stage_of[earlier]
    ]
    if not back:
        return False
    arrows: Arrows = {}
    _draw(arrows, own)
    for other in others:
        known = tuple(peer for peer in other if peer in stage_of and crowded(peer))
        _draw(arrows, known)
        _draw(arrows, in_order(known, stage_of))
    return any(_leads(arrows, earlier, later) for later, earlier in back)


def crowded_by(plan: Mapping[PeerId, Sequence[PeerRoute]], costs: Costs) -> Callable[[PeerId], bool]:
    """Whether the routes of a plan can bring more microbatches at once to a peer than it has slots for."""
    most: Counter[PeerId] = Counter()
    for data_node, routes in plan.items():
        for peer, count in Counter(peer for route in routes for peer in route).items():
            most[peer] += min(costs.slots[data_node], count)
    return lambda peer: most[peer] > costs.slots[peer]


def _draw(arrows: Arrows, way: Iterable[PeerId]) -> None:
    for here, there in itertools.pairwise(way):
        arrows.setdefault(here, set()).add(there)


def _leads(arrows: Arrows, start: PeerId, goal: PeerId) -> bool:
    reached, ahead = {start}, [start]
    while ahead:
        for peer in arrows.get(ahead.pop(), ()):
            if peer == goal:
                return True
            if peer not in reached:
                reached.add(peer)
                ahead.append(peer)
    return False
