"""Custody, step by step: a hop that nobody stands in for is skipped where the run's rules allow."""

from __future__ import annotations

from swarm.pipeline.custody import RETRY_S
from swarm.pipeline.custody_events import Compute, Finished, Forget, Key, Phase, SendOutput, Tell, Work
from swarm.vocabulary.pipeline_messages import Backward, Purpose, Recall
from swarm.vocabulary.types import Path, PeerId
from tests.swarm.pipeline.custody_desk import (
    ABC,
    ACCEPTED,
    B2,
    B3,
    BACK,
    BUSY,
    C2,
    DATA,
    MICROBATCH,
    OUT,
    PASSED_ON,
    REFUSED,
    A,
    B,
    C,
    Desk,
    offer,
    receipt,
    sent,
    stranded,
)

AC = ABC.without(1)
AB = ABC.without(2)


def desk_of(own: PeerId, fewest_hops: int = 2) -> Desk:
    desk = Desk(own, fewest_hops=fewest_hops)
    desk.dead = {B2, B3, C2}
    return desk


def test_the_hop_after_it_gets_what_a_lost_one_cannot_take() -> None:
    desk = desk_of(A)
    desk.handing_on()
    assert desk.lose_for_good(B) == [offer(C, AC, 1)]
    desk.receipt(C, OUT, 1, ACCEPTED)
    desk.receipt(C, OUT, 1, PASSED_ON)
    assert desk.phase(0) is Phase.AWAITING
    assert Compute(Key(MICROBATCH, 0), Work.BACKWARD, Purpose.TRAIN) in desk.backward(0, AC)


def test_one_that_refuses_and_has_no_stand_in_is_skipped_at_once() -> None:
    desk = desk_of(A)
    desk.handing_on()
    assert desk.receipt(B, OUT, 1, REFUSED) == [offer(C, AC, 1)]


def test_what_new_paths_go_round_is_skipped_without_waiting_for_it() -> None:
    desk = desk_of(A)
    desk.handing_on()
    assert desk.lose(B) == [], "a link may have broken"
    desk.gone = {2}
    assert desk.wait(RETRY_S + 0.01) == [offer(C, AC, 1)]


def test_who_is_known_to_be_gone_when_the_offer_fails_is_skipped_at_once() -> None:
    desk = desk_of(A)
    desk.guarding()
    desk.gone = {2}
    assert desk.lose(B) == [offer(C, AC, 1)]


def test_a_gradient_for_a_hop_that_new_paths_go_round_does_not_wait_for_anybody() -> None:
    """Sent anew, its microbatch is home before somebody could have learned that module."""
    desk = desk_of(C)
    desk.forward(2)
    desk.computed(2)
    desk.backward(2)
    desk.computed(2)
    assert desk.lose(B) == []
    desk.gone = {2}
    assert desk.wait(RETRY_S + 0.01) == [
        stranded(BACK, 1, "nobody serves its module"),
        Tell(DATA, receipt(BACK, 2, PASSED_ON)),
    ]


def test_who_must_not_skip_waits_for_it_though_others_go_round() -> None:
    desk = desk_of(A, fewest_hops=3)
    desk.handing_on()
    desk.gone = {2}
    assert stranded(OUT, 1, "the link broke; module 2.0 has no peer left to stand in") in desk.lose_for_good(B)


def test_after_the_last_hop_comes_the_data_node() -> None:
    desk = desk_of(B)
    desk.forward(1)
    desk.computed(1)
    assert desk.lose_for_good(C) == [offer(DATA, AB, 2)]


def test_whoever_comes_next_may_be_replaced_like_any_other() -> None:
    desk = desk_of(A)
    desk.dead = {B2, B3}
    desk.handing_on()
    desk.lose_for_good(B)
    assert desk.receipt(C, OUT, 1, REFUSED) == [offer(C2, AC.with_peer(1, C2), 1)]


def test_no_more_than_the_rules_allow() -> None:
    desk = desk_of(A)
    desk.handing_on()
    desk.lose_for_good(B)
    detail = "the link broke; module 3.0 has no peer left to stand in"
    assert desk.lose_for_good(C) == [Forget(Key(MICROBATCH, 0), detail), stranded(OUT, 1, detail)]


def test_a_busy_hop_is_waited_for() -> None:
    desk = desk_of(A)
    offered = desk.handing_on()
    assert desk.receipt(B, OUT, 1, BUSY, 1.0) == []
    assert desk.wait(1.1) == offered


def test_what_is_measured_is_the_path_that_was_asked_for() -> None:
    desk = desk_of(A)
    desk.handing_on(purpose=Purpose.EVALUATE)
    assert stranded(OUT, 1, "the link broke; module 2.0 has no peer left to stand in") in desk.lose_for_good(B)


def test_hops_before_the_skipped_one_learn_of_it_by_the_gradient() -> None:
    desk = desk_of(DATA)
    desk.start()
    desk.computed(-1)
    desk.receipt(A, OUT, 0, ACCEPTED)
    desk.forward(2, AC)
    desk.computed(2)
    desk.receipt(C, BACK, 1, ACCEPTED)
    assert Compute(Key(MICROBATCH, -1), Work.BACKWARD, Purpose.TRAIN) in desk.backward(-1, AC)
    assert Finished(MICROBATCH, AC) in desk.computed(-1)


def test_a_gradient_by_another_module_than_the_next_is_not_taken() -> None:
    """Only a hop after it can have been skipped without its knowledge."""
    desk = desk_of(A)
    desk.awaiting()
    assert desk.admits(0, AC).name == "REFUSED"


def test_a_microbatch_turns_round_once_though_a_copy_comes_by_a_longer_path() -> None:
    """The hop was not dead, only cut off from the one before it."""
    desk = desk_of(DATA)
    desk.start()
    desk.computed(-1)
    desk.forward(2, AC)
    statuses = [Tell(C, receipt(OUT, 3, status)) for status in (ACCEPTED, PASSED_ON)]
    assert desk.forward(3) == [Forget(Key(MICROBATCH, 3), "another copy came first"), *statuses]
    assert desk.computed(2) == [sent(C, Backward(MICROBATCH, AC, 1), 2)]


def test_a_stand_in_gets_the_input_though_a_later_hop_was_skipped() -> None:
    """On the way back: A is asked for B2's input; what it knows of C, which was skipped after B, is old."""
    desk = Desk(A, fewest_hops=2)
    desk.awaiting()
    taken = Path(DATA, AB.with_peer(1, B2).hops)
    answered = desk.recall(B2, 0, taken)
    assert [action.to for action in answered if isinstance(action, SendOutput)] == [B2]
    stand_in = Desk(B2, fewest_hops=2)
    assert stand_in.admits(1, taken).name == "FREE"
    assert Tell(A, Recall(MICROBATCH, taken, 0)) in stand_in.backward(1, taken)
    assert Compute(Key(MICROBATCH, 1), Work.REPLAY, Purpose.TRAIN) in stand_in.forward(1, ABC.with_peer(1, B2))
    assert stand_in.computed(1) == [sent(A, Backward(MICROBATCH, taken, 0), 1)]


def test_a_stage_with_another_expert_is_never_skipped_but_left_to_the_data_node() -> None:
    """A signed route names modules: the text has to set out anew by another route."""
    desk = desk_of(A)
    desk.handing_on()
    desk.elsewhere, desk.gone = {2}, {2}
    assert stranded(OUT, 1, "the link broke; module 2.0 has no peer left to stand in") in desk.lose(B)
    desk = desk_of(A)
    desk.handing_on()
    desk.elsewhere = {2}
    assert stranded(OUT, 1, "refused: ; module 2.0 has no peer left to stand in") in desk.receipt(B, OUT, 1, REFUSED)
