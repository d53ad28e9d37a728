"""`benchmarks/skipping_time.py` gives every arm the same seconds, in a size that takes a second."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.skipping import STAGES, Task
from benchmarks.skipping_time import ARMS, FASTEST, POINTS, REPLICAS, capacities, compared, measure, reached, summary

TINY = Task(steps=3, hidden=8, heads=2, feed_forward=8, sequence=16, warmup_steps=1, held_out_microbatches=4)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_arms_are_dealt_what_a_data_node_would_deal(seed: int) -> None:
    speeds = capacities(seed)
    assert speeds == capacities(seed)
    assert all(REPLICAS <= speed <= REPLICAS * FASTEST for speed in speeds)
    rates = {name: arm.shares(speeds).rate(speeds) for name, arm in ARMS.items()}
    assert rates["full"] == min(speeds)
    assert rates["full"] < rates["3/4"] < rates["3/4, r 1.5"]
    assert rates["2/3"] < rates["2/3, r 1.5"]
    for arm in ARMS.values():
        shares = arm.shares(speeds)
        visits = Counter(stage for turn in range(shares.of) for stage in shares.stages_at(turn))
        assert len(visits) == STAGES - 1
        assert max(visits.values()) <= arm.ratio * min(visits.values())
        assert all(len(shares.stages_at(turn)) == arm.visited - 1 for turn in range(shares.of))


def test_who_lets_more_through_trains_more_in_the_same_seconds(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 8000)
    task = replace(TINY, source=f"path:{tmp_path / 'text'}")
    told: list[None] = []
    found = {name: measure(task, 1, ARMS[name], lambda: told.append(None)) for name in ("full", "2/3, r 1.5")}
    assert len(told) == 2 * task.steps
    full, partial = found["full"], found["2/3, r 1.5"]
    assert full["steps"] == task.steps
    assert partial["steps"] == int(task.steps * partial["microbatches_per_s"] / full["microbatches_per_s"])
    for row in found.values():
        seconds = row["steps"] * task.microbatches / row["microbatches_per_s"]
        assert row["curve"][0][0] == 0
        assert row["curve"][-1] == [pytest.approx(seconds, abs=0.01), row["loss"]]
        assert len(row["curve"]) <= POINTS + 1
    assert compared(found)["full"]["time_share"] <= 1
    assert compared({"2/3": partial}) == {"2/3": partial}


def test_when_a_curve_is_down_to_a_loss() -> None:
    curve = [[0.0, 5.0], [10.0, 4.0], [20.0, 2.0]]
    assert reached(curve, 3.0, 20.0) == 0.75
    assert reached(curve, 5.5, 20.0) == 0
    assert reached(curve, 1.0, 20.0) is None


def test_the_summary_has_medians_and_times_only_where_most_got_there() -> None:
    rows = [{"loss": loss, "time_share": share, "curve": []} for loss, share in ((1.0, 0.5), (2.0, None), (3.0, 0.7))]
    seeds = [{"arms": {"3/4": row}} for row in rows]
    assert summary(seeds) == {"3/4": {"loss": 2.0, "time_share": 0.6}}
    assert summary(seeds[1:2]) == {"3/4": {"loss": 2.0, "time_share": None}}
