"""The rule that the planner is compared with chooses as SWARM does."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.swarm_rule import MAX_JOURNEYS, WHOLE_VISIT, WORK, Pace, SwarmRule
from swarm.vocabulary.pipeline_messages import Direction, Receipt, ReceiptStatus
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId

OWN, FAST, SLOW, NEW = PeerId("own"), PeerId("fast"), PeerId("slow"), PeerId("new")
MODULE = ModuleId(1)


def launch(rule: SwarmRule, number: int, announced_s: dict[PeerId, float], now: float = 0.0) -> PeerId:
    """Chooses and sets out."""
    peer = rule.choose(MODULE, announced_s)
    assert peer is not None
    rule.launched(MicrobatchId(OWN, number), Path(OWN, (Hop(MODULE, peer),)), now)
    return peer


def passed(number: int, direction: Direction, position: int = 0) -> Receipt:
    return Receipt(MicrobatchId(OWN, number), direction, position, ReceiptStatus.PASSED_ON)


def visit(rule: SwarmRule, number: int, peer: PeerId, begins: float, seconds: float) -> None:
    """Out and back, in the proportion that the rule assumes."""
    out = seconds * WORK[Direction.FORWARD] / WHOLE_VISIT
    rule.passed(peer, passed(number, Direction.FORWARD), begins + out)
    rule.passed(OWN, passed(number, Direction.BACKWARD, 1), begins + out)
    rule.ended(MicrobatchId(OWN, number), Path(OWN, (Hop(MODULE, peer),)))
    rule.passed(peer, passed(number, Direction.BACKWARD), begins + seconds)  # a link's delay later


def test_shares_are_proportional_to_announced_speeds_before_anything_is_measured() -> None:
    rule = SwarmRule(random.Random(1))
    counts = Counter(launch(rule, number, {FAST: 1.0, SLOW: 3.0}) for number in range(400))
    assert counts[FAST] / counts[SLOW] == pytest.approx(3, rel=0.05)


def test_shares_follow_what_is_measured_and_not_what_is_announced() -> None:
    rule, seconds, now = SwarmRule(random.Random(1)), {FAST: 1.0, SLOW: 4.0}, 0.0
    counts: Counter[PeerId] = Counter()
    for number in range(600):
        peer = launch(rule, number, {FAST: 2.0, SLOW: 2.0}, now)
        visit(rule, number, peer, now, seconds[peer])
        now += 10
        counts[peer] += number >= 100
    assert counts[FAST] / counts[SLOW] == pytest.approx(4, rel=0.1)


def test_looking_charges_nobody() -> None:
    rule = SwarmRule(random.Random(1))
    assert len({rule.choose(MODULE, {FAST: 1.0, SLOW: 1.0}) for _ in range(20)}) == 1


def test_a_newcomer_begins_where_the_first_in_the_queue_is() -> None:
    rule = SwarmRule(random.Random(1))
    for number in range(100):
        launch(rule, number, {FAST: 1.0, SLOW: 1.0})
    counts = Counter(launch(rule, number, {FAST: 1.0, SLOW: 1.0, NEW: 1.0}) for number in range(100, 130))
    assert set(counts.values()) <= {9, 10, 11}


def test_who_is_gone_is_not_chosen() -> None:
    rule = SwarmRule(random.Random(1))
    for number in range(10):
        launch(rule, number, {FAST: 1.0, SLOW: 4.0})
    assert {launch(rule, number, {SLOW: 4.0}) for number in range(10, 20)} == {SLOW}
    assert rule.choose(MODULE, {}) is None


def test_the_first_sample_counts_in_full_and_later_ones_a_tenth() -> None:
    pace = Pace()
    pace.ended(0.0, 2.0, 1.0)
    assert pace.seconds == pytest.approx(2.0)
    pace.ended(10.0, 14.0, 1.0)
    assert pace.seconds == pytest.approx((0.9 * 0.1 * 2.0 + 0.1 * 4.0) / (1 - 0.9**2))


def test_tasks_side_by_side_count_as_throughput() -> None:
    pace = Pace()
    for end in (3.0, 4.0, 5.0):  # all given at 2.0
        pace.ended(2.0, end, 1.0)
    assert pace.seconds == pytest.approx(1.0)


def test_visits_are_counted_when_both_ways_are_known() -> None:
    rule = SwarmRule(random.Random(1))
    for number in range(3):
        visit(rule, number, launch(rule, number, {FAST: 1.0}), 10.0 * number, 1.0)
    assert rule.visits() == 3


def test_what_is_lost_and_what_ended_long_ago_is_not_measured() -> None:
    rule = SwarmRule(random.Random(1))
    peer = launch(rule, 0, {FAST: 7.0})
    rule.ended(MicrobatchId(OWN, 0), None)
    rule.passed(peer, passed(0, Direction.FORWARD), 2.0)
    for number in range(1, MAX_JOURNEYS + 2):
        launch(rule, number, {FAST: 7.0})
    rule.passed(peer, passed(1, Direction.FORWARD), 2.0)
    assert rule.samples == 0


def test_a_receipt_counts_once_and_only_for_what_is_under_way() -> None:
    rule = SwarmRule(random.Random(1))
    peer = launch(rule, 0, {FAST: 7.0})
    rule.passed(peer, passed(0, Direction.FORWARD), 2.0)
    rule.passed(peer, passed(0, Direction.FORWARD), 9.0)
    rule.passed(peer, passed(1, Direction.FORWARD), 9.0)
    assert rule.expected_s(peer) == pytest.approx(2.0 * WHOLE_VISIT)
