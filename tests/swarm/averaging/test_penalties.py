"""Who is left out of rounds, for how long, and what is forgiven."""

from __future__ import annotations

from swarm.averaging.trust import FORGIVEN_AFTER_S, Penalties
from swarm.vocabulary.backoff import REMEMBERED
from swarm.vocabulary.types import PeerId

A, B = PeerId("A"), PeerId("B")


def test_rubbish_costs_more_from_time_to_time_and_is_forgiven_in_the_end() -> None:
    penalties = Penalties()
    penalties.rubbish.add(A, 0.0)
    assert penalties.excluded(0.0) == frozenset()
    penalties.rubbish.add(A, 10.0)
    assert penalties.excluded(69.0) == {A}
    assert penalties.excluded(71.0) == frozenset()
    penalties.rubbish.add(A, 100.0)
    assert penalties.excluded(219.0) == {A}
    penalties.rubbish.add(A, 221.0 + FORGIVEN_AFTER_S)
    assert penalties.excluded(221.0 + FORGIVEN_AFTER_S) == frozenset(), "it counts as the first one again"


def test_waiting_in_vain_counts_only_in_a_row() -> None:
    penalties = Penalties()
    penalties.waiting.add(A, 0.0)
    penalties.waiting.forgive(A)
    penalties.waiting.add(A, 3.0)
    assert penalties.excluded(3.0) == frozenset()
    penalties.waiting.add(A, 4.0)
    assert penalties.excluded(33.0) == {A}
    assert penalties.excluded(35.0) == frozenset()
    penalties.waiting.add(A, 40.0)
    assert penalties.excluded(99.0) == {A}
    penalties.waiting.forgive(A)
    assert penalties.excluded(99.0) == frozenset()


def test_success_does_not_pay_for_rubbish() -> None:
    penalties = Penalties()
    for at in (0.0, 1.0):
        penalties.rubbish.add(A, at)
    penalties.waiting.forgive(A)
    assert penalties.excluded(2.0) == {A}


def test_who_is_caught_by_an_audit_is_left_out_at_once_and_longer_than_for_rubbish() -> None:
    penalties = Penalties()
    penalties.fraud.add(A, 0.0)
    penalties.silence.add(B, 0.0)
    assert penalties.excluded(299.0) == {A, B}
    assert penalties.excluded(3599.0) == {A}
    assert penalties.excluded(3600.0) == frozenset()
    penalties.fraud.add(A, 3700.0)
    penalties.waiting.forgive(A)
    assert penalties.excluded(3700.0 + 7199.0) == {A}


def test_sentences_and_records_are_bounded() -> None:
    penalties = Penalties()
    for _ in range(2000):
        penalties.rubbish.add(B, 0.0)
        penalties.waiting.add(A, 0.0)
    assert penalties.excluded(599.0) == {A, B}
    assert penalties.excluded(3599.0) == {B}
    assert penalties.excluded(3600.0) == frozenset()
    for number in range(REMEMBERED):
        for _ in range(2):
            penalties.rubbish.add(PeerId(f"peer {number}"), 0.0)
    assert B not in penalties.excluded(1.0)
    assert len(penalties.excluded(1.0) - {A}) == REMEMBERED
