"""Events survive the trip through JSON, and what is not an event is refused."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.observability import event_json as event_lines
from node.observability import events
from node.observability.event_json import LineSink, event_from_json, event_to_json
from node.observability.events import Event
from swarm.vocabulary.errors import ProtocolViolation

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**53)
texts = st.text(max_size=40)
EVENTS = st.one_of(
    st.builds(events.Step, counts, numbers, counts, numbers, texts),
    st.builds(events.NodeStatus, texts, st.none() | texts, texts, texts, texts),
    st.builds(events.InnerStep, texts, texts, counts, counts, numbers, numbers),
    st.builds(events.Load, texts, texts, counts, counts, numbers),
    st.builds(events.Waiting, texts, texts),
    st.builds(events.Resumed, texts),
    st.builds(events.PeerChange, texts, st.sampled_from(["up", "down"]), texts),
    st.builds(events.Abandoned, texts, texts),
    st.builds(
        events.CaughtUp,
        *(texts, texts, counts, texts, counts, numbers, st.lists(texts).map(tuple), st.lists(counts).map(tuple)),
    ),
    st.builds(events.CatchingUp, texts, texts, counts, counts, counts),
    st.builds(events.LastPeer, texts, texts, st.none() | texts),
    st.builds(events.Note, st.sampled_from(["info", "warning", "error"]), texts),
    st.builds(
        events.NodeSummary,
        *(texts, st.none() | texts, counts, st.none() | numbers, st.none() | numbers, counts, numbers),
        *(st.builds(events.MicrobatchCounts, counts, counts, counts, counts), counts),
        st.builds(events.BusySeconds, numbers, numbers, numbers, numbers),
    ),
    st.builds(
        events.Summary,
        *(counts, st.none() | numbers, st.none() | numbers, counts, numbers),
        st.builds(events.MicrobatchCounts, counts, counts, counts, counts),
        st.lists(
            st.builds(events.PeerSummary, texts, st.none() | texts, counts, counts, st.none() | st.integers(0, 255))
        ).map(tuple),
    ),
)


@given(EVENTS)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    line = event_to_json(event)
    assert "\n" not in line
    assert event_from_json(line) == event
    assert json.loads(line)["event"] == event.NAME


def test_keys_are_the_documented_ones() -> None:
    step = json.loads(event_to_json(events.Step(1, 5.5, 4096, 1000.0, "12D3")))
    assert step == {"event": "step", "step": 1, "loss": 5.5, "tokens": 4096, "tokens_per_s": 1000.0, "peer": "12D3"}
    summary = events.Summary(
        1, 5.5, 5.5, 9, 1.0, events.MicrobatchCounts(3, 2, 1), (events.PeerSummary("p", "0.0", 1, 2, 0),)
    )
    assert json.loads(event_to_json(summary))["microbatches"] == {
        "started": 3,
        "completed": 2,
        "abandoned": 1,
        "duplicated": 0,
    }
    assert json.loads(event_to_json(summary))["peers"] == [
        {"peer": "p", "module": "0.0", "steps": 1, "accumulated": 2, "exit_code": 0}
    ]


def test_a_loss_that_is_not_finite_travels_as_null() -> None:
    line = event_to_json(events.Step(1, math.nan, 1, math.inf, ""))
    assert json.loads(line)["loss"] is None
    read = event_from_json(line)
    assert isinstance(read, events.Step)
    assert math.isnan(read.loss)


def test_a_key_that_an_older_node_did_not_write_has_its_default() -> None:
    table = json.loads(event_to_json(events.CaughtUp("p", "1.0", 3, "ab", 10, 0.5, ("q",), (10,))))
    del table["donor_bytes"]
    assert event_from_json(json.dumps(table)) == events.CaughtUp("p", "1.0", 3, "ab", 10, 0.5, ("q",))


def test_what_a_newer_node_adds_is_ignored() -> None:
    assert event_from_json('{"event":"aurora","x":1}') is None
    assert event_from_json('{"event":"resumed","module":"1.0","colour":"green"}') == events.Resumed("1.0")


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


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_goes_away_is_told_once() -> None:
    calls: list[Any] = []
    sink = LineSink(_Gone(), lambda: calls.append("closed"))
    sink.emit(events.Resumed("1.0"))
    sink.emit(events.Resumed("1.0"))
    assert calls == ["closed"]
