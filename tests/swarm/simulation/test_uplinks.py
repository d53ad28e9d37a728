"""Uplinks as servers: messages of one sender follow each other, and all else is as the forecast says."""

from __future__ import annotations

import pytest

from swarm.simulation.baselines.earliest_return import earliest_return
from swarm.simulation.forecast import forecast
from swarm.simulation.generate import HANDLING_S
from swarm.simulation.problems import problem
from swarm.simulation.uplinks import forecast_over_uplinks, uplink_s
from tests.swarm.routing.small_swarms import names, swarm

HOMES = 5


def test_uplinks_that_are_never_busy_change_nothing() -> None:
    instance = problem(HOMES)
    plan = earliest_return(instance)
    assert forecast_over_uplinks(instance.costs, plan, {}) == forecast(instance.costs, plan)


def test_a_second_message_waits_until_the_first_has_left() -> None:
    costs = swarm([1, 2], {"0.0": 0.1})
    data_node, near, far = costs.data_nodes[0], *names("1.0", "1.1")
    tasks = forecast_over_uplinks(costs, {data_node: [(near,), (far,)]}, {data_node: 0.5}).tasks
    first, second = tasks[data_node, 0], tasks[data_node, 1]
    assert first[1].arrival == pytest.approx(first[0].end + costs.message_s[data_node][near])
    assert second[1].arrival == pytest.approx(first[0].end + 0.5 + costs.message_s[data_node][far])


def test_at_home_it_costs_time() -> None:
    instance = problem(HOMES)
    busy_s, plan = uplink_s(instance.costs), earliest_return(instance)
    assert all(0 < seconds < max(instance.costs.message_s[peer].values()) for peer, seconds in busy_s.items())
    one = instance.costs.data_nodes[0]
    assert busy_s[one] == min(
        seconds - HANDLING_S for there, seconds in instance.costs.message_s[one].items() if there != one
    )
    over_uplinks = forecast_over_uplinks(instance.costs, plan, busy_s)
    assert over_uplinks.makespan_s > forecast(instance.costs, plan).makespan_s
