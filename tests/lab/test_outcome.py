"""From what was seen of a run to its figures, its verdict and its report. Everything is written by hand."""

import asyncio
import json
import math
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab import outcome as outcomes
from lab.audit import AuditReport, Line, Spot, Violation, check_logs
from lab.laboratory import Accused, Held, Kind, Mark
from lab.report import Result, draw, suite_json, suite_text
from lab.run import Run
from lab.scenario import Scenario, known_scenarios, read_scenario, scenario_from_table
from node.__main__ import app
from node.local_swarm.swarm_progress import PeerProgress, SwarmProgress
from node.observability.event_json import event_to_json
from node.observability.events import (
    Abandoned,
    BusySeconds,
    CaughtUp,
    Completed,
    Continued,
    Ended,
    Event,
    MicrobatchCounts,
    NodeStatus,
    NodeSummary,
    Restored,
    Retracted,
    RoundCommitted,
    Started,
    Step,
    Visit,
)
from swarm.vocabulary.errors import ConfigError
from tests.lab.test_scenario import BASE, CHAOS

CLEAN = AuditReport(5, 5, 0, {"completed": 100, "abandoned": 2}, ())
KILLED = Mark(8.0, Kind.FAULT, "peer 3 killed")
BACK = outcomes.Recovery(KILLED, 1.5, 0.25)
WAN = scenario_from_table(tomllib.loads(BASE))


def row(at: float, tokens: int, loss: float | None, links: dict[str, int] | None = None) -> outcomes.Row:
    return outcomes.Row(at, 1, tokens, 10.0, loss, 2, 2, (), links or {}, {"0": 5_000_000}, {"10": 2_500_000, "-": 7})


def outcome(**changes: Any) -> outcomes.Outcome:
    """Of a run in good order that wants 50 microbatches, and at most 3 of them abandoned."""
    made = outcomes.Outcome(
        scenario=expecting(at_least={"completed": 50}, at_most={"abandoned": 3}),
        started_after_s=4.0,
        seconds=10.0,
        steps=20,
        tokens=4000,
        tokens_per_s=400.0,
        capacity=(2000.0, 800.0, 900.0),
        utilization=0.4,
        loss_first=5.5,
        held_out_loss=2.2,
        rows=(row(0, 0, 4.0), row(1, 4000, 2.0)),
        marks=(KILLED, Mark(9.0, Kind.NOTE, "a note")),
        report=CLEAN,
        failures={},
        missed=(),
        cut_short=False,
        pace=10.0,
        recoveries=(BACK,),
        rerouted_for_s=2.0,
        peaks=outcomes.Peaks(2**28, 40, 20),
    )
    return replace(made, **changes)


def expecting(name: str = "one-way", **changes: Any) -> Scenario:
    scenario = read_scenario(known_scenarios()[name])[0]
    assert scenario.chaos is not None
    return scenario.model_copy(update={"chaos": scenario.chaos.model_copy(update=changes)})


def against(**changes: Any) -> str:
    return "; ".join(outcome(**changes).objections)


def steady(first: float, last: float, a_second: int = 10) -> list[float]:
    return [first + number / a_second for number in range(int((last - first) * a_second))]


def test_the_pace_before_is_the_median_of_its_windows() -> None:
    assert outcomes.pace_before(steady(0, 10), 10) == pytest.approx(10, abs=0.5)
    assert outcomes.pace_before([0.5, *steady(2, 20)], 20) == pytest.approx(10, abs=0.5)
    assert outcomes.pace_before(steady(0, 10), 1.0) == 0.0, "too short to say"


def test_the_pace_is_back_when_a_window_has_enough() -> None:
    assert outcomes.pace_back_after(steady(0, 30), 10, 10, 30) == 0.0, "it never fell"
    back = outcomes.pace_back_after(steady(0, 10) + steady(17, 30), 10, 10, 30)
    assert 7 - outcomes.WINDOW_S / 2 <= back <= 7, "a window that begins in the pause may have enough already"
    assert outcomes.pace_back_after(steady(0, 10) + steady(10, 40, 4), 10, 10, 40) == math.inf, "less than half"
    assert outcomes.pace_back_after(steady(0, 12), 10, 10, 12) == math.inf, "not seen yet"
    assert outcomes.pace_back_after([*steady(0, 10), 11.0], 10, 10, 40) == math.inf, "one more step, then nothing"
    slower = steady(0, 10) + steady(10, 20, a_second=7) + steady(20, 40, a_second=9)
    assert outcomes.pace_back_after(slower, 10, 10, 40) == 0.0
    assert 7 <= outcomes.pace_back_after(slower, 10, 10, 40, share=0.8) <= 10


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ([(0.0, True)], 0.0),
        ([], 0.0),
        ([(0.0, True), (5.05, False), (9.0, True)], 4.0),
        ([(0.0, True), (4.0, False), (9.0, True)], 4.0),
        ([(0.0, True), (5.05, False)], math.inf),
        ([(0.0, True), (2.0, False), (4.0, True)], 0.0),
        ([(0.0, True), (8.0, False), (9.0, True)], 0.0),
    ],
    ids=["always", "unknown", "noticed late", "before", "never again", "long over", "something later"],
)
def test_a_module_without_a_replica_counts_until_it_has_one(changes: list[tuple[float, bool]], after: float) -> None:
    assert outcomes.served_after(changes, 5.0) == after


def test_documents_are_back_when_none_goes_elsewhere_any_more() -> None:
    changes = [(0.0, True), (10.0, False), (24.0, True)]
    assert outcomes.rerouted_after(changes, [11.0, 12.0, 25.5]) == 1.5
    assert outcomes.rerouted_after(changes, [11.0, 12.0]) == outcomes.rerouted_after(changes, []) == 0.0
    assert outcomes.rerouted_after(changes[:2], [11.0]) is None, "the expert is still not served"


def anchors(*names: str, module: str = "1.0") -> tuple[Held, ...]:
    """`4x` is the anchor of round 4 with the digest x."""
    return tuple(Held(module, int(name[:-1]), name[-1]) for name in names)


def test_replicas_agree_on_one_anchor_or_the_one_before_it() -> None:
    assert outcomes.agree([])
    assert outcomes.agree([anchors("3w", "4x"), anchors("4x"), anchors("2v", "4x")])
    assert outcomes.agree([anchors("4x"), anchors("9y", module="2.0")]), "modules have rounds of their own"
    assert outcomes.agree([anchors("3w", "4x"), anchors("2v", "3w")]), "it is just applying the round"
    assert not outcomes.agree([anchors("3w", "4x"), anchors("2v")]), "two rounds behind"
    assert not outcomes.agree([anchors("3w", "4x"), anchors("3w", "4y")])
    assert not outcomes.agree([anchors("4x", "5z"), anchors("3w", "4y")]), "one behind, but elsewhere"
    assert outcomes.agree([anchors("4x", "5z"), anchors("4y", "5z")]), "one again"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Half a minute after its beginning; nothing was started."""
    scenario = scenario_from_table(tomllib.loads(CHAOS + '[[event]]\nat = 10\naction = "kill"\npeers = [4]\n'))
    made = Run(scenario, tmp_path, lambda news: None, asyncio.Event())
    made.lab._began = time.monotonic() - 30.0
    made.lab.watch.completed = [-1.0, *steady(0, 10), *steady(14, 30)]
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="the laboratory reads /proc")
def test_recoveries_are_of_faults_and_their_ends(run: Run) -> None:
    assert run.pace == pytest.approx(10, abs=0.5), "before the first event"
    run.lab.marks += [
        Mark(10.0, Kind.FAULT, "peer 4 killed"),
        Mark(11.0, Kind.NOTE, "a note"),
        Mark(12.0, Kind.FAULT, "frozen", lasts=True),
        Mark(13.0, Kind.END, "over: frozen"),
    ]
    killed, frozen, over = run.recoveries(30.0)
    assert (killed.counts, frozen.counts, over.counts) == (True, False, True)
    assert (killed.mark, over.mark) == (run.lab.marks[0], run.lab.marks[3])
    assert 4 - outcomes.WINDOW_S / 2 <= killed.pace_s <= 4
    assert all(each.pace_s == math.inf for each in run.recoveries(12.5)), "seen only until then"


@pytest.mark.skipif(sys.platform != "linux", reason="the laboratory reads /proc")
async def test_a_run_that_is_stopped_is_over_at_once(run: Run) -> None:
    timeline = asyncio.create_task(asyncio.sleep(600))
    run._stop.set()
    async with asyncio.timeout(5):
        await run._until_over(timeline)
    timeline.cancel()


def test_a_row_holds_what_passed_since_the_last_one() -> None:
    peers = {0: PeerProgress(0, "a", state="serving"), 1: PeerProgress(1, "b"), 2: PeerProgress(1, "c", exit_code=137)}
    progress = SwarmProgress(stages=2, peers=peers, step=3, tokens=50, waiting={"1.0": "nobody"})
    recorder = outcomes.Recorder({(0, 1): 100})
    recorder.step(Step(2, 3.0, 10, 1.0, "a"))
    recorder.step(Step(3, 2.0, 10, 1.0, "a"))
    first = recorder.row(1.0, progress, {(0, 1): 150, (1, 0): 20, (None, 0): 5})
    assert (first.loss, first.alive, first.serving, first.waiting) == (2.5, 2, 1, ("1.0",))
    assert first.links == {"0>1": 50, "1>0": 20, "->0": 5}
    assert (first.up, first.down) == ({"0": 50, "1": 20, "-": 5}, {"1": 50, "0": 25})
    second = recorder.row(2.0, progress, {(0, 1): 150, (1, 0): 21, (None, 0): 5})
    assert (second.links, second.loss) == ({"1>0": 1}, None)


def test_the_slowest_stage_bounds_the_swarm() -> None:
    speeds = [(0, 900.0), (1, 300.0), (1, 200.0), (2, 700.0), (-1, 1.0)]
    assert outcomes.capacity_of(speeds, WAN.manifest) == (900.0, 500.0, 700.0)
    assert outcome(capacity=(900.0, 500.0, 0.0)).slowest == (500.0, 1)
    assert outcome(capacity=outcomes.capacity_of([], WAN.manifest)).share_of_compute is None
    table = tomllib.loads(BASE)
    table["manifest"]["stages"] = {"blocks": [0, 1, 1], "per_path": 1}
    half = scenario_from_table(table).manifest
    assert outcomes.capacity_of([(0, 900.0), (1, 300.0), (2, 400.0)], half) == (900.0, 600.0, 800.0)


def test_utilization_is_what_stage_peers_say_of_themselves() -> None:
    def summed(stage: int, compute: float, wait: float) -> PeerProgress:
        busy = BusySeconds(compute=compute, wait=wait)
        summary = NodeSummary("p", f"{stage}.0", 1, None, None, 1, 1.0, MicrobatchCounts(), 1, busy)
        return PeerProgress(stage, "p", summary=summary)

    peers = {0: summed(0, 9.0, 1.0), 1: summed(1, 2.0, 8.0), 2: summed(2, 4.0, 6.0), 3: PeerProgress(1, "killed")}
    assert outcomes.utilization_of(SwarmProgress(stages=3, peers=peers)) == pytest.approx(0.3)
    assert outcomes.utilization_of(SwarmProgress(stages=3)) is None


def test_losses_and_bytes_come_from_the_rows_and_losses_are_compared_with_the_undisturbed_run() -> None:
    rows = (row(1, 50, 9.0), row(2, 89, 8.0), row(3, 90, 3.0), row(4, 95, None), row(5, 100, 2.0))
    assert outcome(rows=rows).loss_last == 2.5, "over the last tenth of the tokens"
    assert outcome(rows=()).loss_last is outcome(rows=(row(1, 0, None),)).loss_last is None
    other = replace(rows[0], up={"10": 1, "9": 2, "-": 3})
    assert list(outcome(rows=(*rows, other)).traffic("up").items()) == [("0", 25_000_000), ("9", 2), ("10", 1)]
    calm = outcome(held_out_loss=2.0)
    assert outcome(undisturbed=calm).loss_ratio == pytest.approx(1.1)
    assert outcome(held_out_loss=None, rows=(row(1, 1, 3.0),), undisturbed=calm).loss_ratio == 1.5, "training loss"
    assert outcome(held_out_loss=None, rows=(), undisturbed=calm).loss_ratio is None
    assert outcome().loss_ratio is None


def test_what_the_check_finds_and_what_was_not_carried_out_speaks_against_a_run() -> None:
    assert against() == ""
    report = replace(CLEAN, violations=(Violation("exactly once", None, "twice"),))
    assert against(report=report) == against(report=report, scenario=WAN) == "check: exactly once: twice"
    assert against(missed=("no p2pd was there",)) == "not carried out: no p2pd was there"
    assert against(cut_short=True) == "the run was cut short"
    assert against(failures={3: 70}, scenario=WAN) == "peer 3 ended with exit code 70"


def test_counts_and_recoveries_have_limits_but_not_while_a_fault_lasts() -> None:
    assert against(report=replace(CLEAN, counts={"completed": 49})) == "completed: 49, but at least 50 expected"
    many = replace(CLEAN, counts={"completed": 50, "abandoned": 4})
    assert against(report=many) == "abandoned: 4, but at most 3 allowed"
    assert against(report=many, scenario=WAN) == ""
    late, never = replace(BACK, pace_s=30.5), replace(BACK, served_s=math.inf)
    assert against(recoveries=(BACK, late)) == "recovered after 30.5 s (peer 3 killed); 30 s allowed"
    assert against(recoveries=(never,)) == "not recovered (peer 3 killed); 30 s allowed"
    assert against(recoveries=(replace(never, mark=replace(KILLED, lasts=True)),)) == ""
    assert "too few to measure" in against(pace=0.1)


def test_an_odd_peer_works_or_is_left_out_as_it_should() -> None:
    assert against(odd={3: (True, 0)}) == "no microbatch visited peer 3"
    assert against(odd={3: (True, 1)}) == ""
    assert against(odd={3: (False, 0)}, failures={3: 65}) == "", "it may give up"
    assert against(odd={3: (False, 0)}, failures={3: 1}) == "peer 3 ended with exit code 1"
    assert "should be excluded" in against(odd={3: (False, 1)})


def test_a_liar_is_named_and_left_out_and_nobody_else_is() -> None:
    liars = frozenset({"liar"})
    assert against(liars=liars) == "no honest replica accused the liar liar"
    assert against(liars=liars, accused={"liar": Accused({"liar"})}) == "no honest replica accused the liar liar"
    assert against(liars=liars, accused={"liar": Accused({"honest"}, commits=40, with_it=10)}) == ""
    kept = against(liars=liars, accused={"liar": Accused({"honest"}, commits=40, with_it=11)})
    assert kept == "11 of 40 rounds included a liar after it was accused"
    assert against(liars=liars, accused={"liar": Accused({"honest"}), "other": Accused({"liar"})}) == ""
    wrong = {"liar": Accused({"honest"}), "other": Accused({"honest"})}
    assert against(liars=liars, accused=wrong) == "other was accused by 1 honest replicas, but did not lie"


def test_the_held_out_loss_has_a_limit_and_of_experts_the_pace_and_rerouting() -> None:
    lied = outcome(scenario=expecting("liar", at_least={}), held_out_loss=2.05)
    assert replace(lied, undisturbed=outcome(held_out_loss=2.04)).objections == ()
    (worse,) = replace(lied, undisturbed=outcome(held_out_loss=2.0)).objections
    assert worse == "the held-out loss is 1.025 times the undisturbed run's, but 1.02 is allowed"
    for unknown in (None, outcome(held_out_loss=None)):
        assert "could not be measured" in replace(lied, undisturbed=unknown).objections[0]
    scenario = expecting(pace_within_s=5.0, rerouted_for_s=15.0)
    assert against(scenario=scenario) == ""
    late = against(scenario=scenario, recoveries=(replace(BACK, pace_s=6.0),))
    assert late == "the pace was back after 6.0 s (peer 3 killed); 5 s allowed"
    assert "15 s allowed" in against(scenario=scenario, rerouted_for_s=16.0)
    assert against(scenario=scenario, rerouted_for_s=None) == "not all modules are served again"


@pytest.mark.parametrize(
    "peaks", [outcomes.Peaks(2**32, 40, 20), outcomes.Peaks(2**28, 4000, 20), outcomes.Peaks(2**28, 40, 2000)]
)
def test_what_a_node_takes_of_its_machine_has_limits(peaks: outcomes.Peaks) -> None:
    assert "are allowed" in against(peaks=peaks)


def test_a_suite_has_a_row_for_each_scenario() -> None:
    good = outcome(accused={"liar": Accused({"liar"})}, liars=frozenset({"liar"}))
    broken = Result(expecting("resets"), None, ("the swarm has not finished a step",))
    results = [Result(good.scenario, good, (), ("traffic.png",)), broken]
    text = suite_text(results)
    assert "1 of 2 scenarios passed" in text
    assert good.scenario.chaos is not None
    assert f"| one-way | {good.scenario.chaos.fault} | yes | 1.5 | 1.5 | 0.2 | 10.0 | 2 abandoned |" in text
    assert "| **no** | - | - | - | - | nothing |" in text
    assert "![traffic.png](one-way/traffic.png)" in text
    table = json.loads(json.dumps(suite_json(results)))
    assert not table["passed"]
    one, other = table["scenarios"]
    assert (one["recoveries"][0]["pace_s"], one["lost"]) == (1.5, {"abandoned": 2})
    assert one["accused"]["liar"]["by"] == ["liar"]
    assert (one["share_of_compute"], one["check"]["ok"], one["plots"]) == (0.5, True, ["traffic.png"])
    assert other["objections"] == list(broken.objections)


def test_plots_are_drawn_or_the_reason_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    found = outcome(rows=(row(1, 10, 3.0, {"0>1": 10}), row(2, 20, None)), undisturbed=outcome(scenario=WAN, rows=()))
    names = draw(tmp_path, found)
    assert set(names) == {"loss_over_time.png", "loss_over_tokens.png", "throughput.png", "traffic.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="matplotlib is not installed"):
        draw(tmp_path, found)


D, A, A2, B = "peer-ddddddd", "peer-aaaaaaa", "peer-aaaaaa2", "peer-bbbbbbb"
M = "dddddd#7"
ANCHOR, OTHER, NEXT = "aa" * 8, "bb" * 8, "cc" * 8
MODULES = {D: "0.0", A: "1.0", A2: "1.0", B: "2.0"}


@dataclass
class Log:
    """One process of a peer. `end` is when it stopped in good order, or None when it was killed."""

    peer: str
    events: list[Event] = field(default_factory=list)
    end: int | None = 1000
    began: int = 1
    ms_each: int = 0
    torn: bool = False

    def lines(self) -> Iterator[Line]:
        events = [Started(self.peer, self.began, 1), *self.events]
        if self.end is not None:
            events.append(Ended(self.peer, self.end))
        for number, event in enumerate(events, start=1):
            yield Spot(self.peer, number), event_to_json(event, self.ms_each * (number - 1)).encode() + b"\n"
        if self.torn:
            yield Spot(self.peer, len(events) + 1), b'{"event":"vis'


def judged(*logs: Log) -> AuditReport:
    return check_logs([log.lines() for log in logs])


def rules(report: AuditReport) -> list[tuple[str, str]]:
    return [(found.rule, str(found.spot)) for found in report.violations]


def visit(peer: str, microbatch: str = M) -> Visit:
    return Visit(peer, MODULES[peer], microbatch)


def completed(*hops: str, microbatch: str = M) -> Completed:
    return Completed(D, microbatch, tuple(f"{MODULES[peer]}@{peer}" for peer in hops))


def summary(started: int, done: int, abandoned: int, duplicated: int = 0) -> NodeSummary:
    counts = MicrobatchCounts(started, done, abandoned, duplicated)
    return NodeSummary(D, "0.0", 1, 1.0, 1.0, 1, 1.0, counts, 1, BusySeconds())


def good(*more: Event) -> list[Log]:
    return [Log(D, [visit(D), completed(A, B), *more]), Log(A, [visit(A)]), Log(B, [visit(B)])]


def test_a_run_in_good_order_is_clean() -> None:
    report = judged(
        *good(Abandoned("dddddd#8", "lost"), summary(3, 1, 1)), Log(A2, [visit(A2), Retracted(A2, "1.0", M)])
    )
    assert report.violations == ()
    assert report.counts["under way at the end"] == 1
    assert (report.counts["visits"], report.counts["completed"], report.counts["retracted"]) == (4, 1, 1)
    assert (report.logs, report.ended_well) == (4, 4)


def test_a_visit_that_no_completed_path_names_is_found() -> None:
    """Of a second replica of a stage, of another one than the path's, and of what was never completed."""
    both = judged(*good(), Log(A2, [visit(A2)]))
    other = judged(good()[0], Log(A2, [visit(A2)]), good()[2], Log(A))
    never = judged(*good(), Log(A2, [visit(A2, "dddddd#9")]))
    assert rules(both) == rules(other) == rules(never) == [("exactly once", f"{A2}:2")]
    assert "2 times at stage 1" in both.violations[0].message
    stranger = judged(*good(), Log(A2, [visit(A2, "xxxxxx#9")]))
    assert stranger.violations == ()
    assert stranger.counts["visits for data nodes without a log"] == 1


@pytest.mark.parametrize("killed", ["nobody", "replica", "data node"])
def test_a_missing_visit_is_let_pass_only_with_a_killed_process(killed: str) -> None:
    logs = good()
    logs[1] = Log(A, [], end=None if killed == "replica" else 1000, torn=killed == "replica")
    if killed == "data node":
        logs[0].end = None
    report = judged(*logs)
    if killed == "nobody":
        assert rules(report) == [("exactly once", f"{D}:3")]
    else:
        assert report.violations == ()
        assert report.counts["lost with a killed peer"] == 1
    assert report.torn == (killed == "replica")


def test_what_a_peer_without_a_log_did_is_unknown() -> None:
    report = judged(*good()[:2])
    assert report.violations == ()
    assert report.counts["peers without a log"] == 1
    assert report.counts["unknown visits of peers without a log"] >= 1


def test_what_completes_twice_or_is_also_abandoned_is_found() -> None:
    assert ("completed once", f"{D}:4") in rules(judged(*good(completed(A, B))))
    assert rules(judged(*good(Abandoned(M, "lost")))) == [("completed once", f"{D}:3")]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (summary(2, 2, 0), "2 completed, but its log has 1"),
        (summary(2, 1, 1), "1 abandoned, but its log has 0"),
        (summary(0, 1, 0), "0 started, but 1 completed"),
        (summary(1, 1, 0, 1), "completed twice"),
    ],
)
def test_an_account_that_does_not_add_up_is_found(figures: NodeSummary, message: str) -> None:
    report = judged(*good(figures))
    assert rules(report) == [("account", f"{D}:4")]
    assert message in report.violations[0].message


def test_what_was_started_adds_up_over_checkpoints_and_killed_data_nodes() -> None:
    before = Continued(D, MicrobatchCounts(started=7, completed=5, abandoned=2))
    report = judged(*good(before, summary(8, 6, 2)))
    assert report.violations == ()
    assert report.counts["started"] == 1
    assert [rule for rule, _ in rules(judged(*good(before, summary(9, 7, 2))))] == ["account"]
    killed = Log(D, [visit(D), completed(A, B), Abandoned("dddddd#8", "lost")], end=None)
    after = Log(D, [Abandoned("dddddd#9", "lost"), summary(2, 0, 1)], began=6)
    counts = judged(killed, after, Log(A, [visit(A)]), Log(B, [visit(B)])).counts
    assert (counts["completed"], counts["abandoned"], counts["under way at the end"]) == (1, 2, 1)
    assert counts["started"] == 4


def commit(peer: str, number: int, digest: str = ANCHOR) -> RoundCommitted:
    return RoundCommitted(peer, "1.0", number, digest, (A, A2), (A, A2), 100, 1, 0.1, 1, 1)


def caught_up(peer: str, number: int, digest: str = ANCHOR) -> CaughtUp:
    return CaughtUp(peer, "1.0", number, digest, 10, 0.1, (A,))


def test_replicas_that_agree_are_clean_and_two_digests_of_one_round_are_found() -> None:
    report = judged(
        Log(A, [commit(A, 1), commit(A, 2, OTHER)]), Log(A2, [Restored(A2, "1.0", 0, NEXT), caught_up(A2, 2, OTHER)])
    )
    assert report.violations == ()
    assert (report.counts["commits"], report.counts["caught_up"], report.counts["restored"]) == (2, 1, 1)
    report = judged(Log(A, [commit(A, 1), commit(A, 2, NEXT)]), Log(A2, [commit(A2, 1, OTHER), commit(A2, 2, NEXT)]))
    assert [rule for rule, _ in rules(report)] == ["one digest a round"]


@pytest.mark.parametrize("joins", [CaughtUp, Restored])
def test_a_fork_has_healed_when_one_side_has_joined_the_other(joins: type[Event]) -> None:
    join = caught_up(A2, 2, NEXT) if joins is CaughtUp else Restored(A2, "1.0", 2, NEXT)
    report = judged(Log(A, [commit(A, 1), commit(A, 2, NEXT)]), Log(A2, [commit(A2, 1, OTHER), join]))
    assert report.violations == ()
    assert report.counts["forks healed"] == 1


def test_a_fork_is_over_when_its_side_comes_back_from_a_checkpoint_and_goes_on_with_the_others() -> None:
    killed = Log(A2, [commit(A2, 1), commit(A2, 2, OTHER)], end=None)
    back = Log(A2, [Restored(A2, "1.0", 1, ANCHOR), commit(A2, 2, NEXT)], began=5)
    report = judged(Log(A, [commit(A, 1), commit(A, 2, NEXT)]), killed, back)
    assert report.violations == ()
    assert report.counts["forks healed"] == 1


def test_a_round_that_goes_back_is_found_but_not_over_a_restart() -> None:
    report = judged(Log(A, [commit(A, 2), caught_up(A, 1, OTHER), commit(A, 2)]))
    assert rules(report) == [("rounds go forward", f"{A}:3")]
    restarted = judged(Log(A, [commit(A, 2)], end=5), Log(A, [Restored(A, "1.0", 1, NEXT), commit(A, 2)], began=6))
    assert restarted.violations == ()


def test_at_the_end_all_hold_the_same_or_what_came_just_before() -> None:
    ahead = [commit(A, 1), commit(A, 2, OTHER)]
    assert judged(Log(A, ahead), Log(A2, [commit(A2, 1)])).violations == ()
    behind = judged(Log(A, [*ahead, commit(A, 3, NEXT)]), Log(A2, [commit(A2, 1)]))
    assert rules(behind) == [("the same end", f"{A2}:2")]
    went_on = Log(A, [*ahead, commit(A, 3, NEXT)], ms_each=400, end=2000)
    assert judged(went_on, Log(A2, [commit(A2, 1)], end=1000)).violations == (), "round 3 came after A2 had stopped"
    assert rules(judged(went_on, Log(A2, [commit(A2, 1)], end=1500))) == [("the same end", f"{A2}:2")]
    left = NodeSummary(A2, "1.0", 1, None, None, 1, 1.0, MicrobatchCounts(0, 0, 0, 0), 1, BusySeconds())
    leaving = Log(A2, [commit(A2, 1), left], ms_each=400, end=1500)
    assert judged(went_on, leaving).violations == (), "round 3 came while A2 ended its links"
    assert judged(Log(A, [*ahead, commit(A, 3, NEXT)], end=100_000), Log(A2, [commit(A2, 1)])).violations == ()


def test_a_peer_answers_for_its_new_module_only_and_only_if_it_has_served_there() -> None:
    ahead = Log(A, [commit(A, 1, OTHER), commit(A, 2), commit(A, 3, NEXT)])
    hosts, moved = (NodeStatus(A2, module, "serving", "", "") for module in ("1.0", "2.0"))
    assert judged(ahead, Log(A2, [hosts, commit(A2, 1), moved])).violations == ()
    back = judged(ahead, Log(A2, [moved, hosts, commit(A2, 1)]))
    assert [rule for rule, _ in rules(back)] == ["one digest a round", "the same end"]
    ahead = Log(A, [commit(A, 1), commit(A, 2), commit(A, 3, NEXT)])
    before = Log(A2, [commit(A2, 1)], end=None)
    joining, serving = (NodeStatus(A2, "1.0", state, "", "") for state in ("joining", "serving"))
    restored = Restored(A2, "1.0", 1, ANCHOR)
    assert judged(ahead, before, Log(A2, [joining, restored], began=2)).violations == ()
    served = judged(ahead, before, Log(A2, [joining, restored, serving], began=2))
    assert [rule for rule, _ in rules(served)] == ["the same end"]


def test_lines_that_are_no_events_are_found() -> None:
    lines = list(Log(A).lines())
    assert rules(check_logs([[lines[0], (Spot(A, 2), b"hello\n"), *lines[1:]]])) == [("log", f"{A}:2")]
    assert rules(check_logs([[lines[0], (Spot(A, 2), b'{"event":'), *lines[1:]]])) == [("log", f"{A}:2")]
    assert ("log", f"{A}:2") in rules(check_logs([lines[1:]]))
    assert rules(check_logs([])) == [("log", "None")]


def write(folder: Path, logs: list[Log]) -> None:
    for log in logs:
        (folder / f"{log.peer}-{log.began}.jsonl").write_bytes(b"".join(line for _, line in log.lines()))


def test_the_command_reads_a_folder_and_says_by_its_exit_code_what_it_found(tmp_path: Path) -> None:
    write(tmp_path, good())
    clean = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert clean.exit_code == 0
    assert "3 logs, 3 with a clean end" in clean.stdout
    write(tmp_path, [Log(A2, [visit(A2)], began=2)])
    dirty = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert dirty.exit_code == 1
    assert f"{A2}-2.jsonl:2: exactly once" in dirty.stdout
    as_json = CliRunner().invoke(app, ["check", str(tmp_path), "--json"])
    report = json.loads(as_json.stdout)
    assert (as_json.exit_code, report["ok"], report["visits"]) == (1, False, 4)
    assert report["violations"][0]["at"] == f"{A2}-2.jsonl:2"


def test_the_parts_of_a_log_are_one_and_a_missing_one_is_found(tmp_path: Path) -> None:
    events: list[Event] = [Started(A, 1, 1), Started(A, 1, 2), Started(A, 1, 3), Ended(A, 9)]
    for part, event in enumerate(events[:3], start=1):
        end = "" if part == 1 else f".{part}"
        last = event_to_json(events[3]) + "\n" if part == 3 else ""
        (tmp_path / f"{A}-1{end}.jsonl").write_text(event_to_json(event) + "\n" + last)
    assert CliRunner().invoke(app, ["check", str(tmp_path)]).exit_code == 0
    (tmp_path / f"{A}-1.2.jsonl").unlink()
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "part 2 of this log is missing" in result.stdout


def test_a_data_node_that_is_killed_while_it_writes_may_lack_its_own_visit_but_not_the_completion() -> None:
    report = judged(Log(D, [completed(A, B)], end=None), Log(A, [visit(A)]), Log(B, [visit(B)]))
    assert report.violations == ()
    assert report.counts["lost with a killed peer"] == 1
    assert [rule for rule, _ in rules(judged(Log(D, [visit(D)], end=None)))] == ["exactly once"]


def data_log(*counted: tuple[int, int, int], before: MicrobatchCounts | None = None) -> Log:
    """Of a data node: (completed microbatches of 64 tokens before it, step, tokens) for each step."""
    events: list[Event] = [] if before is None else [Continued(D, before)]
    for number, (done, step, tokens) in enumerate(counted, start=10 if before is None else 20):
        for each in range(done):
            name = f"dddddd#{number}{each}"
            events += [visit(D, name), Completed(D, name, (), 64)]
        events.append(Step(step, 1.0, tokens, 1.0, D))
    return Log(D, events)


def test_tokens_are_those_of_completed_microbatches_and_each_step_comes_once() -> None:
    assert judged(data_log((4, 1, 256), (3, 2, 448), (5, 3, 768))).violations == ()
    continued = data_log((2, 9, 5000), (1, 10, 5064), before=MicrobatchCounts(90, 80, 0, 0))
    assert judged(data_log((4, 1, 256)), continued).violations == (), "what it had before the snapshot is not here"
    for tokens in (447, 512, 256):
        report = judged(data_log((4, 1, 256), (3, 2, tokens)))
        assert [found.rule for found in report.violations] == ["tokens"]
        assert "for 192 completed ones" in report.violations[0].message
    assert [found.rule for found in judged(data_log((4, 1, 256), (4, 3, 512))).violations] == ["steps go forward"]
    assert [found.rule for found in judged(data_log((4, 2, 256), (4, 2, 512))).violations] == ["steps go forward"]


def routed(hops: tuple[str, ...], visits: dict[str, str], route: tuple[int, ...] = (1, 0)) -> AuditReport:
    """A microbatch that took these hops, and which module each peer says that it has visited it at."""
    data = [Completed(D, M, hops, 64, route), visit(D)]
    return judged(Log(D, data), *(Log(peer, [Visit(peer, module, M)]) for peer, module in visits.items()))


def test_visits_of_a_run_with_experts_are_told_by_module_and_route() -> None:
    report = routed((f"1.1@{A}", f"2.0@{B}"), {A: "1.1", B: "2.0"})
    assert not report.violations
    assert report.as_json()["modules"] == {"1.1": 1, "2.0": 1}
    assert report.as_json()["routes"] == [{"experts": [1, 0], "completed": 1, "rerouted": 0}]
    elsewhere = routed((f"1.0@{A}", f"2.0@{B}"), {A: "1.0", B: "2.0"})
    assert not elsewhere.violations
    assert elsewhere.as_json()["routes"][0]["rerouted"] == elsewhere.counts["rerouted"] == 1
    skipped = routed((f"2.0@{B}",), {B: "2.0"})
    assert skipped.as_json()["routes"][0]["rerouted"] == 0, "a stage that is skipped is no other expert's"
    assert "routes" not in judged(Log(D, [Completed(D, M, (), 64), visit(D)])).as_json()


def test_a_path_visits_one_expert_of_a_stage_and_no_other_one_counts_it() -> None:
    report = routed((f"1.1@{A}", f"2.0@{B}"), {A: "1.0", B: "2.0"})
    assert [found.message for found in report.violations] == [f"{M} counts at module 1.0, but its path names 1.1"]
    assert ("one expert a stage", f"{D}:2") in rules(routed((f"1.0@{A}", f"1.1@{B}"), {B: "1.1"}))
