"""What is objected to in a reducer's result, given figures."""

from __future__ import annotations

import math

import pytest

from swarm.rounds.audits import LONGER_THAN_OURS, LONGEST, OPPOSED, SHORTEST, Beside, oddities
from swarm.vocabulary import PeerId

OWN, A, B = PeerId("own"), PeerId("a"), PeerId("b")


def beside(reducer: PeerId, *, length: float, cosine: float, ours: float = 0.5, share: float = 0.25) -> Beside:
    return Beside(reducer, share, ours * ours, length * length, cosine * ours * length)


def judged(*pieces: Beside) -> dict[PeerId, str]:
    """Three members, alike: norm 1, coefficient 1/3. Every piece is a quarter, where each has half of its norm."""
    return oddities(OWN, pieces, 1 / 3, 1.0, 1.0)


HONEST = beside(OWN, length=0.3, cosine=0.6)


@pytest.mark.parametrize("members", [2, 3, 9, 256])
def test_replicas_with_nothing_in_common_are_honest(members: int) -> None:
    """The mean is then 1 / sqrt(members) of the length, and has as much of ours in it; with a little noise."""
    usual = 1 / math.sqrt(members)
    pieces = [beside(A, length=0.5 * usual, cosine=usual - noise) for noise in (-0.1, 0.0, 0.1)]
    assert oddities(OWN, pieces, 1 / members, 1.0, 1.0) == {}


def test_a_mean_that_points_away_is_odd() -> None:
    assert judged(HONEST, beside(A, length=0.3, cosine=OPPOSED + 0.01)) == {}
    found = judged(HONEST, beside(A, length=0.3, cosine=OPPOSED - 0.01), beside(B, length=0.3, cosine=0.5))
    assert set(found) == {A}
    assert "points away" in found[A]


def test_one_piece_of_four_is_enough() -> None:
    pieces = [beside(A, length=0.3, cosine=0.6) for _ in range(3)]
    assert set(judged(HONEST, *pieces, beside(A, length=0.3, cosine=-1.0))) == {A}


def test_a_mean_longer_than_the_norms_allow_is_odd() -> None:
    assert judged(beside(A, length=0.5 * LONGEST * 0.99, cosine=0.9)) == {}
    assert set(judged(beside(A, length=0.5 * LONGEST * 1.01, cosine=0.9))) == {A}


def test_a_mean_much_longer_than_those_that_we_make_is_odd() -> None:
    ours = beside(OWN, length=0.05, cosine=0.3)
    assert judged(ours, beside(A, length=0.05 * LONGER_THAN_OURS * 0.99, cosine=0.3)) == {}
    assert set(judged(ours, beside(A, length=0.05 * LONGER_THAN_OURS * 1.01, cosine=0.3))) == {A}


def test_zeros_where_ours_are_none_are_odd() -> None:
    least = SHORTEST * 0.5 / 3
    assert judged(HONEST, beside(A, length=1.01 * least, cosine=0.3)) == {}
    assert set(judged(HONEST, beside(A, length=0.0, cosine=0.0))) == {A}


def test_where_ours_is_next_to_nothing_the_others_may_have_much() -> None:
    """Rows of an embedding that only they have seen."""
    assert judged(HONEST, beside(A, length=0.4, cosine=0.0, ours=0.0)) == {}


def test_who_is_odd_itself_slanders_nobody() -> None:
    """Its update points the other way: so do all means then, its own as well."""
    others = [beside(peer, length=0.3, cosine=-0.7) for peer in (A, B)]
    assert judged(beside(OWN, length=0.3, cosine=-0.7), *others) == {}
    assert set(judged(HONEST, *others)) == {A, B}


def test_who_contributes_nothing_has_nothing_to_compare_with() -> None:
    assert oddities(OWN, [beside(A, length=9.0, cosine=-1.0)], 0.0, 0.0, 1.0) == {}
