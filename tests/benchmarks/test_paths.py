"""What `benchmarks/paths.py` plans and what it makes of what it sees."""

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.paths import CELLS, Environment, Trial, figures, make_environment, published, report, trials
from swarm.pipeline.custody import Work
from tests.e2e.small_run import HOME, LAUNCHED, LOST, FlightMark, write_text

WAYS = {"a": {"a": 0.0, "b": 0.1}, "b": {"a": 0.1, "b": 0.0}}
SMALL = Environment((0, 1, 1, 2), (0.01, 0.1, 0.2, 0.05), (1.0,) * 4, ("a", "a", "b", "b"), WAYS)
TWENTY = Path(__file__).parents[1] / "lab" / "world" / "twenty_peers.json"
ALL = Namespace(seeds=2, cells=["D", "E"], arms=["ours", "swarm", "greedy"])


def test_a_seed_always_makes_the_same_environment_which_all_arms_share_in_a_repeatable_order() -> None:
    one, other = make_environment(3), make_environment(3)
    assert one == other != make_environment(4)
    assert Counter(one.stages) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}
    assert all(0.06 <= seconds <= 0.24 for stage, seconds in zip(one.stages, one.forward_s, strict=True) if stage)
    assert all(0.5 <= factor <= 2.0 for factor in one.announced)
    planned = trials(ALL, Path("here"))
    assert len(planned) == 2 * (4 + 3)
    assert planned == trials(ALL, Path("here"))
    assert all(trial.environment == make_environment(trial.seed) for trial in planned)
    one_rule = trials(Namespace(seeds=1, cells=["D"], arms=["ours"]), Path("here"))
    assert {trial.arm for trial in one_rule} == {"ours", "ours-1.25", "ours-1.5"}


def test_a_published_problem_keeps_its_machines_and_its_schedule(tmp_path: Path) -> None:
    problem, schedule = json.loads(TWENTY.read_text()), tmp_path / "schedule.json"
    paths = [{"data_node": own, "peers": [0, 2, 8]} for own in problem["stages"][0]]
    schedule.write_text(json.dumps({"paths": paths}))
    found = published(TWENTY, schedule)
    assert [found.replicas(stage) for stage in range(6)] == [sorted(peers) for peers in problem["stages"]]
    assert found.routes[1] == (1, (0, 2, 8))
    spec = Trial("P", "replay", 1, found, tmp_path).spec(0)
    assert (spec.rule, spec.slots, spec.compute_s(Work.LOSS)) == ("replay", 3, pytest.approx(0.25 * 0.25 * 0.4829))
    assert found.one_way_s["00000"]["00006"] == pytest.approx(0.25 * 0.3666)


def test_arms_differ_in_their_paths_only(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    runs = {arm: CELLS["S"].manifest(text, arm).model_dump() for arm in CELLS["S"].arms}
    assert runs["ours-full"] == runs["swarm-full"]
    assert runs["ours"] == runs["swarm"]
    assert runs["ours-full"]["stages"].pop("per_path") > runs["ours"]["stages"].pop("per_path")
    assert runs["ours-full"] == runs["ours"]
    assert CELLS["D"].manifest(text, "ours-1.5").model_dump()["stages"]["visit_ratio"] == 1.5


def flights(*marks: tuple[float, str]) -> list[FlightMark]:
    return [FlightMark(at, kind, ("p1", "p3"), 2 * number) for number, (at, kind) in enumerate(marks)]


def test_a_swarm_is_measured_between_two_times() -> None:
    marks = flights((5.0, LAUNCHED), (9.0, HOME), *((10.0 + k / 2, HOME) for k in range(20)), (19.9, LOST))
    indices = {"own": 0, "p1": 1, "p2": 2, "p3": 3}
    found = figures(Trial("E", "ours", 1, SMALL, Path()), {0: marks}, indices, (10.0, 20.0), 64)
    assert (found["tokens_per_s"], found["completed"], found["abandoned"]) == (128.0, 20, 1)
    assert found["visits_per_replica"] == {1: 20, 2: 0, 3: 20}
    assert found["hops_between_regions"] == pytest.approx(2 / 3, abs=1e-3)


def test_the_bar_is_of_pairs_of_the_same_seed() -> None:
    rest = {"share_of_bound": 0.5, "hops_between_regions": 0.5, "machine_load": 0.5}
    runs = [
        {"cell": "E", "arm": arm, "seed": seed, "tokens_per_s": pace, **rest}
        for arm, paces in (("ours", (1.0, 2.0, 3.0)), ("swarm", (2.0, 1.25, 0.0)))
        for seed, pace in enumerate(paces)
    ]
    found = report(runs)["E"]
    assert found["ratios"] == {"ours / swarm": [0.5, 1.6]}
    assert found["bar"] == {"limit": 1.0, "is": pytest.approx(0.894, abs=1e-3), "held": False}
    assert found["arms"]["ours"]["tokens_per_s"] == 2.0
