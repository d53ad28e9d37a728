"""A record is accepted as its owner signed it, or not at all."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.frames.frames import TensorFrame, decode, encode
from protocol.generated import records_pb2
from protocol.identity import signatures as routes
from protocol.identity.certificates import make_credentials
from protocol.identity.invitations import NOT_INVITED, Grant, Guests
from protocol.identity.keys import Identity
from protocol.identity.signatures import Routes, signed_bytes
from protocol.identity.signed_records import MAX_RECORD_BYTES, decode_announced, directory_key, encode_record
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import ProtocolViolation, Rejected
from swarm.vocabulary.pipeline_messages import Backward, Forward, MicrobatchTensor, Purpose
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import (
    AnchorVersion,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    PeerState,
    RunId,
    SignedRoute,
    VersionRange,
)

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
        key = f"skipstone/{body.run}/" + (f"{body.stage}.{body.expert}" if body.has_module else "visitors")
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


def test_the_forging_helper_can_write_a_good_record() -> None:
    assert forged(lambda body: None) == RECORD
    assert directory_key(RUN, None) == f"skipstone/{RUN}/visitors"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"anchor": None},
        {"anchor": AnchorVersion(0, 0, 0, 0, b"i" * 32)},
        {"state": PeerState.VISITING, "module": None},
        {"addresses": (), "via": OTHERS, "relay": RELAY},
        {"module": ModuleId(0), "visits": (2**48,) * 64, "route": (1023,) * 64},
        {
            "addresses": tuple(f"{'h' * 56}.x:6553{n % 6}" for n in range(8)),
            "module": ModuleId(1023, 1023),
            "steps": 2**48,
            "incarnation": 2**48 - 1,
            "anchor": AnchorVersion(2**48 - 1, 2**48, 2**48, 63, b"d" * 32),
            "relay": "/dns4/".ljust(128 - len(OWN_PART), "r") + OWN_PART,
        },
    ],
    ids=["whole", "without an anchor", "initial anchor", "visitor", "without an address", "data node", "largest"],
)
def test_a_record_comes_back_as_it_was_announced_and_fits(changes: dict[str, Any]) -> None:
    announcement = replace(HONEST, **changes)
    record = encode_record(announcement, OWNER)
    assert decode_announced(record, run=RUN, now=NOW) == announcement
    assert len(record) < MAX_RECORD_BYTES


def test_anothers_announcement_and_our_own_nonsense_are_not_signed() -> None:
    with pytest.raises(ProtocolViolation, match="cannot be announced with the key"):
        encode_record(HONEST, STRANGER)
    with pytest.raises(ProtocolViolation, match="digest"):
        encode_record(replace(HONEST, anchor=AnchorVersion(1, 1, 1, 0, b"")), OWNER)
    with pytest.raises(ProtocolViolation, match="tokens per second"):
        encode_record(replace(HONEST, tokens_per_second=math.nan), OWNER)


WRONG_VALUES: list[tuple[str, list[object], str]] = [
    ("run", ["AB" * 32, "ab" * 31], "hexadecimal"),
    ("peer", [STRANGER.peer, "x" * 1000], "another peer's key"),
    ("state", [0, 9], "unknown state"),
    ("state", [4], "does not go with"),
    ("has_module", [False], "without a module"),
    ("stage", [1024], "outside"),
    ("expert", [1024], "outside"),
    ("addresses", [["a:1"] * 9], "addresses"),
    ("addresses", [["no-port"], ["host:0"], ["host: 80"], ["ho st:80"], ["300.1.1.1:80"]], "address"),
    ("addresses", [["0.0.0.0:80"], ["2001:db8::1:80"], ["a" * 62 + ":80"]], "address"),
    ("via", [[OTHERS[0]]], "has addresses"),
    ("route", [[0], [0] * 65], "a route"),
    ("relay", ["/", OWN_PART[1:], "r" + RELAY, RELAY + "\n", RELAY + "/p2p-circuit"], "multiaddr"),
    ("relay", [f"/ip4/192.0.2.1 {OWN_PART}", f"/dns4/h\u00f6st/tcp/1{OWN_PART}"], "multiaddr"),
    ("relay", [f"/ip4/192.0.2.1/tcp/4001/p2p/{STRANGER.peer}"], "multiaddr"),
    ("relay", ["/dns4/".ljust(129 - len(OWN_PART), "r") + OWN_PART], "multiaddr"),
    ("certificate", [b""], "certificate"),
    ("certificate", [b"x" * 1025], "the 1024 allowed"),
    ("certificate", [make_credentials(STRANGER, RUN).certificate_der], "belong"),
    ("certificate", [make_credentials(OWNER, RunId("cd" * 32)).certificate_der], "not issued by this run"),
    ("lowest_version", [0, 3], "versions"),
    ("highest_version", [65_536], "versions"),
    ("tokens_per_second", [math.nan, math.inf, -1.0], "tokens per second"),
    ("memory_bytes", [2**48 + 1], "bytes of memory"),
    ("device_bytes", [2**64 - 1], "bytes of memory"),
    ("free_slots", [5], "slots"),
    ("slots", [100_000], "slots"),
    ("steps", [2**63], "out of range"),
    ("incarnation", [0, 2**48], "incarnation"),
    ("round", [2**48], "out of range"),
    ("anchor_steps", [2**48 + 1], "out of range"),
    ("anchor_tokens", [2**63], "out of range"),
    ("fragment", [64], "out of range"),
    ("digest", [b"", b"d", b"d" * 33], "digest"),
    ("expires_at", [math.nan], "expires in nan"),
    ("expires_at", [math.inf], "expires in inf"),
    ("expires_at", [NOW + 31_536_000, NOW + 121], "expires in"),
    ("sequence", [0, 2**48 + 1, 2**64 - 1], "sequence"),
]


@pytest.mark.parametrize(
    ("change", "because"),
    [
        *((fields(**{name: value}), because) for name, values, because in WRONG_VALUES for value in values),
        (fields(has_module=False, stage=0, expert=0), "does not go with"),
        (fields(addresses=[], via=[*OTHERS, STRANGER.peer]), "called through"),
        (fields(addresses=[], via=[OTHERS[0], OTHERS[0]]), "named twice"),
        (fields(addresses=[], via=[OWNER.peer]), "itself"),
        (fields(addresses=[], via=[""]), "peer id"),
        (fields(addresses=[], via=["x" * 600]), "peer id"),
        (fields(addresses=[], via=["QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG"]), "peer id"),
        (fields(round=0, fragment=0, anchor_tokens=0, digest=b""), "digest"),
    ],
)
def test_what_an_owner_may_not_sign(change: Change, because: str) -> None:
    body = records_pb2.Announcement.FromString(records_pb2.SignedRecord.FromString(RECORD).body)
    change(body)
    refused(forged(change), because, run=RunId(body.run))


def test_time_passes_but_what_its_owner_says_on_its_own_link_is_fresh_whatever_the_clocks_say() -> None:
    for expires_at in (NOW - 3600, NOW, NOW + 3600):
        record = encode_record(replace(HONEST, expires_at=expires_at), OWNER)
        assert decode_announced(record, run=RUN, now=None).expires_at == expires_at
        with pytest.raises(ProtocolViolation, match="is a clock wrong"):
            decode_announced(record, run=RUN, now=NOW)
    refused(RECORD, "expires in", now=NOW + 90)
    refused(RECORD, "expires in", now=math.inf)
    refused(RECORD, "expires in", now=NOW - 3600)


def test_another_run_and_an_old_date_are_found_before_a_signature_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("protocol.identity.signed_records._verified", remembered := Latest(3))
    for steps in range(5):
        decode_announced(forged(fields(steps=steps)), run=RUN, now=NOW)
    assert [each.steps for each in remembered.values()] == [2, 3, 4]


def test_a_record_belongs_to_its_own_key_and_run_and_no_other_key_signs_it() -> None:
    refused(forged(lambda body: None, key=directory_key(RUN, ModuleId(3, 2))), "signature")
    refused(RECORD, "belongs to run", run=RunId("cd" * 32))
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


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(RECORD) * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    damaged = bytearray(RECORD)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolViolation):
        decode_announced(bytes(damaged), run=RUN, now=NOW)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=MAX_RECORD_BYTES + 10), st.booleans())
def test_no_bytes_raise_anything_else(data: bytes, in_envelope: bool) -> None:
    if in_envelope:
        data = records_pb2.SignedRecord(public_key=OWNER.public_key, signature=b"s" * 64, body=data).SerializeToString()
    with pytest.raises(ProtocolViolation):
        decode_announced(data, run=RUN, now=NOW)


ROUTE_RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
DATA_NODE, HOP = Identity.generate(), Identity.generate()
GUESTS = Guests(ROUTE_RUN, HOP.peer, is_open=True)
NUMBER = MicrobatchId(DATA_NODE.peer, 7)
PATH = Path(DATA_NODE.peer, tuple(Hop(ModuleId(stage), HOP.peer) for stage in (1, 2, 3)))
LIFETIME_S = 61.23456
NOT_ITS = "the route's signature is not its data node's"


def signed(purpose: Purpose = Purpose.TRAIN) -> Path:
    return Routes(DATA_NODE, ROUTE_RUN, GUESTS).signed(NUMBER, PATH, purpose, LIFETIME_S)


def forward(path: Path, microbatch: MicrobatchId = NUMBER, purpose: Purpose = Purpose.TRAIN) -> Forward:
    return Forward(microbatch, path, 1, purpose, LIFETIME_S)


def route_of(path: Path) -> SignedRoute:
    assert path.route is not None
    return path.route


def read_by_another(message: MicrobatchTensor) -> str | None:
    """What a hop finds wrong with it when it comes by the wire."""
    frame = decode(encode(TensorFrame(message, TensorSpec((2, 1024), DType.FLOAT32), 1, 1)))
    assert isinstance(frame, TensorFrame)
    assert isinstance(frame.message, Forward | Backward)
    return Routes(HOP, ROUTE_RUN, GUESTS).fault(frame.message)


def test_what_is_signed_is_written_out_and_documents_apart_from_modules() -> None:
    """Else what was signed as modules could be shown as documents."""
    modules = (ModuleId(1), ModuleId(258, 3))
    assert signed_bytes(ROUTE_RUN, NUMBER, Purpose.TRAIN, 1.5, modules) == (
        b"skipstone-route:2\0" + b"\xab" * 32 + bytes([0, 0, 0, 0, 0, 0, 0, 7, 1, 0, 0, 5, 220])
        + bytes([0, 1, 0, 0, 1, 2, 0, 3])
    )  # fmt: skip
    assert signed_bytes(ROUTE_RUN, NUMBER, Purpose.TRAIN, 1.5, modules, (5, 70000)) == (
        b"skipstone-route-documents:1\0" + b"\xab" * 32 + bytes([0, 0, 0, 0, 0, 0, 0, 7, 1, 0, 0, 5, 220])
        + bytes([0, 2, 0, 1, 0, 0, 1, 2, 0, 3, 0, 0, 0, 5, 0, 1, 17, 112])
    )  # fmt: skip


def test_nobody_on_the_way_makes_others_mask_it_otherwise() -> None:
    path, counted = (
        Routes(DATA_NODE, ROUTE_RUN, GUESTS).signed(NUMBER, PATH, Purpose.TRAIN, LIFETIME_S, (5, 6), *labels)
        for labels in ((), (7,))
    )
    assert (path.documents, counted.labels) == ((5, 6), 7)
    for honest in (path, counted):
        assert read_by_another(forward(honest)) is None
        assert read_by_another(Backward(NUMBER, honest, 1)) is None
    for lie in (
        *(replace(route_of(path), documents=documents) for documents in ((6, 5), (11,), (5, 6, 1), ())),
        *(replace(route_of(counted), labels=labels) for labels in (6, 0)),
        replace(route_of(path), labels=7),
        replace(route_of(signed()), documents=(11,)),
    ):
        assert read_by_another(forward(replace(path, route=lie))) == NOT_ITS


def test_a_signed_route_holds_out_and_back_at_every_hop_and_through_repairs() -> None:
    path = signed()
    for position in range(3):
        assert read_by_another(Forward(NUMBER, path, position, Purpose.TRAIN, LIFETIME_S)) is None
        assert read_by_another(Backward(NUMBER, path, position)) is None
    assert read_by_another(forward(signed(Purpose.EVALUATE), purpose=Purpose.EVALUATE)) is None
    path = signed()
    for repaired in (path.with_peer(1, DATA_NODE.peer), path.without(0), path.without(1), path.without(2)):
        assert read_by_another(forward(repaired)) is None
        assert read_by_another(Backward(NUMBER, repaired, 0)) is None


def tampered(**changes: object) -> Path:
    return replace(signed(), route=replace(route_of(signed()), **changes))  # type: ignore[arg-type]


def flipped(at: int) -> bytes:
    signature = bytearray(route_of(signed()).signature)
    signature[at] ^= 1
    return bytes(signature)


@pytest.mark.parametrize(
    "message",
    [
        forward(signed(), MicrobatchId(DATA_NODE.peer, 8)),
        forward(replace(signed(), data_node=HOP.peer), MicrobatchId(HOP.peer, 7)),
        forward(signed(), purpose=Purpose.EVALUATE),
        forward(signed(Purpose.EVALUATE)),
        Backward(NUMBER, signed(Purpose.EVALUATE), 1),
        replace(forward(tampered(lifetime_s=3600.0)), lifetime_s=3600.0),
        Backward(NUMBER, tampered(lifetime_s=3600.0), 1),
        forward(tampered(modules=(ModuleId(1), ModuleId(2), ModuleId(3), ModuleId(4)))),
        forward(tampered(signature=flipped(0))),
        forward(tampered(signature=flipped(63))),
    ],
)
def test_another_number_purpose_lifetime_or_module_is_not_signed(message: MicrobatchTensor) -> None:
    assert read_by_another(message) == NOT_ITS


def test_a_signature_is_needed_and_holds_in_its_run_only() -> None:
    assert Routes(HOP, OTHER_RUN, GUESTS).fault(forward(signed())) == NOT_ITS
    assert read_by_another(forward(PATH)) == "its data node has not signed the route"
    assert read_by_another(Backward(NUMBER, PATH, 0)) == "its data node has not signed the route"


@pytest.mark.parametrize("stages", [(1, 3, 2), (2, 1), (1, 2, 3, 4), (1, 1), (4,)])
def test_a_path_that_leaves_the_route(stages: tuple[int, ...]) -> None:
    path = replace(signed(), hops=tuple(Hop(ModuleId(stage), HOP.peer) for stage in stages))
    for message in (forward(path), Backward(NUMBER, path, 0)):
        assert read_by_another(message) == "the path visits other modules than its data node has signed"


def test_a_data_node_shows_its_invitation() -> None:
    guests = Guests(ROUTE_RUN, HOP.peer)
    invitation = Grant.issue(HOP, ROUTE_RUN, 1, 2**40).invitation(ROUTE_RUN, DATA_NODE.peer)
    hop, own = Routes(HOP, ROUTE_RUN, guests), Routes(DATA_NODE, ROUTE_RUN, guests, invitation)
    path = own.signed(NUMBER, PATH, Purpose.TRAIN, LIFETIME_S)
    assert hop.uninvited(forward(path)) is hop.uninvited(Backward(NUMBER, path, 0)) is None
    assert hop.uninvited(forward(signed())) == hop.uninvited(forward(PATH)) == NOT_INVITED
    with pytest.raises(Rejected, match="no invitation"):
        Routes(DATA_NODE, ROUTE_RUN, guests).signed(NUMBER, PATH, Purpose.TRAIN, LIFETIME_S)


def test_a_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REMEMBERED", 2)
    checked: list[bytes] = []
    honest = routes.verify

    def verify(key: bytes, signature: bytes, data: bytes) -> bool:
        checked.append(signature)
        return honest(key, signature, data)

    monkeypatch.setattr(routes, "verify", verify)
    hop, own = Routes(HOP, ROUTE_RUN, GUESTS), Routes(DATA_NODE, ROUTE_RUN, GUESTS)
    path = own.signed(NUMBER, PATH, Purpose.TRAIN, LIFETIME_S)
    assert own.fault(forward(path)) is None
    assert checked == [], "what it has signed itself it knows"
    for message in (forward(path), Backward(NUMBER, path, 0), forward(path.with_peer(0, DATA_NODE.peer))):
        assert hop.fault(message) is None
    assert len(checked) == 1
    forged = forward(replace(path, route=replace(route_of(path), lifetime_s=1.0)))
    for _ in range(3):
        assert hop.fault(forged) == NOT_ITS
    assert len(checked) == 4, "only what is good is remembered"
    for number in range(3):
        other = MicrobatchId(DATA_NODE.peer, 100 + number)
        assert hop.fault(forward(own.signed(other, PATH, Purpose.TRAIN, LIFETIME_S), other)) is None
    assert hop.fault(forward(path)) is None
    assert len(checked) == 8, "it had been forgotten: the memory is bounded"
