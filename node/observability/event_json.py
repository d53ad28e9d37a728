"""Events as JSON lines, written and read (see `node.observability.events`)."""

import json
import logging
import os
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TextIO

from node.observability.events import Event, EventSink, LogEvent, Started
from node.observability.typed_json import from_json, to_json
from swarm.vocabulary.errors import ConfigError, ProtocolViolation

MAX_LINE_BYTES = 64 * 1024  # Longer lines come from no node of ours

_KINDS: dict[str, type[Any]] = {kind.NAME: kind for kind in typing.get_args(Event)}


class LineSink:
    """Event sink that writes a line per event. If the output closes, it drops events and calls `on_closed` once."""

    def __init__(
        self, stream: TextIO, on_closed: Callable[[], None], line_of: Callable[[Event], str | None] | None = None
    ) -> None:
        self._stream: TextIO | None = stream
        self._on_closed = on_closed
        self._line_of = line_of or event_to_json

    def emit(self, event: Event) -> None:
        line = None if self._stream is None else self._line_of(event)
        if self._stream is None or line is None:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # EIO: the terminal was closed; ValueError: the stream is closed
            self._stream = None
            self._on_closed()


def event_to_json(event: Event, ms: int | None = None) -> str:
    """Serializes an event as one line without its newline; the last key is `ms` since the start of the log."""
    table = {"event": event.NAME, **to_json(event)}
    if ms is not None:
        table["ms"] = ms
    return json.dumps(table, allow_nan=False, separators=(",", ":"))


def event_from_json(line: str | bytes) -> Event | None:
    """Parses an event from a JSON line; None for an unknown kind. Raises ProtocolViolation if it is malformed."""
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolViolation(f"event: a line of more than {MAX_LINE_BYTES} bytes")
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolViolation(f"event: not JSON: {line[:80]!r}") from None
    if not isinstance(table, dict) or not isinstance(table.get("event"), str):
        raise ProtocolViolation(f"event: not an object with an `event` key: {line[:80]!r}")
    kind = _KINDS.get(table["event"])
    # Logs of a newer version may have new kinds.
    return None if kind is None else typing.cast(Event, from_json(kind, table, f"event: {kind.NAME}"))


log = logging.getLogger(__name__)


class EventLog:
    """Event sink that appends to a file `PEER-START.jsonl` while open; after `max_bytes`, to `.2`, `.3`, ..."""

    def __init__(
        self,
        folder: Path,
        peer: str,
        wall: Callable[[], float] = time.time,
        max_bytes: int = 256 * 2**20,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._peer, self._max_bytes = folder, peer, max_bytes
        self._unix_ms = int(wall() * 1000)
        self._monotonic, self._began = monotonic, monotonic()
        self._part, self._written = 0, 0
        self._file: int | None = None

    def __enter__(self) -> Self:
        """Opens the log. Raises ConfigError if the folder cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._next_part()
        except OSError as error:
            raise ConfigError(
                f"cannot write the event log in {self._folder}: {error.strerror or error}",
                hint="Choose a writable folder with --log-dir, or leave the option out.",
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def emit(self, event: Event) -> None:
        try:
            if self._file is not None and self._written >= self._max_bytes:
                self._next_part()
            self._append(event)
        except OSError as error:  # a full disk must not stop the training
            log.warning("the event log stops here: %s", error)
            self._close()

    def _next_part(self) -> None:
        self._close()
        self._part += 1
        end = ".jsonl" if self._part == 1 else f".{self._part}.jsonl"
        path = self._folder / f"{self._peer}-{self._unix_ms}{end}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._written = 0
        self._append(Started(self._peer, self._unix_ms, self._part))

    def _append(self, event: Event) -> None:
        if self._file is not None:
            ms = round((self._monotonic() - self._began) * 1000)
            line = event_to_json(event, ms).encode() + b"\n"
            # One unbuffered write per line: a killed process loses at most the last line.
            self._written += os.write(self._file, line)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Tee:
    """Event sink that forwards every event to the log, if any, and all but `LogEvent`s to the stream."""

    def __init__(self, stream: EventSink, event_log: EventSink | None) -> None:
        self._stream, self._log = stream, event_log

    def emit(self, event: Event) -> None:
        if not isinstance(event, LogEvent):
            self._stream.emit(event)
        if self._log is not None:
            self._log.emit(event)
