"""Custody, step by step: a stand-in on the way back, the hop before it, and whose gradient counts."""

from __future__ import annotations

import pytest

from swarm.pipeline.custody import ASK_S, MAX_ASKS, RECALL_AGAIN_S, RECALL_PATIENCE_S
from swarm.pipeline.custody_events import (
    Action,
    Arrived,
    BrokenOff,
    Compute,
    Confirmed,
    Forget,
    KeepGradient,
    Key,
    PeerBack,
    Phase,
    Place,
    Retract,
    Tell,
    Work,
)
from swarm.vocabulary.pipeline_messages import Backward, Close, Forward, Purpose, Recall, Settled, Unsettled
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path
from tests.swarm.pipeline.custody_desk import (
    A2,
    ABC,
    ACCEPTED,
    B2,
    B3,
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
    offer,
    receipt,
    sent,
)

BY_B2 = ABC.with_peer(1, B2)
KEY = Key(MICROBATCH, 1)
ASKS_A = Tell(A, Recall(MICROBATCH, BY_B2, 0))


def recalling() -> Desk:
    """B2, which takes B's place between A and C."""
    desk = Desk(B2)
    assert desk.admits(1, BY_B2) is Place.FREE
    assert desk.backward(1, BY_B2) == [KeepGradient(KEY), Tell(C, receipt(BACK, 1, ACCEPTED)), ASKS_A]
    return desk


# ---- the stand-in ----------------------------------------------------------------------------------------------------


def test_a_stand_in_gets_the_gradient_recalls_the_input_and_computes_both_ways_in_one() -> None:
    desk = recalling()
    assert desk.custody.used_slots == 1
    assert desk.forward(1, BY_B2) == [
        Tell(A, receipt(OUT, 1, ACCEPTED)),
        Tell(A, receipt(OUT, 1, PASSED_ON)),
        Compute(KEY, Work.REPLAY, Purpose.TRAIN),
    ]
    assert desk.computed(1) == [sent(A, Backward(MICROBATCH, BY_B2, 0), 1)]
    assert desk.receipt(A, BACK, 0, ACCEPTED)[0] == Tell(C, receipt(BACK, 1, PASSED_ON))


def test_a_stand_in_knows_the_way_back_from_the_input_and_the_way_after_from_the_gradient() -> None:
    desk = recalling()
    desk.forward(1, BY_B2.with_peer(0, A2))
    assert desk.computed(1) == [sent(A2, Backward(MICROBATCH, BY_B2.with_peer(0, A2), 0), 1)]


def test_an_orphan_takes_a_slot_and_is_refused_as_busy_without_one() -> None:
    desk = Desk(B2, slots=1)
    desk.forward(1, BY_B2)
    other = Backward(MicrobatchId(DATA, 8), BY_B2, 1)
    assert desk.custody.admit_backward(other, desk.now).value is Place.BUSY


def test_nobody_stands_in_for_the_start() -> None:
    assert Desk(DATA).admits(-1) is Place.REFUSED


def test_an_orphan_that_breaks_off_leaves_no_trace() -> None:
    desk = Desk(B2)
    desk.admits(1, BY_B2)
    broken = desk.custody.handle(BrokenOff(Backward(MICROBATCH, BY_B2, 1)), desk.now)
    assert broken == [Forget(KEY, "broken off")]


def test_the_input_is_asked_for_again_unless_it_is_on_its_way() -> None:
    desk = recalling()
    assert desk.wait(RECALL_AGAIN_S) == [ASKS_A]
    message = Forward(MICROBATCH, BY_B2, 1, Purpose.TRAIN, LIFETIME_S)
    assert desk.custody.admit_forward(message, desk.now).value is Place.FREE
    assert desk.wait(RECALL_AGAIN_S) == []
    desk.custody.handle(BrokenOff(message), desk.now)
    assert desk.wait(0.0) == [ASKS_A]
    assert desk.lose(A) == [], "it asks by the clock"


def test_a_gradient_that_is_not_needed_any_more_is_let_go_and_not_added() -> None:
    desk = recalling()
    told, gone = desk.receipt(A, BACK, 0, PASSED_ON)
    assert isinstance(told, Tell)
    assert (told.to, told.message.status) == (C, PASSED_ON)  # type: ignore[union-attr]
    assert gone == Forget(KEY, "the gradient is there already")


def test_a_gradient_whose_input_cannot_be_had_is_given_back() -> None:
    desk = recalling()
    told, _ = desk.receipt(A, BACK, 0, REFUSED)
    assert isinstance(told, Tell)
    assert (told.to, told.message.status) == (C, REFUSED)  # type: ignore[union-attr]
    desk = recalling()
    assert desk.receipt(A, BACK, 0, BUSY) == []
    waited = [action for _ in range(int(RECALL_PATIENCE_S / RECALL_AGAIN_S)) for action in desk.wait(RECALL_AGAIN_S)]
    assert isinstance(waited[-1], Forget)
    assert len(desk.custody) == 0


def test_a_second_gradient_waits_until_it_is_known_what_becomes_of_the_first() -> None:
    desk = recalling()
    assert desk.admits(1, BY_B2) is Place.FREE
    assert desk.backward(1, BY_B2) == [Tell(C, receipt(BACK, 1, ACCEPTED))], "the same again"
    assert desk.admits(1, BY_B2.with_peer(2, B3)) is Place.REFUSED, "no replica of C's module"


# ---- the hop before --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [None, ACCEPTED, PASSED_ON])
def test_a_recalled_output_goes_to_the_stand_in(status: object) -> None:
    desk = Desk(A)
    desk.handing_on()
    if status is not None:
        desk.receipt(B, OUT, 1, status)  # type: ignore[arg-type]
    assert desk.recall(B2, 0, BY_B2) == [offer(B2, BY_B2, 1)]
    assert desk.recall(B2, 0, BY_B2) == [], "it is on its way"
    desk.receipt(B2, OUT, 1, PASSED_ON)
    assert desk.phase(0) is Phase.AWAITING
    assert desk.recall(B2, 0, BY_B2) == [offer(B2, BY_B2, 1)], "it has lost it"


def test_the_data_node_sends_its_embedding_to_the_stand_in_of_the_first_hop() -> None:
    desk = Desk(DATA)
    desk.turned()
    by_a2 = ABC.with_peer(0, A2)
    assert desk.recall(A2, -1, by_a2) == [offer(A2, by_a2, 0)]


@pytest.mark.parametrize("stage", ["computing", "handed back", "settling"])
def test_who_has_the_gradient_needs_no_second(stage: str) -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    if stage != "computing":
        desk.computed(0)
    if stage == "settling":
        desk.receipt(DATA, BACK, -1, ACCEPTED)
    (told,) = desk.recall(B2, 0, BY_B2)
    assert isinstance(told, Tell)
    assert (told.to, told.message.status) == (B2, PASSED_ON)  # type: ignore[union-attr]


def test_the_first_gradient_is_taken_and_every_later_one_let_go() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.recall(B2, 0, BY_B2)
    assert desk.backward(0)[0] == Tell(B, receipt(BACK, 0, ACCEPTED)), "the lost one is back, and faster"
    assert desk.computed(0) == [sent(DATA, Backward(MICROBATCH, ABC, -1), 0)], "it is the one on the path"
    assert desk.backward(0, BY_B2) == [Tell(B2, receipt(BACK, 0, PASSED_ON))]


@pytest.mark.parametrize(
    ("sender", "path"),
    [(B2, ABC), (C, ABC.with_peer(1, C)), (B2, Path(DATA, (ABC.hops[0], Hop(ModuleId(3), B2))))],
    ids=["not on the path", "another module", "other stages"],
)
def test_nobody_else_may_recall(sender: str, path: Path) -> None:
    desk = Desk(A)
    desk.awaiting()
    (told,) = desk.recall(sender, 0, path)  # type: ignore[arg-type]
    assert isinstance(told, Tell)
    assert told.message.status is REFUSED  # type: ignore[union-attr]
    assert desk.phase(0) is Phase.AWAITING


def test_what_is_not_held_or_not_computed_yet_cannot_be_recalled() -> None:
    desk = Desk(A)
    (told,) = desk.recall(B2, 0, BY_B2)
    assert told.message.status is REFUSED  # type: ignore[union-attr]
    desk.forward(0)
    (told,) = desk.recall(B2, 0, BY_B2)
    assert told.message.status is BUSY  # type: ignore[union-attr]


# ---- whose gradient counts -------------------------------------------------------------------------------------------


def settling() -> Desk:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    desk.computed(0)
    desk.receipt(DATA, BACK, -1, ACCEPTED)
    assert desk.phase(0) is Phase.SETTLING
    return desk


def test_a_hop_on_the_final_path_counts_and_another_takes_its_gradient_back() -> None:
    key = Key(MICROBATCH, 0)
    assert settling().settled(ABC) == [Confirmed(key), Forget(key, "complete")]
    assert settling().settled(ABC.with_peer(0, A2)) == [Retract(key), Forget(key, "complete")]
    assert settling().settled(ABC.with_peer(0, A2), sender=B) == [], "only the data node says so"


def test_a_hop_that_hears_nothing_asks_and_in_the_end_takes_its_gradient_back() -> None:
    desk, asks = settling(), Tell(DATA, Unsettled(MICROBATCH))
    desk.lose(DATA)
    for _ in range(MAX_ASKS):
        assert desk.wait(1000 * ASK_S) == [asks], "however long the machine slept"
    assert desk.wait(ASK_S)[0] == Retract(Key(MICROBATCH, 0))
    assert len(desk.custody) == 0


def test_a_hop_asks_at_once_when_the_link_to_the_data_node_is_back() -> None:
    """Whoever was frozen may have a moment only before the data node leaves."""
    desk, asks = settling(), Tell(DATA, Unsettled(MICROBATCH))
    for _ in range(2 * MAX_ASKS):
        desk.lose(DATA)
        assert desk.custody.handle(PeerBack(DATA), desk.now) == [asks]
        assert desk.custody.handle(PeerBack(B), desk.now) == []
    assert desk.wait(ASK_S) == [asks], "it goes on asking by the clock"
    assert desk.settled(ABC) == [Confirmed(Key(MICROBATCH, 0)), Forget(Key(MICROBATCH, 0), "complete")]


def test_what_was_abandoned_is_taken_back() -> None:
    desk = settling()
    gone = desk.custody.handle(Arrived(DATA, Close(MICROBATCH, "abandoned")), desk.now)
    assert gone == [Retract(Key(MICROBATCH, 0)), Forget(Key(MICROBATCH, 0), "closed: abandoned")]


def test_a_data_node_answers_who_asks_unless_it_is_under_way() -> None:
    desk = Desk(DATA)

    def asked() -> list[Action]:
        return desk.custody.handle(Arrived(A, Unsettled(MICROBATCH)), desk.now)

    (told,) = asked()
    assert isinstance(told, Tell)
    assert isinstance(told.message, Close)
    desk.turned()
    assert asked() == []
    desk.backward(-1)
    desk.computed(-1)
    assert asked() == [Tell(A, Settled(MICROBATCH, ABC))]
    assert desk.recall(A2, -1, ABC.with_peer(0, A2))[0].message.status is PASSED_ON  # type: ignore[union-attr]


def test_a_hop_with_too_many_unsettled_gradients_takes_no_more() -> None:
    desk = Desk(A, slots=2)
    for number in range(5):
        message = Forward(MicrobatchId(DATA, number), ABC, 0, Purpose.TRAIN, LIFETIME_S)
        place = desk.custody.admit_forward(message, desk.now)
        if place.value is not Place.FREE:
            assert number == 4
            assert "unsettled" in place.reason
            return
        holding = desk.custody.get(Key(message.microbatch, 0))
        assert holding is not None
        desk.custody._await_settlement(holding, desk.now)
    raise AssertionError("it took all of them")
