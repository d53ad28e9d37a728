"""Events as lines of JSON, written and read (see `node.observability.events`)."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable
from typing import Any, TextIO

from node.observability.events import Event
from node.observability.typed_json import from_json, to_json
from swarm.vocabulary.errors import ProtocolViolation

MAX_LINE_BYTES = 64 * 1024

_MS_AT_END = re.compile(rb',"ms":(\d{1,15})}\s*$')
_KINDS: dict[str, type[Any]] = {kind.NAME: kind for kind in typing.get_args(Event)}


class JsonLinesSink:
    """Writes and flushes each event as one line of JSON. A lost reader silences it and calls `on_closed` once."""

    def __init__(self, stream: TextIO, on_closed: Callable[[], None]) -> None:
        self._stream: TextIO | None = stream
        self._on_closed = on_closed

    def emit(self, event: Event) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(event_to_json(event) + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the stream was closed under us
            self._stream = None
            self._on_closed()


def event_to_json(event: Event, ms: int | None = None) -> str:
    """Serialises an event as one line without its end; `ms` since the log began comes last."""
    table = {"event": event.NAME, **to_json(event)}
    if ms is not None:
        table["ms"] = ms
    return json.dumps(table, allow_nan=False, separators=(",", ":"))


def ms_of(line: bytes) -> int:
    """The time of a line of a log, in milliseconds since the log began; 0 when it does not say so."""
    found = _MS_AT_END.search(line)
    return int(found[1]) if found else 0


def event_from_json(line: str | bytes) -> Event | None:
    """Parses one line; None for an unknown kind of event. Raises ProtocolViolation."""
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolViolation(f"event: a line of more than {MAX_LINE_BYTES} bytes")
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolViolation(f"event: not JSON: {line[:80]!r}") from None
    if not isinstance(table, dict) or not isinstance(table.get("event"), str):
        raise ProtocolViolation(f"event: not an object with an `event` key: {line[:80]!r}")
    kind = _KINDS.get(table["event"])
    return None if kind is None else typing.cast(Event, from_json(kind, table, f"event: {kind.NAME}"))
