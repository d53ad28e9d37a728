import threading

import numpy as np
import pytest

from node.averaging.anchor.anchor import Anchor, hash_all, restored_anchor
from node.averaging.anchor.anchor_store import STATES, AnchorStore
from swarm.vocabulary.errors import ResourceExhausted, StateError
from tests.node.checkpoint.small_states import small_layout, state, written

LAYOUT = small_layout(3 * 4096)


class Now:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def advance(store: AnchorStore, number: int) -> Anchor:
    anchor = written(state(number, LAYOUT), *store.spare())
    store.put(anchor)
    return anchor


def intact(anchor: Anchor) -> bool:
    return hash_all(anchor.layout, anchor.parameters, anchor.momentum) == anchor.hashes


def test_the_previous_anchor_stays_until_its_arrays_are_needed():
    store = AnchorStore(first := state(0, LAYOUT))
    second = advance(store, 1)
    assert store.current is second
    assert store.get(first.version.digest) is first
    arrays = store.spare()
    assert arrays[0] is first.parameters
    assert store.get(first.version.digest) is None
    assert store.get(second.version.digest) is second


def test_in_the_long_run_two_states_are_enough():
    store = AnchorStore(state(0, LAYOUT))
    arrays = {id(advance(store, number).parameters) for number in range(1, 20)}
    assert len(arrays) <= 2


def test_a_leased_anchor_outlives_later_rounds_until_the_lease_ends():
    now = Now()
    store = AnchorStore(first := state(0, LAYOUT), now)
    assert store.lease(first.version.digest, 600.0)
    for number in range(1, 8):
        advance(store, number)
        assert store.get(first.version.digest) is first
        assert intact(first)
    now.time = 601.0
    store.spare()
    assert store.get(first.version.digest) is None


def test_a_lease_on_what_is_not_there_is_refused():
    assert not AnchorStore(state(0, LAYOUT)).lease(b"?" * 32, 600.0)


def test_pinned_arrays_are_never_written_even_when_rounds_need_all_room():
    store = AnchorStore(first := state(0, LAYOUT))
    with store.pinned(first):
        anchors = [advance(store, number) for number in range(1, 2 * STATES)]
        for anchor in anchors:
            store.lease(anchor.version.digest, 600.0)
        lent = [store.spare(), store.spare()]
        assert all(pair[0] is not first.parameters for pair in lent)
        assert intact(first)


def test_rounds_come_before_leases():
    store = AnchorStore(state(0, LAYOUT))
    leased = [advance(store, number) for number in range(1, 4)]
    for anchor in leased:
        store.lease(anchor.version.digest, 600.0)
    lent = [store.spare(), store.spare()]
    assert len(lent) == 2
    kept = [a for a in leased if store.get(a.version.digest) is a]
    assert 1 <= len(kept) <= STATES - len(lent)
    assert store.current is leased[-1]


def test_what_has_gone_cannot_be_pinned():
    store = AnchorStore(first := state(0, LAYOUT))
    advance(store, 1)
    store.spare()
    with pytest.raises(StateError), store.pinned(first):
        pass


def test_no_more_than_two_pairs_are_lent():
    store = AnchorStore(state(0, LAYOUT))
    one, two = store.spare(), store.spare()
    with pytest.raises(ResourceExhausted):
        store.spare()
    store.give_back(*one)
    assert store.spare()[0] is one[0]
    assert two[0] is not one[0]


def test_a_pair_that_was_dropped_counts_no_more():
    store = AnchorStore(state(0, LAYOUT))
    for _ in range(10):
        store.spare()


def test_pinned_arrays_stay_whole_while_another_thread_makes_round_after_round():
    store = AnchorStore(state(0, LAYOUT))
    stop = threading.Event()

    def rounds() -> None:
        number = 1
        while not stop.is_set():
            advance(store, number)
            number += 1

    thread = threading.Thread(target=rounds)
    thread.start()
    try:
        for _ in range(200):
            try:
                with store.pinned(store.current) as anchor:
                    assert intact(anchor)
            except StateError:
                continue  # another became current in between
    finally:
        stop.set()
        thread.join()
    assert intact(store.current)
    assert np.isfinite(store.current.parameters).all()


def test_a_saved_anchor_is_not_written_while_a_checkpoint_of_it_is():
    store = AnchorStore(first := state(0, LAYOUT))
    saved = store.saved()
    for number in range(1, 2 * STATES):
        advance(store, number)
        assert restored_anchor(LAYOUT, saved).version == first.version, "whole, or it would be corrupt"
    before = {id(store.current.parameters), id(store.spare()[0])}
    del saved
    after = {id(advance(store, number).parameters) for number in range(20, 30)}
    assert len(before | after) <= STATES, "its arrays are written again, or let go of"


def test_a_saved_anchor_that_nobody_has_any_more_is_written_again():
    store = AnchorStore(first := state(0, LAYOUT))
    saved = store.saved()
    advance(store, 1)
    arrays = store.spare()
    assert arrays[0] is not first.parameters
    store.give_back(*arrays)
    del saved, arrays
    advance(store, 2)
    advance(store, 3)
    assert len({id(advance(store, number).parameters) for number in range(4, 20)}) <= 3
