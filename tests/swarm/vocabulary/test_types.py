"""Types, pauses and means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.vocabulary import types
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.statistics import REMEMBERED, Ewma, Exclusions, ExponentialBackoff

DATA = types.PeerId("data")
PATH = types.Path(DATA, tuple(types.Hop(types.ModuleId(at), types.PeerId(peer)) for at, peer in ((1, "a"), (2, "b"))))


@pytest.mark.parametrize(
    "beyond", [(-1, 0), (types.MAX_STAGES, 0), (0, -1), (0, types.MAX_EXPERTS), -1, types.MAX_MICROBATCH_NUMBER + 1]
)
def test_modules_numbers_and_paths_outside_the_bounds_are_refused(beyond: tuple[int, int] | int) -> None:
    with pytest.raises(ProtocolViolation, match="is outside"):
        types.ModuleId(*beyond) if isinstance(beyond, tuple) else types.MicrobatchId(DATA, beyond)
    with pytest.raises(ProtocolViolation, match="is longer than"):
        types.Path(DATA, PATH.hops[:1] * (types.MAX_HOPS + 1))


def test_the_bounds_themselves_are_inside_and_names_are_short() -> None:
    assert str(types.ModuleId(types.MAX_STAGES - 1, types.MAX_EXPERTS - 1)) == "1023.1023"
    assert types.MicrobatchId(DATA, types.MAX_MICROBATCH_NUMBER).number == types.MAX_MICROBATCH_NUMBER
    assert len(types.Path(DATA, PATH.hops[:1] * types.MAX_HOPS).hops) == types.MAX_HOPS
    assert types.short(types.PeerId("12D3KooWabcdef")) == "abcdef"
    assert str(types.MicrobatchId(types.PeerId("12D3KooWabcdef"), 7)) == "abcdef#7"


def test_a_path_has_its_data_node_at_both_ends_and_a_repaired_one_differs_in_one_peer() -> None:
    assert [PATH.peer_at(position) for position in range(-1, 3)] == [DATA, "a", "b", DATA]
    assert [types.Path(DATA, ()).peer_at(position) for position in (-1, 0)] == [DATA, DATA]
    repaired = PATH.with_peer(1, types.PeerId("c"))
    assert repaired.hops == (PATH.hops[0], types.Hop(types.ModuleId(2), types.PeerId("c")))
    assert PATH.hops[1].peer == "b"
    for beyond in (-2, 3):
        with pytest.raises(IndexError, match="not on a path of 2 hops"):
            PATH.peer_at(beyond)


@pytest.mark.parametrize(
    ("one", "other", "common"), [((1, 3), (2, 5), 3), ((1, 1), (1, 1), 1), ((1, 2), (3, 4), None), ((1, 9), (4, 4), 4)]
)
def test_peers_speak_the_best_common_version(one: tuple[int, int], other: tuple[int, int], common: int | None) -> None:
    assert types.VersionRange(*one).common(types.VersionRange(*other)) == common
    assert types.VersionRange(*other).common(types.VersionRange(*one)) == common


A = types.PeerId("a")
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
    few = Exclusions(ExponentialBackoff(2.0, 10.0), remembered=2)
    for bounded, remembered in ((exclusions, REMEMBERED), (few, 2)):
        for number in range(remembered + 1):
            bounded.add(types.PeerId(str(number)), 0.0)
        assert len(bounded.excluded(0.0)) == remembered
        assert not {A, "0"} & bounded.excluded(0.0)


def test_a_pause_is_used_up_by_waiting_and_ends_when_forgiven() -> None:
    exclusions = Exclusions(ExponentialBackoff(2.0, 3.0))
    exclusions.add(A, 100.0)
    assert [exclusions.left_s(A, now) for now in (100.0, 101.5, 103.0)] == [2.0, 0.5, 0.0]
    assert exclusions.left_s(types.PeerId("another"), 100.0) == 0.0
    exclusions.forgive(A)
    assert exclusions.left_s(A, 100.0) == 0.0


@given(st.integers(1, 200), st.floats(0, 1))
def test_a_pause_is_never_longer_than_the_limit_nor_less_than_half_of_the_first(failures: int, jitter: float) -> None:
    exclusions = Exclusions(ExponentialBackoff(0.5, 3.0), jitter=lambda: jitter)
    for _ in range(failures):
        exclusions.add(A, 100.0)
    assert 0.25 <= exclusions.left_s(A, 100.0) <= 3.0 + 1e-9


def test_the_first_samples_count_alike_and_later_ones_by_the_weight() -> None:
    smoothed = Ewma(0.25)
    assert smoothed.mean == 0.0
    for sample, mean in ((2.0, 2.0), (4.0, 3.0), (6.0, 4.0), (8.0, 5.0), (9.0, 6.0), (2.0, 5.0)):
        smoothed.add(sample)
        assert smoothed.mean == pytest.approx(mean)
    assert smoothed.samples == 6
    assert smoothed.gain == 0.25
