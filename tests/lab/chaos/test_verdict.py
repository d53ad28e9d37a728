"""What speaks against a trial: each thing that must not be is found, and nothing else."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.audit import Report, Violation
from lab.chaos.chaos_report import Judged, draw, judged, report_json, report_text
from lab.chaos.chaos_run import Peaks
from lab.chaos.chaos_scenario import ChaosScenario, find_scenarios, known_scenarios
from lab.chaos.recovery import Recovery
from lab.chaos.verdict import Trial, objections
from lab.experiment.log_watch import Accused
from lab.experiment.metrics import Kind, Mark
from lab.experiment.scenario import read_scenario
from node.observability.event_json import event_to_json
from node.observability.events import Visit

CLEAN = Report(5, 5, 0, {"completed": 100, "abandoned": 2}, ())
KILLED = Mark(8.0, Kind.FAULT, "peer 3 killed")
BACK = Recovery(KILLED, 1.5, 0.25)


def scenario_of(name: str) -> ChaosScenario:
    return read_scenario(known_scenarios()[name], ChaosScenario)[0]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """Of a scenario that wants 50 microbatches and at most 3 of them abandoned."""
    scenario = scenario_of("one-way")
    expected = scenario.chaos.model_copy(update={"at_least": {"completed": 50}, "at_most": {"abandoned": 3}})
    return Trial(
        scenario.model_copy(update={"chaos": expected}),
        started_after_s=12.0,
        seconds=30.0,
        pace=10.0,
        recoveries=(BACK,),
        marks=(KILLED, Mark(9.0, Kind.NOTE, "a note")),
        completed=(1.0, 2.0),
        report=CLEAN,
        failures={},
        missed=(),
        odd={},
        peers={0: "zero", 3: "three"},
        resources=Peaks(2**28, 40, 20),
        logs=tmp_path,
        cut_short=False,
    )


def against(trial: Trial, *recoveries: Recovery) -> str:
    return "; ".join(objections(replace(trial, recoveries=recoveries or (BACK,))))


def test_nothing_speaks_against_a_trial_in_good_order(trial: Trial) -> None:
    assert against(trial) == ""


def test_what_the_check_finds_speaks_against_it(trial: Trial) -> None:
    report = replace(CLEAN, violations=(Violation("exactly once", None, "twice"),))
    assert against(replace(trial, report=report)) == "check: exactly once: twice"


def test_counts_have_limits(trial: Trial) -> None:
    few = replace(CLEAN, counts={"completed": 49})
    assert against(replace(trial, report=few)) == "completed: 49, at least 50 wanted"
    many = replace(CLEAN, counts={"completed": 50, "abandoned": 4})
    assert against(replace(trial, report=many)) == "abandoned: 4, at most 3 allowed"


def test_recoveries_have_a_limit_but_not_while_the_fault_lasts(trial: Trial) -> None:
    late, never = replace(BACK, pace_s=30.5), replace(BACK, served_s=math.inf)
    assert against(trial, BACK, late) == "recovered after 30.5 s (peer 3 killed); 30 s are allowed"
    assert against(trial, never) == "not recovered (peer 3 killed); 30 s are allowed"
    assert against(trial, replace(never, mark=replace(KILLED, lasts=True))) == ""
    assert never.seconds == math.inf


def test_a_swarm_that_hardly_trained_shows_nothing(trial: Trial) -> None:
    assert "too few to measure" in against(replace(trial, pace=0.1))


def test_a_scenario_that_could_not_be_carried_out_shows_nothing(trial: Trial) -> None:
    assert against(replace(trial, missed=("no p2pd was there",))) == "not carried out: no p2pd was there"
    assert against(replace(trial, cut_short=True)) == "the run was cut short"


def test_nodes_that_break_speak_against_it(trial: Trial) -> None:
    assert against(replace(trial, failures={3: 70})) == "peer 3 ended with exit code 70"


def test_an_odd_peer_works_or_is_left_out_as_it_should(trial: Trial) -> None:
    assert against(replace(trial, odd={3: True})) == "nobody worked with peer 3"
    assert against(replace(trial, odd={3: False}, failures={3: 65})) == "", "it may give up"
    assert against(replace(trial, odd={3: False}, failures={3: 1})) == "peer 3 ended with exit code 1"
    (trial.logs / "three-1.jsonl").write_text(event_to_json(Visit("three", "1.0", "zero#1")) + "\n")
    assert against(replace(trial, odd={3: True})) == ""
    assert "should have been left out" in against(replace(trial, odd={3: False}))


def test_a_liar_is_named_and_left_out_and_nobody_else_is(trial: Trial) -> None:
    lied = replace(trial, liars=frozenset({"liar"}))
    assert against(lied) == "nobody has named liar, which lies"
    assert against(replace(lied, accused={"liar": Accused({"liar"})})) == "nobody has named liar, which lies"
    assert against(replace(lied, accused={"liar": Accused({"honest"}, commits=40, with_it=10)})) == ""
    kept = against(replace(lied, accused={"liar": Accused({"honest"}, commits=40, with_it=11)}))
    assert kept == "11 of 40 rounds had a liar in them after it was named"
    slandered = {"liar": Accused({"honest"}), "other": Accused({"liar"})}
    assert against(replace(lied, accused=slandered)) == ""
    wrong = {"liar": Accused({"honest"}), "other": Accused({"honest"})}
    assert against(replace(lied, accused=wrong)) == "other was accused by 1 honest replicas, and did not lie"


def test_the_held_out_loss_has_a_limit_where_it_is_compared(trial: Trial) -> None:
    lied = replace(trial, scenario=scenario_of("liar"), tokens=1000, held_out=2.05, undisturbed=2.04)
    assert lied.loss_ratio == pytest.approx(1.0049, abs=1e-4)
    worse = judged(replace(lied, undisturbed=2.0))
    assert "the held-out loss is 1.025 of the undisturbed run's; 1.02 is allowed" in worse.objections
    assert "could not be measured" in against(replace(lied, undisturbed=None))
    assert "held-out loss after 1000 tokens: 2.0500, undisturbed 2.0000" in report_text([worse], None)


@pytest.mark.parametrize("peaks", [Peaks(2**32, 40, 20), Peaks(2**28, 4000, 20), Peaks(2**28, 40, 2000)])
def test_what_a_node_takes_of_its_machine_has_limits(trial: Trial, peaks: Peaks) -> None:
    assert "are allowed" in against(replace(trial, resources=peaks))


def test_the_report_has_a_row_for_each_scenario(trial: Trial) -> None:
    broken = Judged(scenario_of("resets"), None, ("the swarm has not finished a step",))
    text = report_text([judged(trial), broken], "chaos.png")
    assert "1 of 2 scenarios passed" in text
    assert f"| one-way | {trial.scenario.chaos.fault} | yes | 1.5 | 1.5 | 0.2 | 10.0 | 2 abandoned |" in text
    assert "| **no** | - | - | - | - | nothing |" in text
    assert "peer 3 killed; pace back after 1.5 s, all served after 0.2 s" in text
    assert "![chaos.png](chaos.png)" in text
    table = report_json([judged(trial), broken])
    assert not table["passed"]
    assert [each["passed"] for each in table["scenarios"]] == [True, False]
    assert table["scenarios"][0]["recoveries"][0]["pace_s"] == 1.5
    assert find_scenarios(["all", "resets"]) == list(known_scenarios().values())


def test_all_trials_are_in_one_picture(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert draw(tmp_path, []) is None
    assert draw(tmp_path, [trial] * 5) == "chaos.png"
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw(tmp_path, [trial]) is None


def test_of_experts_the_pace_is_back_soon_and_documents_are_back_in_time(trial: Trial) -> None:
    expected = {"pace_within_s": 5.0, "rerouted_for_s": 15.0}
    chaos = trial.scenario.chaos.model_copy(update=expected)
    trial = replace(trial, scenario=trial.scenario.model_copy(update={"chaos": chaos}), rerouted_for_s=2.0)
    assert against(trial) == ""
    assert against(trial, replace(BACK, pace_s=6.0)) == "the pace was back after 6.0 s (peer 3 killed); 5 s are allowed"
    assert "15 s are allowed" in against(replace(trial, rerouted_for_s=16.0))
    assert against(replace(trial, rerouted_for_s=None)) == "not all modules are served again"
