"""Chaos scenarios: those that come along can be read, and every wrong key is named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.chaos.chaos_scenario import ChaosScenario, find_scenarios, known_scenarios
from lab.chaos.faults import Child, Crash, FreezeConvener, Lie, Odd, OneWay, Resets, Restart, Worsen
from lab.emulation.link_shape import Fault
from lab.experiment.scenario import read_scenario, scenario_from_table
from node.__main__ import app
from node.observability.failpoints import POINTS
from swarm.vocabulary.errors import ConfigError

BASE = """
name = "test"
seed = 3
duration = 20
[chaos]
fault = "something breaks"
"""


def scenario_of(events: str = "", base: str = BASE) -> ChaosScenario:
    return scenario_from_table(tomllib.loads(base + events), ChaosScenario)


def event(action: str, keys: str, at: float = 5) -> str:
    return f'[[event]]\nat = {at}\naction = "{action}"\n{keys}\n'


@pytest.mark.parametrize("path", known_scenarios().values(), ids=lambda path: path.stem)
def test_a_scenario_that_comes_along_can_be_read_and_is_named_like_its_file(path: Path) -> None:
    read, text = read_scenario(path, ChaosScenario)
    assert read.name == path.stem
    assert read.events
    assert text == path.read_text()


def test_every_crash_point_of_the_matrix_is_in_a_scenario() -> None:
    events = [each for path in known_scenarios().values() for each in read_scenario(path, ChaosScenario)[0].events]
    tried = {each.point for each in events if isinstance(each, Crash)}
    assert tried == POINTS.keys()


def test_what_is_not_said_is_small_and_usual() -> None:
    read = scenario_of()
    assert read.peers == 5
    assert read.site_of(0).shape.latency_s == 0.02
    assert read.held_out == 0
    assert read.manifest.stages.blocks == (0, 1, 1)
    assert read.manifest.model.hidden == 32
    assert read.chaos.save_every_s is None
    assert read.chaos.recovery_s == 30


def test_faults_are_read() -> None:
    read = scenario_of(
        event("worsen", 'peers = [3]\nfault = "half_open"\nfor = 4', at=1)
        + event("one_way", 'from = [0]\nto = ["peers"]\nfor = 4', at=2)
        + event("resets", "peers = [1]\nevery_bytes = 10\nfor = 4", at=3)
        + event("child", 'peers = [1]\nwhich = "p2pd"', at=4)
        + event("crash", 'stage = 1\npoint = "sent"\nnth = 7\nagain = true', at=5)
        + event("restart", "peers = [1, 2]\npolitely = true", at=6)
        + event("odd", 'stage = 2\nclock = -5\nprotocol = "1-2"\nworks = true', at=7)
        + event("freeze_convener", "stage = 1\nfor = 4", at=8)
        + event("odd", "stage = 1\nclock = 300\nstep = -300\nstep_after = 9\nworks = true", at=8.5)
        + event("odd", "stage = 1\nstep = 30\nstep_after = 9", at=8.7)
        + event("lie", "stage = 2\nseed = 5", at=9)
        + event("kill", "peers = [4]", at=10)
    )
    worsen, one_way, resets, child, crash, restart, odd, convener, set_right, set_wrong, lie, _ = read.events
    assert isinstance(worsen, Worsen)
    assert worsen.fault is Fault.HALF_OPEN
    assert one_way == OneWay(at_s=2, from_=(0,), to=(0, 1, 2, 3, 4), for_s=4)
    assert resets == Resets(at_s=3, peers=(1,), every_bytes=10, for_s=4)
    assert child == Child(at_s=4, peers=(1,), which="p2pd")
    assert isinstance(crash, Crash)
    assert (crash.point, crash.nth, crash.again) == ("sent", 7, True)
    assert restart == Restart(at_s=6, peers=(1, 2), politely=True)
    assert isinstance(odd, Odd)
    assert (odd.oddities, odd.works) == (("--clock=-5", "--protocol=1-2"), True)
    assert odd.step_after_s == 0
    assert convener == FreezeConvener(at_s=8, stage=1, for_s=4)
    assert isinstance(set_right, Odd)
    assert isinstance(set_wrong, Odd)
    assert (set_right.oddities, set_right.step_after_s) == (("--clock=300", "--step=-300"), 9)
    assert (set_wrong.oddities, set_wrong.step_after_s, set_wrong.clock_s) == (("--step=30",), 9, 0)
    assert isinstance(lie, Lie)
    assert (lie.stage, lie.seed) == (2, 5)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        (event("crash", 'stage = 1\npoint = "nowhere"'), "nowhere"),
        (event("crash", 'stage = 7\npoint = "sent"'), "stage"),
        (event("crash", 'stage = 1\npoint = "sent"\nagain = "yes"'), "again"),
        (event("child", 'peers = [1]\nwhich = "cat"'), "which"),
        (event("odd", "stage = 1"), "nothing odd"),
        (event("odd", 'stage = 1\nprotocol = "2"'), "protocol"),
        (event("odd", "stage = 1\nstep = -30"), "step_after"),
        (event("explode", ""), "explode"),
        (event("resets", "peers = [1]\nfor = 3"), "every_bytes"),
    ],
)
def test_wrong_keys_are_named(events: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        scenario_of(events)


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("", "chaos"),
        ("[chaos]", "fault"),
        ('[chaos]\nfault = "f"\nrecover = 3', "recover"),
        ('[chaos]\nfault = "f"\nat_least = { commits = "many" }', "at_least.commits"),
    ],
)
def test_wrong_expectations_are_named(own: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        scenario_of(base=f'name = "test"\nduration = 20\n{own}\n')


def test_scenarios_are_named_or_files(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(BASE)
    assert find_scenarios([str(path), "resets", "resets"]) == [path, known_scenarios()["resets"]]
    with pytest.raises(ConfigError, match="resetz"):
        find_scenarios(["resetz"])


def test_the_command_lists_them_and_wants_a_folder() -> None:
    listed = CliRunner().invoke(app, ["chaos", "--list"])
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in known_scenarios())
    assert CliRunner().invoke(app, ["chaos", "resets"]).exit_code == ConfigError.exit_code


@pytest.mark.parametrize("base", ["held_out = 8\n" + BASE, BASE + "loss_ratio = 1.02\n"])
def test_losses_are_compared_where_they_are_measured(base: str) -> None:
    with pytest.raises(ConfigError, match="go together"):
        scenario_of(base=base)
