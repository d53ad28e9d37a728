"""What `benchmarks/paths_live.py` makes of what it sees. That it runs, it shows itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.paths_live import ARMS, Ground, StepClock, by_stage, make_ground, run_of
from tests.e2e.emulated import Network, Spec
from tests.e2e.small_run import write_text

GROUND = Ground((0, 1, 1, 2), (0.01, 0.1, 0.2, 0.05), ("a", "a", "b", "b"), {})


def test_the_bound_is_that_of_the_weakest_stage() -> None:
    assert GROUND.visits_per_s(1) == pytest.approx(1 / 0.3 + 1 / 0.6)
    assert GROUND.bound_tokens_per_s(2, 64) == pytest.approx(64 * 5)
    assert GROUND.bound_tokens_per_s(1, 64) == pytest.approx(64 * 10)


def test_the_same_seed_is_the_same_ground() -> None:
    one, other = make_ground(3, 0.06), make_ground(3, 0.06)
    assert one == other != make_ground(4, 0.06)
    assert all(one.one_way_s[a][b] == one.one_way_s[b][a] for a in "abc" for b in "abc")
    assert Counter(one.stages) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}
    assert all(0.06 <= seconds <= 0.24 for stage, seconds in zip(one.stages, one.forward_s, strict=True) if stage)


def test_arms_differ_in_nothing_but_the_paths(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    runs = {name: run_of(text, arm, 0).model_dump() for name, arm in ARMS.items()}
    assert runs["full"] == runs["swarm"]
    assert runs["partial"] == runs["swarm-partial"]
    assert runs["full"]["stages"].pop("per_path") > runs["partial"]["stages"].pop("per_path")
    assert runs["full"] == runs["partial"]


def test_steps_are_timed_from_the_first_end_on() -> None:
    clock = StepClock({1: [(1.0, 7), (3.0, 8), (5.0, 9), (9.0, 11)], 2: [(1.0, 1), (2.0, 2)]})
    assert clock.seconds_a_step() == [2.0, 2.0]
    assert clock.steps_per_s() == pytest.approx(0.5)
    assert (clock.span(1), clock.span(2)) == ((8, 11), (0, 0))


def test_visits_are_summed_by_stage() -> None:
    assert by_stage(GROUND, Counter({1: 3, 2: 4, 3: 5})) == {1: 7, 2: 5}


def test_a_network_is_read_as_it_was_written(tmp_path: Path) -> None:
    network = Network({"p": "a", "q": "b"}, {"a": {"a": 0.0, "b": 0.03}, "b": {"a": 0.03, "b": 0.0}})
    network.write(tmp_path / "network.json")
    assert Network.read(tmp_path / "network.json").between("q", "p") == 0.03


def test_a_machine_is_slower_both_ways() -> None:
    assert Spec(0.1, "file", backward_factor=2.0).visit_s == pytest.approx(0.3)
