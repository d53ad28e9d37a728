"""What a replica takes its others to stand on."""

from __future__ import annotations

from swarm.averaging.replica_view import PRESUMED_S, OtherReplicas
from swarm.averaging.round_events import OtherReplica
from swarm.vocabulary.types import AnchorVersion, PeerId

B, C = PeerId("b"), PeerId("c")


def version(number: int) -> AnchorVersion:
    return AnchorVersion(number, number, number, 0, bytes([number]) * 32)


def two() -> OtherReplicas:
    others = OtherReplicas()
    others.changed([OtherReplica(B, version(1), True), OtherReplica(C, version(1), True)])
    return others


def test_members_of_a_round_are_taken_to_have_committed_it_too_for_a_while() -> None:
    others = two()
    others.presume([B, PeerId("a stranger")], version(2), 10.0)
    assert others.on(version(2), 10.0) == {B}
    assert others.on(version(1), 10.0) == {C}
    assert others.on(version(2), 10.0 + PRESUMED_S - 0.1) == {B}
    assert others.on(version(2), 10.0 + PRESUMED_S + 0.1) == frozenset()


def test_a_replicas_own_word_ends_a_presumption_at_once() -> None:
    others = two()
    others.presume([B], version(2), 10.0)
    others.reported(B, version(1), 10.1)
    assert others.on(version(2), 10.1) == frozenset()
    others.reported(B, version(3), 10.2)
    others.presume([B], version(2), 10.3)
    assert others.on(version(3), 10.3) == {B}
