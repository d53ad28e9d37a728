"""Training under churn by the node's machines: the account adds up, nothing counts twice, and work goes on."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from lab.world.arms import GREEDY, SWARM, planner_of
from lab.world.churn import NOTICED_AFTER_S, Throughput, run_churn
from lab.world.instance import Instance, from_json
from lab.world.world import TOKENS

SECONDS = 150.0


def twenty_peers() -> Instance:
    return from_json(json.loads((Path(__file__).parent / "twenty_peers.json").read_text()))


@cache
def calm() -> Throughput:
    return run_churn(twenty_peers(), SECONDS, 0.0, seed=1)


def test_stages_are_visited_evenly() -> None:
    visits = run_churn(twenty_peers(), 4 * SECONDS, 0.0, seed=1).accumulated.values()
    assert max(visits) < 1.2 * min(visits)


@pytest.mark.parametrize(("share", "seed"), [(0.1, 0), (0.2, 1), (0.5, 2), (0.5, 3)])
def test_the_account_adds_up_and_nothing_counts_twice(share: float, seed: int) -> None:
    instance = twenty_peers()
    done = run_churn(instance, SECONDS, share, seed)
    assert done.launched == done.completed + done.abandoned + done.in_flight
    assert done.duplicated == 0
    assert 0 <= done.completed * instance.rules.per_path - sum(done.accumulated.values()) < 0.1 * done.completed
    assert done.repaired > 0
    assert 0.25 < done.completed / (calm().completed * done.alive_share) < 1.25


@pytest.mark.parametrize("arm", [SWARM, GREEDY])
def test_other_rules_visit_equally_too(arm: str) -> None:
    done = run_churn(twenty_peers(), 100.0, 0.0, 1, planner_of=planner_of(arm, 1, TOKENS, None))
    visits = done.accumulated.values()
    assert done.completed > 50
    assert max(visits) < 1.2 * min(visits)


def test_the_same_seed_has_the_same_deaths() -> None:
    first, second = (replace(run_churn(twenty_peers(), 60.0, 0.5, 3), planning_cpu_s=0.0) for _ in range(2))
    assert first == second
    assert first.alive_share < 1
    assert run_churn(twenty_peers(), NOTICED_AFTER_S, 60.0, 3).alive_share < 0.6
