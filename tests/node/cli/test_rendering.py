"""What a person sees: the live view, plain lines, and that other peers cannot draw on the terminal."""

import asyncio
import io
import json
import math
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from node.cli.join import ask_consent, description
from node.cli.views.live import remaining_s, render
from node.cli.views.output import NodeLines, join_lines, plain_line
from node.cli.views.run_screen import RunScreen
from node.cli.views.status_view import MOST_ROWS, accused_lines, data_node_lines, left_lines, status_table, status_views
from node.cli.views.text import MAX_FOREIGN_CHARACTERS, duration, harmless, sparkline
from node.context.options import NodeOptions
from node.data.local_paths import LocalPathOptions, local_paths
from node.local_swarm.swarm_progress import SwarmProgress, apply, noted, peer_exited, peer_started
from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes
from node.observability import events
from node.observability.status import PeerStatus, Status, SwarmStatus, parse_status
from node.runtime.limits import Standing
from protocol.identity.keys import Identity
from protocol.manifest.manifest import FilesSection
from protocol.manifest.signing import SignedManifest, sign_manifest
from swarm.vocabulary.errors import LEAVING
from swarm.vocabulary.types import Reasoned
from swarm.workload.limits import Limits
from tests.kit.events import KeptEvents
from tests.node.observability.test_observability import EVENTS
from tests.node.small_manifest import small_manifest

NOW = 10.0
BUSY = events.BusySeconds()
HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]bold[/red]\r\n\u202egnp.exe\x9b31m\ud800"


def printed(*views: Any, width: int = 140) -> str:
    console = Console(record=True, width=width, force_terminal=False, file=io.StringIO())
    for view in views:
        console.print(view)
    return console.export_text()


def drawn(state: SwarmProgress, title: str = "demo") -> str:
    return printed(render(state, title, 75.0, NOW))


def swarm() -> SwarmProgress:
    state = SwarmProgress(stages=3, target=10)
    for index, stage in enumerate((0, 1, 2)):
        state = peer_started(state, index, stage, f"12D3KooWpeer{index}abc")
    for step in (1, 2):
        event = events.Step(step, 6.0 - step, 1000 * step, 500.0, "12D3KooWpeer0abc")
        state = apply(state, 0, event, 2.0 * step).state
    load = events.Load("12D3KooWpeer1abc", "1.0", 4, 3, 1234.0)
    for event in (load, events.NodeStatus("12D3KooWpeer1abc", "1.0", "serving", "127.0.0.1:1", "")):
        state = apply(state, 1, event, 5.0).state
    return state


def test_the_view_shows_the_run() -> None:
    text = drawn(swarm())
    for expected in ("demo", "step 2 of 10", "1m15s", "16s left", "loss 4.0000", "from 5.0000", "500 tokens/s", "█▁"):
        assert expected in text
    assert row_of(swarm()) == ["1", "1", "1", "1,234", "0"]
    assert remaining_s(swarm()) == pytest.approx(16.0)
    assert remaining_s(replace(swarm(), target=None)) is None
    assert all(words in drawn(SwarmProgress(stages=2)) for words in ("step 0", "loss -"))


def committed(number: int, members: tuple[str, ...]) -> events.RoundCommitted:
    return events.RoundCommitted("12D3KooWpeer1abc", "1.0", number, "ab", members, members, 64, 1, 0.5, 10, 10)


def test_the_view_shows_rounds() -> None:
    state = apply(swarm(), 1, committed(12, ("p", "q", "r")), 6.0).state
    assert row_of(state)[-1] == "12"
    caught_up = events.CaughtUp("12D3KooWpeer1abc", "1.0", 14, "ab", 41_000_000, 1.0, ("q",), (41_000_000,))
    assert row_of(apply(state, 1, caught_up, 8.0).state)[-1] == "14"


def row_of(state: SwarmProgress, stage: str = "1") -> list[str]:
    return next(row for line in drawn(state).splitlines() if (row := line.split()) and row[0] == stage)


def test_status_shows_rounds_reachability_and_relayed_bytes() -> None:
    assert "3  2 peers  1m01s ago" in status_of({"last_round": {"members": 2, "seconds_ago": 61}, "catching_up": None})
    assert "5.0 MB of 20.0 MB" in status_of({"catching_up": {"bytes": 5_000_000, "total_bytes": 20_000_000}})
    assert "no answer" in status_of(None)
    assert "(mapped)" in status_of({"reach": {"step": "mapped", "reason": "because"}})
    assert "(" not in status_of({"reach": {"step": "unknown", "reason": "nobody"}})
    relay = {"at": "/ip4/25.0.0.1/tcp/4001/p2p/12D3KooWpeer1abc", "carried_bytes": 12_300_000}
    assert "relay: 12.3 MB carried" in status_of({"relay": relay})
    assert "relay" not in status_of({"relay": {**relay, "at": ""}})


def peer_of(name: str, module: str, answered: Any) -> PeerStatus:
    said = None if answered is None else parse_status(json.dumps(answered).encode())
    return PeerStatus(peer=name, module=module, state="serving", answered=said)


def swarm_of(stages: int, *peers: PeerStatus) -> SwarmStatus:
    return SwarmStatus(run="9f86", name="demo", stages=stages, peers=peers)


def status_of(answered: object) -> str:
    peer = replace(peer_of("12D3KooWpeer1abc", "1.0", answered), slots=4, free_slots=1, steps=5, round=3)
    return printed(status_table(swarm_of(2, peer)))


def test_the_view_names_the_stage_without_a_peer() -> None:
    state = peer_exited(swarm(), 2, 137).state
    state = apply(state, 0, events.Waiting("2.0", "stage 2 has no peer left"), 6.0).state
    text = drawn(state)
    assert all(words in text for words in ("failed (137)", "stage 2 has no peer left"))
    assert row_of(state, "2") == ["2", "none", "0", "0", "0"]
    assert text.index("step 2 of 10") < text.index("\n") < text.index("loss 4.0000")


def test_notes_go_after_a_while() -> None:
    state = swarm()
    assert row_of(state) == ["1", "1", "1", "1,234", "0"]
    for at, level in ((NOW - 31, "info"), (NOW - 31, "error"), (NOW - 2, "warning")):
        state = noted(state, events.Note(level, f"an {level} " + "x" * 200 + " end"), at).state
    text = " ".join(drawn(state).split())
    assert "an info" not in text
    assert all(said in text for said in ("an error", "end 31s ago", "an warning", "end 2s ago"))


def test_a_start_is_no_loss() -> None:
    state = SwarmProgress(stages=3)
    for index, stage in enumerate((0, 1, 2)):
        state = peer_started(state, index, stage, f"12D3KooWpeer{index}abc")
    state = apply(state, 0, events.NodeStatus("12D3KooWpeer0abc", "0.0", "serving", "", ""), 1.0).state
    state = apply(state, 0, events.Waiting("1.0", "stage 1 has no peer yet"), 1.0).state
    assert "starting: 1 of 3 stages are served" in drawn(state)
    assert "no peer" not in drawn(state)


ALONE = "skipstone:ab@/ip4/127.0.0.1/tcp/1/p2p/x,/ip4/192.168.1.4/tcp/1/p2p/x"


def test_the_first_node_says_how_others_join_and_what_it_did() -> None:
    lines = NodeLines(tells_link=True, monotonic=iter((0.0, 438.0)).__next__)
    node = events.NodeStatus("12D3KooWpeer1abc", "1.0", "joining", "127.0.0.1:1", ALONE)
    assert "Others" not in (lines(node) or "")
    said = lines(replace(node, state="serving")) or ""
    assert f"\nOthers join with:\n\n  skipstone join {ALONE}\n" in said
    assert "127.0.0.1 can be reached only on this machine; 192.168.1.4 can be reached only in its own network" in said
    assert "--advertise" in said
    assert "Others" not in (lines(replace(node, state="serving")) or ""), "once"
    assert "--advertise" not in join_lines(f"{ALONE},/ip4/8.8.8.8/tcp/1/p2p/x")
    assert "reached" not in join_lines("skipstone:ab@[2001:4860:4860::8888]:4001,example.org:1")
    assert "Others" not in (NodeLines(tells_link=False)(replace(node, state="serving")) or "")
    lines(committed(3, ("a", "b")))
    done = events.NodeSummary(node.peer, "1.0", 9, None, None, 30139, 1.0, events.MicrobatchCounts(), 59, BUSY)
    assert (lines(done) or "").startswith("left in good order: 59 microbatches, 30,139 tokens, 1 round in 7m18s\n")
    assert lines(events.PeerChange("12D3KooWfriend", "down", LEAVING)) is None


def test_peers_cannot_draw_on_the_terminal() -> None:
    state = swarm()
    state = apply(state, 1, events.NodeStatus(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE), 6.0).state
    state = apply(state, 0, events.Waiting(HOSTILE, HOSTILE), 6.0).state
    state = noted(state, events.Note("error", HOSTILE), NOW).state
    text = drawn(state, HOSTILE)
    assert not any(bad in text for bad in "\x1b\x07\r\x9b\u202e\ud800")
    assert "[red]" in text, "markup is shown, not obeyed"


@settings(max_examples=60)
@given(EVENTS)
def test_every_event_is_harmless_lines(event: events.Event) -> None:
    lines = plain_line(event)
    assert lines is None or (lines and lines.replace("\n", "").isprintable())
    assert lines is None or "\n" not in lines or isinstance(event, events.Summary | events.Reach)


def test_lines_say_what_happened() -> None:
    assert plain_line(events.Step(3, 4.25, 9000, 1234.5, "p")) == "step 3  loss 4.2500  1,234 tokens/s"
    assert plain_line(events.Load("p", "1.0", 1, 1, 1.0)) is None
    peer = events.PeerSummary("12D3KooWabcdef", "0.0", 3, 12, 137)
    text = plain_line(events.Summary(3, 5.5, 2.5, 9000, 100.0, events.MicrobatchCounts(4, 3, 1, 0), (peer,)))
    assert text.splitlines() == [
        "3 steps  loss 5.5000 -> 2.5000  9,000 tokens  100 tokens/s",
        "microbatches: 4 started, 3 completed, 1 abandoned, 0 counted twice",
        "0.0  abcdef  3 inner steps, 12 gradients, exit code 137",
    ]


@given(st.text())
def test_harmless_text_is_printable_and_bounded(text: str) -> None:
    clean = harmless(text)
    assert clean.isprintable()
    assert len(clean) == min(len(text), MAX_FOREIGN_CHARACTERS)


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(0, 60))
def test_a_sparkline_fits_its_width(points: list[float], width: int) -> None:
    assert len(sparkline(points, width)) == min(len(points), width)


def test_a_sparkline_goes_down_with_the_loss_and_durations_are_short() -> None:
    assert (sparkline([4.0, 3.0, 2.0, 1.0], 4), sparkline([2.0, 2.0], 4)) == ("█▆▃▁", "▁▁")
    assert [duration(s) for s in (0.4, 61, 3725, math.inf)] == ["0s", "1m01s", "1h02m", "-"]


def test_status_names_who_is_accused() -> None:
    said: list[Any] = [{"peer": "liar", "round": 7, "why": "sent\nnothing"}, {"peer": 3}, "x", {"peer": "liar2"}]
    peers = [peer_of(name, "1.0", {"accused": about}) for name, about in (("a", said), ("b", said[:1]), ("c", 5))]
    lines = [view.plain for view in accused_lines(swarm_of(2, *peers, peer_of("d", "1.0", None)))]
    assert [line.split(":")[0] for line in lines] == ["accused by 2", "accused by 1"]
    assert lines[0].endswith("sent nothing (round 7)")
    assert list(accused_lines(swarm_of(2))) == []


def test_status_says_who_left_its_anchor_for_others() -> None:
    left = {"a": {"round": 7, "seconds_ago": 65.0, "kept": True}, "b": None, "c": {"round": 7, "followed": 9}}
    peers = [peer_of(name, "1.0", {"left": each} if each else {}) for name, each in left.items()]
    line, later = (view.plain for view in left_lines(swarm_of(2, *peers)))
    assert line.startswith("1.0 a left its anchor of round 7 for others' 1m05s ago; the snapshot before is in")
    assert later == "1.0 c caught up with others from round 7 to 9, 0s ago"


def test_status_names_the_data_nodes_of_a_hop_and_their_shares() -> None:
    shares = {"a": {"x": 0.25, "y": 0.75}, "b": {"x": 1.0}, "c": "x"}
    peers = [peer_of(name, "1.0", {"data_nodes": said}) for name, said in shares.items()]
    assert [view.plain for view in data_node_lines(swarm_of(2, *peers))] == ["data nodes of a: y 75%, x 25%"]


NESTED: dict[str, Any] = {
    "last_round": {"members": HOSTILE, "seconds_ago": HOSTILE, "codec": HOSTILE, "codec_reason": HOSTILE},
    "catching_up": {"bytes": HOSTILE, "total_bytes": -1},
    "reach": {"step": HOSTILE},
    "relay": {"at": HOSTILE, "carried_bytes": HOSTILE},
    "paths": {"stages": {HOSTILE: {"launched": 1, "share": HOSTILE}}, "waiting_s": 1},
    "routes": [{"experts": HOSTILE}, 1],
    "module_visits": {HOSTILE: 1},
    "accused": [{"peer": HOSTILE, "round": 7, "why": HOSTILE}],
    "left": {"round": 10**18, "seconds_ago": 1e308, "kept": True},
    "moments": {"form": HOSTILE * 9, "reason": HOSTILE * 99},
    "compute": {"busy_s": -1e300, "idle_work_s": 30.0, "idle_s": 1e308},
    "weights": {"put_off": True, "reason": HOSTILE, "visits": 10**18},
    "curve": {"points": [[1, -1, 1e308, 5], [2, 3, 2.5, 10**18], [HOSTILE], 7], "stride": 0},
    "completed": [{"microbatch": HOSTILE, "hops": [HOSTILE, "1.0@12D3KooWpeer1.0", "9.9@x"], "seconds": 1e308}, 7],
    "traffic": {HOSTILE: {"sent_bytes": -1, "received_bytes": 10**18, "round_trip_s": 1e308}, "12D3KooWpeer1.0": {}},
    "codecs": {
        "allowed": {"activations": ["none", "int8"]},
        "links": {HOSTILE: {"activations": {"codec": HOSTILE, "why": HOSTILE}}, **{str(n): {} for n in range(1000)}},
    },
}


@pytest.mark.parametrize("key", [field.name for field in fields(Status)])
def test_peers_cannot_draw_with_anything_that_they_answer(key: str) -> None:
    for odd in (HOSTILE, 7, 1e308, [HOSTILE, 1], {HOSTILE: HOSTILE, "links": [HOSTILE]}, NESTED.get(key)):
        peers = tuple(peer_of(f"12D3KooWpeer{module}", module, {key: odd}) for module in ("0.0", "1.0"))
        text = printed(*status_views(SwarmStatus.of("9f86", "demo", 2, peers, ("0.0", "1.0", "1.1"))), width=160)
        assert not any(bad in text for bad in "\x1b\x07\r\x9b\u202e\ud800")
        assert len(text.splitlines()) <= 3 * MOST_ROWS


def routes_of(answered: object) -> str:
    peers = (peer_of("12D3KooWpeer0abc", "0.0", answered), peer_of("12D3KooWpeer1abc", "1.0", None))
    return printed(*status_views(SwarmStatus.of("9f86", "demo", 2, peers, ("0.0", "1.0", "1.1"))))


def test_the_screen_of_a_node_shows_its_run_its_work_and_its_limits() -> None:
    lines = KeptEvents()
    screen = RunScreen(Console(file=io.StringIO()), lines)
    screen.emit(events.Note("info", "before"))
    assert lines.events == [events.Note("info", "before")]
    traffic = {"x": {"sent_bytes": 2_000_000, "received_bytes": 500_000}}
    done = {"steps": 7, "accumulated": 31, "credited": 1984, "traffic": traffic}
    other = peer_of("12D3KooWdata", "0.0", NESTED | {"loss_last": 2.5, "steps": 9})
    screen._status = SwarmStatus.of("98fc", HOSTILE, 3, (peer_of("12D3KooWown", "1.0", done), other))
    screen._own, screen._drawing = (lambda: ("12D3KooWown",)), True
    screen._standing = lambda: Standing(Limits(), 0.5, "82 of 80 °C", 1.25)
    screen.emit(events.Note("error", HOSTILE))
    text = printed(screen.render(), width=80)
    assert "\x1b" not in text
    pieces = ("1 (here)", "7 steps, 31 microbatches, 2.0 MB sent, 0.5 MB received", "credit for 1,984 tokens")
    for piece in (*pieces, "at 50% of its speed: 82 of 80 °C"):
        assert piece in text
    assert len(lines.events) == 1, "the view is drawn instead"


def test_status_names_missing_experts() -> None:
    text = routes_of({})
    assert ["1.1", "none"] in [line.split() for line in text.splitlines()], "the stage has a peer, this expert has none"
    assert "2 peers for 3 modules" in text


def test_the_view_names_the_expert_without_a_peer() -> None:
    state = replace(swarm(), modules=("0.0", "1.0", "2.0", "2.1"))
    for index, module in ((0, "0.0"), (2, "2.0")):
        status = events.NodeStatus(f"12D3KooWpeer{index}abc", module, "serving", "127.0.0.1:1", "")
        state = apply(state, index, status, 5.0).state
    assert row_of(state, "2.1")[:2] == ["2.1", "none"]


pty = pytest.importorskip("pty")

AUTHOR = Identity.generate()
FITS = Reasoned((1, 2), "there is room for stages 1, 2")


def options(**changes: object) -> NodeOptions:
    return NodeOptions(link=None, manifest_path=Path("run.toml"), identity_path=Path("key"), **changes)  # type: ignore[arg-type]


def signed(**changes: object) -> SignedManifest:
    return sign_manifest(small_manifest(**changes), AUTHOR)


def told(run: SignedManifest, asked: NodeOptions, *, own: bool = False) -> str:
    paths = local_paths(run.manifest.data, asked.local_path_options, own=own)
    return "\n".join(description(run, asked, paths, FITS, own=own))


def test_it_says_what_the_run_is_and_what_is_read_sent_and_used() -> None:
    run = signed(data__source="path:~/.ssh", stages__experts=2, model__attention="documents")
    said = told(run, options(text=Path("/text"), port=4002, threads=2))
    manifest = run.manifest
    parameters = sum(parameter_bytes(parameter_shapes(manifest, m)) for m in manifest.modules()) // BYTES_PER_PARAMETER
    for words in ("small", run.run, AUTHOR.peer, f"{parameters:,} parameters in 3 stages of 2 experts", "/text"):
        assert words in said
    for words in ("hidden states back into text", "gradients", "2 CPU threads", "ports 4002 and any", "ask the router"):
        assert words in said
    assert "every peer with a stage reads the text" in told(signed(model__residual=5), options())
    assert "fits      there is room for stages 1, 2" in said
    assert "(this machine)" not in said
    assert "(this machine)" in told(run, options(), own=True)


def test_it_says_why_no_text_is_read_or_which_files_are() -> None:
    run = signed(data__source="path:~/.ssh")
    assert "reads     no text: another machine signed the manifest" in told(run, options())
    for asked in (options(reads_text=False), options(stage="1")):
        assert "reads     no text\n" in told(run, asked)
    assert "this machine's Python" in told(signed(), options())
    files = FilesSection(count=3, bytes=12_345, sha256="0" * 64).model_dump()
    assert "3 files, 12,345 bytes" in told(signed(data__source="path:text", data__files=files), options(), own=True)


def test_a_manifest_cannot_write_to_the_terminal() -> None:
    run = signed(data__source="path:\x1b[2J\nauthor: me")
    lines = description(run, options(), local_paths(run.manifest.data, LocalPathOptions(), own=False), FITS, own=False)
    assert all(line.isprintable() for line in lines)


@contextmanager
def terminal() -> Iterator[int]:
    """Standard input and output are a terminal; its other end."""
    ours, theirs = pty.openpty()
    with (
        os.fdopen(ours, "rb"),
        os.fdopen(os.dup(theirs), "r") as typed,
        os.fdopen(theirs, "w") as shown,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", typed)
        patch.setattr(sys, "stdout", shown)
        yield ours


def shown_on(screen: int) -> str:
    said = b""
    while select.select([screen], [], [], 0)[0]:
        said += os.read(screen, 10_000)
    return said.decode()


async def answer(*, yes: bool = False, as_json: bool = False, own: bool = False) -> bool:
    run, asked = signed(), options(yes=yes, as_json=as_json)
    asking = ask_consent(asked, run, local_paths(run.manifest.data, asked.local_path_options, own=own), FITS, own)
    return await asyncio.wait_for(asking, 20)


@pytest.mark.parametrize(
    ("typed", "joins"),
    [(b"y\n", True), (b"Yes\n", True), (b"n\n", False), (b"\n", False), (b"\x04", False), (b"yellow\n", False)],
)
async def test_on_a_terminal_it_asks_and_silence_is_no(typed: bytes, joins: bool) -> None:
    with terminal() as keyboard:
        os.write(keyboard, typed)
        assert await answer() is joins
        assert "Join this run? [y/N]" in shown_on(keyboard)


@pytest.mark.parametrize("how", [{"yes": True}, {"own": True}])
async def test_nobody_is_asked_who_has_said_it_or_made_the_run(how: dict[str, bool]) -> None:
    with terminal() as keyboard:
        assert await answer(**how)
        said = shown_on(keyboard)
    assert "author" in said
    assert "[y/N]" not in said


@pytest.mark.parametrize("as_json", [False, True])
async def test_without_a_terminal_it_says_it_and_goes_on(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    assert await answer(as_json=as_json)
    said = capsys.readouterr()
    assert "author" in (said.err if as_json else said.out)
    assert not (as_json and said.out), "standard output stays JSON"
