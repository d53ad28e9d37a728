"""Rounds use the mildest codec that does not hold them up, and every roster says which."""

import pytest

from protocol.codecs import encoded_bytes
from swarm.averaging.roster import LEADER_REDUCES_FROM, codec_of
from swarm.averaging.round_events import RoundRules
from swarm.averaging.trust import mark_of
from swarm.compression.round_codecs import MOST_OF_AN_INTERVAL, SHARES, choose, codec_levels
from swarm.vocabulary.averaging_messages import Entry, LinkRate, RoundId
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, Reasoned

A, B = PeerId("a"), PeerId("b")
BASE = AnchorVersion(4, 40, 4000, 0, b"d" * 32)
LEVELS = codec_levels(Codec.INT4)
RULES = RoundRules(inner_steps=10, fragments=1, chunks=10, longest_s=60.0, chunk_bytes=10**6, codecs=LEVELS)
INTERVAL_S = 40.0  # So that an exchange may take 10 s. Two members send and receive 10 MB of float32 each


def chosen(rates: dict[PeerId, int], attempt: int = 0, own: float = 0.0) -> Reasoned[Codec]:
    """Rates are what all the others say."""
    number = RoundId(ModuleId(1), 5, attempt, A)
    said = {peer: tuple(LinkRate(mark_of(other), rates[other]) for other in rates if rates[other]) for peer in rates}
    entries = {peer: Entry(peer, number, BASE, 10, 100, 1.0, said[peer], None) for peer in rates}
    return codec_of(RULES, number, BASE, entries, INTERVAL_S, own)


@pytest.mark.parametrize(
    ("limit", "contributions"),
    [
        (Codec.NONE, [Codec.NONE]),
        (Codec.BF16, [Codec.BF16]),
        (Codec.INT8, [Codec.INT8]),
        (Codec.INT4, [Codec.INT8, Codec.INT4]),
        (Codec.INT2, [Codec.INT8, Codec.INT4, Codec.INT2]),
    ],
)
def test_a_run_allows_what_is_milder_than_its_limit(limit: Codec, contributions: list[Codec]) -> None:
    assert [*codec_levels(limit)] == contributions


def test_the_shares_are_those_of_the_encodings() -> None:
    assert {codec: encoded_bytes(codec, 2**20) / 2**22 for codec in Codec} == SHARES


def test_a_run_that_allows_one_codec_has_no_choice() -> None:
    assert choose((Codec.NONE,), 1e9, 1.0, 1.0).value is Codec.NONE


@pytest.mark.parametrize(
    ("slowest", "codec"),
    [(1e9, Codec.INT8), (0.26e6, Codec.INT8), (0.25e6, Codec.INT4), (0.13e6, Codec.INT4), (1.0, Codec.INT4)],
)
def test_the_mildest_that_the_slowest_member_carries_in_time(slowest: float, codec: Codec) -> None:
    made = choose(LEVELS, 10e6, slowest, INTERVAL_S)
    assert made.value is codec
    assert f"{MOST_OF_AN_INTERVAL:.0%} are wanted" in made.reason


def test_who_has_measured_nothing_holds_nobody_back_and_at_first_the_leaders_own_link_counts() -> None:
    assert chosen({A: 0, B: 8}).value is Codec.INT4
    nothing = chosen({A: 0, B: 0})
    assert (nothing.value, nothing.reason) == (Codec.INT8, "no link was measured yet")
    assert chosen({A: 0, B: 0}, own=0.12e6).value is Codec.INT4
    assert chosen({A: 10, B: 10}, own=0.12e6).value is Codec.INT8


def test_a_convener_that_reduces_alone_has_more_to_carry() -> None:
    peers = {PeerId(name): 10 for name in "abcdefghijkl"}
    assert chosen(peers).value is Codec.INT8
    assert chosen(peers, LEADER_REDUCES_FROM).value is not Codec.INT8
