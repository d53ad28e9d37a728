"""The commands wan and chaos."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lab.emulation.emulation import PROFILES
from lab.scenario import known_scenarios
from node.__main__ import app
from tests.lab.test_scenario import BASE, EVENTS

ROOT = Path(__file__).parent.parent.parent
STAND_IN = (sys.executable, str(ROOT / "tests" / "node" / "local_swarm" / "stand_in_node.py"))
WITH_STAND_INS = f"from node.local_swarm import local_swarm; local_swarm.node_command = lambda: {STAND_IN!r}\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["wan", *arguments], prog_name="skipstone")


def test_the_named_links_are_listed() -> None:
    listed = run("--profiles")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in PROFILES)
    table = json.loads(run("--profiles", "--json").stdout)
    assert set(table["profiles"]) == set(PROFILES)
    assert table["netem_reason"]


@pytest.mark.parametrize("command", ["wan", "chaos", "check"])
def test_outside_a_checkout_one_is_asked_for(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.__main__.CHECKOUT", tmp_path)
    refused = CliRunner().invoke(app, [command, "--help"], prog_name="skipstone")
    assert refused.exit_code == 78
    assert f"`skipstone {command}` needs a checkout" in refused.stderr


def test_chaos_lists_its_scenarios_and_wants_a_folder_and_expectations(tmp_path: Path) -> None:
    def chaos(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["chaos", *arguments], prog_name="skipstone")

    listed = chaos("--list")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in known_scenarios())
    assert json.loads(chaos("--list", "--json").stdout)["scenarios"].keys() == known_scenarios().keys()
    assert chaos("resets").exit_code == 78
    (tmp_path / "scenario.toml").write_text(BASE)
    refused = chaos(str(tmp_path / "scenario.toml"), "--out", str(tmp_path / "out"))
    assert refused.exit_code == 78
    assert "chaos is missing" in refused.stderr


def test_a_scenario_and_a_folder_are_wanted(tmp_path: Path) -> None:
    assert run().exit_code == 78
    (tmp_path / "scenario.toml").write_text(BASE)
    assert run(str(tmp_path / "scenario.toml")).exit_code == 78


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(BASE.replace("home-fibre", "modem"))
    refused = run(str(scenario), "--out", str(tmp_path / "out"))
    assert refused.exit_code == 78
    assert "'modem' is no profile" in refused.stderr
    scenario.write_text(BASE)
    assert run(str(scenario), "--out", str(tmp_path / "out"), "--profile", "modem").exit_code == 78
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text(BASE)
    refused = run(str(tmp_path / "scenario.toml"), "--out", str(tmp_path))
    assert refused.exit_code == 78
    assert "is not empty" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.toml"]


@pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads /proc")
def test_ctrl_c_ends_it_early_with_a_report(tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text(BASE + EVENTS)
    out = tmp_path / "out"
    code = f"{WITH_STAND_INS}from node.__main__ import main; main()"
    arguments = ["wan", str(tmp_path / "scenario.toml"), "--out", str(out), "--profile", "mobile", "--compare"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        seen = ""
        while "peer 1 killed" not in seen:
            line = process.stdout.readline()
            assert line, f"{seen}{process.stderr.read() if process.stderr else ''}"
            seen += line
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "begin with" in rest
    report = (out / "report.md").read_text()
    assert "peer 1 killed" in report
    assert "behind `mobile`" in report
    assert (out / "scenario.toml").read_text().startswith("# run with --profile mobile\n")
    assert (out / "metrics.jsonl").read_text().count("\n") > 0
    assert not (out / "undisturbed").exists()
