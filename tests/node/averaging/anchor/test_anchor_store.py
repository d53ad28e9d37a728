import threading

import numpy as np
import pytest

from node.averaging.anchor.anchor import Anchor, hash_all
from node.averaging.anchor.anchor_store import STATES, AnchorStore
from swarm.vocabulary.errors import ResourceExhausted, StateError
from tests.node.checkpoint.small_states import small_layout, state, written

LAYOUT = small_layout(3 * 4096)


class Now:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def advance(shelf: AnchorStore, number: int) -> Anchor:
    anchor = written(state(number, LAYOUT), *shelf.spare())
    shelf.put(anchor)
    return anchor


def intact(anchor: Anchor) -> bool:
    return hash_all(anchor.layout, anchor.parameters, anchor.momentum) == anchor.hashes


def test_the_previous_anchor_stays_until_its_arrays_are_needed():
    shelf = AnchorStore(first := state(0, LAYOUT))
    second = advance(shelf, 1)
    assert shelf.current is second
    assert shelf.get(first.version.digest) is first
    arrays = shelf.spare()
    assert arrays[0] is first.parameters
    assert shelf.get(first.version.digest) is None
    assert shelf.get(second.version.digest) is second


def test_in_the_long_run_two_states_are_enough():
    shelf = AnchorStore(state(0, LAYOUT))
    arrays = {id(advance(shelf, number).parameters) for number in range(1, 20)}
    assert len(arrays) <= 2


def test_a_leased_anchor_outlives_later_rounds_until_the_lease_ends():
    now = Now()
    shelf = AnchorStore(first := state(0, LAYOUT), now)
    assert shelf.lease(first.version.digest, 600.0)
    for number in range(1, 8):
        advance(shelf, number)
        assert shelf.get(first.version.digest) is first
        assert intact(first)
    now.time = 601.0
    shelf.spare()
    assert shelf.get(first.version.digest) is None


def test_a_lease_on_what_is_not_there_is_refused():
    assert not AnchorStore(state(0, LAYOUT)).lease(b"?" * 32, 600.0)


def test_pinned_arrays_are_never_written_even_when_rounds_need_all_room():
    shelf = AnchorStore(first := state(0, LAYOUT))
    with shelf.pinned(first):
        anchors = [advance(shelf, number) for number in range(1, 2 * STATES)]
        for anchor in anchors:
            shelf.lease(anchor.version.digest, 600.0)
        lent = [shelf.spare(), shelf.spare()]
        assert all(pair[0] is not first.parameters for pair in lent)
        assert intact(first)


def test_rounds_come_before_leases():
    shelf = AnchorStore(state(0, LAYOUT))
    leased = [advance(shelf, number) for number in range(1, 4)]
    for anchor in leased:
        shelf.lease(anchor.version.digest, 600.0)
    lent = [shelf.spare(), shelf.spare()]
    assert len(lent) == 2
    kept = [a for a in leased if shelf.get(a.version.digest) is a]
    assert 1 <= len(kept) <= STATES - len(lent)
    assert shelf.current is leased[-1]


def test_what_has_gone_cannot_be_pinned():
    shelf = AnchorStore(first := state(0, LAYOUT))
    advance(shelf, 1)
    shelf.spare()
    with pytest.raises(StateError), shelf.pinned(first):
        pass


def test_no_more_than_two_pairs_are_lent():
    shelf = AnchorStore(state(0, LAYOUT))
    one, two = shelf.spare(), shelf.spare()
    with pytest.raises(ResourceExhausted):
        shelf.spare()
    shelf.give_back(*one)
    assert shelf.spare()[0] is one[0]
    assert two[0] is not one[0]


def test_a_pair_that_was_dropped_counts_no_more():
    shelf = AnchorStore(state(0, LAYOUT))
    for _ in range(10):
        shelf.spare()


def test_pinned_arrays_stay_whole_while_another_thread_makes_round_after_round():
    shelf = AnchorStore(state(0, LAYOUT))
    stop = threading.Event()

    def rounds() -> None:
        number = 1
        while not stop.is_set():
            advance(shelf, number)
            number += 1

    thread = threading.Thread(target=rounds)
    thread.start()
    try:
        for _ in range(200):
            try:
                with shelf.pinned(shelf.current) as anchor:
                    assert intact(anchor)
            except StateError:
                continue  # another became current in between
    finally:
        stop.set()
        thread.join()
    assert intact(shelf.current)
    assert np.isfinite(shelf.current.parameters).all()
