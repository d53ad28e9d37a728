"""Each guard between hivemind and strangers, by itself. With the real child: test_directory.py."""

import dataclasses
import math
import time
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration
from hypothesis import given
from hypothesis import strategies as st

from protocol.dht import guards
from protocol.identity.keys import Identity
from protocol.identity.signed_records import directory_key, encode_record
from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted
from swarm.vocabulary.types import ModuleId, RunId
from tests.kit.waiting import ManualClock
from tests.protocol.dht.running import MODULE, OTHER_RUN, RUN, announced

OWNER = Identity.generate()
STRANGER = Identity.generate()
RULES = guards.RecordRules(RUN, experts=(1, 2, 2, 2), now=time.time)


@pytest.fixture(autouse=True)
def _guarded() -> None:
    guards.guard_serializer()


def stored(identity: Identity = OWNER, **changes: object) -> DHTRecord:
    announcement = announced(identity, **changes)
    return DHTRecord(
        key=bytes(DHTID.generate(directory_key(announcement.run, announcement.module))),
        subkey=MSGPackSerializer.dumps(str(identity.peer)),
        value=MSGPackSerializer.dumps(encode_record(announcement, identity)),
        expiration_time=announcement.expires_at,
    )


def other_key(run: RunId, module: ModuleId | None) -> bytes:
    return bytes(DHTID.generate(directory_key(run, module)))


@pytest.mark.parametrize(
    ("field", "wrong", "because"),
    [
        ("expiration_time", [math.inf, math.nan, 7, "soon"], "expiry"),
        ("value", [b"x" * 2052], "too long"),
        ("value", ["text"], "not bytes"),
        ("value", [b""], "not one packed record"),
        ("value", [b"\xc4\x03abc"], "record"),
        ("subkey", [MSGPackSerializer.dumps(str(STRANGER.peer)), MSGPackSerializer.dumps(None), b""], "subkey"),
        ("key", [other_key(RUN, ModuleId(2)), other_key(RUN, None), other_key(OTHER_RUN, MODULE)], "another key"),
        ("key", [bytes(DHTID.generate("body1.0."))], "another key"),
    ],
)
def test_what_is_stored_otherwise_than_signed_is_refused(field: str, wrong: list[object], because: str) -> None:
    for value in wrong:
        with pytest.raises(ProtocolViolation, match=because):
            RULES.check(dataclasses.replace(stored(), **{field: value}))


@pytest.mark.parametrize(("seconds", "because"), [(31_536_000, "expiry"), (90, "not the signed one"), (-60, "expiry")])
def test_what_is_stored_for_longer_or_shorter_than_signed_is_refused(seconds: float, because: str) -> None:
    with pytest.raises(ProtocolViolation, match=because):
        RULES.check(dataclasses.replace(stored(), expiration_time=time.time() + seconds))


def test_an_honest_record_is_accepted_and_the_run_and_its_modules_are_all_there_is() -> None:
    assert RULES.validate(stored())
    assert RULES.validate(stored(module=ModuleId(3, 1)))
    assert not RULES.validate(stored(run=OTHER_RUN))
    for module in (ModuleId(4), ModuleId(1, 2), ModuleId(0, 1)):
        assert not RULES.validate(stored(module=module))


@given(st.binary(max_size=2100))
def test_no_value_raises_anything_else(value: bytes) -> None:
    assert not RULES.validate(dataclasses.replace(stored(), value=value))
    assert not RULES.validate(dataclasses.replace(stored(), value=MSGPackSerializer.dumps(value)))


@given(st.binary(max_size=3000))
def test_unpacking_is_the_inverse_of_packing(data: bytes) -> None:
    assert guards.unpack_bytes(msgpack.packb(data)) == data


@pytest.mark.parametrize(
    "packed", [b"\xc5\x00\x03abc", b"\xc6\x00\x00\x00\x03abc", b"\xc4\x04abc", b"\xa3abc", b"\xc0"]
)
def test_other_encodings_of_a_value_are_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        guards.unpack_bytes(packed)


def test_nested_extensions_and_long_values_are_refused_before_they_are_decoded() -> None:
    packed = b"\xc0"
    for _ in range(8):
        packed = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + packed))
    with pytest.raises(ValueError, match="nested deeper"):
        MSGPackSerializer.loads(packed)
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2, 3)))) == (1, (2, 3)), "the level must go down again"
    with pytest.raises(ValueError, match="more than"):
        MSGPackSerializer.loads(b"\x90" * (guards.MAX_PACKED_BYTES + 1))


def test_storage_keeps_no_value_without_an_owner_and_hands_out_copies() -> None:
    storage = guards.GuardedStorage(time.time)
    soon = time.time() + 60
    assert not storage.store(1, b"value", soon)
    assert storage.store(1, b"value", soon, subkey="owner")
    answer = storage.get(1)
    assert answer is not None
    assert isinstance(answer.value, DictionaryDHTValue)
    answer.value.store("intruder", b"", soon)
    assert list(storage.get(1).value.data) == ["owner"]
    assert [key for key, _ in storage.items()] == [1]
    assert storage.get(2) is None
    assert 2 not in storage


def test_one_source_cannot_spend_what_another_has() -> None:
    now = 0.0
    budgets = guards.SourceBudgets(lambda: now)
    budgets.spend("greedy", guards.BUDGET_BURST_BYTES)
    with pytest.raises(ResourceExhausted):
        budgets.spend("greedy", 1)
    budgets.spend("other", 1000)
    now = 1.0
    budgets.spend("greedy", guards.BUDGET_BYTES_PER_S)
    with pytest.raises(ResourceExhausted):
        budgets.spend("greedy", 1)


def test_an_answer_does_not_outlive_its_records() -> None:
    soon = time.time() + 60
    dictionary = DictionaryDHTValue(maxsize=1)
    with dictionary.freeze():
        dictionary.store("one", b"", soon)
        dictionary.store("two", b"", soon + 1)
    answer = guards.recomputed(ValueWithExpiration(dictionary, math.inf))
    assert answer is not None
    assert answer.expiration_time == soon + 1, "an endless answer would end the search with itself"
    assert (set(answer.value.data), answer.value.maxsize) == ({"one", "two"}, math.inf)
    assert guards.recomputed(ValueWithExpiration(DictionaryDHTValue(), math.inf)) is None
    assert (guards.recomputed(ValueWithExpiration(b"regular", math.inf)), guards.recomputed(None)) == (None, None)


def test_neighbours_must_sit_where_their_ids_put_them() -> None:
    peers = [PeerID.from_base58(Identity.generate().peer) for _ in range(4)]
    honest = {guards.node_id_of(peer): peer for peer in peers}
    assert (guards.plausible(honest, 10), len(guards.plausible(honest, 3))) == (honest, 3)
    assert guards.plausible({DHTID.generate(): peer for peer in peers}, 10) == {}


async def test_a_node_with_a_place_of_its_own_choice_is_not_remembered() -> None:
    protocol = guards.GuardedProtocol(_initialized_with_create=True)
    protocol.node_id, protocol.bucket_size, protocol.num_replicas = DHTID.generate(), 20, 5
    protocol.storage = guards.GuardedStorage(time.time)
    protocol.routing_table = RoutingTable(protocol.node_id, 20, 5)
    peer = PeerID.from_base58(OWNER.peer)
    await protocol.update_routing_table(DHTID.generate(), peer)
    assert not protocol.routing_table.uid_to_peer_id
    await protocol.update_routing_table(guards.node_id_of(peer), peer)
    assert protocol.routing_table.uid_to_peer_id == {guards.node_id_of(peer): peer}


def test_a_key_with_many_records_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    store, owners = guards.GuardedStorage(time.time), set(map(str, range(9)))
    for owner in owners:
        store.store_subkey("key", owner, b"", time.time() + 60)
    flood = store.get("key")
    monkeypatch.setattr("protocol.dht.guards.MAX_ANSWERED", 3)
    samples = [set(answer.value.data) for answer in (store.get("key") for _ in range(50)) if answer is not None]
    assert ({len(sample) for sample in samples}, set.union(*samples)) == ({3}, owners), "a random sample is answered"
    checked: list[DHTRecord] = []
    protocol = guards.GuardedProtocol(_initialized_with_create=True)
    protocol.record_validator = SimpleNamespace(validate=lambda record: checked.append(record) is None)
    assert flood is not None
    assert protocol._validate_dictionary(b"key", flood.value)
    assert (len(checked), len(flood.value.data)) == (3, 3), "few signatures of a flood are checked"


def test_a_newer_record_replaces_and_an_older_one_changes_nothing() -> None:
    clock = ManualClock(1000.0)
    store = guards.GuardedStorage(clock.monotonic)
    assert store.store_subkey("key", "owner", b"new", 1090.0)
    assert not store.store_subkey("key", "owner", b"old", 1010.0)
    assert not store.store_subkey("key", "owner", b"same", 1090.0)
    clock.now = 1050.0
    store.store_subkey("other", "somebody", b"", 1051.0)
    assert store.of_key("key") == {"owner": (b"new", 1090.0)}, "a replay must not bring the end forward"
    clock.now = 1090.0
    assert store.of_key("key") == {}


def test_a_full_key_refuses_newcomers_and_serves_incumbents() -> None:
    clock = ManualClock(1000.0)
    store = guards.GuardedStorage(clock.monotonic, owners_of_key=2)
    assert store.store_subkey("key", "a", b"", 1010.0)
    assert store.store_subkey("key", "b", b"", 1020.0)
    assert not store.store_subkey("key", "c", b"", 1599.0)
    assert store.store_subkey("key", "a", b"", 1030.0)
    assert store.store_subkey("another key", "c", b"", 1030.0)
    clock.now = 1021.0
    assert store.store_subkey("key", "c", b"", 1599.0), "an expired record's room is free"
    assert set(store.of_key("key")) == {"a", "c"}


def test_an_owner_pushes_out_only_itself() -> None:
    store = guards.GuardedStorage(ManualClock(1000.0).monotonic)
    store.store_subkey(0, "honest", b"", 1001.0)
    for key in range(guards.MAX_KEYS_OF_OWNER + 1):
        assert store.store_subkey(key, "greedy", b"", 1010.0 + key)
    assert (set(store.of_key(0)), len(store)) == ({"honest"}, guards.MAX_KEYS_OF_OWNER + 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abcdefgh"), st.integers(-5, 30), st.integers(0, 3))))
def test_it_stays_within_its_bounds(steps: list[tuple[int, str, int, int]]) -> None:
    clock = ManualClock(1000.0)
    store = guards.GuardedStorage(clock.monotonic, owners_of_key=3, max_records=9)
    for key, owner, life, passes in steps:
        taken = store.store_subkey(key, owner, b"", clock.now + life)
        assert not taken or (life > 0 and store.of_key(key)[owner] == (b"", clock.now + life))
        clock.now += passes
        rooms = [store.of_key(key) for key, _ in store.items()]
        assert len(store) == sum(map(len, rooms)) <= 9
        assert all(len(room) <= 3 for room in rooms)
        assert all(kept.expiration_time > clock.now for room in rooms for kept in room.values())


def test_room_is_shared_out_among_the_runs_keys() -> None:
    assert (guards.owners_per_key(5), guards.owners_per_key(1024), guards.owners_per_key(1_000_000)) == (256, 16, 8)


def test_what_was_kept_while_our_clock_was_ahead_does_not_stand_in_its_owners_way() -> None:
    clock = ManualClock(1000.0)
    clock.now += 300.0
    store = guards.GuardedStorage(clock.monotonic, longest_s=120.0)
    assert store.store_subkey("key", "owner", b"ahead", clock.monotonic() + 60.0)
    assert not store.store_subkey("key", "other", b"for ever", clock.monotonic() + 121.0)
    clock.now -= 300.0
    assert store.of_key("key") == {}
    right = (b"right", clock.monotonic() + 60.0)
    assert store.store_subkey("key", "owner", *right)
    assert store.of_key("key") == {"owner": right}
    clock.now -= 300.0
    assert (list(store.items()), len(store)) == ([], 0)
