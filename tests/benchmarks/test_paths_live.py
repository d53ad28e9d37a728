"""What `benchmarks/paths_live.py` plans and what it makes of what it sees. That it runs, it shows itself."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.live_cells import ARMS, CELLS, Ground, changes_of, make_ground
from benchmarks.live_report import bootstrap, compared, figures, mean_in_flight, recovered_s, report, steps_s, table
from benchmarks.live_swarm import CpuTimes, Seen, Trial
from benchmarks.paths_live import earlier, parsed, trials
from tests.e2e.emulated import Network, Spec
from tests.e2e.small_run import HOME, LAUNCHED, LOST, FlightMark, FlightWriter, read_flights, write_text

WAYS = {"a": {"a": 0.0, "b": 0.1}, "b": {"a": 0.1, "b": 0.0}}
GROUND = Ground((0, 1, 1, 2), (0.01, 0.1, 0.2, 0.05), (1.0,) * 4, ("a", "a", "b", "b"), WAYS)


# ---- grounds and cells -----------------------------------------------------------------------------------------------


def test_the_bound_is_that_of_the_weakest_stage() -> None:
    assert GROUND.weakest == 1
    assert GROUND.visits_per_s(1) == pytest.approx(1 / 0.3 + 1 / 0.6)
    assert GROUND.bound_per_s(2) == pytest.approx(5)
    assert GROUND.bound_per_s(1) == pytest.approx(10)
    assert GROUND.slowed(1, 4.0).bound_per_s(2) == pytest.approx(1 / 1.2 + 1 / 0.6)


def test_the_knee_is_the_bound_times_the_mean_round_trip_without_waiting() -> None:
    by_fast = 0.06 + 0.3 + 0.15 + 2 * (0.0 + 0.1 + 0.1)
    by_slow = 0.06 + 0.6 + 0.15 + 2 * (0.1 + 0.0 + 0.1)
    assert GROUND.round_trip_s(2) == pytest.approx((2 * by_fast + by_slow) / 3)
    assert GROUND.knee(2) == pytest.approx(5 * GROUND.round_trip_s(2))


def test_the_same_seed_is_the_same_ground() -> None:
    one, other = make_ground(3), make_ground(3)
    assert one == other != make_ground(4)
    assert all(one.one_way_s[a][b] == one.one_way_s[b][a] for a in "abc" for b in "abc")
    assert Counter(one.stages) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}
    assert all(0.06 <= seconds <= 0.24 for stage, seconds in zip(one.stages, one.forward_s, strict=True) if stage)
    assert all(0.5 <= factor <= 2.0 for factor in one.announced)


def test_longer_links_change_nothing_else() -> None:
    near, far = make_ground(3), make_ground(3, links=3.0)
    assert far.one_way_s["a"]["b"] == pytest.approx(3 * near.one_way_s["a"]["b"], abs=1e-3)
    assert far.one_way_s["a"]["a"] == near.one_way_s["a"]["a"]
    assert replace(far, one_way_s=near.one_way_s) == near


def test_arms_differ_in_nothing_but_the_paths(tmp_path: Path) -> None:
    text, cell = write_text(tmp_path / "text"), CELLS["S"]
    runs = {name: cell.run(text, ARMS[name]).model_dump() for name in cell.arms}
    assert runs["ours-full"] == runs["swarm-full"]
    assert runs["ours"] == runs["swarm"]
    assert runs["ours-full"]["stages"].pop("per_path") > runs["ours"]["stages"].pop("per_path")
    assert runs["ours-full"] == runs["ours"]


def test_an_arm_with_unequal_visits_has_them_in_its_manifest(tmp_path: Path) -> None:
    text, cell = write_text(tmp_path / "text"), CELLS["D"]
    assert cell.run(text, ARMS["ours-1.5"]).model_dump()["stages"]["visit_ratio"] == 1.5


def test_only_hops_are_short_of_slots_and_only_data_nodes_write_flights() -> None:
    ground = make_ground(1)
    trial = Trial("B1", CELLS["B1"], "swarm", 1, ground, Path("here"))
    specs = [trial.spec(index) for index in range(len(ground.stages))]
    assert {spec.slots for spec, stage in zip(specs, ground.stages, strict=True) if stage} == {2}
    assert {spec.slots for spec, stage in zip(specs, ground.stages, strict=True) if not stage} == {None}
    assert [spec.flights is not None for spec in specs] == [stage == 0 for stage in ground.stages]
    assert {spec.rule for spec in specs} == {"swarm"}


def test_every_cell_has_as_much_under_way_as_it_allows() -> None:
    under_way = {name: cell.in_flight for name, cell in CELLS.items()}
    assert under_way == {"A1": 6, "A2": 12, "A3": 12, "B1": 24, "B3": 24, "C": 12, "C2": 12, "D": 24, "E": 24, "S": 24}


def test_the_fastest_replica_of_the_weakest_stage_becomes_slower() -> None:
    (change,) = changes_of(CELLS["C"], GROUND, 1, 55.0)
    assert (change.index, change.factor) == (1, 4.0)


def test_spells_are_the_same_for_all_arms_and_slow_a_third_of_the_time() -> None:
    ground = make_ground(1)
    changes = changes_of(CELLS["C2"], ground, 1, 10_000.0)
    assert changes == changes_of(CELLS["C2"], ground, 1, 10_000.0)
    own = [change for change in changes if change.index == 3]
    slow_s = sum(after.after_s - now.after_s for now, after in itertools.pairwise(own) if now.factor > 1)
    assert 0.2 < slow_s / 10_000 < 0.5


def test_all_arms_are_on_the_same_ground_in_an_order_that_does_not_change() -> None:
    planned = trials(["A1", "A2"], [1, 2], None, Path("here"))
    assert len(planned) == 12
    assert all(trial.ground == make_ground(trial.seed, trial.cell.links) for trial in planned)
    assert planned == trials(["A1", "A2"], [1, 2], None, Path("here"))
    orders = {tuple(t.arm for t in trials(["A1"], [seed], None, Path("here"))) for seed in range(20)}
    assert len(orders) == 6


# ---- figures ---------------------------------------------------------------------------------------------------------


def flights(*marks: tuple[float, str], peers: tuple[str, ...] = ("p1", "p3")) -> list[FlightMark]:
    return [FlightMark(at, kind, peers, 2 * number) for number, (at, kind) in enumerate(marks)]


def test_steps_are_timed_from_end_to_end() -> None:
    marks = flights(*((at, HOME) for at in (1.0, 2.0, 4.0, 5.0, 9.0, 11.0, 11.5, 13.0)))
    assert steps_s(marks, 2, 0.0, 12.0) == [3.0, 6.0]
    assert steps_s(marks, 2, 3.0, 20.0) == [6.0, 2.0]


def test_what_is_under_way_is_averaged_over_time() -> None:
    marks = flights((0.0, LAUNCHED), (1.0, LAUNCHED), (6.0, HOME), (8.0, LOST))
    assert mean_in_flight(marks, 2.0, 10.0) == pytest.approx((4 * 2 + 2 * 1 + 2 * 0) / 8)


def test_a_pace_is_back_when_ten_seconds_are_as_they_should_be() -> None:
    steady = [0.5 * k for k in range(200)]
    pause = [at for at in steady if not 20 <= at < 28]
    assert recovered_s(steady, 20.0, 70.0, 2.0) == 0.0
    assert recovered_s(pause, 20.0, 70.0, 2.0) == pytest.approx(7.5)
    assert recovered_s([at for at in steady if at < 20], 20.0, 70.0, 2.0) == 50.0


def seen_of(marks: list[FlightMark], **more: object) -> Seen:
    names = {"own": 0, "p1": 1, "p2": 2, "p3": 3}
    seen = Seen(10.0, 20.0, 5.0, (), {0: marks}, names, (), None, None, 0)
    return replace(seen, **more)  # type: ignore[arg-type]


def test_a_run_tells_what_it_did() -> None:
    ends = [(10.0 + k / 2, HOME) for k in range(20)]
    marks = flights((5.0, LAUNCHED), *ends, (19.9, LOST))
    trial = Trial("E", CELLS["E"], "ours", 1, GROUND, Path())
    found = figures(trial, seen_of(marks), tokens=64)
    assert found["tokens_per_s"] == pytest.approx(128.0)
    assert found["completed"] == 20
    assert found["abandoned"] == 1
    assert found["visits_per_replica"] == {1: 20, 2: 0, 3: 20}
    assert found["visits_per_stage"] == {1: 20, 2: 20}
    assert found["share_measured"] == pytest.approx(42 / 40, abs=1e-3)
    assert found["hops_between_regions"] == pytest.approx(2 / 3, abs=1e-3)
    assert "step_s" not in found


def test_a_change_is_followed_by_what_came_home_after_it() -> None:
    ends = [(at / 2, HOME) for at in range(20, 130)]
    trial = Trial("C", CELLS["C"], "ours", 1, GROUND, Path())
    found = figures(trial, seen_of(flights(*ends), ended=65.0, changed_at=(20.0,)), tokens=10)
    assert found["slowed_replica"] == 1
    assert found["tokens_after_change"] == 600
    assert found["tokens_per_s_before"] == pytest.approx(20.0)
    left = (1 / 1.2 + 1 / 0.6) / 2 * 4  # four stages on each path of the cell, where this ground has two
    assert found["left_tokens_per_s"] == pytest.approx(10 * left / 4, abs=0.1)


def test_ratios_are_of_pairs_and_the_interval_holds_their_mean() -> None:
    runs = [
        {"cell": "A1", "arm": arm, "seed": seed, "step_s": seconds}
        for arm, steps in (("ours", (1.0, 2.0, 3.0)), ("swarm", (2.0, 2.5, 4.0)))
        for seed, seconds in enumerate(steps, start=1)
    ]
    ratio = compared(runs, "step_s", "ours", "swarm")
    assert ratio["by_seed"] == {1: 0.5, 2: 0.8, 3: 0.75}
    assert ratio["geometric_mean"] == pytest.approx(statistics.geometric_mean((0.5, 0.8, 0.75)), abs=1e-3)
    low, high = ratio["interval"]
    assert 0.5 <= low < ratio["geometric_mean"] < high <= 0.8
    (bar,) = report(runs)["A1"]["bars"]
    assert bar["held"] is True
    assert bar["is"] == ratio["geometric_mean"]
    assert "A1 step_s | ours / swarm" in table(report(runs))


def test_a_bootstrap_is_the_same_each_time_and_narrow_for_equal_values() -> None:
    values = [0.8, 0.9, 1.1, 0.7, 1.0]
    assert bootstrap(values, statistics.fmean) == bootstrap(values, statistics.fmean)
    assert bootstrap([0.8] * 5, statistics.fmean) == pytest.approx((0.8, 0.8))


def test_earlier_runs_are_reported_without_running_anything(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"runs": [{"cell": "E"}]}))
    options = parsed(["--seeds", "--add", str(tmp_path / "one.json")])
    assert not options.seeds
    assert earlier(options.add) == [{"cell": "E"}]


def test_load_is_a_share_of_all_cores() -> None:
    assert CpuTimes.shares(CpuTimes(100, 50, 10), CpuTimes(300, 150, 60)) == (0.5, 0.25)
    assert CpuTimes.shares(None, None) == (None, None)


# ---- emulated nodes --------------------------------------------------------------------------------------------------


def test_a_network_is_read_as_it_was_written(tmp_path: Path) -> None:
    network = Network({"p": "a", "q": "b"}, {"a": {"a": 0.0, "b": 0.03}, "b": {"a": 0.03, "b": 0.0}})
    network.write(tmp_path / "network.json")
    assert Network.read(tmp_path / "network.json").between("q", "p") == 0.03


def test_a_machine_is_slower_both_ways() -> None:
    assert Spec(0.1, "file", backward_factor=2.0).visit_s == pytest.approx(0.3)


def test_a_machine_is_as_slow_as_its_file_says_now(tmp_path: Path) -> None:
    spec = Spec(0.1, "file", slowed=str(tmp_path / "slowed"))
    assert spec.slower_by() == 1.0
    (tmp_path / "slowed").write_text("4.0")
    assert spec.slower_by() == 4.0


def test_a_record_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "flights.jsonl"
    assert read_flights(path) == []
    with closing(FlightWriter(path)) as writer, path.open("a") as file:
        writer.write(LAUNCHED, ("p", "q"), 3)
        file.write('{"at":1')
    (mark,) = read_flights(path)
    assert (mark.kind, mark.peers, mark.measured) == (LAUNCHED, ("p", "q"), 3)
