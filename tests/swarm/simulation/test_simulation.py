"""Instances, generated swarms, bounds, and whole iterations in virtual time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from swarm.simulation.central.central_planner import central_iteration
from swarm.simulation.generate import Shape, generate, regions_from_json
from swarm.simulation.instance import Instance, from_json
from swarm.simulation.iteration import Conduct, Iteration, run_iterations
from swarm.simulation.lower_bound import lower_bound_s
from swarm.simulation.negotiation_world import Network
from swarm.vocabulary.errors import ConfigError
from tests.swarm.routing.small_swarms import makespan_by_clockwork

HERE = Path(__file__).parent
REGIONS = regions_from_json(json.loads((HERE / "four_regions.json").read_text()))


def no_clock() -> float:
    return 0.0


def talked(instance: Instance) -> Iteration:
    return run_iterations(instance, Conduct(talk_s=60.0), no_clock)[-1]


def cold(instance: Instance) -> Iteration:
    return run_iterations(instance, Conduct(cold=True), no_clock)[-1]


def central(instance: Instance) -> Iteration:
    return central_iteration(instance, no_clock)


WAYS_TO_PLAN = (talked, cold, central)


def twenty_peers() -> dict[str, Any]:
    data = json.loads((HERE / "twenty_peers.json").read_text())
    assert isinstance(data, dict)
    return data


def assert_valid(instance: Instance, iteration: Iteration) -> None:
    stage_of = instance.costs.stage_of()
    for routes in iteration.plan.values():
        assert len(routes) == instance.microbatches
        assert all(instance.rules.fault([stage_of[peer] for peer in route]) is None for route in routes)
    assert len({iteration.visits[stage] for stage in range(1, instance.rules.stages)}) == 1


@pytest.mark.parametrize("plan", WAYS_TO_PLAN)
def test_an_iteration_keeps_the_rules_and_takes_as_long_as_the_clockwork_says(
    plan: Callable[[Instance], Iteration],
) -> None:
    instance = from_json(twenty_peers())
    iteration = plan(instance)
    assert_valid(instance, iteration)
    assert iteration.played.makespan_s == pytest.approx(makespan_by_clockwork(instance.costs, iteration.plan))
    assert iteration.bound_s <= iteration.played.makespan_s < math.inf


def test_talking_to_each_other_pays() -> None:
    instance = from_json(twenty_peers())
    agreed, alone = talked(instance), cold(instance)
    assert agreed.played.makespan_s < 0.9 * alone.played.makespan_s
    assert agreed.played.waiting_s() < 0.6 * alone.played.waiting_s()


def test_after_a_cold_start_the_talk_goes_on_while_work_does() -> None:
    instance = from_json(twenty_peers())
    done = run_iterations(instance, Conduct(talk_s=0.0, iterations=3), no_clock)
    assert done[0].plan == cold(instance).plan
    assert done[-1].played.makespan_s == pytest.approx(talked(instance).played.makespan_s, rel=0.05)
    assert done[0].talk.messages < done[1].talk.messages == done[2].talk.messages
    for iteration in done:
        assert_valid(instance, iteration)


def test_lost_messages_cost_time_and_some_trades() -> None:
    """Offers that are lost are made again a few times, and then what is left is refined."""
    instance = from_json(twenty_peers())
    rough = Conduct(talk_s=600.0, network=Network(lost=0.3, doubled=0.3))
    done = run_iterations(instance, rough, no_clock)[-1]
    assert_valid(instance, done)
    assert done.played.makespan_s < 0.95 * cold(instance).played.makespan_s
    assert done.talk.settled_s > run_iterations(instance, Conduct(), no_clock)[-1].talk.settled_s


def test_talk_comes_near_to_one_planner_that_knows_everything() -> None:
    instances = [from_json(twenty_peers()), *(generate(Shape(), REGIONS, seed) for seed in range(5))]
    shares = [talked(instance).played.makespan_s / central(instance).played.makespan_s for instance in instances]
    assert geometric_mean(shares) < 1.08


SHAPES = {
    "as SkipPipe's 20 nodes": Shape(),
    "equal compute": Shape(spread=1.0),
    "42 nodes": Shape(peers=42, stages=8, per_path=5, forward_s=0.165),
    "18 nodes": Shape(peers=18, stages=4, per_path=2, forward_s=2.28),
    "no skipping": Shape(peers=12, stages=4, per_path=3, max_back_stops=0),
    "one slot": Shape(peers=20, slots=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("seed", range(3))
def test_swarms_of_all_shapes_come_home_and_visit_equally(shape: Shape, seed: int) -> None:
    instance = generate(shape, REGIONS, seed)
    for plan in WAYS_TO_PLAN:
        iteration = plan(instance)
        assert_valid(instance, iteration)
        assert iteration.bound_s <= iteration.played.makespan_s < math.inf


def test_the_same_seed_makes_the_same_swarm_and_the_same_plan() -> None:
    first, second = (generate(Shape(), REGIONS, 5) for _ in range(2))
    assert first == second != generate(Shape(), REGIONS, 6)
    assert talked(first) == talked(second)


def test_the_bound_of_a_lone_path_is_its_round_trip() -> None:
    data = {
        "nodes": 2,
        "stages": [[0], [1]],
        "forward_seconds": [1.0, 2.0],
        "backward_factor": 1.5,
        "head_factor": 0.25,
        "task_overhead_seconds": 0.0,
        "message_seconds": [[0.0, 3.0], [3.0, 0.0]],
        "slots": [1, 1],
        "stages_per_path": 1,
        "microbatches_per_data_node": 2,
        "order": {"max_forward_jump": 1, "max_back_stops": 0, "max_back_distance": 0},
    }
    instance = from_json(data)
    trip = 2.75 * 1.0 + 2.5 * 2.0 + 4 * 3.0
    assert lower_bound_s(instance) == pytest.approx(2 * trip)
    assert talked(instance).played.makespan_s == pytest.approx(2 * trip)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slots", [0] * 20),
        ("stages", [[0], []]),
        ("stages", [[0, 1], [1]]),
        ("forward_seconds", [1.0]),
        ("nodes", 10**9),
        ("message_seconds", [[-1.0] * 20] * 20),
        ("order", {}),
        ("stages_per_path", 9),
        ("visit_ratio", 0.5),
    ],
)
def test_an_instance_that_cannot_be_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match="the instance"):
        from_json({**twenty_peers(), key: value})
