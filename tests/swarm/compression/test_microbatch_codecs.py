"""The mildest codec that a link carries, within what the run allows, and steady if the link varies a little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.compression.microbatch_codecs import BACK_AT, MOST_OF_A_VISIT, choose, codec_levels
from swarm.vocabulary.types import Codec

LEVELS = codec_levels(Codec.INT4, half_precision=False)
SIZES = {Codec.NONE: 4_000_000, Codec.BF16: 2_000_000, Codec.INT8: 1_031_250, Codec.INT4: 531_250}
VISIT_S = 0.4


def rate_for(codec: Codec, share: float = 1.0) -> float:
    """With which the codec needs just this part of what is allowed."""
    return SIZES[codec] / (MOST_OF_A_VISIT * VISIT_S * share)


def test_the_codec_levels() -> None:
    assert codec_levels(Codec.NONE, half_precision=False) == (Codec.NONE,)
    assert codec_levels(Codec.INT8, half_precision=False) == (Codec.NONE, Codec.BF16, Codec.INT8)
    assert codec_levels(Codec.INT8, half_precision=True) == (Codec.NONE, Codec.INT8)
    assert codec_levels(Codec.BF16, half_precision=True) == (Codec.NONE,)
    assert LEVELS == (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4)


@pytest.mark.parametrize("codec", LEVELS)
def test_a_link_that_just_carries_a_codec_gets_it(codec: Codec) -> None:
    assert choose(LEVELS, SIZES, None, rate_for(codec) * 1.01, VISIT_S).value is codec


@pytest.mark.parametrize(("rate", "visit_s"), [(0.0, VISIT_S), (1e6, 0.0)])
def test_before_anything_is_known_nothing_is_lost(rate: float, visit_s: float) -> None:
    assert choose(LEVELS, SIZES, None, rate, visit_s).value is Codec.NONE


def test_a_link_that_varies_a_little_keeps_its_codec() -> None:
    edge = rate_for(Codec.BF16)
    current: Codec | None = None
    seen = set()
    for factor in (1.05, 0.95, 1.1, 0.9, 1.2, 1.3, 0.92):
        current = choose(LEVELS, SIZES, current, edge * factor, VISIT_S).value
        seen.add(current)
    assert seen == {Codec.BF16, Codec.INT8}, "once worse, it does not come back for a little"
    assert current is Codec.INT8
    assert choose(LEVELS, SIZES, current, edge / BACK_AT * 1.01, VISIT_S).value is Codec.BF16


@given(
    st.sampled_from([None, *LEVELS]),
    st.floats(1.0, 1e10),
    st.floats(1e-4, 100.0),
    st.sampled_from([LEVELS, LEVELS[:2]]),
)
def test_it_fits_or_it_is_the_hardest_and_what_is_much_milder_would_not_fit(
    current: Codec | None, rate: float, visit_s: float, levels: tuple[Codec, ...]
) -> None:
    chosen = choose(levels, SIZES, current, rate, visit_s).value
    assert chosen in levels
    allowed = MOST_OF_A_VISIT * visit_s
    assert SIZES[chosen] / rate <= allowed or chosen is levels[-1]
    for milder in levels[: levels.index(chosen)]:
        assert SIZES[milder] / rate > BACK_AT * allowed
