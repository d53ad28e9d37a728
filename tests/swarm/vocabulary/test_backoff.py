from __future__ import annotations

import pytest

from swarm.vocabulary.backoff import REMEMBERED, Exclusions, ExponentialBackoff
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
