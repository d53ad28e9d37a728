"""Who is left out of rounds, for how long, and what is forgiven."""

from __future__ import annotations

from swarm.averaging.penalties import FORGIVEN_AFTER_S, REMEMBERED, Offences
from swarm.vocabulary.types import PeerId

A, B = PeerId("A"), PeerId("B")


def test_rubbish_costs_more_from_time_to_time_and_is_forgiven_in_the_end() -> None:
    offences = Offences()
    offences.sent_rubbish(A, 0.0)
    assert offences.excluded(0.0) == frozenset()
    offences.sent_rubbish(A, 10.0)
    assert offences.excluded(69.0) == {A}
    assert offences.excluded(71.0) == frozenset()
    offences.sent_rubbish(A, 100.0)
    assert offences.excluded(219.0) == {A}
    offences.sent_rubbish(A, 221.0 + FORGIVEN_AFTER_S)
    assert offences.excluded(221.0 + FORGIVEN_AFTER_S) == frozenset(), "it counts as the first one again"


def test_waiting_in_vain_counts_only_in_a_row() -> None:
    offences = Offences()
    offences.kept_waiting(A, 0.0)
    offences.delivered(A)
    offences.kept_waiting(A, 3.0)
    assert offences.excluded(3.0) == frozenset()
    offences.kept_waiting(A, 4.0)
    assert offences.excluded(33.0) == {A}
    assert offences.excluded(35.0) == frozenset()
    offences.kept_waiting(A, 40.0)
    assert offences.excluded(99.0) == {A}
    offences.delivered(A)
    assert offences.excluded(99.0) == frozenset()


def test_success_does_not_pay_for_rubbish() -> None:
    offences = Offences()
    for at in (0.0, 1.0):
        offences.sent_rubbish(A, at)
    offences.delivered(A)
    assert offences.excluded(2.0) == {A}


def test_who_is_caught_by_an_audit_is_left_out_at_once_and_longer_than_for_rubbish() -> None:
    offences = Offences()
    offences.was_caught(A, certain=True, now=0.0)
    offences.was_caught(B, certain=False, now=0.0)
    assert offences.excluded(299.0) == {A, B}
    assert offences.excluded(3599.0) == {A}
    assert offences.excluded(3600.0) == frozenset()
    offences.was_caught(A, certain=True, now=3700.0)
    offences.delivered(A)
    assert offences.excluded(3700.0 + 7199.0) == {A}


def test_sentences_and_records_are_bounded() -> None:
    offences = Offences()
    for _ in range(2000):
        offences.sent_rubbish(B, 0.0)
        offences.kept_waiting(A, 0.0)
    assert offences.excluded(599.0) == {A, B}
    assert offences.excluded(3599.0) == {B}
    assert offences.excluded(3600.0) == frozenset()
    for number in range(REMEMBERED):
        for _ in range(2):
            offences.sent_rubbish(PeerId(f"peer {number}"), 0.0)
    assert B not in offences.excluded(1.0)
    assert len(offences.excluded(1.0) - {A}) == REMEMBERED
