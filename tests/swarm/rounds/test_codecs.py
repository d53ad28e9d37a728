"""Rounds use the mildest codec that does not hold them up, and every roster says which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.round_messages import Entry, Roster, RoundId
from swarm.rounds.codecs import MOST_OF_AN_INTERVAL, RoundCodecs, Rung, choose, ladder
from swarm.rounds.rosters import CONVENER_REDUCES_FROM, make_roster, objection
from swarm.rounds.words import RoundRules
from swarm.vocabulary import AnchorVersion, Codec, ModuleId, PeerId

A, B = PeerId("a"), PeerId("b")
BASE = AnchorVersion(4, 40, 4000, 0, b"d" * 32)
SHARES = {Codec.INT8: 0.25, Codec.INT4: 0.125, Codec.TOP_K_4: 0.07, Codec.TOP_K_2: 0.06}
RUNGS = tuple(Rung(codecs, SHARES[codecs.contribution]) for codecs in ladder(Codec.TOP_K_2))
RULES = RoundRules(inner_steps=10, fragments=1, chunks=10, longest_s=60.0, chunk_bytes=10**6, rungs=RUNGS)
INTERVAL_S = 40.0
"""So that an exchange may take 10 s. Two members send and receive 10 MB of float32 each."""


def roster(bandwidths: dict[PeerId, float], attempt: int = 0) -> Roster:
    number = RoundId(ModuleId(1), 5, attempt, A)
    entries = {peer: Entry(number, 10, 100, 1.0, bandwidth, None) for peer, bandwidth in bandwidths.items()}
    made = make_roster(RULES, number, BASE, entries, INTERVAL_S)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("limit", "contributions"),
    [
        (Codec.NONE, [Codec.NONE]),
        (Codec.BF16, [Codec.BF16]),
        (Codec.INT8, [Codec.INT8]),
        (Codec.INT4, [Codec.INT8, Codec.INT4]),
        (Codec.TOP_K_2, [Codec.INT8, Codec.INT4, Codec.TOP_K_4, Codec.TOP_K_2]),
    ],
)
def test_a_run_allows_what_is_milder_than_its_limit(limit: Codec, contributions: list[Codec]) -> None:
    assert [codecs.contribution for codecs in ladder(limit)] == contributions


def test_means_are_never_sparse() -> None:
    for codecs in ladder(Codec.TOP_K_2):
        assert codecs.result in (Codec.INT8, Codec.INT4)
        assert codecs.leave_over is (codecs.contribution is not Codec.INT8)


@pytest.mark.parametrize(
    ("slowest", "codec"),
    [
        (1e9, Codec.INT8),
        (0.26e6, Codec.INT8),
        (0.24e6, Codec.INT4),
        (0.13e6, Codec.INT4),
        (0.12e6, Codec.TOP_K_4),
        (0.065e6, Codec.TOP_K_2),
        (1.0, Codec.TOP_K_2),
    ],
)
def test_the_mildest_that_the_slowest_member_carries_in_time(slowest: float, codec: Codec) -> None:
    made = roster({A: 1e9, B: slowest})
    assert made.codec is codec
    assert objection(RULES, made, B, 1.0) is None
    assert f"{MOST_OF_AN_INTERVAL:.0%} are wanted" in made.codec_reason


def test_who_has_measured_nothing_holds_nobody_back() -> None:
    assert roster({A: 0.0, B: 0.12e6}).codec is Codec.TOP_K_4
    nothing = roster({A: 0.0, B: 0.0})
    assert (nothing.codec, nothing.codec_reason) == (Codec.INT8, "no link was measured yet")


def test_a_convener_that_reduces_alone_has_more_to_carry() -> None:
    peers = {PeerId(name): 0.7e6 for name in "abcdef"}
    assert roster(peers).codec is Codec.INT8
    assert roster(peers, CONVENER_REDUCES_FROM).codec is not Codec.INT8


def test_a_run_that_allows_one_has_no_choice() -> None:
    only = RoundCodecs(Codec.NONE)
    assert choose((Rung(only, 1.0),), 1e9, 1.0, 1.0).value == only


def test_a_codec_that_the_run_does_not_allow_is_objected_to() -> None:
    rules = replace(RULES, rungs=RUNGS[:2])
    made = replace(roster({A: 1e9, B: 1e9}), codec=Codec.TOP_K_2)
    assert objection(rules, made, B, 1.0) == "this run's rounds do not use TOP_K_2"
