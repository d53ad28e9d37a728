"""What a replica takes its others to stand on."""

from dataclasses import replace

from swarm.averaging.replica_view import NEW_TALLY_S, OLD_TALLY_S, PRESUMED_S, OtherReplicas, ReplicaView
from swarm.averaging.round_events import OtherReplica, RoundRules
from swarm.vocabulary.averaging_messages import RoundId, SignedRoster, WorkRow, WorkTally
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId
from tests.swarm.averaging.round_world import VirtualSigner

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


NAMES = [PeerId(f"name{number}") for number in range(10)]


def view(own: AnchorVersion, tallies: tuple[WorkTally, ...] = (), proven: tuple[PeerId, ...] = (B,)) -> ReplicaView:
    """We and B have worked; ten names say that they have the anchor of round 300."""
    rules = RoundRules(inner_steps=10, fragments=1, chunks=16, longest_s=60.0)
    made = ReplicaView(PeerId("own"), ModuleId(1), rules, own, VirtualSigner())
    far = AnchorVersion(200, 2000, 10**6, 0, b"invented")
    here = [OtherReplica(B, version(9), True, B in proven)]
    made.others.changed([*here, *(OtherReplica(name, far, True, name in proven) for name in NAMES)])
    made.prove(tallies)
    return made


def test_names_without_proven_work_have_no_vote_are_never_most_and_never_lead_first() -> None:
    trusting = view(version(9))
    assert trusting.standing().value == version(9)
    assert len(trusting.others.all) == 2, "no more names than replicas with proven work"
    assert view(version(0)).standing().value == version(9), "a newcomer"
    assert view(version(9), (TALLY,), proven=()).standing().value == version(9), "we alone have worked"
    assert view(version(9), proven=()).standing().value != version(9), "nothing can be proven"
    own = view(AnchorVersion(200, 2000, 10**6, 0, b"invented"))
    assert own.order()[0] == own.own


def test_a_roster_needs_the_tallies_that_we_have_had_for_a_while() -> None:
    own, roster = view(version(9), (TALLY,)), SignedRoster(RoundId(ModuleId(1), 10, 0, B), version(9), ())
    assert own.unproven(roster) is None
    own.now = NEW_TALLY_S + 1
    own.prove((TALLY,))
    assert own.unproven(roster) is not None
    assert own.unproven(replace(roster, tallies=(TALLY,))) is None
    assert own.unproven(replace(roster, tallies=(replace(TALLY, at=TALLY.at - OLD_TALLY_S - 1),))) is not None


TALLY = WorkTally(PeerId("data"), ModuleId(1), 1, 1000.0, 30.0, (WorkRow(PeerId("own"), 1, 1, 1),))
