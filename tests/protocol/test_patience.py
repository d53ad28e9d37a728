from __future__ import annotations

import pytest

from protocol.patience import (
    COMMON_A_SECOND,
    COMMON_A_TENSOR,
    COMMON_SAVED,
    FRAMES_A_SECOND,
    FRAMES_A_TENSOR,
    IN_ADVANCE,
    MOST_SAVED,
    PAUSE_AFTER,
    CommonPatience,
    Patience,
)

LONGEST_PAUSE_S = PAUSE_AFTER / FRAMES_A_SECOND
NONE_LEFT_UNTIL = 1e9
"""Of a common account whose time has not come yet: it has what it has saved, and gets no more."""


def drained() -> CommonPatience:
    common = CommonPatience(NONE_LEFT_UNTIL)
    while common.take(0.0):
        pass
    return common


def frames_in(patience: Patience, seconds: float, now: float = 0.0) -> int:
    """How many are read in so long of those that are all there at once."""
    end, frames = now + seconds, 0
    while now <= end and frames < 100_000:
        now += patience.heard(now)
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
    assert max(patience.heard(60.0) for _ in range(int(PAUSE_AFTER))) <= LONGEST_PAUSE_S + 1.001 / FRAMES_A_SECOND


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
