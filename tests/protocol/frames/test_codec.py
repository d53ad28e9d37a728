"""What can be declared, and what the codec makes of it; the messages themselves have tests of their own."""

from dataclasses import dataclass, make_dataclass, replace
from typing import Annotated, Any

import pytest

from protocol.frames.codec import checked_version, converter
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.bounds import Length, Range
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import MAX_ROUND, AnchorVersion


@dataclass(frozen=True, slots=True)
class Receipt:
    position: Annotated[int, Range(-1, 3)]
    retry_after_s: Annotated[float, Range(0, 2)]
    detail: Annotated[str, Length(1, 4)]


@pytest.mark.parametrize(
    ("field", "message", "because"),
    [
        (("stages", int), wire.ModuleId, "no field for stages"),
        (("chunks", tuple[int, ...]), wire.StateRequest, "has no bound"),
        (("digest", bytes), wire.StateRequest, "has no bound"),
        (("digest", Annotated[complex, Range(0, 1)]), wire.StateRequest, "no encoding"),
    ],
)
def test_what_cannot_travel_is_noticed_when_it_is_loaded(field: tuple[str, Any], message: type, because: str) -> None:
    with pytest.raises(TypeError, match=because):
        converter(make_dataclass("Declared", [field]), message.DESCRIPTOR)  # type: ignore[attr-defined]


def test_units_and_texts_are_converted() -> None:
    receipt = converter(Receipt, wire.Receipt.DESCRIPTOR)
    assert receipt.write(Receipt(2, 1.5, "abcdef"), None) == {"position": 2, "retry_after_ms": 1500, "detail": "abcd"}
    said = wire.Receipt(position=-1, retry_after_ms=2000, detail="a\x1bb")
    assert receipt.read(said, None) == Receipt(-1, 2.0, "a?b")


@pytest.mark.parametrize(
    ("said", "because"),
    [
        (wire.Receipt(position=4, detail="a"), r"Receipt\.position 4 is out of range; -1 to 3 are allowed"),
        (wire.Receipt(position=-2, detail="a"), r"Receipt\.position -2 is"),
        (wire.Receipt(retry_after_ms=2001, detail="a"), r"Receipt\.retry_after_s 2\.001 is"),
        (wire.Receipt(), r"Receipt\.detail has a length of 0; 1 to 4 are allowed"),
        (wire.Receipt(detail="abcde"), r"Receipt\.detail has a length of 5"),
    ],
)
def test_the_field_that_is_out_of_bounds_is_named(said: wire.Receipt, because: str) -> None:
    with pytest.raises(ProtocolViolation, match=because):
        converter(Receipt, wire.Receipt.DESCRIPTOR).read(said, None)


def test_a_version_from_elsewhere_is_held_against_the_same_bounds() -> None:
    version = AnchorVersion(1, 2, 3, 4, bytes(32))
    assert checked_version(version) == version
    for change in ({"round": MAX_ROUND + 1}, {"steps": -1}, {"fragment": 64}, {"digest": bytes(31)}):
        with pytest.raises(ProtocolViolation, match="AnchorVersion"):
            checked_version(replace(version, **change))  # type: ignore[arg-type]
