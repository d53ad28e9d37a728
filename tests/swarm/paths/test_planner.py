"""Timetables, the planning of one microbatch, and the revision of announced plans."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.paths.balance import visits
from swarm.paths.booking import Booking
from swarm.paths.forecast import Task, forecast
from swarm.paths.planner import Launch, MicrobatchPlanner, NoRoute
from swarm.paths.revision import Revision
from swarm.paths.timetable import Collision, Timetable
from swarm.vocabulary import PeerId
from tests.swarm.paths.small_swarms import RULES, names, swarm

HOST, OTHER = PeerId("1.0"), (PeerId("0.1"), 0)


def test_an_empty_timetable_lets_everyone_start_at_once() -> None:
    turn = Timetable(3, 0.1).forward_turn(5.0, 1.0)
    assert (turn.start, turn.imposed) == (5.0, 0.0)


def test_who_arrives_later_waits_and_who_arrives_earlier_delays() -> None:
    table = Timetable(3, 0.0)
    table.reserve(OTHER, [Task(HOST, 2.0, 2.0, 4.0)], urgency=0.5)
    assert table.turn(3.0, 1.0).start == 4.0
    early = table.turn(1.0, 3.0)
    assert (early.start, early.imposed) == (1.0, 0.5 * 2.0)


def test_a_forward_waits_for_a_slot_and_a_backward_does_not() -> None:
    table = Timetable(1, 0.0)
    table.reserve(OTHER, [Task(HOST, 0, 0, 1), Task(HOST, 8, 8, 9)], urgency=1.0)
    assert table.forward_turn(2.0, 1.0).start == 9.0
    assert table.turn(2.0, 1.0).start == 2.0
    assert table.holding(-1.0, 20.0) == 20.0


def test_a_reservation_that_cannot_be_kept_is_answered_with_when_it_could() -> None:
    table = Timetable(1, 0.0)
    table.reserve(OTHER, [Task(HOST, 0, 0, 1), Task(HOST, 8, 8, 9)], urgency=1.0)
    assert table.answer(2.0, 2.0, 1.0, tolerance_s=0.5) == Collision(9.0)
    table.release(OTHER)
    assert table.answer(2.0, 2.0, 1.0, tolerance_s=0.5) is None


def test_what_is_over_is_forgotten() -> None:
    table = Timetable(1, 0.0)
    table.reserve(OTHER, [Task(HOST, 0, 0, 1), Task(HOST, 8, 8, 9)], urgency=1.0)
    table.expire(10.0)
    assert len(table) == 0
    assert table.forward_turn(10.0, 1.0).start == 10.0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 3)), max_size=20), st.floats(0, 60))
def test_nobody_starts_before_arriving(tasks: list[tuple[float, float]], arrival: float) -> None:
    table = Timetable(64, 0.1)
    for k, (start, length) in enumerate(tasks):
        table.reserve((HOST, k), [Task(HOST, start, start, start + length)], urgency=1.0)
    turn = table.turn(arrival, 1.0)
    assert turn.start >= arrival
    assert turn.imposed >= 0


# ---- one microbatch ------------------------------------------------------------------------------------------------

ME = PeerId("0.0")
LANE = names("1.0", "2.0", "3.0")
STAGES = frozenset({1, 2, 3})


def test_a_microbatch_stays_on_its_lane_when_nothing_is_in_the_way() -> None:
    plan = MicrobatchPlanner(swarm([2, 2, 2, 2, 2, 2]), RULES, {}).plan(Launch(ME, LANE, at=0.0), STAGES)
    assert isinstance(plan.value, Booking)
    assert plan.value.route == LANE


def test_it_leaves_a_peer_that_is_taken_for_long_but_visits_the_same_stages() -> None:
    costs = swarm([2, 2, 2, 2, 2, 2])
    busy = Timetable(3, 0.1)
    busy.reserve(OTHER, [Task(PeerId("2.0"), 0.0, 0.0, 40.0)], urgency=1.0)
    plan = MicrobatchPlanner(costs, RULES, {PeerId("2.0"): busy}).plan(Launch(ME, LANE, at=0.0), STAGES)
    assert isinstance(plan.value, Booking)
    assert "2.0" not in plan.value.route
    assert {int(peer[0]) for peer in plan.value.route} == STAGES


@pytest.mark.parametrize(("own", "others", "stays"), [(1.0, 0.05, True), (0.05, 1.0, False)])
def test_whoever_has_time_to_spare_gets_out_of_the_way_of_the_urgent_one(
    own: float, others: float, stays: bool
) -> None:
    contested = Timetable(3, 0.1)
    contested.reserve(OTHER, [Task(PeerId("2.0"), 3.1, 3.1, 6.0)], urgency=others)
    planner = MicrobatchPlanner(swarm([2, 2, 2, 2, 2, 2]), RULES, {PeerId("2.0"): contested})
    plan = planner.plan(Launch(ME, LANE, at=0.0, urgency=own), STAGES).value
    assert isinstance(plan, Booking)
    assert (plan.route == LANE) is stays


def test_a_lane_with_a_dead_peer_is_left_and_a_dead_stage_is_named() -> None:
    costs = swarm([2, 2, 2, 2, 2, 2])
    other = MicrobatchPlanner(costs.without(frozenset(names("2.0"))), RULES, {}).plan(Launch(ME, LANE, 0.0), STAGES)
    assert isinstance(other.value, Booking)
    assert "2.1" in other.value.route
    none = MicrobatchPlanner(costs.without(frozenset(names("2.0", "2.1"))), RULES, {}).plan(
        Launch(ME, LANE, 0.0), STAGES
    )
    assert none.value == NoRoute(frozenset({2}))


def test_repair_keeps_who_was_visited() -> None:
    planner = MicrobatchPlanner(swarm([2, 2, 2, 2, 2, 2]).without(frozenset(names("2.0"))), RULES, {})
    assert planner.repair(ME, names("1.0"), (2, 3)).value == names("1.0", "2.1", "3.0")


# ---- revision ------------------------------------------------------------------------------------------------------


def test_revision_only_ever_makes_the_plan_better_and_keeps_visits_equal() -> None:
    costs = swarm([5, 3, 3, 3, 3, 3], {"1.0": 2.0, "0.3": 2.0})
    stages = ((1, 2, 3), (3, 4, 5), (1, 2, 5), (2, 3, 4), (1, 4, 5))
    plan = {peer: [tuple(costs.stages[stage][0] for stage in stages[k])] * 4 for k, peer in enumerate(costs.data_nodes)}
    before = forecast(costs, plan).makespan_s
    revision = Revision(costs, RULES, plan)
    last = revision.expected.makespan_s
    assert last == before
    changes = sum(revision.take_turn() for _ in range(12))
    assert changes > 0
    assert revision.expected.makespan_s < before
    assert forecast(costs, revision.plan).makespan_s == revision.expected.makespan_s
    routes = [route for routes in revision.plan.values() for route in routes]
    orders = [[int(peer[0]) for peer in route] for route in routes]
    assert set(visits(orders).values()) == {12}
    assert all(RULES.fault(order) is None for order in orders)


def test_a_plan_that_blocks_for_good_is_known_before_it_is_revised() -> None:
    costs = swarm([2, 1, 1], slots=1)
    plan = {names("0.0")[0]: [names("1.0", "2.0")] * 3, names("0.1")[0]: [names("2.0", "1.0")] * 3}
    assert math.isinf(Revision(costs, RULES, plan).expected.makespan_s)
