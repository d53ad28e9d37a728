"""Custody under faults: many small swarms in virtual time, each from its own seed."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm.flights import FlightRules
from tests.swarm.pipeline_world import Shape, World

SHAPES = (
    Shape(),
    Shape(replicas=(3, 2, 2, 2), per_path=3),
    Shape(data_nodes=3, replicas=(2, 1), per_path=2, slots=2, rules=FlightRules(per_step=2, staleness=2, window=6)),
)
SEEDS_A_SHAPE = 80
LONGEST_BACK_OFF_S = 60.0


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_nothing_is_lost_or_done_twice_whatever_goes_wrong(shape: int) -> None:
    completed = abandoned = 0
    repaired_at: Counter[int] = Counter()
    for seed in range(SEEDS_A_SHAPE):
        world = World(1000 * shape + seed, SHAPES[shape])
        world.run_with_faults(seconds=8.0, every_s=0.5)
        world.heal()
        assert world.progresses(within_s=2 * LONGEST_BACK_OFF_S), f"seed {seed}: training does not go on"
        world.drain()
        world.check_all()
        completed += len(world.ledger.completed)
        abandoned += world.ledger.abandoned
        repaired_at += world.ledger.repaired_at
    # Else the faults were not what they are meant to be, and the above has shown nothing.
    assert completed > 10 * SEEDS_A_SHAPE
    assert abandoned > SEEDS_A_SHAPE
    assert all(repaired_at[position] > SEEDS_A_SHAPE // 10 for position in range(SHAPES[shape].per_path))
