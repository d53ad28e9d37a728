from __future__ import annotations

import pytest

from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import (
    MAX_EXPERTS,
    MAX_HOPS,
    MAX_MICROBATCH_NUMBER,
    MAX_STAGES,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    PeerId,
    VersionRange,
    short,
)

DATA = PeerId("data")
PATH = Path(DATA, (Hop(ModuleId(1), PeerId("a")), Hop(ModuleId(2), PeerId("b"))))


@pytest.mark.parametrize(("stage", "expert"), [(-1, 0), (MAX_STAGES, 0), (0, -1), (0, MAX_EXPERTS)])
def test_modules_outside_the_bounds_are_refused(stage: int, expert: int) -> None:
    with pytest.raises(ProtocolViolation, match="is outside"):
        ModuleId(stage, expert)


@pytest.mark.parametrize("number", [-1, MAX_MICROBATCH_NUMBER + 1])
def test_microbatch_numbers_outside_the_bounds_are_refused(number: int) -> None:
    with pytest.raises(ProtocolViolation, match="is outside"):
        MicrobatchId(DATA, number)


def test_the_bounds_themselves_are_inside() -> None:
    assert str(ModuleId(MAX_STAGES - 1, MAX_EXPERTS - 1)) == "1023.1023"
    assert MicrobatchId(DATA, MAX_MICROBATCH_NUMBER).number == MAX_MICROBATCH_NUMBER
    assert len(Path(DATA, PATH.hops[:1] * MAX_HOPS).hops) == MAX_HOPS


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="is longer than"):
        Path(DATA, PATH.hops[:1] * (MAX_HOPS + 1))


def test_the_data_node_stands_at_both_ends_of_a_path() -> None:
    assert [PATH.peer_at(position) for position in range(-1, 3)] == [DATA, "a", "b", DATA]
    assert [Path(DATA, ()).peer_at(position) for position in (-1, 0)] == [DATA, DATA]


@pytest.mark.parametrize("position", [-2, 3])
def test_there_is_nobody_beyond_the_ends(position: int) -> None:
    with pytest.raises(IndexError, match="not on a path of 2 hops"):
        PATH.peer_at(position)


def test_a_repaired_path_differs_in_one_peer() -> None:
    repaired = PATH.with_peer(1, PeerId("c"))
    assert repaired.hops == (PATH.hops[0], Hop(ModuleId(2), PeerId("c")))
    assert PATH.hops[1].peer == "b"


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [((1, 3), (2, 5), 3), ((1, 1), (1, 1), 1), ((1, 2), (3, 4), None), ((1, 9), (4, 4), 4)],
)
def test_peers_speak_the_highest_version_they_have_in_common(
    one: tuple[int, int], other: tuple[int, int], common: int | None
) -> None:
    assert VersionRange(*one).common(VersionRange(*other)) == common
    assert VersionRange(*other).common(VersionRange(*one)) == common


def test_short_names() -> None:
    assert short(PeerId("12D3KooWabcdef")) == "abcdef"
    assert str(MicrobatchId(PeerId("12D3KooWabcdef"), 7)) == "abcdef#7"
