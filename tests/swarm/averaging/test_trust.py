"""What is objected to in a reducer's result, and what an audit concludes, given figures."""

import math

import pytest

from swarm.averaging import trust
from swarm.vocabulary.types import Codec, PeerId

OWN, A, B = PeerId("own"), PeerId("a"), PeerId("b")


def beside(reducer: PeerId, *, length: float, cosine: float, ours: float = 0.5, share: float = 0.25) -> trust.Beside:
    return trust.Beside(reducer, share, ours * ours, length * length, cosine * ours * length)


def judged(*pieces: trust.Beside) -> dict[PeerId, str]:
    """Three members, alike: norm 1, coefficient 1/3. Every piece is a quarter, where each has half of its norm."""
    return trust.oddities(OWN, pieces, 1 / 3, 1.0, 1.0)


HONEST = beside(OWN, length=0.3, cosine=0.6)


@pytest.mark.parametrize("members", [2, 3, 9, 256])
def test_replicas_with_nothing_in_common_are_honest(members: int) -> None:
    """The mean is then 1 / sqrt(members) of the length, and has as much of ours in it; with a little noise."""
    usual = 1 / math.sqrt(members)
    pieces = [beside(A, length=0.5 * usual, cosine=usual - noise) for noise in (-0.1, 0.0, 0.1)]
    assert trust.oddities(OWN, pieces, 1 / members, 1.0, 1.0) == {}


def test_others_parts_that_oppose_ours_make_a_reducer_suspect() -> None:
    agreeing, liar = beside(A, length=0.3, cosine=0.6), beside(B, length=0.1, cosine=0.2)
    assert trust.suspect([beside(OWN, length=0.1, cosine=-1.0), agreeing], OWN, 1 / 3) is None, "our own sum"
    assert trust.suspect([agreeing, liar], OWN, 1 / 3) == B
    assert trust.suspect([agreeing, liar], OWN, 0.0) is None


def test_who_opposes_most_others_again_and_again_is_named_once() -> None:
    opponents = trust.Opponents()
    heard = [opponents.observed((OWN, A, B), {B} if n != 1 else set()) for n in range(2 * trust.TIMES_OPPOSED)]
    assert [named for named in heard if named] == [(B,)]


def test_a_mean_longer_than_the_norms_allow_or_much_longer_than_ours_is_odd() -> None:
    assert judged(beside(A, length=0.5 * trust.LONGEST * 0.99, cosine=0.9)) == {}
    assert set(judged(beside(A, length=0.5 * trust.LONGEST * 1.01, cosine=0.9))) == {A}
    ours = beside(OWN, length=0.2, cosine=0.3)
    assert judged(ours, beside(A, length=0.2 * trust.LONGER_THAN_OURS * 0.99, cosine=0.3)) == {}
    assert set(judged(ours, beside(A, length=0.2 * trust.LONGER_THAN_OURS * 1.01, cosine=0.3))) == {A}


def test_where_all_agree_a_mean_is_as_long_as_allowed_though_ours_is_of_rows_where_nobody_does() -> None:
    ours = beside(OWN, length=0.5 / 256, cosine=1.0)

    def of_many(theirs: trust.Beside) -> dict[PeerId, str]:
        return trust.oddities(OWN, (ours, theirs), 1 / 256, 1.0, 1.0)

    assert of_many(beside(A, length=0.5 * trust.ALIGNED * 0.99, cosine=1.0)) == {}
    assert set(of_many(beside(A, length=0.5 * trust.ALIGNED * 1.01, cosine=1.0))) == {A}


def test_zeros_where_ours_are_none_are_odd() -> None:
    assert judged(HONEST, beside(A, length=1.01 * trust.SHORTEST * 0.5 / 3, cosine=0.3)) == {}
    assert set(judged(HONEST, beside(A, length=0.0, cosine=0.0))) == {A}
    assert judged(HONEST, beside(A, length=0.4, cosine=0.0, ours=0.0)) == {}, "rows that only others have seen"


def test_who_is_odd_itself_or_contributes_nothing_slanders_nobody() -> None:
    """Its update points the other way: so do all means then, its own as well."""
    others = [beside(peer, length=0.5 * trust.LONGEST * 1.01, cosine=-0.7) for peer in (A, B)]
    assert judged(beside(OWN, length=0.5 * trust.LONGEST * 1.01, cosine=-0.7), *others) == {}
    assert set(judged(HONEST, *others)) == {A, B}
    assert trust.oddities(OWN, [beside(A, length=9.0, cosine=-1.0)], 0.0, 0.0, 1.0) == {}


def left_over(members: int, cosine: float, stretch: float) -> float:
    """Length of `stretch` times the sum of equal updates with this cosine, less those of all but the reducer."""
    own, others = stretch, stretch - 1.0
    count = members - 1
    squares = own**2 + count * others**2
    products = 2 * own * others * count + others**2 * count * (count - 1)
    return math.sqrt(squares + products * cosine)


@pytest.mark.parametrize("members", [2, 3, 9, 256])
@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("codec", list(trust.RESULT_ERROR))
def test_an_honest_mean_is_explained_also_where_the_reducer_has_more_there_than_the_others(
    members: int, cosine: float, codec: Codec
) -> None:
    """Shares of two replicas were seen to differ by 1.95 over 4096 elements, and by 1.34 over 15,000."""
    mean = math.sqrt(members + members * (members - 1) * cosine) / members
    for elements, apart in ((4096, 1.95), (15_000, 1.34), (2**20, 1.34)):
        reckoning = trust.Reckoning(elements, apart * 0.5 / members, 0.5 * mean, (0.5, 0.5))
        assert trust.unexplained(reckoning, 1 / members, 1.0, codec) is None


@pytest.mark.parametrize("members", [3, 5, 9])
@pytest.mark.parametrize("cosine", [0.1, 0.3, 0.9])
def test_a_mean_stretched_by_half_is_not_explained(members: int, cosine: float) -> None:
    left = 0.5 * left_over(members, cosine, 1.5) / members
    why = trust.unexplained(trust.Reckoning(2**18, left, 1.0, (0.5,)), 1 / members, 1.0, Codec.NONE)
    assert "does not match the contributions" in why


def test_a_reducer_leaves_no_more_than_the_norm_that_it_declared() -> None:
    assert trust.unexplained(trust.Reckoning(4096, 1e-5, 1.0, (0.5,)), 0.0, 0.0, Codec.NONE) is None
    assert trust.unexplained(trust.Reckoning(4096, 1e-3, 1.0, (0.5,)), 0.0, 0.0, Codec.NONE) is not None
    assert trust.unexplained(trust.Reckoning(4096, 0.34, 0.0, (0.9,)), 1 / 3, 1.0, Codec.NONE) is not None


@pytest.mark.parametrize(("pieces", "members"), [(1, 3), (4, 3), (4, 9), (4, 256)])
def test_audits_are_as_rare_as_their_bytes_demand(pieces: int, members: int) -> None:
    sent = 2 * 100 * pieces * members * (members - 1)
    fetched = 100 * (members - 2)
    chance = trust.chance_of_audit(sent, members, fetched)
    assert 0 < chance <= 1
    assert chance * fetched * members <= trust.AUDITED_BYTES * sent
    assert trust.chance_of_audit(1000, 2, 0) == 1.0, "nothing has to be fetched"


@pytest.mark.parametrize(
    ("kind", "pauses_s"),
    [("rubbish", (0, 60, 120)), ("waiting", (0, 30, 60)), ("fraud", (3600, 7200)), ("silence", (300, 600))],
)
def test_who_offends_again_is_left_out_longer_and_begins_anew_in_the_end(kind: str, pauses_s: tuple[int, ...]) -> None:
    penalties, now = trust.Penalties(), 0.0
    for pause_s in (*pauses_s, pauses_s[0]):
        getattr(penalties, kind).add(A, now)
        assert penalties.excluded(now + 0.9 * pause_s) == (frozenset({A}) if pause_s else frozenset())
        assert penalties.excluded(now + pause_s) == frozenset()
        now += pause_s + (trust.FORGIVEN_AFTER_S + 1.0 if pause_s == pauses_s[-1] else 0.0)


def test_waiting_in_vain_counts_only_in_a_row_and_excuses_no_fraud() -> None:
    penalties = trust.Penalties()
    for now in (0.0, 3.0):
        penalties.waiting.add(A, now)
        assert penalties.excluded(now) == frozenset()
        penalties.waiting.forgive(A)
    for now in (4.0, 5.0):
        penalties.waiting.add(A, now)
    assert penalties.excluded(5.0) == {A}
    penalties.fraud.add(A, 6.0)
    penalties.waiting.forgive(A)
    assert penalties.excluded(6.0) == {A}
