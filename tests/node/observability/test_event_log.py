"""The event log: whole lines in files of bounded size, and what goes to the stream instead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.observability.event_json import EventLog, Tee, event_from_json, open_event_log
from node.observability.events import Abandoned, Ended, Event, Note, Started, Visit
from swarm.vocabulary.errors import ConfigError
from tests.kit.events import KeptEvents
from tests.test_project import ROOT

VISIT = Visit("peer", "1.0", "aaaaaa#1")


def events_in(path: Path) -> list[Event | None]:
    return [event_from_json(line) for line in path.read_bytes().splitlines()]


def test_everything_is_logged_and_what_nobody_watches_is_kept_from_the_stream(tmp_path: Path) -> None:
    stream, note = KeptEvents(), Note("info", "hello")
    with open_event_log(tmp_path / "deep" / "er", "peer", lambda: 12.345) as event_log:
        both = Tee(stream, event_log)
        for event in (note, VISIT, Abandoned("aaaaaa#2", "lost"), Ended("peer", 1)):
            both.emit(event)
    logged = events_in(tmp_path / "deep" / "er" / "peer-12345.jsonl")
    assert logged == [Started("peer", 12345, 1), note, VISIT, Abandoned("aaaaaa#2", "lost"), Ended("peer", 1)]
    assert stream.events == [note, Abandoned("aaaaaa#2", "lost")]


def test_each_line_says_when_it_was(tmp_path: Path) -> None:
    seconds = iter((100.0, 100.0, 100.25, 103.5))
    with EventLog(tmp_path, "peer-1", "peer", 1, monotonic=lambda: next(seconds)) as event_log:
        event_log.emit(VISIT)
        event_log.emit(VISIT)
    lines = (tmp_path / "peer-1.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["ms"] for line in lines] == [0, 250, 3500]


def test_a_file_that_is_full_is_followed_by_another_and_nothing_is_lost(tmp_path: Path) -> None:
    with EventLog(tmp_path, "peer-1", "peer", 1, max_bytes=400) as event_log:
        for _ in range(20):
            event_log.emit(VISIT)
    files = [tmp_path / "peer-1.jsonl", *(tmp_path / f"peer-1.{part}.jsonl" for part in range(2, 9))]
    files = [file for file in files if file.exists()]
    assert len(files) > 2
    assert all(file.stat().st_size < 500 for file in files)
    assert sum(event == VISIT for file in files for event in events_in(file)) == 20
    assert [event.part for file in files for event in events_in(file)[:1] if isinstance(event, Started)] == list(
        range(1, len(files) + 1)
    )


def test_a_log_that_cannot_be_written_falls_silent(tmp_path: Path) -> None:
    with EventLog(tmp_path, "peer-1", "peer", 1) as event_log:
        assert event_log._file is not None
        os.close(event_log._file)
        read_only = os.open(tmp_path / "peer-1.jsonl", os.O_RDONLY)
        event_log._file = read_only
        event_log.emit(VISIT)
        event_log.emit(VISIT)
        assert event_log._file is None


def test_a_folder_that_cannot_be_made_is_an_error_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="event log"), open_event_log(tmp_path / "file" / "logs", "peer"):
        pass


def test_what_was_logged_survives_the_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from node.observability.event_json import EventLog; "
        "from node.observability.events import Visit\n"
        "log = EventLog(Path(sys.argv[1]), 'peer-1', 'peer', 1).__enter__()\n"
        "log.emit(Visit('peer', '1.0', 'aaaaaa#1')); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert events_in(tmp_path / "peer-1.jsonl")[-1] == VISIT
