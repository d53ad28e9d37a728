"""What is on the wire stays what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.frames.frames import decode, encode
from protocol.generated import link_pb2 as wire
from tests.protocol.frames.frame_examples import EXAMPLES

TABLE = Path(__file__).with_name("wire_bytes.txt")
BYTES = {
    name: bytes.fromhex(octets) for octets, name in (line.split(" ", 1) for line in TABLE.read_text().splitlines())
}
CUT = {"receipt beyond bounds"}


def test_every_kind_of_small_frame_has_an_example() -> None:
    assert EXAMPLES.keys() == BYTES.keys()
    kinds = {name.partition(" ")[0] for name in EXAMPLES}
    assert kinds == {field.name for field in wire.Frame.DESCRIPTOR.fields} - {"chunk"}


def test_every_field_of_every_message_is_in_some_example() -> None:
    said = {name for octets in BYTES.values() for name in fields_said(wire.Frame.FromString(octets))}
    assert set(fields_of(wire.Frame.DESCRIPTOR)) - said == {"TensorHeader.checksum"}, "which is reserved"


def fields_said(message: Any) -> Iterator[str]:
    for field, value in message.ListFields():
        yield f"{message.DESCRIPTOR.name}.{field.name}"
        if field.message_type:
            for inner in value if field.is_repeated else [value]:
                yield from fields_said(inner)


def fields_of(message: Any) -> Iterator[str]:
    for field in message.fields:
        if field.name != "chunk":
            yield f"{message.name}.{field.name}"
            if field.message_type:
                yield from fields_of(field.message_type)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_frame_has_the_bytes_it_always_had(name: str) -> None:
    assert encode(EXAMPLES[name]).hex() == BYTES[name].hex()
    assert wire.Frame.FromString(BYTES[name]).WhichOneof("kind") == name.partition(" ")[0]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - CUT))
def test_the_bytes_are_read_as_the_frame_that_made_them(name: str) -> None:
    assert repr(decode(BYTES[name])) == repr(EXAMPLES[name])
