"""What the benchmark of inner optimizers makes of its curves, and that its idle time computes what the step would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.optimizers import Task, best_of, measure, reached, summary


def run(arm: str, rate: float, *losses: float, seed: int = 1) -> dict[str, Any]:
    curve = [[10 * at, 2.0 * at, loss] for at, loss in enumerate(losses)]
    keys = ("median_step_ms", "p99_step_ms", "idle_s")
    return {"arm": arm, "seed": seed, "rate": rate, "loss": losses[-1], "curve": curve} | dict.fromkeys(keys, 1.0)


def test_the_best_learning_rates_are_compared_where_they_reach_adamws_last_loss() -> None:
    runs = [
        run("adamw", 0.1, 5, 4, 3),
        run("adamw", 0.2, 5, 4, 3.5),
        run("muon", 0.1, 5, 2, 1),
        run("soap", 0.1, 5, 4, 4),
    ]
    adamw, muon, soap = best_of(runs)
    assert (adamw["rate"], adamw["steps_share"]) == (0.1, 1.0)
    assert muon["steps_share"] == pytest.approx((10 * 2 / 3) / 20)
    assert muon["seconds_share"] == pytest.approx((2 * 2 / 3) / 4)
    assert soap["steps_share"] is None
    assert soap["loss_over_adamw"] == 1.0
    assert summary(best_of(runs))["soap"]["steps_share"] is None
    assert reached([[0, 0.0, 2.0], [10, 1.0, 1.0]], 0, 3.0, 10.0) == 0.0


def test_idle_time_computes_what_the_step_would(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number} and then some more of it, " * 40)
    small = Task(14, 1, 16, 2, 24, 16, 2, held_out_microbatches=2, source=f"path:{tmp_path}")
    idle, in_step = (measure(small, name, 1, 0.01) for name in ("soap", "soap in step"))
    assert [point[2] for point in idle["curve"]] == [point[2] for point in in_step["curve"]]
    assert idle["idle_s"] > 0 == in_step["idle_s"]
