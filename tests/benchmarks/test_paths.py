"""What `benchmarks/paths.py` plans and what it makes of what it sees."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paths import CELLS, Environment, Trial, figures, make_environment, report, steps_s, trials
from tests.e2e.small_run import HOME, LAUNCHED, LOST, FlightMark, write_text

WAYS = {"a": {"a": 0.0, "b": 0.1}, "b": {"a": 0.1, "b": 0.0}}
SMALL = Environment((0, 1, 1, 2), (0.01, 0.1, 0.2, 0.05), (1.0,) * 4, ("a", "a", "b", "b"), WAYS)
ALL = Namespace(seeds=2, cells=["A1", "A2"], arms=["ours", "swarm", "greedy"])


def test_a_seed_always_makes_the_same_environment_which_all_arms_share_in_a_repeatable_order() -> None:
    one, other = make_environment(3), make_environment(3)
    assert one == other != make_environment(4)
    assert Counter(one.stages) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}
    assert all(0.06 <= seconds <= 0.24 for stage, seconds in zip(one.stages, one.forward_s, strict=True) if stage)
    assert all(0.5 <= factor <= 2.0 for factor in one.announced)
    far = make_environment(3, links=3.0)
    assert far.one_way_s["a"]["b"] == pytest.approx(3 * one.one_way_s["a"]["b"], abs=1e-3)
    assert replace(far, one_way_s=one.one_way_s) == one
    planned = trials(ALL, Path("here"))
    assert len(planned) == 12
    assert planned == trials(ALL, Path("here"))
    assert all(trial.environment == make_environment(trial.seed, trial.cell.links) for trial in planned)
    one_rule = trials(Namespace(seeds=1, cells=["D"], arms=["ours"]), Path("here"))
    assert {trial.arm for trial in one_rule} == {"ours", "ours-1.25", "ours-1.5"}


def test_arms_differ_in_their_paths_only(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    runs = {arm: CELLS["S"].manifest(text, arm).model_dump() for arm in CELLS["S"].arms}
    assert runs["ours-full"] == runs["swarm-full"]
    assert runs["ours"] == runs["swarm"]
    assert runs["ours-full"]["stages"].pop("per_path") > runs["ours"]["stages"].pop("per_path")
    assert runs["ours-full"] == runs["ours"]
    assert CELLS["D"].manifest(text, "ours-1.5").model_dump()["stages"]["visit_ratio"] == 1.5


def flights(*marks: tuple[float, str]) -> list[FlightMark]:
    return [FlightMark(at, kind, ("p1", "p3"), 2 * number) for number, (at, kind) in enumerate(marks)]


def test_steps_are_timed_from_end_to_end_and_a_swarm_between_two_times() -> None:
    marks = flights(*((at, HOME) for at in (1.0, 2.0, 4.0, 5.0, 9.0, 11.0, 11.5, 13.0)))
    assert steps_s(marks, 2, (0.0, 12.0)) == [3.0, 6.0]
    assert steps_s(marks, 2, (3.0, 20.0)) == [6.0, 2.0]
    marks = flights((5.0, LAUNCHED), (9.0, HOME), *((10.0 + k / 2, HOME) for k in range(20)), (19.9, LOST))
    indices = {"own": 0, "p1": 1, "p2": 2, "p3": 3}
    found = figures(Trial("E", "ours", 1, SMALL, Path()), {0: marks}, indices, (10.0, 20.0), 64)
    assert (found["tokens_per_s"], found["completed"], found["abandoned"]) == (128.0, 20, 1)
    assert found["visits_per_replica"] == {1: 20, 2: 0, 3: 20}
    assert found["hops_between_regions"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["step_s"] is None


def test_the_bar_is_of_pairs_of_the_same_seed() -> None:
    rest = {"share_of_bound": 0.5, "hops_between_regions": 0.5, "machine_load": 0.5}
    runs = [
        {"cell": "A1", "arm": arm, "seed": seed, "step_s": seconds, **rest}
        for arm, steps in (("ours", (1.0, 2.0, 3.0)), ("swarm", (2.0, 2.5)))
        for seed, seconds in enumerate(steps)
    ]
    found = report(runs)["A1"]
    assert found["ratios"] == {"ours / swarm": [0.5, 0.8]}
    assert found["bar"] == {"limit": 0.85, "is": pytest.approx(0.632, abs=1e-3), "held": True}
    assert found["arms"]["ours"]["step_s"] == 2.0
