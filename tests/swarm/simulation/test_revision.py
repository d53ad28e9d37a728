"""Timetables, and the revision of announced plans."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.stage_balance import visits
from swarm.simulation.central.revision import Revision
from swarm.simulation.central.timetable import Timetable
from swarm.simulation.forecast import Task, forecast
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.small_swarms import RULES, names, swarm

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


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 3)), max_size=20), st.floats(0, 60))
def test_nobody_starts_before_arriving(tasks: list[tuple[float, float]], arrival: float) -> None:
    table = Timetable(64, 0.1)
    for k, (start, length) in enumerate(tasks):
        table.reserve((HOST, k), [Task(HOST, start, start, start + length)], urgency=1.0)
    turn = table.turn(arrival, 1.0)
    assert turn.start >= arrival
    assert turn.imposed >= 0


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
