"""Scenario files: what they mean, and that every wrong key is named."""

import json
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lab import scenario as scenarios
from lab.emulation.emulation import MBIT, PROFILES, Fault, LinkShape, Site, profile_of
from node.observability.failpoints import POINTS
from swarm.vocabulary.errors import ConfigError
from tests.node.cli.test_cli import ROOT, STAND_IN, command, ran, refused, until

BASE = """
name = "test"
seed = 3
duration = 60
threads = 2
held_out = 0
[manifest]
stages = { blocks = [0, 1, 1] }
[manifest.training]
staleness = 1
[[group]]
name = "homes"
peers = 3
profile = "home-fibre"
up_mbit = 20
[[group]]
name = "far"
peers = 2
profile = "gcp-iowa"
"""
EVENTS = """
[[event]]
at = 5
action = "partition"
sides = [["homes"], [3, 4]]
for = 2.5
[[event]]
at = 1
action = "shape"
peers = ["far", 0]
profile = "mobile"
fault = "half_open"
latency_ms = 200
[[event]]
at = 2
action = "kill"
peers = [1]
[[event]]
at = 3
action = "stop"
peers = [2, 2]
[[event]]
at = 3.5
action = "start"
stage = 2
[[event]]
at = 4
action = "freeze"
peers = ["far"]
for = 6
"""


def scenario_of(text: str) -> scenarios.Scenario:
    return scenarios.scenario_from_table(tomllib.loads(text))


def test_a_scenario_says_who_where_and_what() -> None:
    scenario = scenario_of(BASE)
    assert (scenario.name, scenario.seed, scenario.duration_s, scenario.threads) == ("test", 3, 60, 2)
    assert (scenario.held_out, scenario.chaos) == (0, None)
    assert scenario.manifest.stages.blocks == (0, 1, 1)
    assert scenario.manifest.training.staleness == 1
    assert scenario.manifest.training.rows == 4, "the rest is the demo run's"
    assert scenario.manifest.seed == 3
    fibre = profile_of("home-fibre").site.shape
    assert scenario.sites[2].shape.up_bytes_per_s == 20 * MBIT
    assert scenario.sites[2].shape.down_bytes_per_s == fibre.down_bytes_per_s
    assert scenario.sites[4].region == "iowa"


def test_events_come_in_order_of_time() -> None:
    assert scenario_of(BASE + EVENTS).events == (
        scenarios.Reshape(at_s=1, peers=(3, 4, 0), profile="mobile", latency_ms=200, fault=Fault.HALF_OPEN),
        scenarios.Kill(at_s=2, peers=(1,)),
        scenarios.Stop(at_s=3, peers=(2,)),
        scenarios.Start(at_s=3.5, stage=2),
        scenarios.Freeze(at_s=4, peers=(3, 4), for_s=6),
        scenarios.Partition(at_s=5, sides=((0, 1, 2), (3, 4)), for_s=2.5),
    )


def test_a_change_leaves_the_rest_of_a_link_as_it_is() -> None:
    slow = Site(LinkShape(latency_s=0.01, up_bytes_per_s=1000.0, down_bytes_per_s=4000.0), "iowa")
    change = scenarios.LinkTable(fault=Fault.RESET, latency_ms=200)
    assert change.applied_to(slow) == Site(LinkShape(0.2, 0.0, 1000.0, 4000.0, Fault.RESET), "iowa")
    assert change.link_in_words() == ("latency 200 ms", "fault reset")
    assert scenarios.LinkTable().applied_to(slow) == slow


def test_churn_is_so_many_replacements_a_minute_and_the_same_with_the_same_seed() -> None:
    text = BASE + '[[event]]\nat = 0\naction = "churn"\nshare_per_minute = 0.4\nfor = 120\n'
    moments = moments_of(text)
    assert len(moments) == 4, "0.4 of 5 peers in each of two minutes"
    assert all(30 * turn <= at_s < 30 * (turn + 1) for turn, at_s in enumerate(moments))
    assert moments_of(text) == moments
    assert moments_of(text.replace("seed = 3", "seed = 4")) != moments
    assert len(moments_of(text.replace("for = 120\n", ""))) == 2, "to the end"
    with pytest.raises(ConfigError, match="fewer than 10000 peers"):
        scenario_of(text.replace("0.4", "10").replace("for = 120", "for = 12060"))


def moments_of(text: str) -> list[float]:
    (churn,) = scenario_of(text).events
    assert isinstance(churn, scenarios.Churn)
    return list(churn.moments(5, scenario_of(text).seed))


def test_the_undisturbed_run_trains_the_same_manifest() -> None:
    scenario = scenario_of(BASE + EVENTS)
    calm = scenario.undisturbed()
    assert calm.manifest == scenario.manifest
    assert calm.events == ()
    assert set(calm.sites) == {profile_of("none").site}
    mobile = scenario.everywhere("mobile")
    assert set(mobile.sites) == {profile_of("mobile").site}
    assert [each.profile for each in mobile.events if isinstance(each, scenarios.Start)] == ["mobile"]


CHAOS = """
name = "test"
seed = 3
duration = 20
[chaos]
fault = "something breaks"
"""


def fault(action: str, keys: str, at: float = 5) -> str:
    return f'[[event]]\nat = {at}\naction = "{action}"\n{keys}\n'


BARE = CHAOS.partition("fault")[0]
WRONG_CHAOS = [
    (CHAOS + fault("crash", 'stage = 1\npoint = "nowhere"'), "nowhere"),
    (CHAOS + fault("child", 'peers = [1]\nwhich = "cat"'), "which"),
    (CHAOS + fault("odd", "stage = 1"), "one is needed"),
    (CHAOS + fault("odd", 'stage = 1\nprotocol = "2"'), "protocol"),
    (CHAOS + fault("odd", "stage = 1\nstep = -30"), "step_after"),
    (BARE, "fault"),
    (BARE + 'fault = "f"\nrecover = 3\n', "recover"),
    (BARE + 'fault = "f"\nat_least = { commits = "many" }\n', "at_least.commits"),
    ("held_out = 8\n" + CHAOS, "go together"),
    (CHAOS + "loss_ratio = 1.02\n", "go together"),
]


def parted(*sides: Any) -> dict[str, Any]:
    return tomllib.loads(BASE) | {"event": [{"at": 1, "action": "partition", "sides": sides}]}


def event(**values: Any) -> dict[str, Any]:
    return tomllib.loads(BASE) | {"event": [{"at": 1.0, "action": "kill", "peers": [0]} | values]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (tomllib.loads(BASE) | {"sede": 1}, "sede is not a key here; did you mean seed"),
        (tomllib.loads(BASE) | {"name": "a\u202eb"}, "name: must be printable"),
        (tomllib.loads(BASE) | {"duration": 0}, "duration: .* greater than or equal to 1"),
        (tomllib.loads(BASE) | {"group": []}, "group: 0 peers cannot host 3 stages"),
        (tomllib.loads(BASE) | {"group": {}}, r"write \[\[group\]\]"),
        (tomllib.loads(BASE) | {"group": [{"name": "a", "peers": True, "profile": "none"}]}, r"group\[0\].peers"),
        (tomllib.loads(BASE) | {"group": [{"name": "a", "peers": 3}]}, r"group\[0\].profile is missing"),
        (tomllib.loads(BASE) | {"group": [{"name": "a", "peers": 3, "profile": "modem"}]}, "'modem' is not a profile"),
        (tomllib.loads(BASE) | {"group": [{"name": "a", "peers": 2, "profile": "none"}] * 2}, "two groups"),
        (event(action="explode"), r"event\[0\].action: 'explode' is not one of shape"),
        (event(peers=[9]), r"event\[0\].peers: 9 is neither a group nor a peer from 0 to 4"),
        (event(peers=[]), "must name at least one peer"),
        (event(peers=[0], stage=1), r"event\[0\].stage is not a key"),
        (event(action="shape", fault="odd"), r"event\[0\].fault: .*'none', 'reset'.*, not 'odd'"),
        (event(at=float("nan")), r"event\[0\].at: "),
        (event(action="start", stage=3), r"event\[0\].stage: must be a whole number from 0 to 2"),
        (event(action="freeze"), r"event\[0\].for is missing"),
        *((tomllib.loads(text), named) for text, named in WRONG_CHAOS),
        *((parted(*sides), "sides") for sides in ([[0]], [[0], [0, 1]], [0, 1], [[0], []])),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scenarios.scenario_from_table(table)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        scenarios.read_scenario(tmp_path / "none.toml")
    for content in (b"name = ", b"\xff\xfe"):
        (tmp_path / "wrong.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="is not TOML"):
            scenarios.read_scenario(tmp_path / "wrong.toml")


def test_the_examples_in_the_document_are_good_and_every_crash_point_is_in_a_scenario() -> None:
    document = (ROOT / "docs" / "lab.md").read_text()
    wide, broken = (scenario_of(part.split("```")[0]) for part in document.split("```toml\n")[1:])
    assert {event.NAME for event in wide.events} >= {"shape", "kill", "start", "freeze", "partition", "churn"}
    assert broken.chaos is not None
    events = [each for path in scenarios.known_scenarios().values() for each in scenarios.read_scenario(path)[0].events]
    assert {each.point for each in events if isinstance(each, scenarios.Crash)} == POINTS


WAN = sorted((ROOT / "lab" / "wan").glob("*.toml"))


@pytest.mark.parametrize("path", [*scenarios.known_scenarios().values(), *WAN], ids=lambda path: path.stem)
def test_a_scenario_that_comes_along_can_be_read_and_is_named_like_its_file(path: Path) -> None:
    read, text = scenarios.read_scenario(path)
    assert (read.name, text) == (path.stem, path.read_text())
    assert path in WAN or (read.events and read.chaos is not None)


def test_faults_are_read() -> None:
    read = scenario_of(
        CHAOS
        + fault("worsen", 'peers = [3]\nfault = "half_open"\nfor = 4', at=1)
        + fault("one_way", 'from = [0]\nto = ["peers"]\nfor = 4', at=2)
        + fault("crash", 'stage = 1\npoint = "sent"\nnth = 7\nagain = true', at=3)
        + fault("restart", "peers = [1, 2]\npolitely = true", at=4)
        + fault("odd", 'stage = 2\nclock = -5\nprotocol = "1-2"\nworks = true', at=5)
        + fault("odd", "stage = 1\nclock = 300\nstep = -300\nstep_after = 9\nworks = true", at=6)
        + fault("freeze_convener", "stage = 1\nfor = 4", at=7)
    )
    *plain, odd, stepping, leader = read.events
    assert plain == [
        scenarios.Worsen(at_s=1, peers=(3,), fault=Fault.HALF_OPEN, for_s=4),
        scenarios.OneWay(at_s=2, from_=(0,), to=(0, 1, 2, 3, 4), for_s=4),
        scenarios.Crash(at_s=3, stage=1, point="sent", nth=7, again=True),
        scenarios.Restart(at_s=4, peers=(1, 2), politely=True),
    ]
    assert isinstance(odd, scenarios.Odd)
    assert isinstance(stepping, scenarios.Odd)
    assert (odd.oddities, odd.step_after_s, odd.works) == (("--clock=-5", "--protocol=1-2"), 0, True)
    assert (stepping.oddities, stepping.step_after_s) == (("--clock=300", "--step=-300"), 9)
    assert leader == scenarios.FreezeLeader(at_s=7, stage=1, for_s=4)


def test_scenarios_are_named_or_files(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(CHAOS)
    assert scenarios.find_scenarios([str(path), "resets", "resets"]) == [path, scenarios.known_scenarios()["resets"]]
    with pytest.raises(ConfigError, match="resetz"):
        scenarios.find_scenarios(["resetz"])


WITH_STAND_INS = f"from node.local_swarm import local_swarm; local_swarm.node_command = lambda: {STAND_IN!r}\n"


def test_the_named_links_are_listed() -> None:
    assert all(name in ran("wan", "--profiles").stdout for name in PROFILES)
    table = json.loads(ran("wan", "--profiles", "--json").stdout)
    assert set(table["profiles"]) == set(PROFILES)
    assert table["netem_reason"]


def test_chaos_lists_its_scenarios_and_wants_a_folder_and_expectations(tmp_path: Path) -> None:
    known = scenarios.known_scenarios()
    assert all(name in ran("chaos", "--list").stdout for name in known)
    assert json.loads(ran("chaos", "--list", "--json").stdout)["scenarios"].keys() == known.keys()
    refused("chaos", "resets")
    (tmp_path / "scenario.toml").write_text(BASE)
    words = ("chaos", str(tmp_path / "scenario.toml"), "--out", str(tmp_path / "out"))
    assert "has no [chaos] table" in refused(*words)


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(BASE.replace("home-fibre", "modem"))
    words = ("wan", str(scenario), "--out", str(tmp_path / "out"))
    assert "'modem' is not a profile" in refused(*words)
    scenario.write_text(BASE)
    refused(*words, "--profile", "modem")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text(BASE)
    assert "is not empty" in refused("wan", str(tmp_path / "scenario.toml"), "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.toml"]


@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads /proc")
def test_ctrl_c_ends_it_early_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenario.toml").write_text(BASE + EVENTS)
    out = tmp_path / "out"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ("wan", str(tmp_path / "scenario.toml"), "--out", str(out), "--profile", "mobile", "--compare")
    with command(*words, code=f"{WITH_STAND_INS}from node.__main__ import main; main()") as process:
        until(process, "peer 1 killed")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "report.md" in rest
    report = (out / "report.md").read_text()
    assert "peer 1 killed" in report
    assert "behind `mobile`" in report
    assert (out / "scenario.toml").read_text().startswith("# run with --profile mobile\n")
    assert (out / "metrics.jsonl").read_text().count("\n") > 0
    assert not (out / "undisturbed").exists()
