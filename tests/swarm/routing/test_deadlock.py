"""That nobody waits in a circle: random lanes over few peers with few slots, walked as each data node decides by
itself."""

from __future__ import annotations

import math
import random
from collections import Counter

from swarm.routing.cost_model import PeerRoute
from swarm.routing.deadlock import closes_a_circle, in_order
from swarm.routing.path_rules import order_tree, orders
from swarm.simulation.forecast import forecast
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.small_swarms import RULES, swarm

EVERY = list(orders(order_tree(RULES, frozenset(), frozenset(range(1, 6)))))


def random_lanes(rng: random.Random) -> tuple[dict[PeerId, PeerRoute], int]:
    replicas, data_nodes = rng.choice([1, 2]), rng.randrange(2, 7)
    lanes = {
        PeerId(f"0.{k}"): tuple(PeerId(f"{stage}.{rng.randrange(replicas)}") for stage in rng.choice(EVERY))
        for k in range(data_nodes)
    }
    return lanes, replicas


def walked_by(lanes: dict[PeerId, PeerRoute], data_node: PeerId, slots: int) -> PeerRoute:
    most = Counter(peer for route in lanes.values() for peer in route)
    stage_of = {peer: int(peer.split(".")[0]) for peer in most}
    others = [route for peer, route in lanes.items() if peer != data_node]
    circle = closes_a_circle(lanes[data_node], others, stage_of, lambda peer: slots * most[peer] > slots)
    return in_order(lanes[data_node], stage_of) if circle else lanes[data_node]


def test_who_looks_for_circles_is_never_blocked_and_who_does_not_sometimes_is() -> None:
    blocked = straightened = stepping_back = 0
    for seed in range(300):
        rng = random.Random(seed)
        lanes, replicas = random_lanes(rng)
        slots = rng.choice([1, 2])
        costs = swarm([len(lanes), *[replicas] * 5], slots=slots)
        careless = {peer: [route] * 6 for peer, route in lanes.items()}
        walked = {peer: [walked_by(lanes, peer, slots)] * 6 for peer in lanes}
        blocked += math.isinf(forecast(costs, careless).makespan_s)
        assert math.isfinite(forecast(costs, walked).makespan_s)
        straightened += sum(walked[peer] != careless[peer] for peer in lanes)
        stepping_back += sum(list(route) != sorted(route) for routes in walked.values() for route in routes)
    assert blocked > 10
    assert straightened > blocked
    assert stepping_back > straightened


def test_one_crowded_peer_makes_no_circle() -> None:
    lanes = {
        PeerId("0.0"): (PeerId("2.0"), PeerId("1.0"), PeerId("3.0")),
        PeerId("0.1"): (PeerId("1.0"), PeerId("2.1"), PeerId("3.1")),
    }
    assert walked_by(lanes, PeerId("0.0"), 1) == lanes[PeerId("0.0")]
    lanes[PeerId("0.1")] = (PeerId("1.0"), PeerId("2.0"), PeerId("3.1"))
    assert walked_by(lanes, PeerId("0.0"), 1) == (PeerId("1.0"), PeerId("2.0"), PeerId("3.0"))
