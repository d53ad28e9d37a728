"""What a replica takes its fellows to stand on."""

from __future__ import annotations

from swarm.averaging.replica_view import PRESUMED_S, Fellows
from swarm.averaging.round_events import Fellow
from swarm.vocabulary.types import AnchorVersion, PeerId

B, C = PeerId("b"), PeerId("c")


def version(number: int) -> AnchorVersion:
    return AnchorVersion(number, number, number, 0, bytes([number]) * 32)


def two() -> Fellows:
    fellows = Fellows()
    fellows.changed([Fellow(B, version(1), True), Fellow(C, version(1), True)], 0.0)
    return fellows


def test_members_of_a_round_are_taken_to_have_committed_it_too() -> None:
    fellows = two()
    fellows.presume([B, PeerId("a stranger")], version(2), 10.0)
    assert fellows.on(version(2), 10.0) == {B}
    assert fellows.on(version(1), 10.0) == {C}


def test_a_presumption_ends_by_itself() -> None:
    fellows = two()
    fellows.presume([B], version(2), 10.0)
    assert fellows.on(version(2), 10.0 + PRESUMED_S - 0.1) == {B}
    assert fellows.on(version(2), 10.0 + PRESUMED_S + 0.1) == frozenset()


def test_a_fellows_own_word_ends_a_presumption_at_once() -> None:
    fellows = two()
    fellows.presume([B], version(2), 10.0)
    fellows.said(B, version(1), 10.1)
    assert fellows.on(version(2), 10.1) == frozenset()
    fellows.said(B, version(3), 10.2)
    fellows.presume([B], version(2), 10.3)
    assert fellows.on(version(3), 10.3) == {B}
