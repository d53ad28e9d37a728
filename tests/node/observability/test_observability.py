"""Status and events survive the trip through JSON, logs lose nothing, crash points are exact, rates forget."""

import ast
import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.scenario import crash_at
from node.observability import event_json as event_lines
from node.observability import events, failpoints
from node.observability.event_json import EventLog, LineSink, Tee, event_from_json, event_to_json
from node.observability.events import Abandoned, Ended, Event, Note, Started, Visit
from node.observability.failpoints import POINTS, VARIABLE
from node.observability.status import (
    Accusation,
    PeerStatus,
    RoundStatus,
    RouteStatus,
    Status,
    SwarmStatus,
    parse_status,
)
from node.observability.throughput import MAX_SAMPLES, WINDOW_S, Rate
from node.observability.typed_json import to_json
from swarm.pipeline.custody import Work
from swarm.vocabulary.errors import ConfigError, ProtocolViolation
from tests.kit.events import KeptEvents
from tests.kit.waiting import ManualClock
from tests.test_project import ROOT

TUNNELS = {"attached": 3, "tunnels": 4, "opened": 5, "refused": 6, "cut_off": 7}
SPREADS = {"tokens": 8190.5, "tokens_spread": 0.012, "cost": 12_300.25, "cost_spread": 0.004}
RECORDED: dict[str, Any] = {
    "peer": "12D3KooWa",
    "module": "0.0",
    "state": "serving",
    "addresses": ["192.0.2.1:4002"],
    "via": ["12D3KooWb"],
    "reach": {"step": "direct", "reason": "2 of 2 peers connected"},
    "relay": {"at": "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWa", "carried_bytes": 1, "left_bytes": 2, **TUNNELS},
    "relays": [{"relay": "/ip4/192.0.2.2/tcp/4001/p2p/12D3KooWb", "standing": True, "reason": ""}],
    "unix_ms": 1_795_000_000_000,
    "slots": 8,
    "free_slots": 5,
    "round": 3,
    "digest": "ab12",
    "rounds": "round 3; all 2 replicas stand on our anchor",
    "last_round": {"members": 2, "seconds_ago": 4.5, "codec": "int8", "codec_reason": "fits"},
    "accused": [{"peer": "12D3KooWc", "round": 2, "why": "sent nothing"}],
    "catching_up": {"round": 4, "bytes": 5, "total_bytes": 6},
    "codecs": {
        "allowed": {"activations": ["none", "int8"], "gradients": ["none"]},
        "too_coarse": ["gradients: int4"],
        "links": {"abcdef": {"bytes_per_s": 1000, "activations": {"codec": "int8", "why": "slow"}}},
    },
    "steps": 12,
    "accumulated": 48,
    "recomputed": 1,
    "tokens": 24_576,
    "tokens_per_s": 512.5,
    "codec_s": 0.25,
    "counts": {"started": 50, "completed": 48, "abandoned": 2, "duplicated": 0},
    "loss_first": 5.5,
    "loss_last": 3.25,
    "waiting_for": ["2.0"],
    "visits": {"1": 24, "2": 24},
    "measured": ["12D3KooWb"],
    "paths": {
        "stages": {"1": {"launched": 50, "share": 0.5, "ahead": -1.5, "price_s": -0.25}},
        "waiting_s": {"12D3KooWb": 0.0125},
    },
    "sizes": {"microbatches": 64, "documents": 17.5, "padding": 0.013, **SPREADS},
}

TYPED = parse_status(json.dumps(RECORDED).encode())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def parsed(table: Any) -> Status:
    return parse_status(json.dumps(table).encode())


def test_its_keys_are_those_of_before() -> None:
    assert (to_json(TYPED), parsed(RECORDED)) == (RECORDED, TYPED)


def test_versions_mix() -> None:
    assert parsed({}) == Status()
    assert parsed({**RECORDED, "colour": "green", "reach": {**RECORDED["reach"], "speed": 3}}) == TYPED
    assert parsed({"steps": 3, "last_round": {"members": 2}}) == Status(steps=3, last_round=RoundStatus(2))


@pytest.mark.parametrize("answer", [b"", b"[]", b"7", b"[" * 50_000, b"9" * 5000])
def test_what_is_no_object_is_no_answer(answer: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse_status(answer)


@pytest.mark.parametrize("odd", [None, True, "x", 1e400, 10**400, -(2**63), [], {}, [[]], {"a": []}])
def test_malformed_fields_have_their_defaults(odd: Any) -> None:
    for key in RECORDED:
        read = parsed({**RECORDED, key: odd})
        assert to_json(read) | {key: None} == to_json(TYPED) | {key: None}
        assert type(getattr(read, key)) in (type(getattr(TYPED, key)), type(None))
    assert (parsed({"tokens_per_s": odd}).tokens_per_s, parsed({"steps": odd}).steps) == (0.0, 0)
    assert parsed({"loss_last": odd}).loss_last is None


def test_of_lists_and_maps_what_is_well_formed_is_taken() -> None:
    assert parsed({"via": ["a", 5, None, "b"]}).via == ("a", "b")
    assert parsed({"visits": {"1": 2, "2": "x", "3": True}}).visits == {"1": 2}
    assert parsed({"accused": [{"peer": 3}, {"peer": "a", "round": "y"}, "x"]}).accused == (Accusation("a"),)


@given(st.dictionaries(st.sampled_from(sorted(RECORDED)) | st.text(max_size=8), JSON))
def test_whatever_a_peer_sends_can_be_read_summed_up_and_written(answer: dict[str, Any]) -> None:
    peer = PeerStatus(peer="p", module="0.0", state="serving", answered=parsed(answer))
    for modules in (None, ("0.0", "1.0", "1.1")):
        swarm = SwarmStatus.of("9f86", "demo", 2, (peer, peer), modules)
        json.dumps(to_json(swarm), allow_nan=False)
        assert math.isfinite(swarm.tokens_per_s)


def test_a_swarm_is_the_sum_of_its_data_nodes() -> None:
    hop = PeerStatus(peer="h", module="1.0", state="serving", answered=Status(steps=99, tokens=5))
    silent = PeerStatus(peer="s", module="0.0", state="serving")
    data = [PeerStatus(peer=name, module="0.0", state="serving", answered=TYPED) for name in "ab"]
    summed = to_json(SwarmStatus.of("9f86", "demo", 3, (*data, hop, silent)))
    peers = summed.pop("peers")
    assert summed == {
        "run": "9f86",
        "name": "demo",
        "stages": 3,
        "step": 12,
        "loss": 3.25,
        "tokens": 2 * 24_576,
        "tokens_per_s": 1025.0,
        "microbatches": {"started": 100, "completed": 96, "abandoned": 4, "duplicated": 0},
        "waiting_for": ["2.0"],
    }
    assert peers[0]["answered"] == RECORDED
    assert (peers[3]["addresses"], peers[3]["steps"], peers[3]["answered"]) == ([], 0, None)
    assert SwarmStatus.of("9f86", "demo", 3, (hop, silent)).step is None
    absurd = PeerStatus(peer="x", module="0.0", state="serving", answered=Status(loss_last=1.7e308))
    assert SwarmStatus.of("9f86", "demo", 3, (*data, absurd, absurd)).loss == 3.25


def test_the_routes_of_a_swarm_are_those_of_its_data_nodes() -> None:
    modules = ("0.0", "1.0", "1.1")
    told = [{"experts": [0], "visits": 30, "loss": 2.0}, {"experts": [1], "visits": 10, "rerouted": 4, "loss": 1e300}]
    said = parsed({"routes": told, "module_visits": {"1.0": 34, "1.1": 6}, "rerouted": {"1.1": 4}})
    data = [PeerStatus(peer=name, module="0.0", state="serving", answered=said) for name in "ab"]
    swarm = SwarmStatus.of("9f86", "demo", 2, (*data, PeerStatus(peer="h", module="1.0", state="serving")), modules)
    assert swarm.routes == (RouteStatus((0,), 0.75, 60, 0, 2.0), RouteStatus((1,), 0.25, 20, 8, None))
    assert swarm.too_few_peers is None, "three peers, though two of them are data nodes"
    few = SwarmStatus.of("9f86", "demo", 2, tuple(data), modules)
    assert few.too_few_peers == "2 peers for 3 modules: documents of an unserved expert go to the next best"
    assert SwarmStatus.of("9f86", "demo", 2, ()).too_few_peers is None


st.register_type_strategy(int, st.integers(-(2**53), 2**53))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
EVENTS = st.one_of([st.from_type(kind) for kind in get_args(Event)])


@given(EVENTS)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    line = event_to_json(event)
    assert "\n" not in line
    assert (event_from_json(line), json.loads(line)["event"]) == (event, event.NAME)


def test_keys_are_the_documented_ones() -> None:
    step = json.loads(event_to_json(events.Step(1, 5.5, 4096, 1000.0, "12D3")))
    assert step == {"event": "step", "step": 1, "loss": 5.5, "tokens": 4096, "tokens_per_s": 1000.0, "peer": "12D3"}
    peers = (events.PeerSummary("p", "0.0", 1, 2, 0),)
    table = json.loads(event_to_json(events.Summary(1, 5.5, 5.5, 9, 1.0, events.MicrobatchCounts(3, 2, 1), peers)))
    assert table["microbatches"] == {"started": 3, "completed": 2, "abandoned": 1, "duplicated": 0}
    assert table["peers"] == [{"peer": "p", "module": "0.0", "steps": 1, "accumulated": 2, "exit_code": 0}]


def test_a_loss_that_is_not_finite_travels_as_null() -> None:
    line = event_to_json(events.Step(1, math.nan, 1, math.inf, ""))
    assert json.loads(line)["loss"] is None
    assert math.isnan(event_from_json(line).loss)


def test_what_a_newer_node_adds_is_ignored_and_what_an_older_one_lacks_has_its_default() -> None:
    assert event_from_json('{"event":"aurora","x":1}') is None
    assert event_from_json('{"event":"resumed","module":"1.0","colour":"green"}') == events.Resumed("1.0")
    table = json.loads(event_to_json(events.CaughtUp("p", "1.0", 3, "ab", 10, 0.5, ("q",), (10,))))
    del table["donor_bytes"]
    assert event_from_json(json.dumps(table)) == events.CaughtUp("p", "1.0", 3, "ab", 10, 0.5, ("q",))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("hello", "not JSON"),
        ("[" * 50_000, "not JSON"),
        ('"step"', "not an object"),
        ('{"step":1}', "not an object"),
        ('{"event":"resumed"}', "resumed.module is missing"),
        ('{"event":"resumed","module":1}', "resumed.module is malformed"),
        ('{"event":"load","peer":"p","module":"1.0","slots":true,"busy_slots":0,"tokens_per_s":1}', "load.slots"),
        ('{"event":"peer","peer":"p","change":"sideways","reason":""}', "peer.change is malformed"),
        ("x" * (event_lines.MAX_LINE_BYTES + 1), "more than"),
    ],
)
def test_what_is_not_an_event_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(ProtocolViolation, match=complaint):
        event_from_json(line)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "the terminal was closed")])
def test_a_reader_that_goes_away_is_told_once(error: OSError) -> None:
    class _Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    calls: list[Any] = []
    sink = LineSink(_Gone(), lambda: calls.append("closed"))
    sink.emit(events.Resumed("1.0"))
    sink.emit(events.Resumed("1.0"))
    assert calls == ["closed"]


VISIT = Visit("peer", "1.0", "aaaaaa#1")


def events_in(path: Path) -> list[Event | None]:
    return [event_from_json(line) for line in path.read_bytes().splitlines()]


def test_everything_is_logged_and_what_nobody_watches_is_kept_from_the_stream(tmp_path: Path) -> None:
    stream, note = KeptEvents(), Note("info", "hello")
    with EventLog(tmp_path / "deep" / "er", "peer", lambda: 12.345) as event_log:
        for event in (note, VISIT, Abandoned("aaaaaa#2", "lost"), Ended("peer", 1)):
            Tee(stream, event_log).emit(event)
    logged = events_in(tmp_path / "deep" / "er" / "peer-12345.jsonl")
    assert logged == [Started("peer", 12345, 1), note, VISIT, Abandoned("aaaaaa#2", "lost"), Ended("peer", 1)]
    assert stream.events == [note, Abandoned("aaaaaa#2", "lost")]


def test_each_line_says_when_it_was(tmp_path: Path) -> None:
    seconds = iter((100.0, 100.0, 100.25, 103.5))
    with EventLog(tmp_path, "peer", lambda: 0.001, monotonic=lambda: next(seconds)) as event_log:
        for number in (1, 2):
            event_log.emit(VISIT)
            assert events_in(tmp_path / "peer-1.jsonl")[1:] == [VISIT] * number, "there whatever ends the process"
    lines = (tmp_path / "peer-1.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["ms"] for line in lines] == [0, 250, 3500]


def test_a_file_that_is_full_is_followed_by_another_and_nothing_is_lost(tmp_path: Path) -> None:
    with EventLog(tmp_path, "peer", lambda: 0.001, max_bytes=400) as event_log:
        for _ in range(20):
            event_log.emit(VISIT)
    files = [tmp_path / "peer-1.jsonl", *(tmp_path / f"peer-1.{part}.jsonl" for part in range(2, 9))]
    files = [file for file in files if file.exists()]
    assert len(files) > 2
    assert all(file.stat().st_size < 500 for file in files)
    assert sum(event == VISIT for file in files for event in events_in(file)) == 20
    starts = [event for file in files for event in events_in(file)[:1] if isinstance(event, Started)]
    assert [event.part for event in starts] == list(range(1, len(files) + 1))


def test_a_log_that_cannot_be_written_falls_silent(tmp_path: Path) -> None:
    with EventLog(tmp_path, "peer", lambda: 0.001) as event_log:
        os.close(event_log._file)
        event_log._file = os.open(tmp_path / "peer-1.jsonl", os.O_RDONLY)
        event_log.emit(VISIT)
        event_log.emit(VISIT)
        assert event_log._file is None


def test_a_folder_that_cannot_be_made_is_an_error_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="event log"), EventLog(tmp_path / "file" / "logs", "peer"):
        pass


PROGRAM = """
from node.observability.failpoints import crash_point
for turn in range(3):
    crash_point("sent")
    crash_point("staged")
    print(turn, flush=True)
"""


def test_a_process_dies_at_the_nth_time_and_not_before() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: crash_at("staged", 2)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "0\n")


@pytest.mark.parametrize("value", ["nowhere:1", "sent", "sent:0", "sent:x", "sent:-1"])
def test_a_point_that_is_none_is_no_silent_survival(value: str) -> None:
    with pytest.raises(ConfigError, match="names no crash point"):
        failpoints._calls_left(value)
    with pytest.raises(ConfigError, match="nowhere"):
        crash_at("nowhere", 1)
    assert failpoints._calls_left(None) == failpoints._calls_left("") == {}


def test_every_point_is_somewhere_and_every_place_has_a_known_name() -> None:
    found = set[str]()
    for path in (ROOT / "node").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "crash_point":
                name = ast.unparse(call.args[0])
                by_work = re.fullmatch(r"f'(before|after) \{action\.work\.name\.lower\(\)\}'", name)
                if by_work:
                    found |= {f"{by_work[1]} {work.name.lower()}" for work in Work}
                else:
                    found.add(ast.literal_eval(name))
    assert found == POINTS


def test_young_rates_are_divided_by_their_age_and_old_amounts_leave_the_window_but_not_the_mean() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    clock.now += 2
    assert rate.per_second() == rate.mean() == 0.0
    clock.now += 2
    rate.add(200)
    assert rate.per_second() == rate.mean() == pytest.approx(50)
    clock.now += WINDOW_S + 1
    rate.add(30)
    assert rate.per_second() == pytest.approx(30 / WINDOW_S)
    assert rate.mean() == pytest.approx(230 / (4 + WINDOW_S + 1))
    clock.now += WINDOW_S + 1
    assert rate.per_second() == 0.0


def test_more_samples_than_are_kept_count_over_the_time_they_cover() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    for _ in range(2 * MAX_SAMPLES):
        clock.now += 0.001
        rate.add(1)
    assert rate.per_second() == pytest.approx(1000, rel=0.01)
