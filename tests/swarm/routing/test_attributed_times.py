"""Receipts that pass become measurements of whoever sent them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.attribution import LOST_S, MAX_TRACES, PathTimes
from swarm.routing.measured_times import LEAST_LINK_SHARE, MeasuredTimes
from swarm.vocabulary.pipeline_messages import Direction, Receipt, ReceiptStatus
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.swarm.membership.announcements import announcement
from tests.swarm.pipeline.custody_desk import A2, ABC, BACK, DATA, MICROBATCH, OUT, A, B, C

TOKENS = 100


class Travel:
    """One microbatch on its way by A, B and C. It sets out at 0."""

    def __init__(self, queue: dict[PeerId, int] | None = None, size: float = 1.0) -> None:
        self.book = MeasuredTimes(DATA, TOKENS)
        self.times = PathTimes(DATA, self.book, lambda peer: 4)
        self.times.launched(MICROBATCH, ABC, queue or {}, 0.0, size)

    def passed(self, sender: PeerId, direction: Direction, position: int, now: float) -> None:
        self.times.passed(sender, Receipt(MICROBATCH, direction, position, ReceiptStatus.PASSED_ON), now)

    def out(self) -> None:
        """To the loss at 10: A takes 1 second, B 2, C 3."""
        for peer, direction, position, now in ((A, OUT, 0, 1.0), (B, OUT, 1, 3.0), (C, OUT, 2, 6.0)):
            self.passed(peer, direction, position, now)
        self.times.loss_known(MICROBATCH, 10.0)

    def back(self, first: PeerId = A) -> None:
        """C takes 6 seconds, B 4, A 2."""
        for peer, position, now in ((C, 2, 16.0), (B, 1, 20.0), (first, 0, 22.0)):
            self.passed(peer, BACK, position, now)

    def seconds(self, peer: PeerId) -> float | None:
        known = self.book.visit(peer)
        return None if known is None else known.mean


@pytest.fixture
def travel() -> Travel:
    return Travel()


def test_long_documents_and_the_queue_of_others_make_no_peer_look_slower() -> None:
    travel = Travel(size=2.0)
    travel.out()
    travel.back()
    assert [travel.seconds(peer) for peer in (A, B, C)] == pytest.approx([1.5, 3.0, 4.5])
    travel = Travel({B: 2})
    travel.out()
    travel.back()
    assert travel.seconds(B) == pytest.approx(2.0)


def test_receipts_that_come_when_it_is_home_already_count(travel: Travel) -> None:
    """As they do wherever a round trip is longer than what we compute: those of the first hop always."""
    travel.out()
    travel.times.completed(MICROBATCH, 15.0)
    travel.back()
    assert [travel.seconds(peer) for peer in (A, B, C)] == pytest.approx([3.0, 6.0, 9.0])


@given(st.permutations(range(7)))
def test_the_order_in_which_receipts_come_does_not_matter(order: list[int]) -> None:
    words: list[tuple[PeerId, Direction, int, float]] = [
        (A, OUT, 0, 1.0),
        (B, OUT, 1, 3.0),
        (C, OUT, 2, 6.0),
        (DATA, BACK, 3, 10.0),
        (C, BACK, 2, 16.0),
        (B, BACK, 1, 20.0),
        (A, BACK, 0, 22.0),
    ]
    travel = Travel()
    for place in order:
        travel.passed(*words[place])
    assert [travel.seconds(peer) for peer in (A, B, C)] == pytest.approx([3.0, 6.0, 9.0])


def test_a_visit_whose_two_ways_were_anothers_each_is_nobodys_measurement(travel: Travel) -> None:
    travel.out()
    travel.back(first=A2)
    assert [travel.seconds(peer) for peer in (A, A2)] == [None, None]
    assert travel.seconds(B) == pytest.approx(6.0)


def test_who_stood_in_is_measured_instead_of_who_was_planned(travel: Travel) -> None:
    travel.passed(A2, OUT, 0, 1.0)
    travel.times.loss_known(MICROBATCH, 10.0)
    travel.passed(B, BACK, 1, 10.0)
    travel.passed(A2, BACK, 0, 14.0)
    assert travel.seconds(A2) == pytest.approx(5.0)
    assert travel.seconds(A) is None


def test_a_hop_that_was_skipped_is_not_measured_and_the_one_after_it_is(travel: Travel) -> None:
    for peer, direction, position, now in ((A, OUT, 0, 1.0), (C, OUT, 1, 4.0)):
        travel.passed(peer, direction, position, now)
    travel.times.loss_known(MICROBATCH, 10.0)
    for peer, position, now in ((C, 1, 16.0), (A, 0, 18.0)):
        travel.passed(peer, BACK, position, now)
    assert [travel.seconds(peer) for peer in (A, B, C)] == [pytest.approx(3.0), None, pytest.approx(9.0)]


def test_a_receipt_that_comes_again_counts_once_and_moves_no_clock(travel: Travel) -> None:
    travel.out()
    travel.passed(A, OUT, 0, 11.0)
    travel.back()
    travel.passed(C, BACK, 2, 30.0)
    assert travel.book.visit(C).samples == 1
    assert travel.seconds(C) == pytest.approx(9.0)


@pytest.mark.parametrize("position", [-2, 4, 255])
def test_a_position_off_the_path_moves_no_clock(travel: Travel, position: int) -> None:
    travel.out()
    travel.passed(A, BACK, position, 15.0)
    travel.back()
    assert travel.seconds(C) == pytest.approx(9.0)


def test_the_ends_are_not_measured_but_their_time_is_nobody_elses(travel: Travel) -> None:
    travel.passed(DATA, OUT, -1, 0.5)
    travel.out()
    travel.passed(DATA, BACK, 3, 12.0)
    travel.back()
    assert travel.seconds(DATA) is None
    assert travel.seconds(A) == pytest.approx(2.5)
    assert travel.seconds(C) == pytest.approx(7.0)


def test_what_is_lost_counts_against_the_link_on_which_it_should_have_moved_on(travel: Travel) -> None:
    assert travel.times.holders(MICROBATCH) == {ABC.hops[0]: True}
    travel.passed(A, OUT, 0, 2.0)
    assert travel.times.holders(MICROBATCH) == dict.fromkeys(ABC.hops[1:], True), "nobody knows which of the two"
    travel.times.passed(B, Receipt(MicrobatchId(DATA, 99), OUT, 1, ReceiptStatus.PASSED_ON), 3.0)
    assert travel.times.holders(MICROBATCH) == {ABC.hops[1]: False, ABC.hops[2]: True}, "B passed another one on"
    travel.times.lost(MICROBATCH, 32.0)
    assert travel.times.holders(MICROBATCH) == {}
    links = travel.book.costs([announcement(name) for name in (A, B, C)]).message_s
    assert links[B][C] == pytest.approx(LEAST_LINK_SHARE * 30.0), "B has had it for 30 s"
    assert links[A][B] < 1.0


def test_what_is_lost_counts_against_everybody_on_its_path_however_fast_that_went(travel: Travel) -> None:
    """A hop that spoils all at once must not look fast; a measured one is not ruined by the fault of another."""
    travel.book.visited(B, 1.0)
    travel.out()
    travel.times.lost(MicrobatchId(DATA, 99), 10.0)  # never launched
    assert travel.seconds(A) is None
    travel.times.lost(MICROBATCH, 10.5)
    travel.times.loss_known(MICROBATCH, 11.0)
    travel.back()
    assert [travel.seconds(peer) for peer in (A, B, C)] == pytest.approx([10.5, 1.2, 10.5])
    travel.times.launched(MICROBATCH, ABC, {}, 20.0)
    travel.times.lost(MICROBATCH, 20.001)
    assert travel.seconds(A) == pytest.approx((10.5 + LOST_S) / 2)


def claimed(direction: Direction, position: int, waited_s: float, computed_s: float, sent_s: float) -> Receipt:
    return Receipt(MICROBATCH, direction, position, ReceiptStatus.PASSED_ON, 0.0, "", waited_s, computed_s, sent_s)


def forward_s(travel: Travel, peer: PeerId) -> float:
    return travel.book.costs([announcement(each, k) for k, each in enumerate((A, B, C), start=1)]).forward_s[peer]


def test_waiting_computing_and_sending_are_told_apart(travel: Travel) -> None:
    travel.times.passed(DATA, claimed(OUT, -1, 0.0, 0.125, 0.5), 0.625)
    travel.times.passed(A, claimed(OUT, 0, 1.0, 0.5, 0.25), 2.375)
    assert forward_s(travel, DATA) == 0.125
    assert forward_s(travel, A) == 0.5
    assert travel.book.waiting_s() == {A: 1.0}


def test_who_says_it_is_fast_and_is_not_counts_as_slow(travel: Travel) -> None:
    travel.times.passed(A, claimed(OUT, 0, 0.0, 0.001, 0.001), 2.0)
    assert forward_s(travel, A) == pytest.approx(2.0, abs=0.01)


def test_waiting_is_believed_up_to_a_full_queue(travel: Travel) -> None:
    travel.times.passed(A, claimed(OUT, 0, 100.0, 0.01, 0.0), 2.0)
    assert travel.book.waiting_s()[A] == pytest.approx(0.09), "three slots more, each out and back"
    assert forward_s(travel, A) == pytest.approx(1.91)


def test_a_completed_microbatch_shows_the_share_of_sending_that_the_link_takes(travel: Travel) -> None:
    now = 0.0
    for peer, direction, position in ((DATA, OUT, -1), (A, OUT, 0), (B, OUT, 1), (C, OUT, 2)):
        now += 3.0
        travel.times.passed(peer, claimed(direction, position, 0.0, 1.0, 2.0), now)
    travel.times.loss_known(MICROBATCH, now := now + 1.0)
    for peer, position in ((DATA, 3), (C, 2), (B, 1), (A, 0)):
        now += 3.0 if peer != DATA else 2.0
        travel.times.passed(peer, claimed(BACK, position, 0.0, 1.0, 2.0), now)
    travel.times.completed(MICROBATCH, now - 4.0)
    assert travel.book.costs([announcement(A, 1)]).message_s[DATA][A] == pytest.approx(2.0 * (16.0 - 4.0) / 16.0)


def test_journeys_that_never_end_are_forgotten(travel: Travel) -> None:
    for number in range(MAX_TRACES):
        travel.times.launched(MicrobatchId(DATA, 1000 + number), ABC, {}, 0.0)
    travel.times.passed(A, claimed(OUT, 0, 0.0, 1.0, 0.0), 1.0)
    assert travel.book.waiting_s() == {}
