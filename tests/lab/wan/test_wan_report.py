"""From what was seen to figures: rows, capacity, losses, the report, the plots."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from lab.audit import Report, Violation
from lab.experiment.metrics import Kind, Mark, Meter, Row, row_line
from lab.experiment.scenario import Scenario, scenario_from_table
from lab.wan.outcome import Capacity, Outcome, capacity_of, last_loss, totals, utilization_of
from lab.wan.plots import draw_all
from lab.wan.wan_report import loss_ratio, report_text
from node.local_swarm.swarm_progress import PeerProgress, SwarmProgress
from node.observability.events import BusySeconds, MicrobatchCounts, NodeSummary, Step
from swarm.vocabulary.errors import ConfigError
from tests.lab.experiment.test_scenario import BASE

SCENARIO = scenario_from_table(tomllib.loads(BASE), Scenario)
GOOD = Report(5, 5, 0, {"completed": 7}, ())


def row(at: float, tokens: int, loss: float | None, links: dict[str, int] | None = None) -> Row:
    return Row(at, 1, tokens, 10.0, loss, 2, 2, (), links or {}, {"0": 5}, {"1": 5})


def outcome(loss: float | None = 2.0, held_out: float | None = 2.2, check: Report = GOOD) -> Outcome:
    return Outcome(
        name="test",
        started_after_s=4.0,
        seconds=10.0,
        steps=20,
        tokens=4000,
        tokens_per_s=400.0,
        capacity=Capacity((2000.0, 800.0, 900.0), 1),
        utilization=0.4,
        loss_first=5.5,
        loss_last=loss,
        held_out_loss=held_out,
        up_bytes={"0": 10_000_000, "1": 2_000_000},
        down_bytes={"0": 2_000_000, "1": 10_000_000},
        failures={},
        diary=(Mark(3.0, Kind.FAULT, "peer 1 killed"),),
        check=check,
    )


def read_rows(path: Path) -> list[Row]:
    tables = (json.loads(line) for line in path.read_text().splitlines())
    return [Row(**{**table, "waiting": tuple(table["waiting"])}) for table in tables]


def test_a_row_holds_what_passed_since_the_last_one() -> None:
    peers = {0: PeerProgress(0, "a", state="serving"), 1: PeerProgress(1, "b"), 2: PeerProgress(1, "c", exit_code=137)}
    progress = SwarmProgress(stages=2, peers=peers, step=3, tokens=50, waiting={"1.0": "nobody"})
    meter = Meter({(0, 1): 100})
    meter.step(Step(2, 3.0, 10, 1.0, "a"))
    meter.step(Step(3, 2.0, 10, 1.0, "a"))
    first = meter.row(1.0, progress, {(0, 1): 150, (1, 0): 20, (None, 0): 5})
    assert (first.loss, first.alive, first.serving, first.waiting) == (2.5, 2, 1, ("1.0",))
    assert first.links == {"0>1": 50, "1>0": 20, "->0": 5}
    assert (first.up, first.down) == ({"0": 50, "1": 20, "-": 5}, {"1": 50, "0": 25})
    second = meter.row(2.0, progress, {(0, 1): 150, (1, 0): 21, (None, 0): 5})
    assert (second.links, second.loss) == ({"1>0": 1}, None)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [row(0.5, 10, None, {"0>1": 3}), row(1.5, 20, 2.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(row_line(each) + "\n" for each in rows))
    assert read_rows(tmp_path / "metrics.jsonl") == rows


def test_the_slowest_stage_bounds_the_swarm() -> None:
    manifest = SCENARIO.manifest
    speeds = [(0, 900.0), (1, 300.0), (1, 200.0), (2, 700.0), (-1, 1.0)]
    assert capacity_of(speeds, manifest) == Capacity((900.0, 500.0, 700.0), 1)
    assert capacity_of([], manifest).bound is None


def test_a_stage_that_half_of_the_paths_skip_can_do_with_half() -> None:
    table = tomllib.loads(BASE)
    table["manifest"]["stages"] = {"blocks": [0, 1, 1], "per_path": 1}
    manifest = scenario_from_table(table, Scenario).manifest
    assert capacity_of([(0, 900.0), (1, 300.0), (2, 400.0)], manifest) == Capacity((900.0, 600.0, 800.0), 1)


def test_utilization_is_what_stage_peers_say_of_themselves() -> None:
    def summed(stage: int, compute: float, wait: float) -> PeerProgress:
        busy = BusySeconds(compute=compute, wait=wait)
        summary = NodeSummary("p", f"{stage}.0", 1, None, None, 1, 1.0, MicrobatchCounts(), 1, busy)
        return PeerProgress(stage, "p", summary=summary)

    peers = {0: summed(0, 9.0, 1.0), 1: summed(1, 2.0, 8.0), 2: summed(2, 4.0, 6.0), 3: PeerProgress(1, "killed")}
    assert utilization_of(SwarmProgress(stages=3, peers=peers)) == pytest.approx(0.3)
    assert utilization_of(SwarmProgress(stages=3)) is None


def test_the_last_loss_is_that_of_the_last_tenth_of_the_tokens() -> None:
    assert last_loss([row(1, 50, 9.0), row(2, 89, 8.0), row(3, 90, 3.0), row(4, 95, None), row(5, 100, 2.0)]) == 2.5
    assert last_loss([]) is None
    assert last_loss([row(1, 0, None)]) is None


def test_bytes_are_summed_by_peer_without_outsiders() -> None:
    rows = [Row(1, 1, 1, 1.0, None, 1, 1, (), {}, {"10": 1, "9": 2, "-": 3}, {}), row(2, 1, None)]
    assert list(totals(rows, "up").items()) == [("0", 5), ("9", 2), ("10", 1)]


def test_the_report_says_what_ran_and_what_came_of_it() -> None:
    text = report_text(SCENARIO, outcome(), outcome(held_out=2.0), ("loss.png",))
    assert "| share of compute | 0.500 | 0.500 |" in text
    assert "| loss over the undisturbed one's | 1.1000 | 1 |" in text
    assert "**ok**" in text
    assert "* 3.0 s: peer 1 killed" in text
    assert "| 0 | 10.0 | 2.0 | 8.00 | 1.60 |" in text
    assert "![loss.png](loss.png)" in text
    assert "`homes` (peers 0 to 2) behind `home-fibre`" in text


def test_violations_stand_in_the_report() -> None:
    bad = Report(5, 5, 0, {}, (Violation("exactly once", None, "a microbatch counts twice"),))
    text = report_text(SCENARIO, outcome(check=bad), None, ())
    assert "**violations**" in text
    assert "* exactly once: a microbatch counts twice" in text


def test_without_held_out_loss_the_training_loss_is_compared() -> None:
    assert loss_ratio(outcome(loss=3.0, held_out=None), outcome(loss=2.0)) == 1.5
    assert loss_ratio(outcome(loss=None, held_out=None), outcome()) is None


def test_the_result_is_json() -> None:
    table = json.loads(json.dumps(outcome().as_json()))
    assert table["share_of_compute"] == 0.5
    assert table["check"] == {"ok": True, "counts": {"completed": 7}, "violations": 0}


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {"test": [row(1, 10, 3.0, {"0>1": 10}), row(2, 20, None)], "undisturbed": []}
    names = draw_all(tmp_path, runs, (Mark(1.5, Kind.NOTE, "something"),))
    assert set(names) == {"loss_over_time.png", "loss_over_tokens.png", "throughput.png", "traffic.png"}
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_reason_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="matplotlib, which is not installed"):
        draw_all(tmp_path, {"test": []}, ())
