"""`benchmarks/skipping.py` trains what it says, in a size that takes a second."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.skipping import ARMS, HALF, STAGES, Task, manifest_of, measure, random_parts, summary, with_distance

TINY = Task(steps=2, hidden=8, heads=2, feed_forward=8, sequence=16, microbatches=11, warmup_steps=1)


@pytest.mark.parametrize("name", ARMS)
def test_every_stage_is_visited_equally_often(name: str) -> None:
    """Over as many paths as there are stages to skip: an inner step of these sizes, and ten for those whose paths
    change."""
    task = Task(steps=40, microbatches=11, warmup_steps=1)
    choose = ARMS[name].choose(manifest_of(task, 1, ARMS[name].visited), task)
    paths = [choose(number) for number in range(task.paths)]
    visits = Counter(stage for path in paths for stage in path)
    assert len(visits) == STAGES - 1
    assert len(set(visits.values())) == 1
    assert min(len(path) for path in paths) == ARMS[name].visited - 1
    assert {len(path) for path in paths} <= {ARMS[name].visited - 1, STAGES - 1}


def test_what_is_measured(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 8000)
    task = replace(TINY, source=f"path:{tmp_path / 'text'}")
    steps: list[None] = []
    found = {name: measure(task, 3, ARMS[name], lambda: steps.append(None)) for name in ("full", "1/2")}
    assert len(steps) == 2 * task.steps
    compared = with_distance(found)
    assert compared["full"]["behind"] == 0
    assert compared["1/2"]["behind"] == pytest.approx(found["1/2"]["perplexity"] / found["full"]["perplexity"] - 1)
    for row in found.values():
        assert 0 < row["loss"] < 6
        assert row["half_random_perplexity"] == pytest.approx(math.exp(row["loss"]) * (1 + row["half_random_drop"]))


def test_parts_are_half_of_the_stages() -> None:
    parts = random_parts(1)
    assert parts == random_parts(1)
    assert all(len(set(part)) == HALF.per_path and list(part) == sorted(part) for part in parts)


def test_the_summary_has_medians_over_the_seeds_that_have_the_arm() -> None:
    seeds = [{"arms": {"full": {"loss": 1.0}}}, {"arms": {"full": {"loss": 3.0}, "1/2": {"loss": 5.0}}}]
    assert summary(seeds) == {"full": {"seeds": 2, "loss": 2.0}, "1/2": {"seeds": 1, "loss": 5.0}}
