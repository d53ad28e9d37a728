"""Anchors that are kept, lent and leased; the arrays they lie in; the outer step that makes the next one."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

from node.averaging.anchor import shared_vector
from node.averaging.anchor.anchor import STATES, Anchor, AnchorStore, hash_all, restored_anchor
from node.averaging.anchor.outer_step import OuterRule, Staging
from node.averaging.anchor.shared_vector import KEPT, STRETCH, SpareArrays
from swarm.vocabulary.errors import ResourceExhausted
from tests.kit.waiting import ManualClock
from tests.node.averaging.small_rounds import vector
from tests.node.checkpoint.small_states import small_layout, state, written

LAYOUT = small_layout(3 * 4096)


def advance(store: AnchorStore, number: int) -> Anchor:
    anchor = written(state(number, LAYOUT), *store.spare())
    store.put(anchor)
    return anchor


def intact(anchor: Anchor) -> bool:
    return hash_all(anchor.layout, anchor.parameters, anchor.momentum) == anchor.hashes


def next_of(store: AnchorStore) -> Anchor:
    """The anchor that a round makes of the current one: one fragment moves."""
    base, rule = store.current, OuterRule(0.7, 0.9)
    first, end = base.layout.fragments[base.version.fragment]
    part = base.layout.range_of(first, end)
    staging = Staging(base, rule, *store.spare(part))
    gradient = np.random.default_rng(base.version.round).standard_normal(part.stop - part.start, np.float32)
    staging.apply(first, end, gradient)
    store.put(anchor := staging.finish(base.version.round + 1, 1, 1))
    return anchor


def arrays_of(*anchors: Anchor) -> int:
    """How many arrays they have among them."""
    return len({id(array) for anchor in anchors for array in (*anchor.parameters.arrays, *anchor.momentum.arrays)})


def test_the_previous_anchor_stays_until_the_next_is_begun():
    store = AnchorStore(first := state(0, LAYOUT))
    second = advance(store, 1)
    assert store.current is second
    assert store.get(first.version.digest) is first
    store.spare()
    assert store.get(first.version.digest) is None
    assert store.get(second.version.digest) is second


def test_what_is_kept_no_more_is_let_go_of():
    store = AnchorStore(state(0, LAYOUT))
    array = weakref.ref(advance(store, 1).parameters.arrays[0])
    advance(store, 2)
    assert array() is not None
    store.spare()
    assert array() is None


@pytest.mark.parametrize("rounds", [1, 8, 11])
def test_versions_share_the_fragments_that_have_not_moved(rounds):
    store = AnchorStore(state(0, small_layout(16 * 4096 + 7, 8)))
    for _ in range(rounds):
        before = store.current
        after = next_of(store)
        assert intact(before)
        assert intact(after)
        assert arrays_of(before, after) == 2 * (8 + 1)


def test_a_leased_anchor_outlives_later_rounds_until_the_lease_ends():
    clock = ManualClock()
    store = AnchorStore(first := state(0, LAYOUT), clock.monotonic)
    assert store.lease(first.version.digest, 600.0)
    for number in range(1, 8):
        advance(store, number)
        assert store.get(first.version.digest) is first
        assert intact(first)
    clock.now += 601.0
    store.spare()
    assert store.get(first.version.digest) is None


def test_a_lease_on_what_is_not_there_is_refused():
    assert not AnchorStore(state(0, LAYOUT)).lease(b"?" * 32, 600.0)


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


def test_no_more_than_two_pairs_are_lent():
    store = AnchorStore(state(0, LAYOUT))
    one, two = store.spare(), store.spare()
    with pytest.raises(ResourceExhausted):
        store.spare()
    store.give_back(*one)
    store.spare()
    assert two[0].arrays


def test_a_pair_that_became_an_anchor_counts_no_more():
    store = AnchorStore(state(0, small_layout(16 * 4096, 4)))
    anchors = [next_of(store) for _ in range(5)]
    assert store.current is anchors[-1]
    assert len({store.spare()[0], store.spare()[0]}) == 2


def test_a_pair_that_was_dropped_counts_no_more():
    store = AnchorStore(state(0, LAYOUT))
    for _ in range(10):
        store.spare()


def test_an_anchor_stays_whole_while_another_thread_makes_round_after_round():
    store = AnchorStore(first := state(0, small_layout(16 * 4096, 4)))
    stop = threading.Event()

    def rounds() -> None:
        while not stop.is_set():
            next_of(store)

    thread = threading.Thread(target=rounds)
    thread.start()
    try:
        for _ in range(200):
            assert intact(store.current)
        assert intact(first)
    finally:
        stop.set()
        thread.join()
    assert intact(store.current)


def test_a_saved_anchor_is_not_written_while_a_checkpoint_of_it_is():
    layout = small_layout(16 * 4096 + 7, 4)
    store = AnchorStore(first := state(0, layout))
    saved = store.saved()
    for _ in range(2 * STATES):
        next_of(store)
        assert restored_anchor(layout, saved).version == first.version, "whole, or it would be corrupt"


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again() -> None:
    arrays = SpareArrays(1000)
    first = arrays.empty(1000)
    place = address(first)
    first[:] = 7
    del first
    again = arrays.empty(900)
    assert address(again) == place
    assert len(again) == 900


@pytest.mark.parametrize("read", [lambda a: a[10:20], lambda a: a[5:][3:].reshape(-1, 4), torch.from_numpy, memoryview])
def test_what_is_still_read_is_not_written(read: object) -> None:
    assert callable(read)
    arrays = SpareArrays(1000)
    first = arrays.empty(1000)
    first[:] = 7
    reader = read(first[8:]) if read is not memoryview else memoryview(first)
    del first
    others = [arrays.empty(1000) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert np.all(np.asarray(reader) == 7)


def test_no_more_is_kept_than_a_round_needs() -> None:
    arrays = SpareArrays(1000)
    places = {address(array) for array in [arrays.empty(1000) for _ in range(5)]}
    assert len(places) == 5
    assert len(arrays._spare) == KEPT


def test_what_is_large_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_vector, "LARGEST_KEPT_BYTES", 3999)
    arrays = SpareArrays(1000)
    arrays.empty(1000)
    assert not arrays._spare


@pytest.mark.parametrize("elements", [1, STRETCH, 3 * STRETCH + 5])
def test_it_is_torchs_sgd_with_nesterov_momentum(elements: int) -> None:
    rule = OuterRule(0.7, 0.9)
    ours, momentum = vector(elements, 1), np.zeros(elements, np.float32)
    theirs = torch.from_numpy(ours.copy()).requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(20):
        gradient = vector(elements, 100 + step, 0.1)
        new = np.empty_like(ours), np.empty_like(momentum)
        rule.step(gradient, ours, momentum, *new)
        ours, momentum = new
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        torch.testing.assert_close(torch.from_numpy(ours), theirs.detach(), rtol=1e-6, atol=1e-6)


def test_every_operation_is_rounded_by_itself() -> None:
    """As written down in float32, one operation at a time: a fused multiply-add gives other last bits."""
    rule = OuterRule(0.7, 0.9)
    gradient, parameters, momentum = vector(1000, 1), vector(1000, 2), vector(1000, 3)
    new_parameters, new_momentum = np.empty_like(parameters), np.empty_like(momentum)
    rule.step(gradient, parameters, momentum, new_parameters, new_momentum)
    rate, mu = np.float32(0.7), np.float32(0.9)
    for i in range(1000):
        buffer = np.float32(np.float32(momentum[i] * mu) + gradient[i])
        update = np.float32(np.float32(np.float32(buffer * mu) + gradient[i]) * rate)
        assert new_momentum[i] == buffer
        assert new_parameters[i] == np.float32(parameters[i] - update)


def test_it_may_write_over_the_old_state() -> None:
    rule = OuterRule(0.7, 0.9)
    gradient, parameters, momentum = vector(100_000, 1), vector(100_000, 2), vector(100_000, 3)
    new = np.empty_like(parameters), np.empty_like(momentum)
    rule.step(gradient, parameters, momentum, *new)
    rule.step(gradient, parameters, momentum, parameters, momentum)
    np.testing.assert_array_equal(parameters, new[0])
    np.testing.assert_array_equal(momentum, new[1])
