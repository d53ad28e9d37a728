from __future__ import annotations

import pytest

from protocol.frames.frames import MAX_SMALL_FRAME_BYTES
from protocol.transport.rate_limits import (
    BYTES_A_FRAME,
    COMMON_A_SECOND,
    COMMON_A_TENSOR,
    COMMON_SAVED,
    FRAMES_A_SECOND,
    FRAMES_A_TENSOR,
    IN_ADVANCE,
    LONGEST_PAUSE_S,
    MOST_SAVED,
    PAUSE_AFTER,
    STRANGERS,
    CommonPatience,
    Patience,
)
from protocol.transport.settings import TransportSettings

SHORT_PAUSE_S = PAUSE_AFTER / FRAMES_A_SECOND
NONE_LEFT_UNTIL = 1e9


def drained() -> CommonPatience:
    common = CommonPatience(NONE_LEFT_UNTIL)
    while common.take(0.0):
        pass
    return common


def frames_in(patience: Patience, seconds: float, now: float = 0.0, octets: int = 0, serves: bool = True) -> int:
    """How many are read in so long of those that are all there at once."""
    end, frames = now + seconds, 0
    while now <= end and frames < 100_000:
        now += patience.heard(now, octets, serves=serves)
        frames += 1
    return frames


def test_what_is_due_is_read_at_once() -> None:
    patience = Patience(drained(), 0.0)
    assert [patience.heard(0.0) for _ in range(int(IN_ADVANCE))] == [0.0] * int(IN_ADVANCE)
    later = MOST_SAVED / FRAMES_A_SECOND
    assert [patience.heard(later) for _ in range(int(MOST_SAVED))] == [0.0] * int(MOST_SAVED)


def test_what_is_more_is_read_at_its_pace_in_short_pauses() -> None:
    patience = Patience(drained(), 0.0)
    assert frames_in(patience, 60.0) == pytest.approx(IN_ADVANCE + 60 * FRAMES_A_SECOND, abs=2 * PAUSE_AFTER)
    assert max(patience.heard(60.0) for _ in range(int(PAUSE_AFTER))) <= SHORT_PAUSE_S + 1.001 / FRAMES_A_SECOND


def test_what_all_say_beyond_their_due_is_bounded_for_all_together() -> None:
    common = CommonPatience(0.0)
    links = [Patience(common, 0.0) for _ in range(8)]
    next_at, frames, seconds = [0.0] * len(links), 0, 60.0
    while (now := min(next_at)) <= seconds:
        link = next_at.index(now)
        next_at[link] += links[link].heard(now) + 1e-4  # a sender that is never out of words
        frames += 1
    due = len(links) * (IN_ADVANCE + seconds * FRAMES_A_SECOND)
    assert frames == pytest.approx(due + COMMON_SAVED + seconds * COMMON_A_SECOND, rel=0.01)


def test_who_exchanges_tensors_is_read_at_once_whatever_others_say() -> None:
    patience = Patience(drained(), 0.0)
    for _ in range(1000):
        patience.exchanged()
        assert [patience.heard(0.0) for _ in range(int(FRAMES_A_TENSOR))] == [0.0] * int(FRAMES_A_TENSOR)


def test_who_reports_of_others_tensors_is_read_at_once() -> None:
    common = drained()
    working, reporting = Patience(common, 0.0), Patience(common, 0.0)
    assert [reporting.heard(0.0) for _ in range(int(IN_ADVANCE))] == [0.0] * int(IN_ADVANCE)
    for _ in range(1000):
        working.exchanged()
        assert [reporting.heard(0.0) for _ in range(int(COMMON_A_TENSOR))] == [0.0] * int(COMMON_A_TENSOR)


def test_nobody_saves_without_limit() -> None:
    patience = Patience(CommonPatience(NONE_LEFT_UNTIL), 0.0)
    for _ in range(int(MOST_SAVED)):
        patience.exchanged()
    assert frames_in(patience, 0.0, now=1e6) <= MOST_SAVED + COMMON_SAVED + PAUSE_AFTER


LONGEST = MAX_SMALL_FRAME_BYTES


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("octets", [1, 256, 4096, 30 * 1024])
def test_a_frame_weighs_what_its_bytes_do_and_twice_as_much_from_a_stranger(octets: int, serves: bool) -> None:
    weight = (1 + octets / BYTES_A_FRAME) * (1 if serves else STRANGERS)
    patience = Patience(drained(), 0.0)
    due = (IN_ADVANCE + 600 * FRAMES_A_SECOND) / weight
    read = frames_in(patience, 600.0, octets=octets, serves=serves)
    assert read == pytest.approx(due, abs=3 + PAUSE_AFTER / weight)


@pytest.mark.parametrize("serves", [True, False])
def test_after_the_longest_frame_the_link_is_not_silent_for_too_long(serves: bool) -> None:
    patience = Patience(drained(), 0.0)
    pauses, now = [], 0.0
    for _ in range(20):
        pauses.append(patience.heard(now, LONGEST, serves=serves))
        now += pauses[-1]
    assert pauses[-1] == LONGEST_PAUSE_S < TransportSettings().stall_after_s - TransportSettings().ping_period_s


def test_who_serves_nothing_has_no_part_in_what_is_common() -> None:
    common = CommonPatience(0.0)
    strangers = [Patience(common, 0.0) for _ in range(64)]
    for stranger in strangers:
        assert frames_in(stranger, 0.0, serves=False) <= IN_ADVANCE / STRANGERS + PAUSE_AFTER + 1
    member = Patience(common, 0.0)
    assert frames_in(member, 0.0) >= IN_ADVANCE + COMMON_SAVED


def test_what_honest_peers_say_at_once_fits_their_due() -> None:
    """The largest of each kind."""
    for octets, times in ((70 * 1024, 3), (48 * 1024, 4), (20 * 1024, 12)):
        patience = Patience(CommonPatience(0.0), 0.0)
        assert [patience.heard(0.0, octets) for _ in range(times)] == [0.0] * times


@pytest.mark.parametrize("hops", [1, 16, 256])
def test_long_paths_do_not_make_a_busy_link_slow(hops: int) -> None:
    """Each way a header and a few words that name the path, and some that do not; no time passes and nothing is in
    common."""
    patience = Patience(drained(), 0.0)
    for _ in range(300):
        patience.exchanged(hops)
        patience.exchanged(hops)
        assert patience.heard(0.0, 80 * hops) == 0.0
        assert [patience.heard(0.0, 150) for _ in range(8)] == [0.0] * 8
        assert patience.heard(0.0, 80 * hops) == 0.0
