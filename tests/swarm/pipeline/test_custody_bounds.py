"""What one peer, one link or one data node may take of a hop, and from whom a hop takes anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.pipeline.custody import (
    DATA_NODE_GRACE_S,
    LIFETIME_IN_RESIDENCES,
    LONGEST_LIFETIME_S,
    MAX_TIMED,
    OTHER_ROUTE,
    SHORTEST_LIFETIME_S,
    STRANGER,
    ResidenceTimes,
)
from swarm.pipeline.custody_events import (
    Arrived,
    Compute,
    Forget,
    Key,
    PeerBack,
    Phase,
    Place,
    Retract,
    SendOutput,
    Tell,
    TensorArrived,
)
from swarm.vocabulary.pipeline_messages import Backward, Close, Forward, Purpose, Receipt
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId, SignedRoute
from tests.swarm.pipeline.custody_desk import (
    A2,
    ABC,
    ACCEPTED,
    B2,
    BACK,
    BUSY,
    DATA,
    LIFETIME_S,
    MICROBATCH,
    OUT,
    PASSED_ON,
    REFUSED,
    A,
    B,
    C,
    Desk,
)

HOUR_S = 3600.0
ROUTE = SignedRoute(tuple(hop.module for hop in ABC.hops), LIFETIME_S, b"s" * 64)
SIGNED = replace(ABC, route=ROUTE)
OTHERWISE = replace(ABC, route=replace(ROUTE, signature=b"o" * 64))


def forward(path: Path, position: int, number: int = 7, purpose: Purpose = Purpose.TRAIN) -> Forward:
    return Forward(MicrobatchId(path.data_node, number), path, position, purpose, HOUR_S)


def admitted(desk: Desk, message: Forward) -> Place:
    return desk.custody.admit_forward(message, desk.now).value


# ---- from whom -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "position", "before"),
    [(B, 1, PeerId("visitor")), (B, 1, C), (B, 1, B2), (A, 0, C), (DATA, 3, B)],
)
def test_a_forward_is_taken_from_a_replica_of_the_module_before_only(
    own: PeerId, position: int, before: PeerId
) -> None:
    """Where the view is old its sender is honest: it is put off."""
    path = replace(ABC, data_node=before) if position == 0 else ABC.with_peer(position - 1, before)
    desk = Desk(own)
    place = desk.custody.admit_forward(forward(path, position), desk.now)
    assert (place.value, place.reason) == (Place.BUSY, STRANGER)
    assert len(desk.custody) == 0


def test_a_stand_in_takes_a_gradient_from_a_replica_of_the_module_after_only() -> None:
    desk = Desk(B2)
    stranger = desk.custody.admit_backward(Backward(MICROBATCH, ABC.with_peer(1, B2).with_peer(2, A), 1), desk.now)
    assert (stranger.value, stranger.reason) == (Place.BUSY, STRANGER)
    assert desk.admits(1, ABC.with_peer(1, B2)) is Place.FREE


def test_what_is_held_is_held_on_the_route_that_was_signed_first() -> None:
    """A data node that signs two routes for one number does not get them mixed."""
    desk = Desk(B)
    assert admitted(desk, forward(SIGNED, 1)) is Place.FREE
    place = desk.custody.admit_forward(forward(OTHERWISE, 1), desk.now)
    assert (place.value, place.reason) == (Place.REFUSED, OTHER_ROUTE)
    desk.custody.handle(TensorArrived(forward(SIGNED, 1)), desk.now)
    desk.computed(1)
    assert desk.admits(1, OTHERWISE) is Place.REFUSED
    assert desk.admits(1, SIGNED) is Place.FREE
    (told,) = desk.recall(C, 1, OTHERWISE)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.message.status, told.message.detail) == (REFUSED, OTHER_ROUTE)


def test_a_signed_route_goes_with_the_microbatch_through_every_repair() -> None:
    desk = Desk(B)
    desk.forward(1, SIGNED)
    (offer,) = desk.computed(1)
    assert offer.message.path == SIGNED  # type: ignore[union-attr]
    (elsewhere,) = desk.receipt(C, OUT, 2, REFUSED)
    assert elsewhere.message.path.route == ROUTE  # type: ignore[union-attr]
    stand_in = Desk(B2)
    repaired = SIGNED.with_peer(1, B2)
    stand_in.admits(1, repaired)
    recall = stand_in.backward(1, repaired)[-1]
    assert recall.message.path.route == ROUTE  # type: ignore[union-attr]
    stand_in.forward(1, repaired.with_peer(0, A2))
    (back,) = stand_in.computed(1)
    assert back.message.path.route == ROUTE  # type: ignore[union-attr]


# ---- slots -----------------------------------------------------------------------------------------------------------


def from_many(desk: Desk, before: PeerId, count: int, first: int = 0) -> int:
    """How many of so many microbatches, each of another data node, are taken over this link."""
    path = ABC.with_peer(0, before)
    paths = [replace(path, data_node=PeerId(f"data{n}")) for n in range(first, first + count)]
    return sum(admitted(desk, forward(each, 1)) is Place.FREE for each in paths)


def test_what_came_by_one_link_cannot_take_all_slots() -> None:
    desk = Desk(B, slots=8)
    assert from_many(desk, A, 10) == 6
    assert from_many(desk, A2, 10, first=10) == 2


def test_the_gradients_that_a_stand_in_takes_count_for_the_link_that_they_came_by() -> None:
    desk, path = Desk(B2, slots=8), ABC.with_peer(1, B2)
    messages = [
        Backward(MicrobatchId(PeerId(f"data{n}"), 7), replace(path, data_node=PeerId(f"data{n}")), 1) for n in range(10)
    ]
    places = [desk.custody.admit_backward(message, desk.now) for message in messages]
    assert [place.value for place in places].count(Place.FREE) == 6
    assert "this link" in places[-1].reason


def test_data_nodes_without_a_link_have_a_quarter_together() -> None:
    desk = Desk(B, slots=8)
    desk.unlinked = {PeerId(f"data{n}") for n in range(10)}
    assert from_many(desk, A, 10) == 2
    assert "no link" in desk.custody.admit_forward(forward(replace(ABC, data_node=PeerId("data9")), 1), desk.now).reason
    assert admitted(desk, forward(ABC, 1)) is Place.FREE, "others have room"


def test_the_grace_of_a_data_node_without_a_link_begins_at_once() -> None:
    desk = Desk(B)
    desk.unlinked.add(DATA)
    desk.forward(1)
    assert desk.wait(DATA_NODE_GRACE_S - 1) == []
    assert desk.wait(1.0) == [Forget(Key(MICROBATCH, 1), f"nothing happened to it for {LIFETIME_S:.0f} s")]


def test_a_data_node_without_a_link_is_spoken_to_and_kept_for_once_there_is_one() -> None:
    """Its deadline would come before the first word to it, where computing takes long."""
    desk = Desk(B)
    desk.unlinked.add(DATA)
    to_sender, to_data_node, compute = desk.forward(1)
    assert isinstance(to_sender, Tell)
    assert to_data_node == replace(to_sender, to=DATA)
    assert isinstance(compute, Compute)
    desk.unlinked.clear()
    desk.custody.handle(PeerBack(DATA), desk.now)
    assert desk.wait(LIFETIME_S - 1) == []
    assert len(desk.wait(1.0)) == 1


# ---- lifetimes -------------------------------------------------------------------------------------------------------


def kept_s(desk: Desk, message: Forward) -> float:
    assert admitted(desk, message) is Place.FREE
    holding = desk.custody.get(Key(message.microbatch, message.position))
    assert holding is not None
    return holding.deadline - desk.now


def test_a_lifetime_is_bounded_by_how_long_microbatches_stay() -> None:
    desk = Desk(A, slots=8)
    assert kept_s(desk, forward(ABC, 0, number=1)) == LONGEST_LIFETIME_S, "nothing is known yet"
    desk.awaiting()
    desk.now += 5.0
    desk.backward(0)
    desk.computed(0)
    desk.receipt(DATA, BACK, -1, ACCEPTED)
    assert desk.phase(0) is Phase.SETTLING
    assert kept_s(desk, forward(ABC, 0, number=2)) == pytest.approx(LIFETIME_IN_RESIDENCES * 5.0)


def test_what_is_only_evaluated_waits_for_its_next_hop_for_the_shortest_time() -> None:
    desk = Desk(A)
    assert kept_s(desk, forward(ABC, 0, purpose=Purpose.EVALUATE)) == SHORTEST_LIFETIME_S


def test_replicas_that_are_busy_in_turn_do_not_keep_a_slot_for_ever() -> None:
    desk = Desk(A)
    desk.handing_on()
    begun, busy = desk.now, B
    while desk.held(0) is not None:
        assert desk.now - begun < 2 * LIFETIME_S
        actions = desk.receipt(busy, OUT, 1, BUSY, 0.1) or desk.wait(5.0)
        offers = [action for action in actions if isinstance(action, SendOutput)]
        busy = offers[-1].to if offers else busy
        desk.now += 1.0
    assert desk.now - begun >= LIFETIME_S


def test_stays_are_those_of_each_data_node_within_bounds() -> None:
    stays = ResidenceTimes()
    assert stays.longest_s(DATA) == LONGEST_LIFETIME_S
    stays.note(DATA, 0.1)
    assert stays.longest_s(DATA) == SHORTEST_LIFETIME_S
    slow, hostile = PeerId("slow"), PeerId("hostile")
    for _ in range(100):
        stays.note(slow, 10.0)
    assert stays.longest_s(slow) == pytest.approx(200.0)
    assert stays.longest_s(PeerId("new")) == pytest.approx(200.0), "as slow as the slowest"
    stays.note(hostile, 1e6)
    assert stays.longest_s(hostile) == LONGEST_LIFETIME_S
    assert stays.longest_s(slow) == pytest.approx(200.0), "which changes nothing for others"
    assert stays.longest_s(DATA) == SHORTEST_LIFETIME_S
    for number in range(2 * MAX_TIMED):
        stays.note(PeerId(str(number)), 1.0)
    assert len(stays._mean_s) == MAX_TIMED


# ---- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "phase"),
    [(0, Phase.BACKWARD), (1, Phase.HANDING_BACK), (2, Phase.GUARDING_BACK), (3, Phase.SETTLING)],
)
def test_a_close_takes_back_what_was_added_or_is_being_added(steps: int, phase: Phase) -> None:
    desk = Desk(B)
    desk.forward(1)
    desk.computed(1)
    desk.receipt(C, OUT, 2, PASSED_ON)
    desk.backward(1)
    for step in (
        lambda: desk.computed(1),
        lambda: desk.receipt(A, BACK, 0, ACCEPTED),
        lambda: desk.receipt(A, BACK, 0, PASSED_ON),
    )[:steps]:
        step()
    assert desk.phase(1) is phase
    closed = desk.custody.handle(Arrived(DATA, Close(MICROBATCH, "lost")), desk.now)
    assert closed == [Retract(Key(MICROBATCH, 1)), Forget(Key(MICROBATCH, 1), "closed: lost")]
    assert len(desk.custody) == 0


def test_repair_keeps_to_the_signed_modules() -> None:
    route = SignedRoute((ModuleId(1), ModuleId(2), ModuleId(3)), 60.0, bytes(64))
    assert route.allows(ABC)
    assert route.allows(ABC.without(1))
    assert route.allows(ABC.with_peer(1, B2))
    assert not route.allows(Path(DATA, (*ABC.hops, Hop(ModuleId(3), C))))
    assert not route.allows(Path(DATA, ABC.hops[::-1]))
