"""The rule of three lines that lanes are compared with: at each launch, of all paths the one with the least links and
service times, a peer's service counting once more for each own microbatch under way there. Pure.

It is what a good engineer would write in an afternoon: no talk, no forecast, nothing of what the others do. Whatever
lanes are worth, they are worth beyond this; so it stands alone and short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.vocabulary.types import PeerId


def least_route(costs: Costs, data_node: PeerId, stages: Sequence[int], in_flight: Mapping[PeerId, int]) -> PeerRoute:
    """A peer for each of the stages, in this order: the least sum of links there and back and of
    service x (1 + own in flight there).

    Args:
        in_flight: for each peer, how many microbatches of this data node are on a path through it.

    Raises:
        ValueError: a stage has no peer.
    """
    ends: list[tuple[float, PeerRoute]] = [(0.0, ())]
    """Of the best routes so far, one to each peer of the stage."""
    for stage in stages:
        ends = [_onwards(costs, data_node, ends, peer, _stay_s(costs, peer, in_flight)) for peer in costs.stages[stage]]
    return _onwards(costs, data_node, ends, data_node, 0.0)[1][:-1]


def _onwards(
    costs: Costs, data_node: PeerId, ends: Sequence[tuple[float, PeerRoute]], peer: PeerId, stay_s: float
) -> tuple[float, PeerRoute]:
    """The best way to go on to a peer."""
    return min((seconds + _way_s(costs, data_node, route, peer) + stay_s, (*route, peer)) for seconds, route in ends)


def _way_s(costs: Costs, data_node: PeerId, route: PeerRoute, peer: PeerId) -> float:
    """To a peer from the end of a route, and back."""
    return 2 * costs.message_s[route[-1] if route else data_node][peer]


def _stay_s(costs: Costs, peer: PeerId, in_flight: Mapping[PeerId, int]) -> float:
    return costs.service_s(peer) * (1 + in_flight.get(peer, 0))
