"""`skipstone simulate`: its JSON, its table, its picture, and how it refuses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from swarm.simulation.instance import from_json, peer_of
from tests.swarm.routing.small_swarms import makespan_by_clockwork

FILES = Path(__file__).parent.parent.parent.parent / "swarm" / "simulation"
TWENTY = str(FILES / "twenty_peers.json")
REGIONS = str(FILES / "four_regions.json")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_json_has_the_paths_in_launch_order_and_their_makespan() -> None:
    report = json.loads(run("--instance", TWENTY, "--json"))
    assert list(report)[:4] == ["makespan_seconds", "planning_cpu_seconds", "lower_bound_seconds", "paths"]
    assert report["lower_bound_seconds"] <= report["makespan_seconds"]
    instance = from_json(json.loads(Path(TWENTY).read_text()))
    launched = Counter(path["data_node"] for path in report["paths"])
    assert set(launched.values()) == {instance.microbatches}
    plan = {peer_of(node): [] for node in launched}
    for path in report["paths"]:
        plan[peer_of(path["data_node"])].append(tuple(peer_of(peer) for peer in path["peers"]))
    assert report["makespan_seconds"] == pytest.approx(makespan_by_clockwork(instance.costs, plan))


def test_people_get_a_table_of_a_made_up_swarm() -> None:
    shown = run("--regions", REGIONS, "--peers", "24", "--stages", "5", "--per-path", "2", "--seed", "3")
    for words in ("makespan", "lower bound", "waiting per microbatch", "visits per stage"):
        assert words in shown


def test_jitter_changes_what_happens_and_not_what_was_planned() -> None:
    calm = json.loads(run("--instance", TWENTY, "--json"))
    rough = json.loads(run("--instance", TWENTY, "--jitter", "0.2", "--json"))
    assert rough["paths"] == calm["paths"]
    assert rough["makespan_seconds"] != calm["makespan_seconds"]


def test_what_was_said_is_reported_and_iterations_follow_each_other() -> None:
    report = json.loads(run("--instance", TWENTY, "--talk-seconds", "0", "--iterations", "3", "--json"))
    assert len(report["iterations"]) == 3
    assert report["iterations"][-1] == report["makespan_seconds"] < report["iterations"][0]
    assert report["talk"]["messages"] > report["talk"]["offers"] >= report["talk"]["trades"] > 0
    assert "makespans of all iterations" in run("--instance", TWENTY, "--iterations", "2", "--lost", "0.1")


@pytest.mark.parametrize("dies", [15, 18])
def test_a_death_is_weighed_against_a_new_plan(dies: int) -> None:
    report = json.loads(run("--instance", TWENTY, "--dies", str(dies), "--json"))
    assert list(report) == [
        "at_once_seconds",
        "settled_seconds",
        "anew_seconds",
        "replanning_cpu_seconds",
        "replanning_cpu_each_seconds",
    ]
    assert all(seconds > 0 for seconds in report.values())
    assert report["settled_seconds"] < 1.3 * report["anew_seconds"]


@pytest.mark.parametrize("option", ["--cold", "--central"])
def test_for_comparison_nobody_talks(option: str) -> None:
    report = json.loads(run("--instance", TWENTY, option, "--json"))
    assert report["talk"]["messages"] == 0
    assert len(set(report["visits_per_stage"].values())) == 1


def test_the_timetable_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timetable.png"
    run("--instance", TWENTY, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_search_says_how_far_the_plan_is_from_it() -> None:
    report = json.loads(run("--instance", TWENTY, "--search", "0.3", "--json"))
    assert list(report)[:4] == ["makespan_seconds", "planning_cpu_seconds", "lower_bound_seconds", "paths"]
    assert list(report)[-2:] == ["search_makespan_seconds", "search_ratio"]
    assert report["lower_bound_seconds"] <= report["search_makespan_seconds"] <= report["makespan_seconds"]
    assert report["search_ratio"] == report["makespan_seconds"] / report["search_makespan_seconds"]


def test_people_are_told_in_a_sentence_what_the_search_found() -> None:
    shown = run("--instance", TWENTY, "--cold", "--search", "0.3")
    assert "% longer than the best that a search of 0.3 CPU seconds" in shown
    assert "search" not in run("--instance", TWENTY, "--cold")


def test_the_searched_plan_is_played_in_the_same_world() -> None:
    report = json.loads(run("--instance", TWENTY, "--jitter", "0.2", "--search", "0.2", "--json"))
    assert report["search_ratio"] == report["makespan_seconds"] / report["search_makespan_seconds"]


def test_both_timetables_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timetables.svg"
    run("--instance", TWENTY, "--search", "0.2", "--plot", str(picture))
    drawn = picture.read_text()
    assert ", planned: " in drawn
    assert ", searched: " in drawn


@pytest.mark.parametrize(
    "arguments",
    [
        ["--instance", TWENTY, "--cold", "--central"],
        ["--instance", TWENTY, "--search", "1", "--dies", "1"],
        ["--instance", TWENTY, "--search", "1", "--churn", "0.1"],
        ["--instance", TWENTY, "--dies", "20"],
        [],
        ["--instance", TWENTY, "--regions", REGIONS],
        ["--instance", "nowhere.json"],
        ["--instance", REGIONS],
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 78
    assert "error:" in result.stderr


def test_churn_is_reported_beside_the_calm() -> None:
    report = json.loads(run("--instance", TWENTY, "--churn", "0.3", "--minutes", "2", "--json"))
    assert report["duplicated"] == 0
    assert 0 < report["completed"] < report["calm_completed"]
    assert "share of ideal" in run("--instance", TWENTY, "--churn", "0.2", "--minutes", "0.5")
