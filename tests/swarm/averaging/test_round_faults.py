"""Rounds under random faults, many worlds in virtual time, each from its own seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.swarm.averaging.faults import harm_of, try_seed

CHUNKS, QUICK_CHUNKS = 10, 4
SEEDS_A_CHUNK = 100


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=[pytest.mark.long] * (chunk >= QUICK_CHUNKS)) for chunk in range(CHUNKS)]
)
def test_replicas_come_together_and_go_on_whatever_goes_wrong(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk * SEEDS_A_CHUNK, (chunk + 1) * SEEDS_A_CHUNK):
        world = try_seed(seed)
        seen["commits"] += len(world.commits)
        seen["catch-ups"] += sum(world.caught_up.values())
        seen["second attempts"] += sum(attempts > 1 for attempts in world.attempts.values())
        if harm_of(seed).forks:
            seen["forks"] += len(world.forks())
    # Else the faults were not what they are meant to be, and the above has shown nothing.
    assert seen["commits"] > 4 * SEEDS_A_CHUNK
    assert seen["catch-ups"] > SEEDS_A_CHUNK
    assert seen["second attempts"] > SEEDS_A_CHUNK / 4
    assert seen["forks"] > SEEDS_A_CHUNK / 10
