"""Conversion of dataclasses to JSON and back: of numbers, words, lists, maps and other dataclasses.

Numbers that are not finite travel as null, because JSON has no word for them.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

from swarm.vocabulary.errors import ProtocolViolation

MAX_INTEGER: Final = 2**63
LEFT_OUT: Final = {"left_out": True}
"""Metadata of a field whose key is not written when it is None."""

Read = TypeVar("Read")
Key = TypeVar("Key")


def to_json(value: Any) -> Any:
    """Converts a value to the types that `json.dumps` writes."""
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {f.name: to_json(item) for f, item in fields if item is not None or "left_out" not in f.metadata}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: type[Read], table: Any, where: str, *, lenient: bool = False) -> Read:
    """Reads a dataclass. Keys that it does not have are ignored, those that are missing have its defaults.

    Args:
        where: what is read, for errors.
        lenient: a malformed field has its default, if there is one, and a malformed item of a list or a map is left
            out: for what another peer says of itself.

    Raises:
        ProtocolViolation: a field without a default is missing, or the type of something is not that of its annotation.
    """
    if not isinstance(table, dict):
        raise _wrong(where, "an object", table)
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        at = f"{where}.{field.name}"
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if field.name not in table and not has_default:
            raise ProtocolViolation(f"{at} is missing")
        if field.name in table:
            with suppress(*([ProtocolViolation] if lenient and has_default else [])):
                values[field.name] = _read(hints[field.name], table[field.name], at, lenient)
    return kind(**values)


def _read(kind: Any, value: Any, where: str, lenient: bool) -> Any:
    """`value` as the annotated type `kind`; nothing is coerced but whole numbers to float."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(inner[0], value, where, lenient)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return tuple(item for _, item in _items(inner[0], enumerate(value), where, lenient))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return dict(_items(inner[1], value.items(), where, lenient))
    if origin is Literal:
        if value not in inner:
            raise _wrong(where, " or ".join(inner), value)
        return value
    if dataclasses.is_dataclass(kind):
        return from_json(typing.cast(type[Any], kind), value, where, lenient=lenient)
    return _read_scalar(kind, value, where, lenient)


def _items(kind: Any, items: Iterable[tuple[Key, Any]], where: str, lenient: bool) -> Iterator[tuple[Key, Any]]:
    for key, item in items:
        with suppress(*([ProtocolViolation] if lenient else [])):
            yield key, _read(kind, item, f"{where}[{key}]", lenient)


def _read_scalar(kind: type, value: Any, where: str, lenient: bool) -> Any:
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise _wrong(where, "a smaller number", "a larger one")
    if kind is float:
        if value is None and not lenient:
            return math.nan
        if isinstance(value, int | float) and not isinstance(value, bool) and (math.isfinite(value) or not lenient):
            return float(value)
        raise _wrong(where, "a number", value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(where, kind.__name__, value)
    return value


def _wrong(where: str, wanted: str, value: Any) -> ProtocolViolation:
    return ProtocolViolation(f"{where} must be {wanted}, not {str(value)[:80]!r}")
