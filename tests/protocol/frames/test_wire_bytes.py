"""What is on the wire stays what it is: the bytes of an example and more of every small frame, written down once.

`wire_bytes.txt` has a line for each example of `frame_examples`: its bytes in hexadecimal, and its name. Nodes of
another version speak those bytes, so a line of it changes only together with the protocol's version.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.frames.frames import decode, encode
from protocol.generated import link_pb2 as wire
from tests.protocol.frames.frame_examples import EXAMPLES

TABLE = Path(__file__).with_name("wire_bytes.txt")
BYTES = {
    name: bytes.fromhex(octets) for octets, name in (line.split(" ", 1) for line in TABLE.read_text().splitlines())
}
CUT = {"receipt beyond bounds"}
"""What is brought within its bounds when it is sent comes out another."""


def test_every_kind_of_small_frame_has_an_example() -> None:
    assert EXAMPLES.keys() == BYTES.keys()
    kinds = {name.partition(" ")[0] for name in EXAMPLES}
    assert kinds == {field.name for field in wire.Frame.DESCRIPTOR.fields} - {"chunk"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_frame_has_the_bytes_it_always_had(name: str) -> None:
    assert encode(EXAMPLES[name]).hex() == BYTES[name].hex()
    assert wire.Frame.FromString(BYTES[name]).WhichOneof("kind") == name.partition(" ")[0]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - CUT))
def test_the_bytes_are_read_as_the_frame_that_made_them(name: str) -> None:
    assert repr(decode(BYTES[name])) == repr(EXAMPLES[name])
