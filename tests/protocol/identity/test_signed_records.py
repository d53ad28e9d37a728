"""A record is accepted as its owner signed it, or not at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import protocol.identity.signed_records
from protocol.generated import records_pb2
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signed_records import (
    MAX_RECORD_BYTES,
    decode_announced,
    directory_key,
    encode_record,
)
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerState, RunId, VersionRange

NOW = 1_800_000_000.0
RUN = RunId("ab" * 32)
OWNER = Identity.generate()
STRANGER = Identity.generate()
CERTIFICATE = make_credentials(OWNER, RUN).certificate_der
MODULE = ModuleId(3, 1)
KEY = directory_key(RUN, MODULE)
HONEST = Announcement(
    run=RUN,
    peer=OWNER.peer,
    state=PeerState.SERVING,
    module=MODULE,
    addresses=("192.0.2.1:4000", "[2001:db8::1]:4000", "node.example.org:4000"),
    certificate=CERTIFICATE,
    versions=VersionRange(2, 2),
    tokens_per_second=1500.0,
    quadratic_share=0.25,
    memory_bytes=8 << 30,
    device_bytes=12 << 30,
    slots=4,
    free_slots=3,
    steps=70,
    anchor=AnchorVersion(2, 60, 4_000_000, 1, b"d" * 32),
    incarnation=int(NOW * 1000) - 5000,
    sequence=int(NOW * 1000),
    expires_at=NOW + 90,
)
RECORD = encode_record(HONEST, OWNER)
OTHERS = tuple(Identity.generate().peer for _ in range(4))
OWN_PART = f"/p2p/{OWNER.peer}"
RELAY = f"/ip4/192.0.2.1/tcp/4001{OWN_PART}"

Change = Callable[[records_pb2.Announcement], None]


def forged(change: Change, identity: Identity = OWNER, key: str | None = None) -> bytes:
    """A record that its owner signed properly although no honest code would write it."""
    envelope = records_pb2.SignedRecord.FromString(RECORD)
    body = records_pb2.Announcement.FromString(envelope.body)
    change(body)
    raw = body.SerializeToString(deterministic=True)
    if key is None:
        key = (
            f"skipstone/{body.run}/{body.stage}.{body.expert}" if body.has_module else f"skipstone/{body.run}/visitors"
        )
    signature = identity.sign(b"skipstone-record:" + key.encode() + b"\0" + raw)
    return records_pb2.SignedRecord(public_key=identity.public_key, signature=signature, body=raw).SerializeToString()


def fields(**values: object) -> Change:
    def change(body: records_pb2.Announcement) -> None:
        for name, value in values.items():
            if isinstance(value, list):
                del getattr(body, name)[:]
                getattr(body, name).extend(value)
            else:
                setattr(body, name, value)

    return change


def refused(record: bytes, because: str, *, run: RunId = RUN, now: float = NOW) -> None:
    with pytest.raises(ProtocolViolation, match=because):
        decode_announced(record, run=run, now=now)


def test_a_record_comes_back_as_it_was_announced() -> None:
    assert decode_announced(RECORD, run=RUN, now=NOW) == HONEST
    assert forged(lambda body: None) == RECORD, "the forging helper must be able to write a good record"
    assert len(RECORD) < MAX_RECORD_BYTES


def test_a_peer_without_an_anchor_says_so() -> None:
    bare = dataclasses.replace(HONEST, anchor=None)
    assert decode_announced(encode_record(bare, OWNER), run=RUN, now=NOW) == bare
    initial = dataclasses.replace(HONEST, anchor=AnchorVersion(0, 0, 0, 0, b"i" * 32))
    assert decode_announced(encode_record(initial, OWNER), run=RUN, now=NOW) == initial


def test_a_visitor_stands_under_the_visitors_key() -> None:
    visitor = dataclasses.replace(HONEST, state=PeerState.VISITING, module=None)
    record = encode_record(visitor, OWNER)
    assert decode_announced(record, run=RUN, now=NOW) == visitor
    assert directory_key(RUN, None) == f"skipstone/{RUN}/visitors"


def test_the_largest_honest_record_fits() -> None:
    widest = dataclasses.replace(
        HONEST,
        addresses=tuple(f"{'h' * 56}.x:6553{n % 6}" for n in range(8)),
        module=ModuleId(1023, 1023),
        steps=2**48,
        incarnation=2**48 - 1,
        anchor=AnchorVersion(2**48 - 1, 2**48, 2**48, 63, b"d" * 32),
        relay="/dns4/".ljust(128 - len(OWN_PART), "r") + OWN_PART,
    )
    assert len(encode_record(widest, OWNER)) < MAX_RECORD_BYTES


def test_who_has_no_addresses_names_those_to_be_called_through() -> None:
    called = dataclasses.replace(HONEST, addresses=(), via=OTHERS, relay=RELAY)
    record = encode_record(called, OWNER)
    assert decode_announced(record, run=RUN, now=NOW) == called
    assert len(record) < MAX_RECORD_BYTES


def test_another_peers_announcement_is_not_signed() -> None:
    with pytest.raises(ProtocolViolation, match="cannot be announced with the key"):
        encode_record(HONEST, STRANGER)


def test_our_own_nonsense_is_not_signed() -> None:
    with pytest.raises(ProtocolViolation, match="digest"):
        encode_record(dataclasses.replace(HONEST, anchor=AnchorVersion(1, 1, 1, 0, b"")), OWNER)
    with pytest.raises(ProtocolViolation, match="tokens per second"):
        encode_record(dataclasses.replace(HONEST, tokens_per_second=math.nan), OWNER)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (fields(run="AB" * 32), "hexadecimal"),
        (fields(run="ab" * 31), "hexadecimal"),
        (fields(peer=STRANGER.peer), "another peer's key"),
        (fields(peer="x" * 1000), "another peer's key"),
        (fields(state=0), "unknown state"),
        (fields(state=9), "unknown state"),
        (fields(state=4), "does not go with"),
        (fields(has_module=False), "without a module"),
        (fields(has_module=False, stage=0, expert=0), "does not go with"),
        (fields(stage=1024), "outside"),
        (fields(expert=1024), "outside"),
        (fields(addresses=["a:1"] * 9), "addresses"),
        (fields(addresses=["no-port"]), "address"),
        (fields(addresses=[":4000"]), "address"),
        (fields(addresses=["host:0"]), "address"),
        (fields(addresses=["host:65536"]), "address"),
        (fields(addresses=["host: 80"]), "address"),
        (fields(addresses=["host:80\n"]), "address"),
        (fields(addresses=["ho st:80"]), "address"),
        (fields(addresses=["http://host:80"]), "address"),
        (fields(addresses=["300.1.1.1:80"]), "address"),
        (fields(addresses=["0.0.0.0:80"]), "address"),
        (fields(addresses=["[::]:80"]), "address"),
        (fields(addresses=["2001:db8::1:80"]), "address"),
        (fields(addresses=["a" * 62 + ":80"]), "address"),
        (fields(addresses=[], via=[*OTHERS, STRANGER.peer]), "called through"),
        (fields(addresses=[], via=[OTHERS[0], OTHERS[0]]), "named twice"),
        (fields(addresses=[], via=[OWNER.peer]), "itself"),
        (fields(addresses=[], via=[""]), "peer id"),
        (fields(addresses=[], via=["x" * 600]), "peer id"),
        (fields(addresses=[], via=["QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG"]), "peer id"),
        (fields(via=[OTHERS[0]]), "has addresses"),
        (fields(relay="/"), "multiaddr"),
        (fields(relay=OWN_PART[1:]), "multiaddr"),
        (fields(relay="r" + RELAY), "multiaddr"),
        (fields(relay=RELAY + "\n"), "multiaddr"),
        (fields(relay=f"/ip4/192.0.2.1 {OWN_PART}"), "multiaddr"),
        (fields(relay=f"/dns4/h\u00f6st/tcp/1{OWN_PART}"), "multiaddr"),
        (fields(relay=f"/ip4/192.0.2.1/tcp/4001/p2p/{STRANGER.peer}"), "multiaddr"),
        (fields(relay=RELAY + "/p2p-circuit"), "multiaddr"),
        (fields(relay="/dns4/".ljust(129 - len(OWN_PART), "r") + OWN_PART), "multiaddr"),
        (fields(certificate=b""), "certificate"),
        (fields(certificate=b"x" * 1025), "at most 1024"),
        (fields(certificate=make_credentials(STRANGER, RUN).certificate_der), "belong"),
        (fields(certificate=make_credentials(OWNER, RunId("cd" * 32)).certificate_der), "not issued by this run"),
        (fields(lowest_version=0), "versions"),
        (fields(lowest_version=3), "versions"),
        (fields(highest_version=65_536), "versions"),
        (fields(tokens_per_second=math.nan), "tokens per second"),
        (fields(tokens_per_second=math.inf), "tokens per second"),
        (fields(tokens_per_second=-1.0), "tokens per second"),
        (fields(memory_bytes=2**48 + 1), "bytes of memory"),
        (fields(device_bytes=2**64 - 1), "bytes of memory"),
        (fields(quadratic_share=math.nan), "quadratic share"),
        (fields(quadratic_share=-0.1), "quadratic share"),
        (fields(quadratic_share=1.1), "quadratic share"),
        (fields(free_slots=5), "slots"),
        (fields(slots=100_000), "slots"),
        (fields(steps=2**63), "out of range"),
        (fields(incarnation=0), "incarnation"),
        (fields(incarnation=2**48), "incarnation"),
        (fields(round=2**48), "out of range"),
        (fields(anchor_steps=2**48 + 1), "out of range"),
        (fields(anchor_tokens=2**63), "out of range"),
        (fields(fragment=64), "out of range"),
        (fields(digest=b""), "digest"),
        (fields(round=0, fragment=0, anchor_tokens=0, digest=b""), "digest"),
        (fields(digest=b"d"), "digest"),
        (fields(digest=b"d" * 33), "digest"),
        (fields(expires_at=math.nan), "expires in nan"),
        (fields(expires_at=math.inf), "expires in inf"),
        (fields(expires_at=NOW + 31_536_000), "expires in"),
        (fields(expires_at=NOW + 121), "expires in"),
        (fields(sequence=0), "sequence"),
        (fields(sequence=2**48 + 1), "sequence"),
        (fields(sequence=2**64 - 1), "sequence"),
    ],
)
def test_what_an_owner_may_not_sign(change: Change, because: str) -> None:
    body = records_pb2.Announcement.FromString(records_pb2.SignedRecord.FromString(RECORD).body)
    change(body)
    refused(forged(change), because, run=RunId(body.run))


def test_time_passes() -> None:
    refused(RECORD, "expires in", now=NOW + 90)
    refused(RECORD, "expires in", now=math.inf)
    refused(RECORD, "expires in", now=NOW - 3600)


def test_what_its_owner_says_on_its_own_link_is_fresh_whatever_the_clocks_say() -> None:
    for expires_at in (NOW - 3600, NOW, NOW + 3600):
        record = encode_record(dataclasses.replace(HONEST, expires_at=expires_at), OWNER)
        assert decode_announced(record, run=RUN, now=None).expires_at == expires_at
        with pytest.raises(ProtocolViolation, match="is a clock wrong"):
            decode_announced(record, run=RUN, now=NOW)


def test_of_another_run_and_out_of_date_is_found_before_any_signature_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []
    monkeypatch.setattr("protocol.identity.signed_records.verify", lambda *_: checked.append("record") or True)
    monkeypatch.setattr(
        "protocol.identity.signed_records.peer_of_certificate", lambda *_: checked.append("certificate") or OWNER.peer
    )
    record = forged(fields(steps=71))
    with pytest.raises(ProtocolViolation, match="belongs to run"):
        decode_announced(record, run=RunId("cd" * 32), now=NOW)
    refused(record, "expires in", now=NOW + 90)
    refused(forged(fields(steps=71, slots=100_000)), "slots")
    assert checked == []
    assert decode_announced(record, run=RUN, now=NOW).steps == 71
    assert checked == ["record", "certificate"]
    assert decode_announced(record, run=RUN, now=NOW).steps == 71
    assert checked == ["record", "certificate"], "remembered"
    refused(record, "expires in", now=NOW + 90)
    with pytest.raises(ProtocolViolation, match="belongs to run"):
        decode_announced(record, run=RunId("cd" * 32), now=NOW)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.identity.signed_records._REMEMBERED_RECORDS", 3)
    monkeypatch.setattr(
        "protocol.identity.signed_records._verified", remembered := type(protocol.identity.signed_records._verified)()
    )
    for steps in range(5):
        decode_announced(forged(fields(steps=steps)), run=RUN, now=NOW)
    assert [each.steps for each in remembered.values()] == [2, 3, 4]


def test_a_record_belongs_to_its_own_key_and_run() -> None:
    refused(forged(lambda body: None, key=directory_key(RUN, ModuleId(3, 2))), "signature")
    refused(RECORD, "belongs to run", run=RunId("cd" * 32))


def test_another_key_cannot_sign_for_the_owner() -> None:
    refused(forged(lambda body: None, identity=STRANGER), "another peer's key")
    envelope = records_pb2.SignedRecord.FromString(RECORD)
    envelope.signature = STRANGER.sign(b"skipstone-record:" + KEY.encode() + b"\0" + envelope.body)
    refused(envelope.SerializeToString(), "signature")


def test_there_is_one_encoding_only() -> None:
    unknown_field = b"\x7a\x01x"
    refused(RECORD + unknown_field, "canonical")
    refused(RECORD + RECORD[:34], "canonical")
    refused(b"", "unknown state")
    refused(b"x" * 2049, "more than")
    envelope = records_pb2.SignedRecord.FromString(RECORD)
    envelope.body += b"\xf2\x01\x01x"
    envelope.signature = OWNER.sign(b"skipstone-record:" + KEY.encode() + b"\0" + envelope.body)
    refused(envelope.SerializeToString(), "canonical")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(RECORD) * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    damaged = bytearray(RECORD)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolViolation):
        decode_announced(bytes(damaged), run=RUN, now=NOW)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=MAX_RECORD_BYTES + 10), st.booleans())
def test_no_bytes_raise_anything_else(data: bytes, in_envelope: bool) -> None:
    if in_envelope:
        data = records_pb2.SignedRecord(public_key=OWNER.public_key, signature=b"s" * 64, body=data).SerializeToString()
    with pytest.raises(ProtocolViolation):
        decode_announced(data, run=RUN, now=NOW)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_changed_field_is_noticed(data: st.DataObject) -> None:
    envelope = records_pb2.SignedRecord.FromString(RECORD)
    body = records_pb2.Announcement.FromString(envelope.body)
    numbers = (
        "stage",
        "expert",
        "slots",
        "free_slots",
        "steps",
        "round",
        "incarnation",
        "sequence",
        "lowest_version",
        "highest_version",
    )
    name = data.draw(st.sampled_from(numbers))
    value = data.draw(st.integers(0, 2**32 - 1).filter(lambda value: value != getattr(body, name)))
    setattr(body, name, value)
    envelope.body = body.SerializeToString(deterministic=True)
    with pytest.raises(ProtocolViolation):
        decode_announced(envelope.SerializeToString(deterministic=True), run=RUN, now=NOW)
