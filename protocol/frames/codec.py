"""Converters between dataclasses of `swarm.vocabulary` and messages of link.proto, derived from type annotations.

A field is sent in the proto field of the same name. The receiver checks its declared bounds, then the message's
`fault`. Seconds `x_s` may be sent as whole `x_ms` or `x_us`. Text is truncated and made printable, a frozenset is
sorted, None is an absent message or 0. A nested message omits the fields that it inherits from the enclosing one.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from protocol.generated import link_pb2 as wire
from swarm.vocabulary.averaging_messages import LinkRate
from swarm.vocabulary.bounds import Distinct, Inherits, Length, Range, Rising
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import AnchorVersion, PeerId

Around = Any  # Values that a message passes to its parts, by name
MessageType = Any  # A descriptor
Convert = Callable[[Any, Around], Any]
Made = TypeVar("Made")
Parsed = TypeVar("Parsed", bound=Message)

_PARTS_OF_A_SECOND: Final = {"ms": 1000, "us": 1_000_000}


class Converter(NamedTuple):
    """Pair of functions that convert values of one type to protobuf fields and back."""

    write: Convert  # To a number, text, bytes, a list, or a dict for a message
    read: Convert  # Raises ProtocolViolation


@cache
def converter(kind: Any, message: MessageType, inherited: tuple[str, ...] = ()) -> Converter:
    """Returns the converter between the dataclass `kind` and the protobuf message type `message`, field by field."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {ours.name: _wire_field(message, ours.name) for ours in dataclasses.fields(kind)}
    parts = {name: field_converter(hints[name], field, f"{kind.__name__}.{name}") for name, field in fields.items()}
    maybe = {name for name in fields if fields[name].message_type and (name in inherited or inner_type(hints[name]))}
    whole = _by_fields(kind, fields, parts, maybe, inherited)
    bounds = [bound for hint in hints.values() for bound in getattr(hint, "__metadata__", ())]
    once = {name: parts[name].read for bound in bounds if isinstance(bound, Inherits) for name in bound.fields}
    return _saying_once(whole, once) if once else whole


def _by_fields(
    kind: Any, fields: dict[str, FieldDescriptor], parts: dict[str, Converter], maybe: set[str], outer: tuple[str, ...]
) -> Converter:
    """Builds a converter that applies `parts` to the fields. It must be fast, because it runs for each microbatch."""
    reads = [_inherited(name) if name in outer else part.read for name, part in parts.items()]
    kept = [(name, part.write) for name, part in parts.items() if name not in outer]
    writes = [(fields[name].name, None if write is _as_is else write) for name, write in kept]
    of_ours = _getter([name for name, _ in kept], set())
    of_theirs = _getter([fields[name].name for name in parts], {fields[name].name for name in maybe})

    def write(value: Any, around: Around) -> dict[str, Any]:
        return {
            name: part if write is None else write(part, around)
            for (name, write), part in zip(writes, of_ours(value), strict=True)
        }

    read = _reader(kind, reads, of_theirs)
    return Converter(write, (lambda said, around: faultless(read(said, around))) if hasattr(kind, "fault") else read)


def _getter(names: list[str], maybe: set[str]) -> Callable[[Any], Sequence[Any]]:
    """Returns a function that reads these attributes of a message, and None for an absent submessage in `maybe`."""
    if maybe:
        return lambda said: [None if key in maybe and not said.HasField(key) else getattr(said, key) for key in names]
    return attrgetter(*names) if len(names) > 1 else lambda said: (getattr(said, names[0]),)


def _reader(kind: Any, reads: list[Convert], values: Callable[[Any], Sequence[Any]]) -> Convert:
    """Returns a function that parses a message into `kind`."""
    if all(read is _as_is for read in reads):
        return lambda said, _: kind(*values(said))
    checks = [None if read is _as_is else read for read in reads]
    return lambda said, around: kind(
        *[part if read is None else read(part, around) for read, part in zip(checks, values(said), strict=True)]
    )


def faultless(made: Made) -> Made:
    """Returns `made` unchanged. Raises ProtocolViolation if its method `fault` reports an inconsistency."""
    fault = made.fault()  # type: ignore[attr-defined]
    if fault is not None:
        raise ProtocolViolation(f"{type(made).__name__}: {fault}")
    return made


def parsed(kind: type[Parsed], data: bytes, fault: str) -> Parsed:
    """Parses a protobuf message of type `kind`. Raises ProtocolViolation with text `fault` if `data` is malformed."""
    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError, ValueError):
        raise ProtocolViolation(fault) from None


def checked_version(version: AnchorVersion) -> AnchorVersion:
    """Checks the fields of an anchor's version against their bounds and returns it. Raises ProtocolViolation."""
    checked: AnchorVersion = converter(AnchorVersion, wire.AnchorVersion.DESCRIPTOR).read(version, None)
    return checked


def _wire_field(message: MessageType, name: str) -> FieldDescriptor:
    in_parts = [f"{name[:-1]}{part}" for part in _PARTS_OF_A_SECOND if name.endswith("_s")]
    for known in (name, *in_parts):
        if known in message.fields_by_name:
            field: FieldDescriptor = message.fields_by_name[known]
            return field
    raise TypeError(f"{message.name} of link.proto has no field for {name}")


def _as_is(value: Any, _: Around) -> Any:
    return value


def _inherited(name: str) -> Convert:
    """Returns a reader that takes the field `name` from the enclosing message; a nested message must not repeat it."""

    def read(own: Any, around: Around) -> Any:
        if own is not None:
            raise ProtocolViolation(f"a part repeats the {name} of the enclosing message")
        return around[name]

    return read


def _saying_once(fields: Converter, once: dict[str, Convert]) -> Converter:
    return Converter(
        fields.write,
        lambda said, _: fields.read(said, {name: read(getattr(said, name), None) for name, read in once.items()}),
    )


def field_converter(hint: Any, field: Any, where: str) -> Converter:
    """Returns the converter between type `hint` and `field` of link.proto. `where` names the field in errors."""
    if inner := inner_type(hint):
        return _optional(field_converter(inner, field, where))
    kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    several = get_origin(kind)
    if (several or kind in (bytes, str)) and not bounds:
        raise TypeError(f"{where} has no bound")
    if several:
        item, inherits = get_args(kind)[0], [bound.fields for bound in bounds if isinstance(bound, Inherits)]
        one = converter(item, field.message_type, *inherits) if inherits else field_converter(item, field, where)
        return _repeated(several, one, bounds, where)
    if kind is LinkRate:
        return _measured()
    if field.message_type:
        return converter(kind, field.message_type)
    return _scalar(kind, bounds, field, where)


def inner_type(hint: Any) -> Any | None:
    if get_origin(hint) not in (Union, UnionType):
        return None
    [inner] = (kind for kind in get_args(hint) if kind is not NoneType)
    return inner


def _optional(part: Converter) -> Converter:
    write, read = part
    return Converter(
        lambda value, around: None if value is None else write(value, around),
        lambda value, around: read(value, around) if value else None,
    )


def _repeated(kind: Callable[[Any], Any], item: Converter, bounds: Sequence[Any], where: str) -> Converter:
    (length, *others), (write, read) = bounds, item
    check, distinct, rising = _bounded([length], where), Distinct() in others, kind is frozenset or Rising() in others

    def read_all(values: Any, around: Around) -> Any:
        check(values, None)
        if distinct and len(set(values)) < len(values):
            raise ProtocolViolation(f"{where} has equal elements")
        if rising and any(later <= earlier for earlier, later in pairwise(values)):
            raise ProtocolViolation(f"{where} is not increasing")
        return kind(values if read is _as_is else [read(value, around) for value in values])

    def write_all(values: Any, around: Around) -> Any:
        return [write(value, around) for value in (sorted(values) if kind is frozenset else values)]

    return Converter(write_all, read_all)


def _measured() -> Converter:
    rate = _bounded(get_args(get_type_hints(LinkRate, include_extras=True)["rate"])[1:], "LinkRate.rate")
    return Converter(
        lambda measured, _: packed(measured), lambda figure, _: LinkRate(figure >> 8, rate(figure & 0xFF, None))
    )


def _scalar(kind: Any, bounds: Sequence[Any], field: Any, where: str) -> Converter:
    check = _bounded(bounds, where)
    if kind is PeerId:
        return Converter(_as_is, lambda text, _: checked_peer(text))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return Converter(lambda member, _: member.value, lambda number, _: read_enum(kind, number, where))
    if kind is str:
        most = bounds[0].most
        return Converter(lambda text, _: text[:most], lambda text, _: printable(check(text, None)))
    if kind is float and field.type != field.TYPE_DOUBLE:
        parts = _PARTS_OF_A_SECOND[field.name[-2:]]
        return Converter(lambda value, _: parts_of_a_second(value, parts), lambda count, _: check(count / parts, None))
    if kind not in (int, bool, bytes, float):
        raise TypeError(f"{where}: {kind} has no encoding")
    return Converter(_as_is, check)


def _bounded(bounds: Sequence[Any], where: str) -> Convert:
    """Returns a function that returns a value of allowed size or length, and raises ProtocolViolation for others."""
    if not bounds:
        return _as_is
    [bound] = bounds
    least, most, or_none = bound.least, bound.most, isinstance(bound, Length) and bound.or_none

    def in_range(value: Any, _: Around) -> Any:
        if least <= value <= most:
            return value
        raise ProtocolViolation(f"{where} {value} is out of range; {least} to {most} are allowed")

    def of_length(value: Any, _: Around) -> Any:
        if least <= len(value) <= most or (or_none and not value):
            return value
        raise ProtocolViolation(f"{where} has a length of {len(value)}; {least} to {most} are allowed")

    return in_range if isinstance(bound, Range) else of_length


_LARGEST: Final = 2**32 - 1
_PEER_ID: Final = re.compile(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{45}")

EnumT = TypeVar("EnumT", bound=enum.Enum)


def parts_of_a_second(seconds: float, parts: int) -> int:
    """Converts seconds to units of 1/`parts` s, clamped to 0..2^32 - 1."""
    return min(max(round(seconds * parts), 0), _LARGEST)


def milliseconds(seconds: float) -> int:
    return parts_of_a_second(seconds, 1000)


def packed(measured: LinkRate) -> int:
    """Packs a measured rate into 32 bits: 24 bits that mark the peer, then 8 bits for the logarithm of the rate."""
    return measured.mark << 8 | measured.rate


@lru_cache(maxsize=4096)
def checked_peer(text: str) -> PeerId:
    """Returns `text` if it has the form of a peer id; a certificate must prove it. Raises ProtocolViolation."""
    if not _PEER_ID.fullmatch(text):
        raise ProtocolViolation("a peer id does not have the form 12D3Koo... with 52 characters")
    return PeerId(text)


def read_enum(kind: type[EnumT], number: int, what: str) -> EnumT:
    try:
        return kind(number)
    except ValueError:
        raise ProtocolViolation(f"{what} {number} is unknown") from None


def printable(text: str) -> str:
    """Replaces unprintable characters, which could control a terminal, by `?`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
