"""One scenario of `skipstone chaos`, through the command. The others: `skipstone chaos all`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the laboratory reads /proc"),
]

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", ["stage-lost"])
def test_a_scenario_is_passed(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-m", "skipstone", "chaos", name, "--out", str(out), "--json"]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr + (out / "report.md").read_text()
    report = json.loads(ran.stdout)
    assert report == json.loads((out / "report.json").read_text())
    (scenario,) = report["scenarios"]
    assert scenario["passed"]
    assert scenario["recovery_s"] <= scenario["recovery_limit_s"]
    assert [event for event in scenario["events"] if event["kind"] == "fault"]
    assert (out / name / "scenario.toml").is_file()
