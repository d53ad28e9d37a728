"""Custody, step by step: second copies, deadlines, closing, a data node that vanishes."""

from __future__ import annotations

import math

import pytest

from swarm.pipeline.custody import DATA_NODE_GRACE_S
from swarm.pipeline.custody_events import (
    Arrived,
    Compute,
    ComputeFailed,
    Event,
    Finished,
    Forget,
    Key,
    PeerBack,
    Phase,
    Tell,
    Work,
)
from swarm.vocabulary.pipeline_messages import Backward, Close, Forward, Purpose, Receipt, Settled, Stranded
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, PeerId
from tests.swarm.pipeline.custody_desk import (
    A2,
    ABC,
    ACCEPTED,
    B2,
    BACK,
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
    receipt,
    sent,
    stranded,
)

# ---- the same microbatch again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("repaired_since", [False, True])
def test_the_same_forward_again_is_answered_and_not_computed(repaired_since: bool) -> None:
    desk = Desk(A)
    desk.forward(0)
    accepted, passed_on = Tell(DATA, receipt(OUT, 0, ACCEPTED)), Tell(DATA, receipt(OUT, 0, PASSED_ON))
    assert desk.forward(0) == [accepted]
    desk.computed(0)
    if repaired_since:
        desk.lose(B)
    assert desk.forward(0) == [accepted]
    desk.receipt(B2 if repaired_since else B, OUT, 1, ACCEPTED)
    assert desk.forward(0) == [accepted, passed_on]
    assert desk.phase(0) is Phase.GUARDING


@pytest.mark.parametrize("progress", ["computing", "handing on", "awaiting"])
def test_a_copy_by_a_repaired_path_replaces_one_that_has_no_gradient_yet(progress: str) -> None:
    desk = Desk(B)
    desk.forward(1)
    if progress != "computing":
        desk.computed(1)
    if progress == "awaiting":
        desk.receipt(C, OUT, 2, PASSED_ON)
    repaired = ABC.with_peer(0, A2)
    assert desk.forward(1, repaired) == [
        Forget(Key(MICROBATCH, 1), "replaced by a repaired path"),
        Tell(A2, receipt(OUT, 1, ACCEPTED)),
        Compute(Key(MICROBATCH, 1), Work.FORWARD, Purpose.TRAIN),
    ]
    assert desk.computed(1) == [offer(C, repaired, 2)]
    assert desk.custody.used_slots == 1


def test_once_the_gradient_is_there_a_copy_by_another_path_only_changes_the_way_back() -> None:
    desk, by_a2 = Desk(B), ABC.with_peer(0, A2)
    desk.handing_on(1)
    desk.backward(1)
    receipts = [Tell(A2, receipt(OUT, 1, status)) for status in (ACCEPTED, PASSED_ON)]
    assert desk.forward(1, by_a2) == receipts
    assert desk.phase(1) is Phase.BACKWARD
    assert desk.computed(1) == [sent(A2, Backward(MICROBATCH, by_a2, 0), 1)]
    assert desk.forward(1, ABC) == [
        *(Tell(A, receipt(OUT, 1, status)) for status in (ACCEPTED, PASSED_ON)),
        sent(A, Backward(MICROBATCH, ABC, 0), 1),
    ]


def test_it_turns_round_only_once_whoever_brings_it() -> None:
    desk, by_c2 = Desk(DATA), ABC.with_peer(2, C2)
    desk.turned()
    receipts = [Tell(C2, receipt(OUT, 3, status)) for status in (ACCEPTED, PASSED_ON)]
    assert desk.forward(3, by_c2) == [*receipts, sent(C2, Backward(MICROBATCH, by_c2, 2), 3)], "the same gradient"
    desk.receipt(C2, BACK, 2, PASSED_ON)
    (told,) = desk.forward(3, ABC)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.to, told.message.status) == (C, REFUSED)
    desk.backward(-1)
    desk.computed(-1)
    assert len(desk.custody) == 0


def test_a_loss_of_the_last_hop_after_it_has_passed_the_gradient_on_matters_no_more() -> None:
    desk = Desk(DATA)
    desk.turned()
    desk.receipt(C, BACK, 2, PASSED_ON)
    assert desk.lose(C) == []
    desk.custody.touch(Key(MICROBATCH, -1), desk.now + 10 * LIFETIME_S)
    assert desk.wait(2 * LIFETIME_S) == [], "the end lasts as long as its start"


def test_an_end_whose_receipt_is_late_ends_with_its_start() -> None:
    desk = Desk(DATA)
    desk.turned()
    desk.receipt(C, BACK, 2, ACCEPTED)
    desk.backward(-1)
    assert Finished(MICROBATCH, ABC) in desk.computed(-1)
    assert len(desk.custody) == 0
    assert desk.lose(C) == []


# ---- deadlines, closing, a data node that vanishes -------------------------------------------------------------------


def test_a_hop_forgets_in_silence_when_nothing_happens_any_more() -> None:
    desk = Desk(A)
    desk.awaiting()
    assert desk.wait(LIFETIME_S - 1) == []
    assert desk.wait(1.0) == [Forget(Key(MICROBATCH, 0), "nothing happened to it for 30 s")]


def test_whatever_happens_puts_the_deadline_off() -> None:
    desk = Desk(A)
    desk.handing_on()
    for status in (ACCEPTED, PASSED_ON):
        assert desk.wait(LIFETIME_S - 1) == []
        desk.receipt(B, OUT, 1, status)
    assert desk.wait(LIFETIME_S - 1) == []
    assert len(desk.custody) == 1


def test_a_data_node_strands_its_own_at_the_deadline() -> None:
    desk = Desk(DATA)
    desk.start()
    desk.computed(-1)
    desk.receipt(A, OUT, 0, PASSED_ON)
    desk.now += LIFETIME_S - 1
    desk.custody.touch(Key(MICROBATCH, -1), desk.now)
    assert desk.wait(LIFETIME_S - 1) == [], "it has moved elsewhere"
    gone, told = desk.wait(1.0)
    assert isinstance(gone, Forget)
    assert told == stranded(OUT, -1, "lost on its path")


def test_abandoning_forgets_both_ends_and_tells_every_hop() -> None:
    desk = Desk(DATA)
    desk.turned()
    actions = desk.custody.abandon(MICROBATCH, "enough")
    assert set(actions) == {
        Forget(Key(MICROBATCH, -1), "enough"),
        Forget(Key(MICROBATCH, 3), "enough"),
        *(Tell(peer, Close(MICROBATCH, "enough")) for peer in (A, B, C)),
    }
    assert desk.custody.abandon(MICROBATCH, "again") == []


def test_abandoning_also_tells_the_hops_of_a_repaired_path() -> None:
    desk = Desk(DATA)
    desk.start()
    desk.computed(-1)
    desk.forward(3, ABC.with_peer(1, B2))
    told = {action.to for action in desk.custody.abandon(MICROBATCH, "enough") if isinstance(action, Tell)}
    assert told == {A, B, B2, C}


def test_only_its_own_data_node_may_close_a_microbatch() -> None:
    desk = Desk(A)
    desk.awaiting()
    close = Close(MICROBATCH, "abandoned")
    assert desk.custody.handle(Arrived(B, close), desk.now) == []
    assert len(desk.custody) == 1
    assert desk.custody.handle(Arrived(DATA, close), desk.now) == [Forget(Key(MICROBATCH, 0), "closed: abandoned")]


def test_closing_one_microbatch_leaves_the_others() -> None:
    desk = Desk(A)
    desk.awaiting()
    other = Forward(MicrobatchId(DATA, 8), ABC, 0, Purpose.TRAIN, LIFETIME_S)
    desk.custody.admit_forward(other, desk.now)
    desk.custody.handle(Arrived(DATA, Close(MICROBATCH, "abandoned")), desk.now)
    assert desk.custody.get(Key(other.microbatch, 0)) is not None


@pytest.mark.parametrize("own", [A, C])
def test_a_vanished_data_nodes_microbatches_are_kept_for_a_grace_only(own: PeerId) -> None:
    desk, position = Desk(own), ABC.hops.index(Hop(ModuleId(1 if own == A else 3), own))
    desk.handing_on(position)
    desk.receipt(ABC.peer_at(position + 1), OUT, position + 1, ACCEPTED)
    assert desk.lose(DATA) == []
    assert desk.wait(DATA_NODE_GRACE_S / 2) == []
    assert len(desk.wait(DATA_NODE_GRACE_S / 2)) == 1
    assert len(desk.custody) == 0


def test_a_step_while_the_data_node_is_gone_gives_a_microbatch_another_grace_not_a_lifetime() -> None:
    desk = Desk(A)
    desk.handing_on(0)
    desk.lose(DATA)
    desk.wait(DATA_NODE_GRACE_S / 2)
    desk.receipt(B, OUT, 1, ACCEPTED)
    assert desk.wait(DATA_NODE_GRACE_S - 1) == []
    assert len(desk.wait(1.0)) == 1


@pytest.mark.parametrize(
    "sign",
    [
        PeerBack(DATA),
        Arrived(DATA, Settled(MicrobatchId(DATA, 8), ABC)),
        Arrived(DATA, receipt(OUT, 1, ACCEPTED)),
    ],
)
def test_a_data_node_that_is_back_has_its_microbatches_kept_as_before(sign: Event) -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.lose(DATA)
    desk.wait(DATA_NODE_GRACE_S / 2)
    desk.custody.handle(sign, desk.now)
    assert desk.wait(LIFETIME_S - 1) == []
    assert len(desk.wait(1.0)) == 1


def test_the_grace_never_lengthens_a_deadline() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.wait(LIFETIME_S - 1)
    desk.lose(DATA)
    assert len(desk.wait(1.0)) == 1


def test_an_end_that_has_been_passed_back_has_no_deadline_of_its_own() -> None:
    desk = Desk(DATA)
    desk.turned()
    desk.receipt(C, BACK, 2, PASSED_ON)
    end = desk.held(3)
    assert end is not None
    assert end.deadline == math.inf


def test_a_long_explanation_is_cut_to_what_a_message_carries() -> None:
    desk = Desk(A)
    desk.forward(0)
    failed = desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "x" * 1000), desk.now)
    assert isinstance(failed[1], Tell)
    assert isinstance(failed[1].message, Stranded)
    assert len(failed[1].message.detail) == 256
