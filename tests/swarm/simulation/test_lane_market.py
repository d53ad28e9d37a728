"""Lanes: who gets which peers, that trades help and keep visits equal, and what becomes of a lane when a peer dies."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import visits
from swarm.simulation.central.lane_market import LaneMarket
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.small_swarms import RULES, swarm

FIVE = [5, 3, 3, 3, 3, 3]


def market(forward_s: dict[str, float] | None = None) -> LaneMarket:
    opened = LaneMarket(swarm(FIVE, forward_s), RULES)
    opened.open()
    return opened


def stage_visits(lanes: LaneMarket) -> Counter[int]:
    return visits([int(peer.split(".")[0]) for peer in route] for route in lanes.routes.values())


def test_lanes_avoid_each_other_where_there_is_a_peer_for_everyone() -> None:
    lanes = market()
    lanes.settle(15)
    assert max(Counter(peer for route in lanes.routes.values() for peer in route).values()) == 1


def test_every_trade_makes_long_round_trips_shorter_and_visits_stay_equal() -> None:
    lanes = market({"1.0": 3.0, "2.1": 2.0, "0.4": 2.5, "4.2": 3.0})
    before = sum(lanes.round_trip_s(lane) ** 12 for lane in lanes.routes)
    made = lanes.settle(1)
    while made:
        after = sum(lanes.round_trip_s(lane) ** 12 for lane in lanes.routes)
        assert after < before
        assert set(stage_visits(lanes).values()) == {3}
        before, made = after, lanes.settle(1)
    assert lanes.next_trade().value is None


def test_every_lane_is_legal() -> None:
    lanes = market({"0.0": 3.0})
    lanes.settle(15)
    assert all(RULES.fault([int(peer.split(".")[0]) for peer in route]) is None for route in lanes.routes.values())


def test_a_stage_without_peers_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 2"):
        LaneMarket(swarm([2, 2, 0, 2]), PathRules(4, 2, 3)).open()


def test_several_lanes_a_data_node_share_out_its_slots() -> None:
    rules = PathRules(stages=4, per_path=2, max_forward_jump=3)
    lanes = LaneMarket(swarm([4, 3, 3, 3]), rules, lanes=3)
    lanes.open()
    assert all(len(lanes.of(PeerId(f"0.{k}"))) == 3 for k in range(4))
    assert set(stage_visits(lanes).values()) == {8}
