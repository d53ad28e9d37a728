"""Conversion of dataclasses to JSON and back."""

import dataclasses
import json
import math
import re
import typing
from functools import cache, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, TypeVar

from swarm.vocabulary.errors import ProtocolViolation

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# Fields that came later are left out while None, so that older output stays the same.
OMITTED_IF_NONE: Final = {"omitted_if_none": True}

Read = TypeVar("Read")


def to_json(value: Any) -> Any:
    """Converts a value to types that `json.dumps` accepts. Infinity and NaN become None."""
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {f.name: to_json(item) for f, item in fields if item is not None or "omitted_if_none" not in f.metadata}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: type[Read], table: Any, where: str, *, lenient: bool = False) -> Read:
    """Converts a JSON object to a dataclass. `lenient`: malformed fields get defaults. Raises ProtocolViolation."""
    from pydantic import ValidationError

    try:
        # Pydantic refuses lone surrogates, which a peer may send even in keys.
        text = json.dumps(table, ensure_ascii=False).encode(errors="replace")
        # Integers beyond 64 bits, and constants such as NaN, become strings, which number fields reject.
        if re.search(rb"\d{19}|NaN|Infinity", text):
            text = json.dumps(json.loads(text, parse_int=_bounded, parse_constant=str), ensure_ascii=False).encode()
        while True:  # each pass mends all reported errors; a mended table may show new ones
            try:
                return typing.cast(Read, _reader(typing.cast(Any, kind)).validate_json(text, strict=True))
            except ValidationError as error:
                _mend(mended := json.loads(text), error, where, lenient=lenient)
                text = json.dumps(mended, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ProtocolViolation(f"{where} is not JSON") from None


@cache
def _reader(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _bounded(digits: str) -> int | str:
    return int(digits) if abs(int(digits)) < 2**63 else digits


def _mend(table: Any, error: Any, where: str, *, lenient: bool) -> None:
    """Removes from `table` the items in `error` if `lenient`; else turns null in number fields into NaN, or raises."""
    malformed = set()
    for each in error.errors(include_url=False, include_context=False):
        place = each["loc"]
        if lenient:
            # An object without a required field is malformed as a whole.
            malformed.add(place[:-1] if each["type"] == "missing" else place)
        elif each["type"] == "float_type" and each["input"] is None:
            reduce(getitem, place[:-1], table)[place[-1]] = math.nan
        else:
            raise _wrong(where, place, each)
    if () in malformed:
        raise _wrong(where, place, each)
    for place in sorted(malformed, reverse=True):  # last first, so that positions in lists stay valid
        del reduce(getitem, place[:-1], table)[place[-1]]


def _wrong(where: str, place: tuple[int | str, ...], error: Any) -> ProtocolViolation:
    at = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    message = "is missing" if error["type"] == "missing" else f"is malformed: {error['msg']}"
    return ProtocolViolation(f"{where}{at} {message}")
