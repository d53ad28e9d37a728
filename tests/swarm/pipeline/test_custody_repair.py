"""Custody, step by step: what goes wrong on the way out and on the way back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.pipeline.custody import ASK_S, PATIENCE_S, RETRY_S, SUBSTITUTE_AFTER_S, put_off
from swarm.pipeline.custody_events import ComputeFailed, Confirmed, Forget, Key, Phase, Tell
from swarm.vocabulary.pipeline_messages import Backward, ReceiptStatus, Stranded, Unsettled
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.swarm.pipeline.custody_desk import (
    A2,
    ABC,
    ACCEPTED,
    B2,
    B3,
    BACK,
    BUSY,
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

# ---- the way out goes wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarding", [False, True])
def test_a_lost_successor_is_replaced_from_the_output_that_is_kept(guarding: bool) -> None:
    desk = Desk(A)
    if guarding:
        desk.guarding()
    else:
        desk.handing_on()
    assert desk.lose(B) == [offer(B2, ABC.with_peer(1, B2), 1)]
    assert desk.phase(0) is Phase.HANDING_ON


def test_the_data_node_replaces_a_lost_first_hop() -> None:
    desk = Desk(DATA)
    desk.start()
    desk.computed(-1)
    assert desk.lose(A) == [offer(A2, ABC.with_peer(0, A2), 0)]


def test_a_lost_successor_that_has_passed_it_on_matters_no_more() -> None:
    desk = Desk(A)
    desk.awaiting()
    assert desk.lose(B) == []
    assert desk.phase(0) is Phase.AWAITING


def test_a_refusing_successor_is_replaced_and_not_asked_again() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.receipt(B, OUT, 1, REFUSED) == [offer(B2, ABC.with_peer(1, B2), 1)]
    assert desk.receipt(B2, OUT, 1, REFUSED) == [offer(B3, ABC.with_peer(1, B3), 1)]
    gone, told = desk.receipt(B3, OUT, 1, REFUSED)
    assert isinstance(gone, Forget)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Stranded)
    assert (told.to, told.message.direction, told.message.position) == (DATA, OUT, 1)
    assert "no peer left" in told.message.detail
    assert len(desk.custody) == 0


def test_a_busy_successor_is_replaced_by_another() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.receipt(B, OUT, 1, BUSY, 1.0) == [offer(B2, ABC.with_peer(1, B2), 1)]


def test_when_all_are_busy_the_last_is_asked_again_when_it_wants_to_be_and_then_the_others() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B3}
    desk.receipt(B, OUT, 1, BUSY, 1.0)
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == []
    assert desk.wait(0.5) == []
    assert desk.wait(0.6) == [offer(B2, ABC.with_peer(1, B2), 1)]
    assert desk.wait(0.6) == [], "once for each answer"
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == [offer(B, ABC, 1)]


def test_a_busy_one_is_asked_again_before_the_microbatch_strands() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B3}
    desk.receipt(B, OUT, 1, BUSY, 1.0)
    assert desk.lose(B2) == [offer(B, ABC, 1)]


def test_one_that_refused_is_not_asked_again_because_the_rest_are_busy() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B3}
    desk.receipt(B, OUT, 1, REFUSED)
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == []
    desk.wait(1.1)
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == []
    assert desk.wait(3.1) == [offer(B2, ABC.with_peer(1, B2), 1)]


def pauses(desk: Desk, asked_s: float, times: int) -> list[float]:
    """How long it waits after each refusal of the only peer there is, to a hundredth of a second."""
    waited = []
    for _ in range(times):
        assert desk.receipt(B, OUT, 1, BUSY, asked_s) == []
        begun = desk.now
        while not desk.wait(0.01):
            pass
        waited.append(desk.now - begun)
    return waited


def test_who_is_refused_again_and_again_asks_less_often_and_not_in_step_with_others() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B2, B3}
    waited = pauses(desk, 0.1, 6)
    assert waited[0] == pytest.approx(0.1, abs=0.011)
    assert all(0.1 * 2**n <= pause + 1e-6 <= 0.1 * 2**n * 1.5 + 0.02 for n, pause in enumerate(waited[:4]))
    assert max(waited) <= 0.8 * 1.5 + 0.02
    assert len({round(pause, 2) for pause in waited[3:]}) > 1
    held = desk.held(0)
    assert held is not None
    other = replace(held, key=Key(MicrobatchId(DATA, 8), 0))
    assert put_off(held, 0.1, 0.0).retry_at != put_off(other, 0.1, 0.0).retry_at
    desk.receipt(B, OUT, 1, ACCEPTED)
    assert desk.held(0) is not None
    assert desk.held(0).refusals == 0  # type: ignore[union-attr]


def test_the_deadline_comes_also_to_one_that_waits_for_a_busy_peer() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B2, B3}
    for _ in range(40):
        desk.receipt(B, OUT, 1, BUSY, 0.5)
        desk.wait(1.0)
    assert len(desk.custody) == 0


def test_busy_after_accepted_is_not_believed() -> None:
    desk = Desk(A)
    desk.guarding()
    assert desk.receipt(B, OUT, 1, BUSY, 1.0) == []
    assert desk.phase(0) is Phase.GUARDING


def test_nobody_left_strands_it() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B2, B3}
    detail = "the link broke; module 2.0 has no peer left to stand in"
    assert desk.lose_for_good(B) == [Forget(Key(MICROBATCH, 0), detail), stranded(OUT, 1, detail)]


def test_a_lone_successor_that_comes_back_gets_it() -> None:
    desk = Desk(A)
    offered = desk.handing_on()
    desk.dead = {B2, B3}
    assert desk.lose(B) == []
    assert desk.wait(RETRY_S + 0.01) == offered
    desk.receipt(B, OUT, 1, ACCEPTED)
    assert desk.phase(0) is Phase.GUARDING
    # A later outage has the whole of its patience again.
    desk.now += 2 * PATIENCE_S
    assert desk.lose(B) == []


def test_a_replica_that_comes_up_meanwhile_gets_it() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B2, B3}
    assert desk.lose(B) == []
    desk.dead = {B2}
    assert desk.wait(RETRY_S + 0.01) == [offer(B3, ABC.with_peer(1, B3), 1)]


def test_a_replica_that_comes_up_meanwhile_has_the_whole_patience_to_itself() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B2, B3}
    desk.lose(B)
    desk.now += PATIENCE_S - RETRY_S
    desk.dead = {B2}
    assert desk.lose(B) == [offer(B3, ABC.with_peer(1, B3), 1)]
    assert desk.wait(2 * RETRY_S) == []
    assert desk.lose(B3) == [], "its link may come back"
    assert stranded(OUT, 1, "the link broke; module 2.0 has no peer left to stand in") in desk.lose_for_good(B3)


def test_nobody_stands_in_for_the_data_node() -> None:
    desk = Desk(C)
    desk.handing_on(2)
    gone = Forget(Key(MICROBATCH, 2), "the link broke")
    assert desk.lose_for_good(DATA) == [gone, stranded(OUT, 3, "the link broke")]


def test_a_busy_data_node_is_asked_again() -> None:
    desk = Desk(C)
    offered = desk.handing_on(2)
    assert desk.receipt(DATA, OUT, 3, BUSY, 1.0) == []
    assert desk.wait(1.1) == offered


@pytest.mark.parametrize("status", list(ReceiptStatus))
def test_only_the_one_it_is_handed_to_can_answer(status: ReceiptStatus) -> None:
    desk = Desk(A)
    desk.handing_on()
    before = desk.held(0)
    assert desk.receipt(B2, OUT, 1, status) == []
    assert desk.receipt(B, BACK, 1, status) == []
    assert desk.receipt(B, OUT, 2, status) == []
    assert desk.held(0) == before


def test_a_computation_that_fails_strands_it() -> None:
    desk = Desk(A)
    desk.forward(0)
    failed = desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "out of memory"), desk.now)
    assert failed == [Forget(Key(MICROBATCH, 0), "out of memory"), stranded(OUT, 0, "out of memory")]


def test_results_for_what_is_not_held_are_ignored() -> None:
    desk = Desk(A)
    assert desk.computed(0) == []
    assert desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "late"), desk.now) == []


# ---- the way back goes wrong -----------------------------------------------------------------------------------------


def handing_back(position: int = 1, own: PeerId = B) -> Desk:
    desk = Desk(own)
    desk.handing_on(position)
    desk.backward(position)
    desk.computed(position)
    return desk


def released_by(position: int, guard: PeerId) -> Tell:
    """Whoever keeps its gradient in case that the hop at `position` is lost need not any more."""
    return Tell(guard, receipt(BACK, position, PASSED_ON))


@pytest.mark.parametrize("guarding", [False, True])
def test_a_lost_predecessor_is_tried_again_and_then_replaced_from_the_gradient_that_is_kept(guarding: bool) -> None:
    desk = handing_back()
    if guarding:
        desk.receipt(A, BACK, 0, ACCEPTED)
    assert desk.lose(A) == []
    assert desk.wait(SUBSTITUTE_AFTER_S / 2) == [sent(A, Backward(MICROBATCH, ABC, 0), 1)]
    desk.now += SUBSTITUTE_AFTER_S / 2
    by_a2 = ABC.with_peer(0, A2)
    assert desk.lose(A) == [sent(A2, Backward(MICROBATCH, by_a2, 0), 1)]
    desk.receipt(A2, BACK, 0, ACCEPTED)
    assert desk.phase(1) is Phase.GUARDING_BACK


def test_a_predecessor_that_has_been_given_up_is_replaced_without_waiting_for_its_link() -> None:
    desk = handing_back()
    assert desk.lose(A) == []
    desk.given_up = {A}
    assert desk.wait(RETRY_S + 0.01) == [sent(A2, Backward(MICROBATCH, ABC.with_peer(0, A2), 0), 1)]


def test_a_predecessor_known_to_be_given_up_is_replaced_at_once() -> None:
    desk = handing_back()
    desk.given_up = {A}
    assert desk.lose(A) == [sent(A2, Backward(MICROBATCH, ABC.with_peer(0, A2), 0), 1)]


@pytest.mark.parametrize("guarding", [False, True])
def test_with_nobody_to_stand_in_the_data_node_is_told_and_asked_what_counts(guarding: bool) -> None:
    desk = handing_back()
    desk.dead = {A2}
    if guarding:
        desk.receipt(A, BACK, 0, ACCEPTED)
    assert desk.lose_for_good(A) == [stranded(BACK, 0, "the link broke"), released_by(1, C)]
    assert desk.phase(1) is Phase.SETTLING
    assert desk.wait(ASK_S) == [Tell(DATA, Unsettled(MICROBATCH))]


def test_who_guards_a_gradient_that_came_home_though_nobody_said_so_asks_what_counts() -> None:
    """The link to the data node broke just when it had the gradient: it has completed the microbatch and refuses a
    second copy."""
    first, second = handing_back(0, A), handing_back(1, B)
    second.receipt(A, BACK, 0, ACCEPTED)
    assert second.phase(1) is Phase.GUARDING_BACK
    assert released_by(0, B) in first.receipt(DATA, BACK, -1, REFUSED)
    second.receipt(A, BACK, 0, PASSED_ON)
    assert second.wait(ASK_S) == [Tell(DATA, Unsettled(MICROBATCH))]
    assert Confirmed(Key(MICROBATCH, 1)) in second.settled(ABC)


def test_nobody_stands_in_for_a_data_node_on_the_way_back() -> None:
    desk = handing_back(0, A)
    assert desk.lose_for_good(DATA) == [stranded(BACK, -1, "the link broke"), released_by(0, B)]


def test_a_refused_gradient_goes_to_a_stand_in_at_once_and_strands_without_one() -> None:
    desk = handing_back()
    assert desk.receipt(A, BACK, 0, REFUSED) == [sent(A2, Backward(MICROBATCH, ABC.with_peer(0, A2), 0), 1)]
    assert desk.receipt(A2, BACK, 0, ACCEPTED) != []
    assert desk.receipt(A2, BACK, 0, REFUSED) == [stranded(BACK, 0, "refused: "), released_by(1, C)]


def test_a_busy_stand_in_is_replaced_by_another_and_the_original_waited_for() -> None:
    desk = handing_back(2, C)
    assert desk.receipt(B, BACK, 1, BUSY, 1.0) == [], "it has the input; a stand-in would have to fetch it"
    desk.receipt(B, BACK, 1, REFUSED)
    assert desk.receipt(B2, BACK, 1, BUSY, 1.0) == [sent(B3, Backward(MICROBATCH, ABC.with_peer(1, B3), 1), 2)]
    assert desk.receipt(B3, BACK, 1, BUSY, 1.0) == []
    assert desk.wait(1.1) == [sent(B3, Backward(MICROBATCH, ABC.with_peer(1, B3), 1), 2)]


def test_the_deadline_comes_also_to_a_gradient_whose_stand_ins_are_all_busy() -> None:
    desk = handing_back(2, C)
    desk.receipt(B, BACK, 1, REFUSED)
    for _ in range(40):
        for stand_in in (B2, B3):
            desk.receipt(stand_in, BACK, 1, BUSY, 0.5)
        desk.wait(1.0)
    assert desk.phase(2) is Phase.SETTLING


def test_a_busy_predecessor_is_asked_again() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.backward(1)
    handed_back = desk.computed(1)
    assert desk.receipt(A, BACK, 0, BUSY, 1.0) == []
    assert desk.wait(1.1) == handed_back


def test_a_backward_that_fails_strands_it() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    failed = desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "not finite"), desk.now)
    assert failed == [Forget(Key(MICROBATCH, 0), "not finite"), stranded(BACK, 0, "not finite")]
