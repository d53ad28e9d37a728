"""The card kit runs whole on a CPU, each part small: whoever gets an hour on a card need not spend it on the kit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.card import PARTS, ROOT

COMMAND = (sys.executable, "-m", "benchmarks.card", "--smoke", "--out")


@pytest.mark.timeout(400)
def test_every_part_reports_its_figures(tmp_path: Path) -> None:
    ran = subprocess.run([*COMMAND, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads((tmp_path / "card.json").read_text())
    assert {name: part["ended"] for name, part in report["parts"].items()} == dict.fromkeys(PARTS, "ok"), ran.stderr
    found = {name: part["result"] for name, part in report["parts"].items()}
    assert found["train"]["solo 160m"]["tokens_per_s"] > 0
    assert found["train"]["solo 160m"]["mfu"] > 0, "it has the ceiling that an earlier part measured"
    assert all(row["equal_to_cpu"] for name, row in found["codecs"].items() if not name.startswith("copy"))
    assert found["attention"]["documents"]["tflop_s"] > 0
    assert found["hop"]["int8"]["forward_backward_ms"] > found["hop"]["int8"]["forward_ms"] > 0
    assert found["split"]["chunk_ms"]["chunks_a_microbatch"] > 1
    assert found["tests"]["failed"] == 0
    assert found["swarm"]["check"]["violations"] == 0
    assert found["swarm"]["check"]["ended_well"] == 3, "of four, one of which was killed"
    assert "swarm: ok" in ran.stdout
