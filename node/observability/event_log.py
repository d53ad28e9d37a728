"""A node's event log: every event as one line of JSON, written by one `write` so that it survives a SIGKILL."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from node.observability.event_json import event_to_json
from node.observability.events import (
    Completed,
    Continued,
    Ended,
    Event,
    EventSink,
    Retracted,
    RoundProgress,
    Started,
    Visit,
)
from swarm.vocabulary.errors import ConfigError

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
ONLY_LOGGED = (Visit, Retracted, Completed, RoundProgress, Started, Continued, Ended)


class EventLog:
    """`EventSink` that appends to a file within `with`, and beyond `max_bytes` to further ones (`.2`, `.3`)."""

    def __init__(
        self,
        folder: Path,
        name: str,
        peer: str,
        unix_ms: int,
        max_bytes: int = MAX_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._name = name
        self._peer = peer
        self._unix_ms = unix_ms
        self._max_bytes = max_bytes
        self._monotonic = monotonic
        self._began = monotonic()
        self._part = 0
        self._written = 0
        self._file: int | None = None

    def __enter__(self) -> Self:
        """Raises ConfigError when the folder cannot be made or written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._next_part()
        except OSError as error:
            raise ConfigError(
                f"the event log cannot be written in {self._folder}: {error.strerror or error}",
                hint="Name a folder that can be written with --log-dir, or leave it out.",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def emit(self, event: Event) -> None:
        try:
            if self._file is not None and self._written >= self._max_bytes:
                self._next_part()
            self._append(event)
        except OSError as error:
            log.warning("the event log ends here: %s", error)
            self._close()

    def _next_part(self) -> None:
        self._close()
        self._part += 1
        end = ".jsonl" if self._part == 1 else f".{self._part}.jsonl"
        path = self._folder / f"{self._name}{end}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._written = 0
        self._append(Started(self._peer, self._unix_ms, self._part))

    def _append(self, event: Event) -> None:
        if self._file is not None:
            ms = round((self._monotonic() - self._began) * 1000)
            line = event_to_json(event, ms).encode() + b"\n"
            self._written += os.write(self._file, line)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def open_event_log(folder: Path, peer: str, wall: Callable[[], float] = time.time) -> EventLog:
    """The log of a node that starts now: FOLDER/<peer>-<start in Unix milliseconds>.jsonl."""
    unix_ms = int(wall() * 1000)
    return EventLog(folder, f"{peer}-{unix_ms}", peer, unix_ms)


class Watched:
    """Passes on every event that is not only for the log."""

    def __init__(self, stream: EventSink) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        if not isinstance(event, ONLY_LOGGED):
            self._stream.emit(event)


class Both:
    def __init__(self, first: EventSink, second: EventSink) -> None:
        self._sinks = first, second

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)
