"""The contenders of the benchmark do the same work: legal paths, as many microbatches, every stage visited equally
often."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paths import churn, uneven
from benchmarks.paths_arms import Arm, arms, cost_blind, fault, fixed_pairs, measure
from benchmarks.paths_central import improved
from benchmarks.paths_online import SmallestVirtualTime
from benchmarks.paths_planning import after_each_death
from benchmarks.paths_trades import after_a_cold_start, after_a_death, compared
from swarm.routing.cost_model import PeerRoute
from swarm.simulation.baselines.earliest_return import EarliestReturn
from swarm.simulation.baselines.one_by_one import Moment, one_by_one
from swarm.simulation.forecast import Unit, forecast
from swarm.simulation.generate import Shape, generate, regions_from_json
from swarm.simulation.instance import Instance, from_json

HERE = Path(__file__).parent.parent / "swarm" / "simulation"


def twenty_peers() -> Instance:
    return from_json(json.loads((HERE / "twenty_peers.json").read_text()))


def eight_peers() -> Instance:
    """Two peers a stage."""
    regions = regions_from_json(json.loads((HERE / "four_regions.json").read_text()))
    made = generate(Shape(peers=8, stages=4, per_path=2, microbatches=3), regions, seed=1)
    peers = [peer for stage in made.costs.stages for peer in stage]
    stages = tuple(tuple(peers[first : first + 2]) for first in (0, 2, 4, 6))
    return replace(made, costs=replace(made.costs, stages=stages))


@pytest.mark.parametrize("instance", [eight_peers(), twenty_peers(), uneven(twenty_peers(), 2)], ids=lambda i: i.name)
def test_all_arms_do_the_same_work_by_the_rules(instance: Instance) -> None:
    stage_of = instance.costs.stage_of()
    for name, arm in arms(instance, attempts=30).items():
        assert arm.plans, name
        for plan in arm.plans:
            walked = [[stage_of[peer] for peer in route] for routes in plan.values() for route in routes]
            assert len(walked) == instance.total, name
            assert {arm.rules.fault(order) for order in walked} == {None}, name
            visits = Counter(stage for order in walked for stage in order)
            assert len({visits[stage] for stage in range(1, instance.rules.stages)}) == 1, name
            assert name.startswith("full") == (len(walked[0]) == instance.rules.skippable)


def test_unequal_work_is_refused() -> None:
    instance = twenty_peers()
    plan = dict(fixed_pairs(instance))
    first = instance.costs.data_nodes[0]
    rules = replace(instance.rules, per_path=instance.rules.skippable, max_back_stops=0)
    assert fault(instance, Arm(rules, [plan])) is None
    fewer = {**plan, first: plan[first][1:]}
    assert "microbatches" in str(fault(instance, Arm(rules, [fewer])))
    same_stages = {peer: (routes[0][:3],) * len(routes) for peer, routes in plan.items()}
    assert "visits differ" in str(fault(instance, Arm(instance.rules, [same_stages])))
    with pytest.raises(ValueError, match="visits differ"):
        measure(instance, Arm(instance.rules, [same_stages]))


def test_one_by_one_launches_when_the_simulator_does() -> None:
    """The launches that the rules were asked at are those that happen when the finished plan is played."""
    instance = eight_peers()
    asked: dict[Unit, float] = {}

    class Watched(EarliestReturn):
        def choose(self, moment: Moment) -> PeerRoute:
            asked[moment.unit] = moment.at
            return super().choose(moment)

    (plan,) = one_by_one(instance, Watched)
    played = forecast(instance.costs, plan)
    assert asked == {unit: pytest.approx(tasks[0].start) for unit, tasks in played.tasks.items()}


def test_swarms_rule_leaves_a_slow_replica_most_of_the_time() -> None:
    instance = eight_peers()
    slow, fast = instance.costs.stages[2]
    slowed = {**instance.costs.forward_s, slow: 20.0, fast: 0.4}
    plans = one_by_one(replace(instance, costs=replace(instance.costs, forward_s=slowed)), SmallestVirtualTime)
    used = Counter(peer for plan in plans for routes in plan.values() for route in routes for peer in route)
    assert 0 < used[slow] < used[fast] / 3


def test_central_search_never_makes_a_plan_longer_and_keeps_the_visits() -> None:
    instance = eight_peers()
    plan = cost_blind(instance, seed=1)
    better = improved(instance, plan, attempts=100)
    assert forecast(instance.costs, better).makespan_s < forecast(instance.costs, plan).makespan_s
    assert fault(instance, Arm(instance.rules, [better])) is None


def test_deaths_and_churn_are_reported() -> None:
    instance = eight_peers()
    deaths = after_each_death(instance, [1, 2])
    assert deaths["deaths"] == 12
    assert all(math.isfinite(lost["largest"]) for lost in deaths["makespan_lost"].values())
    rows = churn(instance, 2.0, [1])["rows"]
    assert [row["duplicated"] for row in rows.values()] == [0, 0, 0]
    assert rows["50% a minute"]["repaired"] > 0


def test_without_trades_data_nodes_say_less() -> None:
    instance = eight_peers()
    died = (after_a_death(instance, peer, 1) for peer in instance.costs.stages[1])
    found = compared([after_a_cold_start(instance, None, 1), *died])
    assert found["cases"] == 3
    assert found["messages"]["off"] <= found["messages"]["on"]
    assert all(math.isfinite(seconds) for seconds in found["makespan_s"].values())
