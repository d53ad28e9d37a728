"""Training under churn: the account adds up, nothing counts twice, and work goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.simulation.churn import run_churn, share_of_ideal
from swarm.simulation.instance import Instance, from_json

SECONDS = 300.0


def twenty_peers() -> Instance:
    return from_json(json.loads((Path(__file__).parent / "twenty_peers.json").read_text()))


def test_without_churn_nothing_is_lost() -> None:
    calm = run_churn(twenty_peers(), SECONDS, 0.0, seed=1)
    assert (calm.abandoned, calm.repaired, calm.alive_share) == (0, 0, pytest.approx(1.0))
    assert calm.completed > 100
    visits = calm.accumulated.values()
    assert max(visits) < 1.25 * min(visits)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_account_adds_up_and_nothing_counts_twice(share: float, seed: int) -> None:
    instance = twenty_peers()
    done = run_churn(instance, SECONDS, share, seed)
    assert done.launched == done.completed + done.abandoned + done.under_way
    assert done.duplicated == 0
    assert sum(done.accumulated.values()) == done.completed * instance.rules.per_path
    assert done.repaired > 0
    calm = run_churn(instance, SECONDS, 0.0, seed)
    assert 0.25 < share_of_ideal(done, calm) < 1.1


def test_the_same_seed_has_the_same_deaths() -> None:
    assert run_churn(twenty_peers(), 120.0, 0.5, 3) == run_churn(twenty_peers(), 120.0, 0.5, 3)
