"""The arithmetic of rounds, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.averaging.layout import layout_of
from swarm.round_messages import Entry, Roster, RoundId
from swarm.rounds.rosters import (
    leads_to,
    lower_median,
    make_roster,
    may_be_committed,
    objection,
    shards,
    sound_entry,
    weigh,
)
from swarm.rounds.rules import PLAUSIBLE_LEAD, convener_order, due, fragment_chunks, next_number, standing
from swarm.rounds.words import RoundRules
from swarm.vocabulary import AnchorVersion, Codec, ModuleId, PeerId

MODULE = ModuleId(2)
RULES = RoundRules(inner_steps=10, fragments=1, chunks=16, longest_s=60.0)
A, B, C, D = (PeerId(name) for name in "abcd")
BASE = AnchorVersion(4, 40, 4000, 0, b"base")
ATTEMPT = RoundId(MODULE, 5, 0, A)


def entry(tokens: int, norm: float = 1.0, bandwidth: float = 1e6, steps: int = 10) -> Entry:
    return Entry(ATTEMPT, steps, tokens, norm, bandwidth, None)


def version(number: int, tokens: int = 0, digest: bytes = b"x") -> AnchorVersion:
    return AnchorVersion(number, 0, tokens, 0, digest)


# ---- who, when, which number ------------------------------------------------------------------------------------------


def test_the_convener_changes_from_round_to_round_and_a_leaver_moves_nobody_else() -> None:
    peers = [PeerId(f"peer{number}") for number in range(8)]
    first = [convener_order(MODULE, number, peers)[0] for number in range(400)]
    assert all(20 < first.count(peer) < 90 for peer in peers)
    for number in range(20):
        order = convener_order(MODULE, number, peers)
        assert convener_order(MODULE, number, peers[1:]) == tuple(peer for peer in order if peer != peers[0])


@pytest.mark.parametrize(
    ("own", "others", "replicas", "since_s", "expected"),
    [
        (10, [10, 10], 3, 0.0, True),
        (10, [10, 9], 3, 0.0, False),
        (12, [18], 3, 0.0, True),
        (5, [10**9], 3, 0.0, False),  # one claim alone makes no round due
        (20, [], 9, 0.0, True),
        (0, [], 3, 1000.0, False),
        (0, [1], 3, 60.0, True),
    ],
)
def test_a_round_is_due_by_the_work_of_all_or_by_time(
    own: int, others: list[int], replicas: int, since_s: float, expected: bool
) -> None:
    assert due(RULES, own, others, replicas, since_s).value is expected


@pytest.mark.parametrize("fragments", [1, 2, 3, 7, 64, 1000])
def test_fragments_are_those_of_the_modules_layout(fragments: int) -> None:
    shapes = {f"model.layers.{number}.weight": (977, 61) for number in range(12)}
    layout = layout_of(shapes, fragments)
    rules = replace(RULES, fragments=fragments, chunks=layout.chunks)
    assert [fragment_chunks(rules, number) for number in range(len(layout.fragments))] == list(layout.fragments)


def test_numbers_go_beyond_all_that_is_seen_but_not_beyond_reason() -> None:
    assert next_number(BASE, [version(7), version(2)]) == 8
    assert next_number(BASE, [version(4 + PLAUSIBLE_LEAD + 1)]) == 5
    assert next_number(version(0), [version(2**48 - 1)]) == 1


# ---- what the module stands on --------------------------------------------------------------------------------------


def test_most_replicas_decide_and_of_equally_many_the_greater() -> None:
    other = version(9, tokens=1, digest=b"other")
    assert standing(BASE, {A: BASE, B: other, C: other}).value == BASE
    assert standing(BASE, {A: other, B: other}).value == other
    assert standing(BASE, {A: other}).value == BASE
    assert standing(BASE, {A: replace(other, tokens=5000)}).value.tokens == 5000


def test_one_replica_cannot_move_a_majority_by_lying() -> None:
    for lie in (version(5, tokens=2**47), version(2**40, tokens=2**47), version(4, digest=b"z")):
        assert standing(BASE, {A: BASE, B: BASE, C: lie}).value == BASE


def test_nobody_stays_with_the_initial_weights_when_there_is_something_later() -> None:
    start = version(0)
    assert standing(start, {A: start, B: start, C: BASE}).value == BASE
    assert standing(BASE, {A: start, B: start, C: start}).value == BASE


# ---- rosters --------------------------------------------------------------------------------------------------------


def test_shares_follow_tokens_up_to_a_limit_and_long_updates_are_scaled_down() -> None:
    assert weigh({A: entry(100), B: entry(300)}) == {A: 0.25, B: 0.75}
    assert weigh({A: entry(100), B: entry(10**9)}) == {A: 0.2, B: 0.8}
    clipped = weigh({A: entry(100), B: entry(100, norm=1e6)})
    assert clipped[A] == 0.5
    assert clipped[B] * 1e6 == pytest.approx(0.5 * 1.5)
    more_work = weigh({A: entry(100), B: entry(400, norm=1e6)})
    assert more_work[B] * 1e6 == pytest.approx(0.8 * 3.0)
    assert weigh({A: entry(0), B: entry(100, norm=0.0)}) == {A: 0.0, B: 1.0}
    assert weigh({A: entry(0), B: entry(0)}) == {A: 0.0, B: 0.0}


@pytest.mark.parametrize(
    "wrong",
    [{"norm": math.nan}, {"norm": math.inf}, {"norm": -1.0}, {"tokens": -1}, {"steps": 2**40}, {"bandwidth": math.nan}],
)
def test_entries_with_impossible_figures_are_unsound(wrong: dict[str, float]) -> None:
    assert sound_entry(entry(1))
    assert not sound_entry(replace(entry(1), **wrong))  # type: ignore[arg-type]


@given(
    st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=3).map(PeerId),
        st.just(0.0) | st.floats(1.0, 1e12),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 50),
    st.integers(0, 200),
)
def test_shards_cover_every_chunk_once_and_no_bandwidth_is_taken_at_its_word(
    bandwidths: dict[PeerId, float], start: int, count: int
) -> None:
    cut = shards(range(start, start + count), bandwidths)
    chunks = [chunk for first, end in cut.values() for chunk in range(first, end)]
    assert sorted(chunks) == list(range(start, start + count))
    sizes = [end - first for first, end in cut.values()]
    assert max(sizes) <= 8 * (min(sizes) + 1) + 1


def test_shards_are_in_proportion_to_bandwidth_and_unknown_is_the_median() -> None:
    cut = shards(range(16), {A: 1e6, B: 3e6, C: 0.0})
    assert [end - first for first, end in cut.values()] == [3, 10, 3]
    cut = shards(range(18), {A: 1.0, B: 8.0})
    assert [end - first for first, end in cut.values()] == [2, 16]


def roster(attempt: RoundId = ATTEMPT) -> Roster:
    made = make_roster(RULES, attempt, BASE, {A: entry(100), B: entry(300, steps=20), C: entry(0, steps=0)}, 60.0)
    assert made is not None
    return made


def test_a_roster_counts_the_work_and_says_what_it_leads_to() -> None:
    made = roster()
    assert (made.steps, made.tokens) == (55, 4400)
    assert objection(RULES, made, A, 1.0) is None
    assert leads_to(RULES, made, AnchorVersion(5, 55, 4400, 0, b"any"))
    assert not leads_to(RULES, made, AnchorVersion(5, 55, 4401, 0, b"any"))
    assert make_roster(RULES, ATTEMPT, BASE, {A: entry(0)}, 60.0) is None


def test_from_the_third_attempt_on_the_convener_reduces_alone() -> None:
    made = roster(replace(ATTEMPT, attempt=2))
    assert {member.peer: member.end_chunk - member.first_chunk for member in made.members} == {A: 16, B: 0, C: 0}
    assert objection(RULES, made, B, 1.0) is None


def test_rosters_that_cannot_be_right_are_objected_to() -> None:
    made = roster()
    first, second, third = made.members
    wrong = [
        (first, second),
        (first, second, third, third),
        (replace(first, end_chunk=first.end_chunk + 1), second, third),
        (replace(first, first_chunk=first.first_chunk + 1), second, third),
        (replace(first, coefficient=1.0), second, third),
        (replace(first, coefficient=math.nan), second, third),
        (replace(first, coefficient=-0.1), second, third),
        (first, second, replace(third, norm=math.inf)),
        (first, second, replace(third, norm=2.0)),
        (second, third),
        (),
    ]
    assert objection(RULES, made, C, 1.0) is None
    for members in wrong:
        assert objection(RULES, replace(made, members=members), C, 1.0) is not None
    assert objection(RULES, replace(made, steps=made.base.steps - 1), C, 1.0) is not None
    assert objection(RULES, replace(made, tokens=2**63), C, 1.0) is not None
    assert objection(RULES, replace(made, codec=Codec.INT8), C, 1.0) == "this run's rounds do not use INT8"


def test_a_majority_leaves_no_room_for_another_one() -> None:
    made = roster()
    assert may_be_committed(made, without=1)
    assert not may_be_committed(made, without=2)


def test_the_lower_median_of_two_is_the_smaller() -> None:
    assert lower_median([5, 1]) == 1
    assert lower_median([5, 1, 3]) == 3
