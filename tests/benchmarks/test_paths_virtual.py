"""The cells in virtual time: each arm goes by its own rule, and the same seed is the same swarm."""

from __future__ import annotations

from benchmarks.live_cells import ABROAD, STEP_S, TOKENS_PER_S
from benchmarks.live_report import report
from benchmarks.paths_virtual import completed_of, measured, report_of_problems


def test_the_arms_of_a_cell_go_by_different_rules_and_a_seed_repeats_itself() -> None:
    runs = {arm: measured("A1", arm, 1, 40.0) for arm in ("ours", "swarm", "greedy")}
    assert len({(run[STEP_S], run["completed"]) for run in runs.values()}) == 3
    assert runs["swarm"][ABROAD] > runs["ours"][ABROAD], "SWARM's rule knows no distances"
    assert measured("A1", "greedy", 1, 40.0) == runs["greedy"]
    cell = report(list(runs.values()))["A1"]
    assert cell["ratios"]["ours / swarm"]["by_seed"][1] < 1


def test_a_slow_replica_costs_tokens_and_the_pace_comes_back() -> None:
    run = measured("C", "ours", 1, 55.0)
    assert 0 < run["tokens_after_change"] < 30 * run[TOKENS_PER_S] * 1.1
    assert 0 <= run["recovered_s"] <= 45


def test_unlike_swarms_are_counted_by_rule() -> None:
    completed = {rule: [completed_of(6, rule, 60.0)] for rule in ("swarm", "greedy")}
    assert all(count > 0 for (count,) in completed.values())
    assert report_of_problems(completed)["ratios"]["swarm / greedy"]["by_seed"][1] > 0
