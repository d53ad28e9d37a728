"""What a data node takes peers and the swarm to be by its own measurements."""

import pytest

from swarm.routing import measured_times as module_under_test
from swarm.routing.measured_times import ASSUMED_BACKWARD_FACTOR, UNKNOWN_TOKENS_PER_S, MeasuredTimes
from swarm.vocabulary.pipeline_messages import Direction
from swarm.vocabulary.types import PeerId
from swarm.workload.microbatch_sizes import Size
from tests.swarm.membership.announcements import announcement

TOKENS = 100
DATA, A, B, C = PeerId("data"), PeerId("a"), PeerId("b"), PeerId("c")
REPLICAS = (announcement(A, 1, speed=50.0), announcement(B, 1, speed=0.0), announcement(C, 2, speed=100.0))
OUT, BACK = Direction.FORWARD, Direction.BACKWARD


def test_what_is_announced_counts_for_the_documents_that_are_usual_here() -> None:
    times = MeasuredTimes(DATA, TOKENS)
    assert times.visit_s(A, 50.0).value == TOKENS / 50.0, "none has set out"
    assert times.sizes.add(Size(80, (40, 40), 90.0)) == 1.0
    assert times.visit_s(A, 50.0).value == pytest.approx(90 / 50.0)
    assert times.sizes.add(Size(80, (80,), 110.0)) == pytest.approx(1.1)
    assert times.visit_s(A, 50.0).value == pytest.approx(100 / 50.0)


def test_without_a_measurement_the_announcement_counts_and_without_that_a_constant() -> None:
    times = MeasuredTimes(DATA, TOKENS)
    assert times.visit_s(A, 50.0) == times.visit_s(B, 50.0)
    assert times.visit_s(A, 50.0).value == 2.0
    for unusable in (0.0, -1.0, float("nan")):
        assert times.visit_s(A, unusable).value == TOKENS / UNKNOWN_TOKENS_PER_S
    times.visited(A, -1.0, queue=-5)
    assert times.visit_s(A, 0.0).value == 0.0


def test_what_was_lost_makes_a_peer_slow_and_nobody_waits_longer_for_it() -> None:
    times = MeasuredTimes(DATA, TOKENS)
    assert times.usual_s(A, 50.0) == 2.0, "nothing has come back from anybody: what it announces"
    times.visited(B, 3.0)
    times.visited(C, 1.0)
    for seconds in (60.0, 1200.0):
        times.lost(A, seconds)
        times.lost(C, seconds)
    assert times.visit_s(A, 50.0).value == 630.0
    assert times.usual_s(A, 50.0) == 3.0, "as the slowest that has brought something back"
    assert times.usual_s(C, 50.0) == 1.0
    assert [times.has_completed(peer) for peer in (A, B, C)] == [False, True, True]


def test_the_longest_unused_time_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MAX_PEERS", 2)
    times = MeasuredTimes(DATA, TOKENS)
    for peer in (A, B, A, C):
        times.visited(peer, 1.0)
    assert [times.visit(peer) is None for peer in (A, B, C)] == [False, True, False]


def test_announcements_count_until_there_are_measurements() -> None:
    measured = MeasuredTimes(DATA, TOKENS)
    costs = measured.costs(REPLICAS)
    assert set(costs.slots) == {DATA, A, B, C}
    assert costs.backward_factor == ASSUMED_BACKWARD_FACTOR
    assert [costs.service_s(peer) for peer in (A, B, C)] == pytest.approx([2.0, 0.1, 1.0])
    measured.computed(A, OUT, 0.25)
    measured.computed(A, BACK, 0.75)
    costs = measured.costs(REPLICAS)
    assert costs.backward_factor == 3.0
    assert costs.service_s(A) == pytest.approx(1.0)
    assert costs.service_s(C) == pytest.approx(1.0)


def test_the_way_there_is_a_share_of_sending_and_as_long_as_the_longer_one_where_unmeasured() -> None:
    measured = MeasuredTimes(DATA, TOKENS)
    measured.sent(DATA, A, 0.2)
    measured.sent(B, DATA, 0.6)
    measured.sent(A, C, 0.8)
    way = measured.costs(REPLICAS).message_s
    assert way[A][DATA] == way[DATA][A] == pytest.approx(0.1), "half of what sending and its answer take"
    assert way[A][B] == way[B][A] == pytest.approx(0.3)
    assert way[A][C] == pytest.approx(0.4)
    assert way[DATA][C] == pytest.approx(0.3), "the median of what is known"
    assert way[A][A] == 0.0
    measured = MeasuredTimes(DATA, TOKENS)
    measured.sent(DATA, A, 0.2)
    measured.completed(moving_s=0.9, sent_s=1.0)
    assert measured.costs(REPLICAS).message_s[DATA][A] == pytest.approx(0.18)
    for moving_s in (0.0, 50.0):  # neither can be
        measured = MeasuredTimes(DATA, TOKENS)
        measured.sent(DATA, A, 0.2)
        measured.completed(moving_s, sent_s=1.0)
        assert measured.costs(REPLICAS).message_s[DATA][A] == pytest.approx(0.1 if moving_s == 0 else 0.2)
