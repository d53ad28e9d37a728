from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.vocabulary.statistics import REMEMBERED, Exclusions, ExponentialBackoff
from swarm.vocabulary.types import PeerId

A = PeerId("a")
BACKOFF = ExponentialBackoff(2.0, 10.0, free=1)


def test_a_pause_doubles_up_to_its_bound() -> None:
    assert [BACKOFF.seconds(failures) for failures in range(6)] == [0, 0, 2, 4, 8, 10]
    assert BACKOFF.seconds(10**9) == 10.0


@pytest.mark.parametrize(("forgiven_after_s", "pause_s"), [(5.0, 0.0), (6.0, 4.0)])
def test_offences_are_forgiven_so_long_after_the_end_of_a_pause(forgiven_after_s: float, pause_s: float) -> None:
    exclusions = Exclusions(BACKOFF, forgiven_after_s)
    assert [exclusions.add(A, 0.0), exclusions.add(A, 1.0)] == [0.0, 2.0]
    assert [exclusions.excluded(now) for now in (2.9, 3.0)] == [{A}, frozenset()]
    assert exclusions.add(A, 8.5) == pause_s


def test_who_is_forgiven_begins_anew_and_only_so_many_are_remembered() -> None:
    exclusions = Exclusions(ExponentialBackoff(2.0, 10.0))
    exclusions.add(A, 0.0)
    exclusions.forgive(A)
    assert exclusions.add(A, 0.0) == 2.0
    for number in range(REMEMBERED):
        exclusions.add(PeerId(str(number)), 0.0)
    assert A not in exclusions.excluded(0.0)
    assert len(exclusions.excluded(0.0)) == REMEMBERED


def test_a_pause_is_used_up_by_waiting_and_ends_when_forgiven() -> None:
    exclusions = Exclusions(ExponentialBackoff(2.0, 3.0))
    exclusions.add(A, 100.0)
    assert [exclusions.left_s(A, now) for now in (100.0, 101.5, 103.0)] == [2.0, 0.5, 0.0]
    assert exclusions.left_s(PeerId("another"), 100.0) == 0.0
    exclusions.forgive(A)
    assert exclusions.left_s(A, 100.0) == 0.0


@given(st.integers(1, 200), st.floats(0, 1))
def test_a_pause_is_never_longer_than_the_limit_nor_less_than_half_of_the_first(failures: int, jitter: float) -> None:
    exclusions = Exclusions(ExponentialBackoff(0.5, 3.0), jitter=lambda: jitter)
    for _ in range(failures):
        exclusions.add(A, 100.0)
    assert 0.25 <= exclusions.left_s(A, 100.0) <= 3.0 + 1e-9


def test_the_bound_of_remembered_peers_can_be_set() -> None:
    exclusions = Exclusions(ExponentialBackoff(2.0, 10.0), remembered=2)
    for peer in ("a", "b", "c"):
        exclusions.add(PeerId(peer), 0.0)
    assert exclusions.excluded(0.0) == {"b", "c"}
