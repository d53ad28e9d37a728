"""Custody, step by step: the way everything goes well, evaluation, admission."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.pipeline.custody_events import (
    BrokenOff,
    Compute,
    Confirmed,
    Finished,
    Forget,
    Key,
    Phase,
    Place,
    Tell,
    TensorArrived,
    Work,
)
from swarm.vocabulary.pipeline_messages import Backward, Forward, Purpose, Receipt, Settled
from swarm.vocabulary.types import MicrobatchId, Path, PeerId
from tests.swarm.pipeline.custody_desk import (
    A2,
    ABC,
    ACCEPTED,
    BACK,
    BUSY,
    C2,
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
    offer,
    path_by,
    receipt,
    sent,
)

# ---- the way everything goes well ------------------------------------------------------------------------------------


def test_a_hop_takes_computes_and_hands_on() -> None:
    desk = Desk(A)
    took = desk.forward(0)
    assert took == [
        Tell(DATA, receipt(OUT, 0, ACCEPTED)),
        Compute(Key(MICROBATCH, 0), Work.FORWARD, Purpose.TRAIN),
    ]
    assert desk.phase(0) is Phase.FORWARD
    assert desk.computed(0) == [offer(B, ABC, 1)]
    assert desk.phase(0) is Phase.HANDING_ON
    assert desk.receipt(B, OUT, 1, ACCEPTED) == [Tell(DATA, receipt(OUT, 0, PASSED_ON))]
    assert desk.phase(0) is Phase.GUARDING
    assert desk.receipt(B, OUT, 1, PASSED_ON) == []
    assert desk.phase(0) is Phase.AWAITING


def test_a_hop_in_the_middle_tells_its_predecessor_and_the_data_node_that_it_has_passed_it_on() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    passed = receipt(OUT, 1, PASSED_ON)
    assert desk.receipt(C, OUT, 2, ACCEPTED) == [Tell(A, passed), Tell(DATA, passed)]


def test_a_hop_says_how_long_it_let_the_microbatch_wait_and_how_long_it_computed() -> None:
    desk = Desk(B)
    desk.forward(1)
    desk.wait(5.0)
    desk.computed(1, seconds=3.0)
    desk.wait(0.5)
    desk.receipt(C, OUT, 2, BUSY, 1.0)
    assert desk.wait(0.25) == [] == desk.receipt(C2, OUT, 2, BUSY, 0.25)
    desk.wait(0.25)
    desk.wait(0.125)
    passed = replace(receipt(OUT, 1, PASSED_ON), waited_s=3.0, computed_s=3.0, sent_s=0.125)
    assert desk.receipt(C2, OUT, 2, ACCEPTED) == [Tell(A, passed), Tell(DATA, passed)]
    desk.receipt(C2, OUT, 2, PASSED_ON)
    desk.backward(1, path_by(A, B, C2))
    desk.wait(0.5)
    desk.computed(1, seconds=0.5)
    passed = replace(receipt(BACK, 1, PASSED_ON), computed_s=0.5)
    assert Tell(DATA, passed) in desk.receipt(A, BACK, 0, ACCEPTED)


def test_the_gradient_goes_back_and_the_hop_is_done_when_it_has_been_passed_on() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.receipt(C, OUT, 2, ACCEPTED)
    desk.receipt(C, OUT, 2, PASSED_ON)
    key = Key(MICROBATCH, 1)
    assert desk.backward(1) == [
        Tell(C, receipt(BACK, 1, ACCEPTED)),
        Compute(key, Work.BACKWARD, Purpose.TRAIN),
    ]
    assert desk.computed(1) == [sent(A, Backward(MICROBATCH, ABC, 0), 1)]
    passed = receipt(BACK, 1, PASSED_ON)
    assert desk.receipt(A, BACK, 0, ACCEPTED) == [Tell(C, passed), Tell(DATA, passed)]
    assert desk.phase(1) is Phase.GUARDING_BACK
    assert desk.receipt(A, BACK, 0, PASSED_ON) == []
    assert desk.phase(1) is Phase.SETTLING
    assert desk.settled(ABC) == [Confirmed(key), Forget(key, "complete")]
    assert len(desk.custody) == 0


def test_the_first_hop_is_done_as_soon_as_the_data_node_has_its_gradient() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    assert desk.computed(0) == [sent(DATA, Backward(MICROBATCH, ABC, -1), 0)]
    desk.receipt(DATA, BACK, -1, ACCEPTED)
    assert desk.phase(0) is Phase.SETTLING
    assert desk.custody.used_slots == 0


def test_a_data_node_starts_turns_round_and_finishes() -> None:
    desk = Desk(DATA)
    assert desk.start() == [Compute(Key(MICROBATCH, -1), Work.FORWARD, Purpose.TRAIN)]
    assert desk.computed(-1) == [offer(A, ABC, 0)]
    desk.receipt(A, OUT, 0, ACCEPTED)
    desk.receipt(A, OUT, 0, PASSED_ON)
    assert desk.forward(3)[1:] == [Compute(Key(MICROBATCH, 3), Work.LOSS, Purpose.TRAIN)]
    assert desk.computed(3) == [sent(C, Backward(MICROBATCH, ABC, 2), 3)]
    desk.receipt(C, BACK, 2, ACCEPTED)
    desk.receipt(C, BACK, 2, PASSED_ON)
    assert desk.backward(-1)[1:] == [Compute(Key(MICROBATCH, -1), Work.BACKWARD, Purpose.TRAIN)]
    finished = desk.computed(-1)
    assert finished[0] == Finished(MICROBATCH, ABC)
    assert [Tell(peer, Settled(MICROBATCH, ABC)) for peer in (A, B, C)] == finished[-3:]
    assert len(desk.custody) == 0


def test_passed_on_counts_for_accepted_when_that_was_overtaken() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.receipt(B, OUT, 1, PASSED_ON) == [Tell(DATA, receipt(OUT, 0, PASSED_ON))]
    assert desk.phase(0) is Phase.AWAITING


def test_a_gradient_that_overtakes_the_receipts_is_taken() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.admits(0) is Place.FREE
    assert desk.backward(0)[1:] == [Compute(Key(MICROBATCH, 0), Work.BACKWARD, Purpose.TRAIN)]
    assert desk.receipt(B, OUT, 1, ACCEPTED) == []
    assert desk.lose(B) == []
    assert desk.phase(0) is Phase.BACKWARD


def test_the_last_hop_awaits_its_gradient_as_soon_as_the_data_node_has_accepted() -> None:
    desk = Desk(C)
    desk.handing_on(2)
    desk.receipt(DATA, OUT, 3, ACCEPTED)
    assert desk.phase(2) is Phase.AWAITING


def test_a_path_without_hops_goes_from_the_data_node_to_itself() -> None:
    desk, path = Desk(DATA), path_by()
    desk.start(path)
    assert desk.computed(-1) == [offer(DATA, path, 0)]
    desk.forward(0, path)
    desk.receipt(DATA, OUT, 0, ACCEPTED)
    assert desk.computed(0) == [sent(DATA, Backward(MICROBATCH, path, -1), 0)]
    desk.backward(-1, path)
    desk.receipt(DATA, BACK, -1, ACCEPTED)
    assert Finished(MICROBATCH, path) in desk.computed(-1)
    assert len(desk.custody) == 0


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_what_is_only_evaluated_is_gone_as_soon_as_the_next_one_has_accepted() -> None:
    for own, position, target in ((A, 0, B), (C, 2, DATA)):
        desk = Desk(own)
        desk.handing_on(position, Purpose.EVALUATE)
        actions = desk.receipt(target, OUT, position + 1, ACCEPTED)
        assert actions[-1] == Forget(Key(MICROBATCH, position), "passed on")
        assert len(desk.custody) == 0


def test_what_is_only_evaluated_ends_with_its_loss() -> None:
    desk = Desk(DATA)
    desk.start(purpose=Purpose.EVALUATE)
    desk.computed(-1)
    desk.receipt(A, OUT, 0, ACCEPTED)
    assert len(desk.custody) == 0
    assert desk.forward(3, purpose=Purpose.EVALUATE)[1:] == [Compute(Key(MICROBATCH, 3), Work.LOSS, Purpose.EVALUATE)]
    assert desk.computed(3) == [Forget(Key(MICROBATCH, 3), "evaluated")]


# ---- admission -------------------------------------------------------------------------------------------------------


def test_slots_are_bounded_reserved_at_admission_and_given_back() -> None:
    desk = Desk(A, slots=2)
    messages = [Forward(MicrobatchId(DATA, n), ABC, 0, Purpose.TRAIN, LIFETIME_S) for n in range(3)]
    admitted = [desk.custody.admit_forward(message, desk.now).value for message in messages]
    assert admitted == [Place.FREE, Place.FREE, Place.BUSY]
    assert desk.custody.used_slots == 2
    assert desk.custody.admit_forward(messages[0], desk.now).value is Place.FREE, "the same one needs no second slot"
    assert desk.custody.used_slots == 2
    broken = desk.custody.handle(BrokenOff(messages[0]), desk.now)
    assert broken == [Forget(Key(MicrobatchId(DATA, 0), 0), "broken off")]
    assert desk.custody.admit_forward(messages[2], desk.now).value is Place.FREE


def test_one_data_node_cannot_take_all_slots() -> None:
    desk = Desk(A, slots=8)

    def admitted(data_node: PeerId) -> int:
        path = Path(data_node, ABC.hops)
        messages = [Forward(MicrobatchId(data_node, n), path, 0, Purpose.TRAIN, LIFETIME_S) for n in range(10)]
        return sum(desk.custody.admit_forward(message, desk.now).value is Place.FREE for message in messages)

    assert admitted(PeerId("greedy")) == 6
    assert admitted(DATA) == 2
    assert desk.custody.used_slots == 8


def test_a_data_nodes_own_need_no_slot() -> None:
    desk = Desk(DATA, slots=0)
    desk.start()
    desk.forward(3)
    assert desk.custody.used_slots == 0
    assert len(desk.custody) == 2


def test_broken_off_means_nothing_once_the_tensor_is_there() -> None:
    desk = Desk(A)
    desk.forward(0)
    message = Forward(MICROBATCH, ABC, 0, Purpose.TRAIN, LIFETIME_S)
    assert desk.custody.handle(BrokenOff(message), desk.now) == []
    assert desk.phase(0) is Phase.FORWARD


def test_a_forward_whose_reservation_is_gone_is_refused() -> None:
    desk = Desk(A)
    message = Forward(MICROBATCH, ABC, 0, Purpose.TRAIN, LIFETIME_S)
    (told,) = desk.custody.handle(TensorArrived(message), desk.now)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.to, told.message.status) == (DATA, REFUSED)
    assert len(desk.custody) == 0


@pytest.mark.parametrize("phase", [Phase.RECEIVING, Phase.FORWARD])
def test_a_gradient_that_comes_before_the_output_has_been_handed_on_is_to_come_again(phase: Phase) -> None:
    desk = Desk(A)
    if phase is Phase.RECEIVING:
        desk.custody.admit_forward(Forward(MICROBATCH, ABC, 0, Purpose.TRAIN, LIFETIME_S), desk.now)
    else:
        desk.forward(0)
    assert desk.admits(0) is Place.BUSY
    (told,) = desk.backward(0)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.to, told.message.direction, told.message.status) == (B, BACK, BUSY)
    assert desk.phase(0) is phase


def test_a_second_copy_of_a_gradient_is_accepted_and_not_computed() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    assert desk.backward(0) == [Tell(B, receipt(BACK, 0, ACCEPTED))]


def test_a_gradient_is_awaited_along_a_path_that_others_have_repaired_further_on() -> None:
    desk = Desk(A)
    desk.awaiting()
    repaired = ABC.with_peer(2, C2)
    assert desk.admits(0, repaired) is Place.FREE
    desk.backward(0, repaired)
    assert desk.computed(0) == [sent(DATA, Backward(MICROBATCH, repaired, -1), 0)]


def test_a_gradient_comes_only_from_a_replica_of_the_next_module_on_the_same_stages() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.lose(C)
    assert desk.admits(1, ABC.with_peer(2, C2)) is Place.FREE
    assert desk.admits(1, ABC) is Place.FREE, "the one it was handed to first may be the first to have it"
    assert desk.admits(1, ABC.with_peer(2, A2)) is Place.REFUSED
    assert desk.admits(1, Path(DATA, ABC.hops[:2])) is Place.REFUSED, "another length"


def test_each_side_of_a_hop_knows_the_repairs_of_its_own_side() -> None:
    desk = Desk(B)
    desk.forward(1, ABC.with_peer(0, A2))
    desk.computed(1)
    desk.backward(1, ABC.with_peer(2, C2))
    taken = ABC.with_peer(0, A2).with_peer(2, C2)
    assert desk.computed(1) == [sent(A2, Backward(MICROBATCH, taken, 0), 1)]
