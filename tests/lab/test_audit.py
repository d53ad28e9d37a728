"""The checker on logs written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.audit import AuditReport, Line, Spot, check_logs
from node.__main__ import app
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
    report = judged(*good(Abandoned("dddddd#8", "lost"), summary(3, 1, 1)), Log(A2, [Retracted(A2, "1.0", M)]))
    assert report.violations == ()
    assert report.counts["under way at the end"] == 1
    assert (report.counts["visits"], report.counts["completed"], report.counts["retracted"]) == (3, 1, 1)
    assert (report.logs, report.ended_well) == (4, 4)


def test_a_visit_that_was_taken_back_is_none() -> None:
    report = judged(*good(), Log(A2, [visit(A2), Retracted(A2, "1.0", M)]))
    assert report.violations == ()


def test_two_replicas_of_a_stage_that_both_count_are_found() -> None:
    report = judged(*good(), Log(A2, [visit(A2)]))
    assert rules(report) == [("exactly once", f"{A2}:2")]
    assert "2 times at stage 1" in report.violations[0].message


def test_a_replica_that_counts_twice_is_found() -> None:
    logs = good()
    logs[1].events.append(visit(A))
    assert rules(judged(*logs)) == [("exactly once", f"{A}:3")]


def test_a_visit_by_another_replica_than_the_paths_is_found() -> None:
    logs = good()
    logs[1] = Log(A2, [visit(A2)])
    assert rules(judged(*logs, Log(A))) == [("exactly once", f"{A2}:2")]


def test_a_visit_at_a_skipped_stage_is_found() -> None:
    report = judged(Log(D, [visit(D), completed(B)]), Log(A, [visit(A)]), Log(B, [visit(B)]))
    assert rules(report) == [("exactly once", f"{A}:2")]
    assert "skipped" in report.violations[0].message


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


def test_a_missing_log_is_no_excuse() -> None:
    report = judged(*good()[:2])
    assert "no log of that peer" in report.violations[0].message


def test_a_visit_of_what_was_never_completed_is_found() -> None:
    report = judged(*good(), Log(A2, [visit(A2, "dddddd#9")]))
    assert rules(report) == [("exactly once", f"{A2}:2")]
    stranger = judged(*good(), Log(A2, [visit(A2, "xxxxxx#9")]))
    assert stranger.violations == ()
    assert stranger.counts["visits for data nodes without a log"] == 1


def test_what_completes_twice_or_is_also_abandoned_is_found() -> None:
    twice = judged(*good(completed(A, B)))
    assert ("completed once", f"{D}:4") in rules(twice)
    both = judged(*good(Abandoned(M, "lost")))
    assert rules(both) == [("completed once", f"{D}:3")]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (summary(2, 2, 0), "2 completed, its log has 1"),
        (summary(2, 1, 1), "1 abandoned, its log has 0"),
        (summary(0, 1, 0), "0 started, but 1 completed"),
        (summary(1, 1, 0, 1), "completed twice"),
    ],
)
def test_an_account_that_does_not_add_up_is_found(figures: NodeSummary, message: str) -> None:
    report = judged(*good(figures))
    assert rules(report) == [("account", f"{D}:4")]
    assert message in report.violations[0].message


def test_a_data_node_that_goes_on_from_a_checkpoint_answers_for_what_came_after() -> None:
    before = Continued(D, MicrobatchCounts(started=7, completed=5, abandoned=2))
    report = judged(*good(before, summary(8, 6, 2)))
    assert report.violations == ()
    assert report.counts["started"] == 1
    assert [rule for rule, _ in rules(judged(*good(before, summary(9, 7, 2))))] == ["account"]


def test_what_was_started_adds_up_when_data_nodes_were_killed() -> None:
    """A killed one leaves no figures; its log has what it has done."""
    killed = Log(D, [visit(D), completed(A, B), Abandoned("dddddd#8", "lost")], end=None)
    after = Log(D, [Abandoned("dddddd#9", "lost"), summary(2, 0, 1)], began=6)
    counts = judged(killed, after, Log(A, [visit(A)]), Log(B, [visit(B)])).counts
    assert (counts["completed"], counts["abandoned"], counts["under way at the end"]) == (1, 2, 1)
    assert counts["started"] == 4


def commit(peer: str, number: int, digest: str = ANCHOR) -> RoundCommitted:
    return RoundCommitted(peer, "1.0", number, digest, (A, A2), (A, A2), 100, 1, 0.1, 1, 1)


def caught_up(peer: str, number: int, digest: str = ANCHOR) -> CaughtUp:
    return CaughtUp(peer, "1.0", number, digest, 10, 0.1, (A,))


def test_replicas_that_agree_are_clean() -> None:
    report = judged(
        Log(A, [commit(A, 1), commit(A, 2, OTHER)]), Log(A2, [Restored(A2, "1.0", 0, NEXT), caught_up(A2, 2, OTHER)])
    )
    assert report.violations == ()
    assert (report.counts["commits"], report.counts["caught_up"], report.counts["restored"]) == (2, 1, 1)


def test_two_digests_of_one_round_are_found() -> None:
    report = judged(Log(A, [commit(A, 1), commit(A, 2, NEXT)]), Log(A2, [commit(A2, 1, OTHER), commit(A2, 2, NEXT)]))
    assert [rule for rule, _ in rules(report)] == ["one digest a round"]


@pytest.mark.parametrize("joins", [CaughtUp, Restored])
def test_a_fork_has_healed_when_one_side_has_joined_the_other(joins: type[Event]) -> None:
    join = caught_up(A2, 2, NEXT) if joins is CaughtUp else Restored(A2, "1.0", 2, NEXT)
    report = judged(Log(A, [commit(A, 1), commit(A, 2, NEXT)]), Log(A2, [commit(A2, 1, OTHER), join]))
    assert report.violations == ()
    assert report.counts["forks healed"] == 1


def test_a_fork_has_not_healed_by_catching_up_with_something_else_or_before() -> None:
    elsewhere = judged(Log(A, [commit(A, 1)]), Log(A2, [commit(A2, 1, OTHER), caught_up(A2, 1, NEXT)]))
    assert "one digest a round" in [rule for rule, _ in rules(elsewhere)]
    before = judged(Log(A, [commit(A, 1)]), Log(A2, [caught_up(A2, 1), commit(A2, 1, OTHER)]))
    assert "one digest a round" in [rule for rule, _ in rules(before)]


def test_a_fork_that_ended_with_a_killed_process_is_over() -> None:
    report = judged(Log(A, [commit(A, 1)]), Log(A2, [commit(A2, 1, OTHER)], end=None))
    assert report.violations == ()


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
    left_early = judged(Log(A, [*ahead, commit(A, 3, NEXT)], end=100_000), Log(A2, [commit(A2, 1)]))
    assert left_early.violations == ()


def test_a_peer_that_has_moved_answers_for_its_new_module_only() -> None:
    ahead = Log(A, [commit(A, 1, OTHER), commit(A, 2), commit(A, 3, NEXT)])
    hosts, moved = (NodeStatus(A2, module, "serving", "", "") for module in ("1.0", "2.0"))
    assert judged(ahead, Log(A2, [hosts, commit(A2, 1), moved])).violations == ()
    back = judged(ahead, Log(A2, [moved, hosts, commit(A2, 1)]))
    assert [rule for rule, _ in rules(back)] == ["one digest a round", "the same end"]


def test_a_peer_that_stops_before_it_serves_again_answers_for_nothing() -> None:
    ahead = Log(A, [commit(A, 1), commit(A, 2), commit(A, 3, NEXT)])
    before = Log(A2, [commit(A2, 1)], end=None)
    joining, serving = (NodeStatus(A2, "1.0", state, "", "") for state in ("joining", "serving"))
    restored = Restored(A2, "1.0", 1, ANCHOR)
    assert judged(ahead, before, Log(A2, [joining, restored], began=2)).violations == ()
    served = judged(ahead, before, Log(A2, [joining, restored, serving], began=2))
    assert [rule for rule, _ in rules(served)] == ["the same end"]


def test_lines_that_are_no_events_are_found() -> None:
    lines = list(Log(A).lines())
    broken = check_logs([[lines[0], (Spot(A, 2), b"hello\n"), *lines[1:]]])
    assert rules(broken) == [("log", f"{A}:2")]
    cut = check_logs([[lines[0], (Spot(A, 2), b'{"event":'), *lines[1:]]])
    assert rules(cut) == [("log", f"{A}:2")]
    headless = check_logs([lines[1:]])
    assert ("log", f"{A}:2") in rules(headless)
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
    """Therefore it writes the completion first."""
    hops = [Log(A, [visit(A)]), Log(B, [visit(B)])]
    report = judged(Log(D, [completed(A, B)], end=None), *hops)
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


def test_tokens_are_those_of_completed_microbatches() -> None:
    assert judged(data_log((4, 1, 256), (3, 2, 448), (5, 3, 768))).violations == ()
    continued = data_log((2, 9, 5000), (1, 10, 5064), before=MicrobatchCounts(90, 80, 0, 0))
    assert judged(data_log((4, 1, 256)), continued).violations == (), "what it had before the snapshot is not here"
    for tokens in (447, 512, 256):
        report = judged(data_log((4, 1, 256), (3, 2, tokens)))
        assert [found.rule for found in report.violations] == ["tokens"]
        assert "for 192 completed ones" in report.violations[0].message


def test_a_step_that_is_left_out_or_done_again_is_found() -> None:
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


def test_another_expert_than_the_paths_must_not_count_it() -> None:
    report = routed((f"1.1@{A}", f"2.0@{B}"), {A: "1.0", B: "2.0"})
    assert [found.message for found in report.violations] == [f"{M} counts at module 1.0, but its path names 1.1"]


def test_a_path_visits_one_expert_of_a_stage() -> None:
    report = routed((f"1.0@{A}", f"1.1@{B}"), {B: "1.1"})
    assert ("one expert a stage", f"{D}:2") in rules(report)
