"""A restarted data node reads on at the first text that is not in its parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from node.data.documents import Place
from node.data.feed import ReadingPosition
from node.data.packing import Cursor, Microbatch
from swarm.vocabulary.types import MicrobatchId, PeerId


def text(index: int) -> Microbatch:
    nothing = torch.zeros(0)
    return Microbatch(nothing, nothing, 0.0, at(index), at(index + 1))


def at(index: int) -> Cursor:
    """Two texts a block."""
    return Cursor(Place(position=index // 2), index % 2)


def named(number: int) -> MicrobatchId:
    return MicrobatchId(PeerId("a"), number)


def among(*numbers: int) -> Callable[[MicrobatchId], bool]:
    return lambda microbatch: microbatch.number in numbers


def position_after(sent: int, back: int) -> ReadingPosition:
    position = ReadingPosition(at(0), remembered=8)
    for index in range(sent):
        position.sent(text(index), named(index))
    for index in range(back):
        position.came_back(text(index))
    return position


def test_it_begins_at_the_start_and_ends_behind_what_is_applied() -> None:
    assert ReadingPosition(at(3), 8).resume_at(among()) == at(3)
    assert position_after(5, 5).resume_at(among(0, 1, 2, 3, 4)) == at(5)


def test_what_is_under_way_or_not_applied_is_read_again() -> None:
    assert position_after(5, 3).resume_at(among(0, 1, 2)) == at(3)
    assert position_after(5, 3).resume_at(among(0)) == at(1)
    assert position_after(5, 3).resume_at(among(0, 2, 3, 4)) == at(1)


def test_a_text_that_sets_out_again_counts_under_its_new_name_and_a_dropped_one_not_at_all() -> None:
    position = position_after(3, 0)
    position.sent(text(0), named(7))
    assert position.resume_at(among(0, 1, 2)) == at(0)
    assert position.resume_at(among(7, 1, 2)) == at(3)
    position.dropped(text(1))
    assert position.resume_at(among(7)) == at(2)


@given(st.permutations(range(8)), st.integers(0, 8))
def test_no_text_is_left_out_in_whatever_order_they_come_back(order: list[int], applied: int) -> None:
    position = position_after(8, 0)
    for index in order:
        position.came_back(text(index))
    resumed = position.resume_at(among(*order[:applied]))
    assert resumed == at(min(order[applied:], default=8))


def test_what_waits_while_others_set_out_is_read_again() -> None:
    position = ReadingPosition(at(0), remembered=8)
    for index in range(3):
        position.drawn(text(index))
    position.sent(text(2), named(2))
    position.came_back(text(2))
    assert position.resume_at(among(2)) == at(0)
    position.sent(text(0), named(3))
    assert position.resume_at(among(2, 3)) == at(1)
    position.sent(text(1), named(4))
    assert position.resume_at(among(2, 3, 4)) == at(3)
