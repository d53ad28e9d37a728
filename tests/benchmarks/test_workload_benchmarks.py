"""The benchmarks of packing and whole documents: interfaces, and that their arms do what they say."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.packing import ARMS, Task, concat, figures, ours, queues
from benchmarks.workload_bound import step_seconds

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = {"max_over_mean", "cv2", "padding", "cut", "ms_a_block"}


def run(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-P", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "lengths",
    [[100] * 500, list(range(1, 2000, 7)), [5, 6, 7], [3000] * 9 + [20] * 400, [50_000, 3]],
    ids=["equal", "uniform", "few", "two sorts", "longer than S"],
)
def test_lengths_of_ones_own(lengths: list[int], tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    words = ("--lengths", str(tmp_path / "lengths.json"), "--sequence", "1024", "--tokens", "4096", "--json")
    found = run("benchmarks/packing.py", *words, "--microbatches", "64")
    assert found.keys() == {"arms"}
    assert found["arms"].keys() == {"ours", "concat", "queues"}
    assert all(arm.keys() == KEYS for arm in found["arms"].values())
    assert found["arms"]["ours"]["cut"] == 0
    assert found["arms"]["ours"]["cv2"] <= found["arms"]["concat"]["cv2"] + 0.002


def log_normal_task() -> Task:
    rng = random.Random(2)
    lengths = [max(1, int(rng.lognormvariate(5, 1.3))) for _ in range(2000)]
    return Task(lengths, sequence=1024, tokens=4096, share=1 / 1000, microbatches=128)


def test_arms_leave_nothing_out_and_no_room_is_exceeded() -> None:
    task = log_normal_task()
    for arm in ARMS.values():
        packed = arm(task).packed
        assert len(packed) >= task.microbatches
        assert all(0 < sum(one.documents) <= task.tokens for one in packed)
        assert all(0 < length <= task.sequence for one in packed for length in one.documents)


def test_ours_is_more_even_than_the_others() -> None:
    task = log_normal_task()
    found = {name: figures(arm(task), task) for name, arm in (("ours", ours), ("concat", concat), ("queues", queues))}
    assert found["ours"]["cv2"] < min(found["concat"]["cv2"], found["queues"]["cv2"]) / 2
    assert found["ours"]["max_over_mean"] < min(found["concat"]["max_over_mean"], found["queues"]["max_over_mean"])
    assert found["concat"]["cut"] > 0


def test_stage_devices_and_loss_at_small_sizes() -> None:
    found = run("benchmarks/workload.py", "--quick", "--seeds", "1", "--parts", "stage", "devices", "loss")
    assert found["stage"]["arms"]["us_a_token"].keys() == {"rows", "mask", "documents"}
    assert found["stage"]["cost_model"]["held_out"] > 0
    assert found["devices"]["gradients_differ"] <= 1e-5
    assert found["devices"]["dealt_max_over_mean"] <= 1.02
    assert found["loss"]["losses"].keys() == {"documents", "causal"}


def test_balance_is_worth_what_waits_for_the_costliest() -> None:
    assert step_seconds([1.0] * 4, replicas=1, hops=1) == pytest.approx(12.0)
    assert step_seconds([1.0] * 4, replicas=4) == pytest.approx(6.0), "a replica for each"
    assert step_seconds([1.0, 1.0, 1.0, 3.0], replicas=4) == pytest.approx(18.0), "all wait for one"
    even, uneven = step_seconds([1.0] * 32, replicas=1), step_seconds([0.5, 1.5] * 16, replicas=1)
    assert even < uneven < 1.02 * even, "in a row it shows at the ends only"
