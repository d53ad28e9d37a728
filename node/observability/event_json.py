"""Events as lines of JSON: written, and read from whoever wrote them (see `node.observability.events`)."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TextIO, TypeVar

from node.observability.events import Event
from swarm.vocabulary.errors import ProtocolViolation

MAX_LINE_BYTES = 64 * 1024
"""Longer lines are not events; a reader refuses them before it parses them."""

_KINDS: dict[str, type[Any]] = {kind.NAME: kind for kind in typing.get_args(Event)}


class JsonLinesSink:
    """Writes each event as one line of JSON and flushes it.

    A reader that goes away is no error of the node: the sink falls silent and calls `on_closed` once, which lets the
    node stop in good order.
    """

    def __init__(self, stream: TextIO, on_closed: Callable[[], None]) -> None:
        self._stream: TextIO | None = stream
        self._on_closed = on_closed

    def emit(self, event: Event) -> None:
        """Writes one line, unless the reader has gone."""
        if self._stream is None:
            return
        try:
            self._stream.write(event_to_json(event) + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the stream was closed under us
            self._stream = None
            self._on_closed()


def event_to_json(event: Event, ms: int | None = None) -> str:
    """One line without its end, `event` first; last, if given, when it was, in milliseconds since the log began."""
    table = {"event": event.NAME, **dataclasses.asdict(event)}
    if ms is not None:
        table["ms"] = ms
    return json.dumps(_finite(table), allow_nan=False, separators=(",", ":"))


def event_from_json(line: str | bytes) -> Event | None:
    """Reads one line; None for a kind of event that this version does not know.

    Raises:
        ProtocolViolation: the line is too long, not JSON, or a known event lacks a field or has one of a wrong type.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolViolation(f"event: a line of more than {MAX_LINE_BYTES} bytes")
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolViolation(f"event: not JSON: {line[:80]!r}") from None
    if not isinstance(table, dict) or not isinstance(table.get("event"), str):
        raise ProtocolViolation(f"event: not an object with an `event` key: {line[:80]!r}")
    kind = _KINDS.get(table["event"])
    return None if kind is None else typing.cast(Event, _read_dataclass(kind, table, kind.NAME))


def _finite(value: Any) -> Any:
    """The same value with null for every number that JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Read = TypeVar("Read")


def _read_dataclass(kind: type[Read], table: Any, where: str) -> Read:
    if not isinstance(table, dict):
        raise _wrong(where, "an object", table)
    types_by_field = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if field.name not in table and field.default is not dataclasses.MISSING:
            continue  # came with a later version than the writer's
        if field.name not in table:
            raise ProtocolViolation(f"event: {where}.{field.name} is missing")
        values[field.name] = _read(types_by_field[field.name], table[field.name], f"{where}.{field.name}")
    return kind(**values)


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `kind`, one of those used above; nothing is coerced but whole numbers to float."""
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        return None if value is None else _read(typing.get_args(kind)[0], value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return tuple(_read(typing.get_args(kind)[0], item, f"{where}[{at}]") for at, item in enumerate(value))
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise _wrong(where, " or ".join(typing.get_args(kind)), value)
        return value
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type[Any], kind), value, where)
    return _read_scalar(kind, value, where)


def _read_scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float:
        if value is None:
            return math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise _wrong(where, "a number", value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _wrong(where, kind.__name__, value)
    return value


def _wrong(where: str, wanted: str, value: Any) -> ProtocolViolation:
    return ProtocolViolation(f"event: {where} must be {wanted}, not {str(value)[:80]!r}")
