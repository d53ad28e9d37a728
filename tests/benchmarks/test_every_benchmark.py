"""Every benchmark still runs in its smallest form, as a script and as a module, and prints one JSON object."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kit
from benchmarks.card import PARTS
from benchmarks.hop import SAMPLES_PER_ROUND, skipstone

ROOT = Path(__file__).resolve().parent.parent.parent
COMMON = {"benchmark", "command", "date", "machine"}


def run(*words: str, within_s: float = 400.0) -> dict[str, Any]:
    command = [sys.executable, *words, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=within_s)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found.keys() > COMMON
    assert all(value for key, value in found.items() if key != "failures"), found
    return {key: value for key, value in found.items() if key not in COMMON}


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("codecs", {"table", "hop", "loss"}),
        ("crowd", {"rows"}),
        ("experts", {"loss", "rounds"}),
        ("filling", {"put_off", "filling"}),
        ("memory", {"head", "node"}),
        ("optimizers", {"task", "summary", "best", "runs"}),
        ("packing", {"hidden", "bars", "settings"}),
        ("parity", {"rounds", "difference"}),
        ("paths", {"compared", "runs"}),
        ("skipping", {"stages", "task", "tokens", "trap", "time"}),
        ("transport", {"chunks", "best_mb_per_s"}),
    ],
)
def test_what_one_process_or_two_measure(name: str, keys: set[str]) -> None:
    assert run(f"benchmarks/{name}.py").keys() == keys


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("averaging", ()),
        ("demo", ()),
        ("faults", ()),
        ("head_to_head", ()),
        ("hop", ("--without-hivemind",)),
        ("packing", ("--parts", "loss")),
        ("paths", ("--parts", "live", "whole", "--arms", "ours")),
        ("soak", ()),
        ("throughput", ()),
    ],
)
def test_what_swarms_measure(name: str, words: tuple[str, ...]) -> None:
    run("-m", f"benchmarks.{name}", *words, within_s=580.0)


def card(folder: Path, *parts: str) -> tuple[dict[str, Any], str]:
    """The figures of these parts of the card kit, and what it prints."""
    command = (sys.executable, "-m", "benchmarks.card", "--smoke", "--out", folder, "--only", ",".join(parts))
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads((folder / "card.json").read_text())
    assert {name: part["ended"] for name, part in report["parts"].items()} == dict.fromkeys(parts, "ok"), ran.stderr
    return {name: part["result"] for name, part in report["parts"].items()}, ran.stdout


def test_parts_of_the_card_kit_report_their_figures_on_a_cpu(tmp_path: Path) -> None:
    found, printed = card(tmp_path, "hop", "split")
    assert found["hop"]["int8"]["forward_backward_ms"] > found["hop"]["int8"]["forward_ms"] > 0
    assert found["split"]["chunk_ms"]["chunks_a_microbatch"] > 1
    assert "split: ok" in printed


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_part_of_the_card_kit_reports_its_figures_on_a_cpu(tmp_path: Path) -> None:
    found, printed = card(tmp_path, *PARTS)
    assert found["train"]["solo 160m"]["tokens_per_s"] > 0
    assert found["train"]["solo 160m"]["mfu"] > 0, "it has the ceiling that an earlier part measured"
    assert all(row["equal_to_cpu"] for name, row in found["codecs"].items() if not name.startswith("copy"))
    assert found["attention"]["documents"]["tflop_s"] > 0
    assert found["tests"]["failed"] == 0
    assert found["swarm"]["check"]["violations"] == 0
    assert found["swarm"]["check"]["ended_well"] == 3, "of four, one of which was killed"
    assert "swarm: ok" in printed


def test_a_round_of_the_hop_moves_tensors_there_and_back() -> None:
    with skipstone((2, 16, 64)) as a_round:
        samples = a_round()
    assert len(samples) == SAMPLES_PER_ROUND - 1
    assert all(0 < sample.forward_s < sample.forward_backward_s for sample in samples)


def test_options_go_before_those_of_a_quick_run_and_these_before_defaults() -> None:
    quick, defaults = {"steps": 2, "parts": ["a"]}, {"steps": 9, "seeds": [1, 2], "parts": ("a", "b"), "text": Path}
    given = ["--quick", "--steps", "5", "--seeds", "3"]
    options: argparse.Namespace = kit.parsed("", quick, {**defaults, "all": False}, given)
    assert (options.steps, options.seeds, options.parts) == (5, [3], ["a"])
    assert (options.text, options.all, options.out) == (None, False, None)
    assert kit.parsed("", quick, defaults, []).parts == ("a", "b")
    with pytest.raises(SystemExit):
        kit.parsed("", quick, defaults, ["--parts", "c"])


def test_figures_are_written_to_a_file_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/that.py", "--out", str(tmp_path / "that.json")])
    kit.run("", lambda options: {"answer": 42}, {})
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == f"python benchmarks/that.py --out {tmp_path / 'that.json'}"
    assert printed == json.loads((tmp_path / "that.json").read_text())
    assert printed.keys() == COMMON | {"answer"}
