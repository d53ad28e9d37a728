"""Custody under faults: many small swarms in virtual time, each from its own seed."""

from collections import Counter
from dataclasses import replace

import pytest

from swarm.pipeline.in_flight import InFlightRules
from swarm.vocabulary.types import PeerId
from tests.swarm.pipeline.pipeline_world import RoughWorld, Shape

SHAPES = (
    Shape(),
    Shape(replicas=(3, 2, 2, 2), per_path=3),
    Shape(data_nodes=3, replicas=(2, 1), per_path=2, slots=2, rules=InFlightRules(per_step=2, staleness=2, window=6)),
    Shape(replicas=(1, 2, 1, 1), per_path=3),
)
SEEDS_A_SHAPE = 20
ONE_FAULT_SEEDS = 15
LONGEST_BACK_OFF_S = 60.0


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_nothing_is_lost_or_done_twice_whatever_goes_wrong(shape: int) -> None:
    completed = abandoned = 0
    repaired_at: Counter[int] = Counter()
    skipped = left_out = 0
    for seed in range(SEEDS_A_SHAPE):
        world = RoughWorld(1000 * shape + seed, SHAPES[shape])
        world.run_with_faults(seconds=8.0, every_s=0.5)
        world.heal()
        assert world.progresses(within_s=2 * LONGEST_BACK_OFF_S), f"seed {seed}: training does not go on"
        world.drain()
        completed += len(world.ledger.completed)
        abandoned += world.ledger.abandoned
        repaired_at += world.ledger.repaired_at
        skipped, left_out = skipped + world.ledger.skipped, left_out + world.ledger.left_out
    # Else the faults were not what they are meant to be, and the above has shown nothing.
    assert completed > 10 * SEEDS_A_SHAPE
    assert abandoned > SEEDS_A_SHAPE
    if min(SHAPES[shape].replicas) > 1:  # then somebody can stand in anywhere
        assert all(repaired_at[position] > SEEDS_A_SHAPE for position in range(SHAPES[shape].per_path))
    if SHAPES[shape].per_path < len(SHAPES[shape].replicas):  # then a stage that nobody serves may be missed
        assert skipped > SEEDS_A_SHAPE // 10  # paths are planned round it, and seldom shorter
    else:
        assert skipped == left_out == 0


@pytest.mark.parametrize("kind", ["killed", "killed and back", "frozen for a moment", "frozen until it counts as dead"])
def test_one_lost_hop_costs_no_microbatch_where_another_replica_stands_in(kind: str) -> None:
    repaired = repaired_back = retracted = 0
    for seed in range(ONE_FAULT_SEEDS):
        world = RoughWorld(seed, Shape(compute_failures=0.0, slots=64))
        world.run(2.0 + world.random.uniform(0.0, 2.0))
        victim = world.random.choice([peer for peer in world.living if peer.module.stage])
        if kind.startswith("killed"):
            world.kill(victim)
        else:
            world.freeze(victim, 0.5 if kind == "frozen for a moment" else 4.0)
        world.run(4.0)
        if kind == "killed and back":
            world.revive(victim)
        world.run(8.0)
        world.drain()
        assert world.ledger.abandoned == 0, f"seed {seed}"
        repaired += sum(world.ledger.repaired_at.values())
        repaired_back += sum(world.ledger.repaired_back.values())
        retracted += world.ledger.retracted
    # Else the moments were not those that are meant, and the above has shown nothing.
    if kind != "frozen for a moment":
        assert repaired > ONE_FAULT_SEEDS
        assert repaired_back > ONE_FAULT_SEEDS // 3
    assert (retracted > 0) is (kind == "frozen until it counts as dead")


@pytest.mark.parametrize("shape", [Shape(slots=64), Shape(replicas=(1,), per_path=0)], ids=["usual", "no other peer"])
def test_without_faults_everything_is_completed_as_planned(shape: Shape) -> None:
    for seed in range(5):
        world = RoughWorld(seed, replace(shape, compute_failures=0.0))
        world.run(10.0)
        world.drain()
        assert len(world.ledger.completed) > 20
        assert world.ledger.abandoned == 0
        assert not world.ledger.repaired_at


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> tuple[int, int, float]:
        world = RoughWorld(7)
        world.run_with_faults(seconds=5.0, every_s=0.5)
        return len(world.ledger.completed), world.ledger.abandoned, world.random.random()

    assert run() == run()


def test_a_stage_without_a_peer_stops_the_training_until_one_comes() -> None:
    world = RoughWorld(3, Shape(replicas=(1, 1), per_path=2, compute_failures=0.0))
    world.run(5.0)
    only = world.peers[PeerId("stage2-peer0")]
    world.kill(only)
    world.run(30.0)
    before = len(world.ledger.completed)
    world.run(5.0)
    assert len(world.ledger.completed) == before
    assert not any(in_flight.entries for _, in_flight in world.data_nodes())
    world.revive(only)
    assert world.progresses(within_s=2 * LONGEST_BACK_OFF_S)
    world.drain()
