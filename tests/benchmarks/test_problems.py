"""Generated problems: all unlike, all possible, each the seed's."""

from __future__ import annotations

import pytest

from benchmarks import problems
from benchmarks.problems import problem

SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_problem_is_within_its_ranges_and_visits_can_be_equal(seed: int) -> None:
    made = problem(seed)
    costs, rules = made.costs, made.rules
    assert problems.PEERS[0] <= len(costs.slots) <= problems.PEERS[1]
    assert problems.SKIPPED[0] <= 1 - rules.per_path / rules.skippable <= problems.SKIPPED[1]
    assert min(len(peers) for peers in made.stages) >= problems.FEWEST_REPLICAS
    assert max(costs.forward_s.values()) <= problems.SPREAD[1] * min(costs.forward_s.values())
    assert {problems.SLOTS[0] <= slots <= problems.SLOTS[1] for slots in costs.slots.values()} == {True}
    assert made.microbatches * len(made.stages[0]) * rules.per_path % rules.skippable == 0


def test_problems_are_unlike_and_the_seed_makes_them() -> None:
    made = [problem(seed) for seed in SEEDS]
    assert made[3] == problem(3)
    assert {one.name.rpartition("-")[2] for one in made} == {"clouds", "homes", "lan"}
    assert len({(one.rules, one.microbatches, len(one.stages[0])) for one in made}) > len(SEEDS) // 2
