"""The arithmetic of rounds, and what is refused."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.averaging.anchor.shared_vector import layout_of
from swarm.averaging import schedule
from swarm.averaging.roster import (
    leads_to,
    make_roster,
    may_be_committed,
    objection,
    oddity,
    shards,
    sound_entry,
    weigh,
)
from swarm.averaging.round_events import RoundRules
from swarm.averaging.schedule import fragment_chunks, leader_order, next_number, possible, standing
from swarm.averaging.trust import (
    DRIFT_LIMIT,
    FADING,
    FEWEST_APART,
    AnchorDrift,
    UsualLength,
    mark_of,
    measured_of,
    rates,
    slowest_bytes_per_s,
)
from swarm.vocabulary.averaging_messages import Entry, LinkRate, Roster, RoundId, SignedRoster, WorkRow, WorkTally
from swarm.vocabulary.types import MAX_COUNT, MAX_ROUND, AnchorVersion, Codec, ModuleId, PeerId
from tests.swarm.averaging.round_world import VirtualSigner

MODULE = ModuleId(2)
RULES = RoundRules(inner_steps=10, fragments=1, chunks=16, longest_s=60.0, step_tokens=1000)
A, B, C, D = (PeerId(name) for name in "abcd")
BASE = AnchorVersion(4, 40, 4000, 0, b"base")
ATTEMPT = RoundId(MODULE, 5, 0, A)
SIGNER = VirtualSigner()


def entry(tokens: int, norm: float = 1.0, steps: int = 10, peer: PeerId = A, attempt: RoundId = ATTEMPT) -> Entry:
    return SIGNER.sign(Entry(peer, attempt, BASE, steps if tokens else 0, tokens, norm, (), None))


def version(number: int, tokens: int = 0, digest: bytes = b"x") -> AnchorVersion:
    return AnchorVersion(number, 0, tokens, 0, digest)


def test_the_leader_changes_from_round_to_round_and_is_not_known_before_the_last_one_is_committed() -> None:
    peers = [PeerId(f"peer{number}") for number in range(8)]
    first = [leader_order(MODULE, BASE, number, peers)[0] for number in range(400)]
    assert all(20 < first.count(peer) < 90 for peer in peers)
    for number in range(20):
        order = leader_order(MODULE, BASE, number, peers)
        assert leader_order(MODULE, BASE, number, peers[1:]) == tuple(peer for peer in order if peer != peers[0])
    # A key that leads the next rounds would have to be made after they have begun.
    anchors = [replace(BASE, digest=bytes([number])) for number in range(200)]
    firsts = [leader_order(MODULE, anchor, 5, peers)[0] for anchor in anchors]
    assert all(5 < firsts.count(peer) < 60 for peer in peers)


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
def test_when_a_round_is_due(own: int, others: list[int], replicas: int, since_s: float, expected: bool) -> None:
    assert schedule.due(RULES, own, others, replicas, since_s).value is expected


@pytest.mark.parametrize("fragments", [1, 2, 3, 7, 64, 1000])
def test_fragments_are_those_of_the_modules_layout(fragments: int) -> None:
    layout = layout_of({f"model.layers.{number}.weight": (977, 61) for number in range(12)}, fragments)
    rules = replace(RULES, fragments=fragments, chunks=layout.chunks)
    assert [fragment_chunks(rules, number) for number in range(len(layout.fragments))] == list(layout.fragments)


def test_numbers_go_beyond_all_that_is_seen_but_not_beyond_reason() -> None:
    assert next_number(BASE, [version(7), version(2)]) == 8
    assert next_number(BASE, [version(4 + schedule.LARGEST_LEAD)]) == 5
    assert next_number(BASE, [version(900)]) == 901
    assert next_number(version(100_000), [version(300_000)]) == 300_001
    assert next_number(version(0), [version(2**48 - 1)]) == next_number(START, [OLD]) == 1


START, OTHER = version(0), version(9, tokens=1, digest=b"other")
OLD = AnchorVersion(50_000, 500_000, 2**40, 0, b"old")  # Weeks of rounds that nobody else knows of
FAR = AnchorVersion(1_000_000, 10**6, 10**6, 0, b"x")
GREATER, MORE = replace(OTHER, tokens=5000), version(5, tokens=2**47)
STANDING = {
    "most replicas decide": (BASE, {A: BASE, B: OTHER, C: OTHER}, BASE),
    "against us, too": (BASE, {A: OTHER, B: OTHER}, OTHER),
    "of equally many the greater decides, which is ours": (BASE, {A: OTHER}, BASE),
    "of equally many the greater decides": (BASE, {A: GREATER}, GREATER),
    "a lie about tokens moves no majority": (BASE, {A: BASE, B: BASE, C: MORE}, BASE),
    "a lie about rounds moves no majority": (BASE, {A: BASE, B: BASE, C: replace(MORE, round=2**40)}, BASE),
    "a lie about the digest moves no majority": (BASE, {A: BASE, B: BASE, C: version(4, digest=b"z")}, BASE),
    "nobody stays with the initial weights": (START, {A: START, B: BASE, C: BASE, D: START}, BASE),
    "not with a single other one": (START, {A: BASE}, BASE),
    "nor goes back to them": (BASE, {A: START, B: START, C: START}, BASE),
    "a fresh run does not follow one that claims to be ahead": (START, {A: START, B: OLD}, START),
    "nor does a larger one": (START, {A: START, B: START, C: START, D: OLD}, START),
    "with one other replica there is nobody else to ask": (START, {B: OLD}, OLD),
    "two that claim the same are followed": (START, {A: START, B: OLD, C: OLD}, OLD),
    "a newcomer to a run that most have begun believes what can be true": (START, {A: BASE, B: OLD}, BASE),
    "not where most have not begun": (START, {A: START, B: BASE}, START),
    "who was away for long does not follow one": (BASE, {A: BASE, B: FAR}, BASE),
    "who was away for long follows two": (BASE, {A: FAR, B: FAR}, FAR),
    "or the only one": (BASE, {B: FAR}, FAR),
}


@pytest.mark.parametrize(("own", "others", "followed"), STANDING.values(), ids=STANDING)
def test_followed_version(own: AnchorVersion, others: dict[PeerId, AnchorVersion], followed: AnchorVersion) -> None:
    assert standing(RULES, own, others).value == followed


@pytest.mark.parametrize(
    "absurd",
    [
        AnchorVersion(MAX_ROUND, 1, 1, 0, b"x"),
        AnchorVersion(schedule.MOST_ROUNDS + 1, 1, 1, 0, b"x"),
        AnchorVersion(5, 2**32, 4000, 0, b"x"),
        AnchorVersion(5, 50, MAX_COUNT, 0, b"x"),
    ],
)
def test_absurd_figures_are_nobodys_version_but_hours_of_failing_rounds_are_possible(absurd: AnchorVersion) -> None:
    assert not possible(RULES, absurd)
    for own in (version(0), BASE):
        assert standing(RULES, own, {A: absurd}).value == own
        assert standing(RULES, own, {A: absurd, B: absurd}).value == own
    assert possible(RULES, AnchorVersion(3, 3 * 3600 * 100, 10**12, 0, b"x"))


def lengths(proven: dict[PeerId, float] | None = None, **entries: Entry) -> dict[str, float]:
    members = {PeerId(peer): member for peer, member in entries.items()}
    return {peer: w.coefficient * members[peer].norm for peer, w in weigh(members, proven).items()}


def test_claims_count_up_to_the_median_and_no_member_outweighs_the_others() -> None:
    assert lengths(a=entry(100), b=entry(100)) == {A: 0.5, B: 0.5}
    assert lengths(a=entry(100), b=entry(10**9)) == {A: 0.5, B: 0.5}, "a claim"
    assert lengths(a=entry(100), b=entry(100, norm=1e6)) == pytest.approx({A: 0.5, B: 0.5})
    assert lengths(a=entry(0), b=entry(100, norm=0.5)) == {A: 0.0, B: 0.5}
    assert lengths(a=entry(0), b=entry(0)) == {A: 0.0, B: 0.0}
    for honest in (2, 4, 8):
        found = lengths(**{f"h{n}": entry(100) for n in range(honest)}, liar=entry(400, norm=1e6))
        assert found.pop("liar") <= 1.5 / (honest + 1) + 1e-9 <= sum(found.values()) + 1e-9


def test_proven_work_counts_beyond_the_median_and_names_without_it_together_like_one_replica() -> None:
    most, little = entry(2000, norm=10.0), entry(100)
    assert lengths(a=little, b=most)[B] == pytest.approx(0.5)
    assert lengths({A: 5.0, B: 100.0}, a=little, b=most) == pytest.approx({A: 1 / 21, B: 200 / 21})
    assert lengths({B: 100.0}, a=little, b=most)[B] > 5, "the other one has just come"
    assert lengths({A: 50.0, B: 50.0}, a=little, b=most)[B] == pytest.approx(0.5), "tokens that nobody gave it"
    assert lengths({A: 5.0, B: 100.0}, a=little, b=replace(most, tokens=100))[B] == pytest.approx(0.5)
    names = {f"n{n}": entry(100, norm=1e6) for n in range(50)}
    found = lengths({A: 5.0, B: 5.0, C: 5.0}, a=entry(100), b=entry(100), c=entry(100), **names)
    assert sum(found[name] for name in names) <= 1.5 / 3 * sum(found[peer] for peer in (A, B, C)) + 1e-9
    assert make_roster(RULES, with_tally(signed(), {A: 100})).tokens == BASE.tokens + 100 + 2 * 100 // 2


@pytest.mark.parametrize("honest", [2, 4, 8])
@pytest.mark.parametrize("claimed", [6400, 10**12])
def test_claimed_tokens_do_not_speed_the_schedule_up(honest: int, claimed: int) -> None:
    others = tuple(entry(100, peer=PeerId(f"h{n}")) for n in range(honest))
    rosters = [replace(signed(), entries=(*others, entry(tokens, peer=D))) for tokens in (100, claimed)]
    usual, faster = (make_roster(RULES, each).tokens - BASE.tokens for each in rosters)
    assert usual == 100 * (honest + 1)
    assert faster <= 1.5 * usual


def with_tally(roster: SignedRoster, recent: dict[PeerId, int], by: PeerId = D, mark: bytes = b"good") -> SignedRoster:
    rows = tuple(WorkRow(peer, 1, tokens, tokens) for peer, tokens in recent.items())
    tally = WorkTally(by, roster.round.module, 1, 1000.0, 30.0, rows, b"", mark)
    return replace(roster, tallies=(*roster.tallies, tally))


def test_a_roster_needs_tallies_of_different_data_nodes_that_are_signed() -> None:
    own = signed().entries[0]
    good = with_tally(signed(), {A: 100})
    assert objection(RULES, good, own, SIGNER) is None
    assert objection(RULES, with_tally(good, {B: 100}), own, SIGNER), "twice the same data node"
    assert objection(RULES, with_tally(signed(), {A: 100}, mark=b"forged"), own, SIGNER)
    assert objection(RULES, replace(good, tallies=(replace(good.tallies[0], module=ModuleId(7)),)), own, SIGNER)


def far(drift: AnchorDrift, donors: list[PeerId], at: float, rounds: int = 1) -> float:
    return drift.farthest(donors, at, 5.0, rounds, by_most=False)


def test_an_anchor_may_be_as_far_as_the_rounds_since_we_were_together_and_no_farther() -> None:
    drift = AnchorDrift(80.0)
    drift.committed(2.0, 1.0, 0.0, [B], 90.0)
    drift.committed(2.0, 1.0, 0.0, [B], 100.0)
    assert (far(drift, [B], 1e9, rounds=3), drift.longest(1e9, 5.0)) == (DRIFT_LIMIT * 15.0, 5.0), "the anchor's norm"
    drift.committed(3.0, 1.0, 0.0, [B], 110.0)
    assert (drift.longest(110.0, 5.0), drift.longest(130.0, 50.0)) == (DRIFT_LIMIT * 3.0, 50.0)
    assert drift.farthest([B], 210.0, 5.0, 1, by_most=True) == DRIFT_LIMIT * 5.0 * FEWEST_APART
    assert far(drift, [B], 110.0) == DRIFT_LIMIT * 3.0 * FEWEST_APART
    assert far(drift, [B], 210.0) == DRIFT_LIMIT * 3.0 * 10
    drift.committed(0.0, 1.0, 0.0, [], 120.0)
    assert far(drift, [B], 210.0) == pytest.approx(DRIFT_LIMIT * FADING * 3.0 * 10), "not a round together"
    drift.committed(3.0, 2.0, 0.0, [B], 130.0)
    assert far(drift, [B], 50.0) == DRIFT_LIMIT * 3.0 * FEWEST_APART, "the computer's clock was set back"


def test_rounds_among_ourselves_are_none_with_the_other_side_of_a_cut_network() -> None:
    drift = AnchorDrift(98.0)
    drift.committed(1.0, 1.0, 0.0, [B, C], 100.0)
    for after_s in (20.0, 22.0, 24.0, 26.0):  # the first one waited for a peer behind the cut
        drift.committed(1.0, 1.0, 0.0, [B], 100.0 + after_s)
    assert far(drift, [B], 126.0) == DRIFT_LIMIT * FEWEST_APART
    assert far(drift, [C], 126.0) == DRIFT_LIMIT * 26.0 / 2.0
    assert far(drift, [B, C], 126.0) == far(drift, [D], 126.0) == DRIFT_LIMIT * FEWEST_APART, (
        "a stranger's anchor is no farther than that of those whom we met last"
    )


def test_a_replica_that_gets_hardly_any_work_follows_one_that_gets_all_of_it() -> None:
    """Ten steps a round, of which we take one or none."""
    drift = AnchorDrift(98.0)
    drift.committed(0.0, 0.0, 0.02, [B], 99.0)
    drift.committed(0.05, 0.1, 0.02, [B], 100.0)
    drift.committed(0.0, 0.0, 0.02, [B], 101.0)
    assert far(drift, [B], 111.0) == pytest.approx(DRIFT_LIMIT * FADING * 0.5 * 10), "ten rounds of the other one"
    drift.committed(0.0, 0.0, 0.7, [B], 102.0)
    assert far(drift, [B], 112.0) == pytest.approx(DRIFT_LIMIT * 0.7 * 10), "we have none to compare with"


def test_an_update_far_too_short_for_its_work_is_known_by_our_own_and_by_the_rounds_before() -> None:
    usual, own = UsualLength(), entry(100)
    assert usual.too_short(entry(100, norm=1e-30), own)
    assert not usual.too_short(entry(2, norm=0.02, steps=1), own), "little work"
    assert not usual.too_short(entry(100, norm=0.05), own)
    usual.committed([own, entry(100)])
    diverged = entry(100, norm=1000.0)
    assert not usual.too_short(entry(100), diverged), "our own has become too long"
    assert usual.too_short(entry(100, norm=1e-30), diverged)
    for number in range(40):  # the learning rate falls to nothing
        assert not usual.too_short(entry(100, norm=0.8**number), entry(100, norm=0.8**number))
        usual.committed([entry(100, norm=0.8**number)] * 2)


@pytest.mark.parametrize(
    "wrong", [{"norm": math.nan}, {"norm": math.inf}, {"norm": -1.0}, {"tokens": -1}, {"steps": 2**40}, {"steps": 0}]
)
def test_entries_with_impossible_figures_are_unsound(wrong: dict[str, float]) -> None:
    assert sound_entry(entry(1))
    assert not sound_entry(replace(entry(1), **wrong))  # type: ignore[arg-type]


@given(
    st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=3).map(PeerId), st.none() | st.integers(1, 24), min_size=1, max_size=12
    ),
    st.integers(0, 50),
    st.integers(0, 200),
)
def test_shards_cover_every_chunk_once_and_nobody_reduces_much_more_than_another(
    said: dict[PeerId, int | None], start: int, count: int
) -> None:
    cut = shards(range(start, start + count), {peer: rate for peer, rate in said.items() if rate is not None}, said)
    chunks = [chunk for first, end in cut.values() for chunk in range(first, end)]
    assert sorted(chunks) == list(range(start, start + count))
    sizes = [end - first for first, end in cut.values()]
    assert max(sizes) <= 2 * (min(sizes) + 1)


def test_who_is_faster_by_what_others_measured_reduces_more_and_one_accomplice_lifts_nobody() -> None:
    sizes = {peer: end - first for peer, (first, end) in shards(range(20), {A: 10, B: 12, C: 24}, [A, B, C, D]).items()}
    assert sizes == {A: 3, B: 6, C: 6, D: 5}
    assert shards(range(4), {}, [A, B]) == {A: (0, 2), B: (2, 4)}
    said = {A: {B: 4.0**10, C: 4.0**10}, B: {A: 4.0**8, C: 4.0**10}, C: {A: 4.0**20, C: 4.0**20, B: 4.0**20}}
    entries = {by: replace(entry(100, peer=by), measured=measured_of(rates, BASE)) for by, rates in said.items()}
    assert rates(entries) == {A: 8, B: 10, C: 10}
    assert rates({A: entry(100)}) == {}
    entries[C] = replace(entries[C], measured=measured_of({A: 4.0, B: 4.0}, BASE))
    assert slowest_bytes_per_s(entries) == 4.0**8, "one that calls the others slow holds nobody up"


def test_an_entry_tells_of_some_links_where_there_are_many() -> None:
    links = {PeerId(f"peer{number}"): 1e6 for number in range(100)}
    told, later = measured_of(links, BASE), measured_of(links, replace(BASE, digest=b"next"))
    assert len(told) == len(later) == 16
    assert set(told) != set(later)
    assert measured_of({A: 0.0, B: 1e300}, BASE) == (LinkRate(mark_of(B), 24),)


def signed(attempt: RoundId = ATTEMPT) -> SignedRoster:
    figures = ((A, 100, 10), (B, 300, 20), (C, 0, 0))
    entries = tuple(entry(tokens, steps=steps, peer=peer, attempt=attempt) for peer, tokens, steps in figures)
    return SignedRoster(attempt, BASE, entries)


def roster(attempt: RoundId = ATTEMPT) -> Roster:
    return make_roster(RULES, signed(attempt))


def test_a_roster_counts_the_work_and_says_what_it_leads_to() -> None:
    made = roster()
    assert (made.steps, made.tokens) == (55, 4250)
    assert make_roster(RULES, replace(signed(), entries=signed().entries[::-1])) == made, "in whatever order"
    assert objection(RULES, signed(), signed().entries[0], SIGNER) is None
    assert leads_to(RULES, made, AnchorVersion(5, 55, 4250, 0, b"any"))
    assert not leads_to(RULES, made, AnchorVersion(5, 55, 4251, 0, b"any"))
    assert make_roster(RULES, replace(signed(), entries=(entry(0),))) is None


def test_sums_end_where_frames_end_and_from_the_third_attempt_on_the_leader_reduces_alone() -> None:
    made = make_roster(RULES, replace(signed(), base=replace(BASE, steps=MAX_COUNT - 1, tokens=MAX_COUNT - 1)))
    assert (made.steps, made.tokens) == (MAX_COUNT, MAX_COUNT)
    made = roster(replace(ATTEMPT, attempt=2))
    assert {member.peer: member.end_chunk - member.first_chunk for member in made.members} == {A: 16, B: 0, C: 0}


def test_one_of_two_that_claims_many_or_hardly_any_steps_bends_the_schedule_a_little() -> None:
    def steps(claimed: int) -> int:
        made = make_roster(RULES, replace(signed(), entries=(entry(100), entry(100, steps=claimed, peer=B))))
        return made.steps - BASE.steps

    assert steps(10) == 10
    assert steps(1) >= 5
    assert steps(2**32) <= 25


def test_rosters_that_cannot_be_right_are_objected_to() -> None:
    made = signed()
    first, second, third = made.entries
    wrong = [
        (first, second),
        (second, third),
        (first, second, third, third),
        (first, second, replace(third, norm=2.0)),
        (first, replace(second, norm=2.0), third),
        (first, replace(second, tokens=1), third),
        (first, replace(second, signature=b""), third),
        (first, replace(second, peer=D), third),
        (first, SIGNER.sign(replace(second, base=replace(BASE, digest=b"other"))), third),
        (first, SIGNER.sign(replace(second, round=replace(ATTEMPT, number=4))), third),
        (first, SIGNER.sign(replace(second, norm=math.inf)), third),
        (),
    ]
    assert objection(RULES, made, third, SIGNER) is None
    for entries in wrong:
        assert objection(RULES, replace(made, entries=entries), third, SIGNER) is not None
    assert objection(RULES, replace(made, codec=Codec.INT8), third, SIGNER) == "this run's rounds do not use INT8"


def test_signatures_are_checked_last_and_once_for_each_of_the_others() -> None:
    asked: list[PeerId] = []

    class Asked(VirtualSigner):
        def verify(self, entry: Entry) -> bool:
            asked.append(entry.peer)
            return True

    made = signed()
    objection(RULES, replace(made, codec=Codec.INT8), made.entries[2], Asked())
    assert asked == []
    assert objection(RULES, made, made.entries[2], Asked()) is None
    assert asked == [A, B]


def test_a_first_roster_that_leaves_most_of_us_out_or_is_full_of_strangers_is_odd() -> None:
    made, others = signed(), [PeerId(name) for name in "bcdefgh"]
    assert oddity(made, A, others[:2], others[:2]) is None
    assert oddity(made, A, others, others[:5]) is None
    assert oddity(made, A, others, others[:6]) is not None
    assert oddity(replace(made, round=replace(ATTEMPT, attempt=1)), A, others, others[:6]) is None
    assert oddity(made, A, [B], [B]) is None, "one that we do not see yet holds nobody up"
    assert oddity(made, A, [], []) is not None


def test_a_majority_leaves_no_room_for_another_one() -> None:
    made = roster()
    assert may_be_committed(made, without=1)
    assert not may_be_committed(made, without=2)
    four = replace(made, members=(*made.members, replace(made.members[0], peer=D)))
    assert not may_be_committed(four, without=2), "half is no majority"
