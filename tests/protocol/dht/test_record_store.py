"""What a DHT node keeps is bounded, and a flood does not push out who was there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.dht.guards import MAX_KEYS_OF_OWNER, Kept, RecordStore, owners_per_key


class HandClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


def test_a_newer_record_replaces_and_an_older_one_changes_nothing() -> None:
    clock = HandClock()
    store = RecordStore(clock.now)
    assert store.put("key", "owner", Kept(b"new", 1090.0))
    assert not store.put("key", "owner", Kept(b"old", 1010.0))
    assert not store.put("key", "owner", Kept(b"same", 1090.0))
    clock.time = 1050.0
    store.put("other", "somebody", Kept(b"", 1051.0))
    assert store.of_key("key") == {"owner": Kept(b"new", 1090.0)}, "a replay must not bring the end forward"
    clock.time = 1090.0
    assert store.of_key("key") == {}


def test_a_full_key_refuses_newcomers_and_serves_incumbents() -> None:
    clock = HandClock()
    store = RecordStore(clock.now, owners_of_key=2)
    assert store.put("key", "a", Kept(b"", 1010.0))
    assert store.put("key", "b", Kept(b"", 1020.0))
    assert not store.put("key", "c", Kept(b"", 1599.0))
    assert store.put("key", "a", Kept(b"", 1030.0))
    assert store.put("another key", "c", Kept(b"", 1030.0))
    clock.time = 1021.0
    assert store.put("key", "c", Kept(b"", 1599.0)), "an expired record's room is free"
    assert set(store.of_key("key")) == {"a", "c"}


def test_an_owner_pushes_out_only_itself() -> None:
    store = RecordStore(HandClock().now)
    store.put(0, "honest", Kept(b"", 1001.0))
    for key in range(MAX_KEYS_OF_OWNER + 1):
        assert store.put(key, "greedy", Kept(b"", 1010.0 + key))
    assert set(store.of_key(0)) == {"honest"}
    assert len(store) == MAX_KEYS_OF_OWNER + 1


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abcdefgh"), st.integers(-5, 30), st.integers(0, 3))))
def test_it_stays_within_its_bounds(steps: list[tuple[int, str, int, int]]) -> None:
    clock = HandClock()
    store = RecordStore(clock.now, owners_of_key=3, max_records=9)
    for key, owner, life, passes in steps:
        taken = store.put(key, owner, Kept(b"", clock.time + life))
        assert taken == (store.of_key(key).get(owner) == Kept(b"", clock.time + life) and life > 0) or not taken
        clock.time += passes
        rooms = [store.of_key(key) for key in store.keys()]  # noqa: SIM118
        assert len(store) == sum(map(len, rooms)) <= 9
        assert all(len(room) <= 3 for room in rooms)
        assert all(kept.expires_at > clock.time for room in rooms for kept in room.values())


def test_room_is_shared_out_among_the_runs_keys() -> None:
    assert owners_per_key(5) == 256
    assert owners_per_key(1024) == 16
    assert owners_per_key(1_000_000) == 8


def test_what_was_kept_while_our_clock_was_ahead_does_not_stand_in_its_owners_way() -> None:
    clock = HandClock()
    clock.time += 300.0
    store = RecordStore(clock.now, longest_s=120.0)
    assert store.put("key", "owner", Kept(b"ahead", clock.now() + 60.0))
    assert not store.put("key", "other", Kept(b"for ever", clock.now() + 121.0))
    clock.time -= 300.0
    assert store.of_key("key") == {}
    right = Kept(b"right", clock.now() + 60.0)
    assert store.put("key", "owner", right)
    assert store.of_key("key") == {"owner": right}
    clock.time -= 300.0
    assert list(store.keys()) == []
    assert len(store) == 0
