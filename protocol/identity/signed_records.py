"""Signed announcements of peers in the DHT and on links (`proto/records.proto`), in a canonical encoding."""

import ipaddress
import math
import re
from collections.abc import Iterator
from typing import Any, Final

from protocol.frames.codec import Parsed, checked_peer, checked_version, parsed
from protocol.generated import records_pb2
from protocol.identity.certificates import peer_of_certificate
from protocol.identity.keys import Identity, peer_id_of, verify
from swarm.vocabulary.announcement import MAX_VISITED_STAGES, Announcement
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import MAX_COUNT, AnchorVersion, ModuleId, PeerState, RunId, VersionRange

KEY_PREFIX = "skipstone/"
MAX_RECORD_BYTES = 2048
RECORD_LIFETIME_S = 60.0  # From signing to expiry, by the signer's clock
MAX_LIFETIME_S = 2 * RECORD_LIFETIME_S  # Longest accepted time to expiry: the signer's clock may be a minute ahead
MAX_ADDRESSES = 8
MAX_ADDRESS_LENGTH = 64
MAX_VIA = 4
MAX_RELAY_LENGTH = 128
MAX_VERSION = 65_535
MAX_SLOTS = 65_536
MAX_INCARNATION = 2**48 - 1

_DOMAIN = b"skipstone-record:"
MAX_RECORDS: Final = 16_384  # Records that a DHT node stores, and verified ones that we remember
# Fields with the same name in announcement and record
_SAME = (
    *("run", "peer", "certificate", "tokens_per_second", "slots", "free_slots", "steps", "relay"),
    *("incarnation", "sequence", "expires_at", "memory_bytes", "device_bytes"),
)
_SAME_TUPLES = ("addresses", "via", "visits", "route")
_NO_ANCHOR = AnchorVersion(0, 0, 0, 0, b"")
_RUN = re.compile(r"[0-9a-f]{64}")
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_MULTIADDR = re.compile(r"/[!-~]+")


def directory_key(run: RunId, module: ModuleId | None) -> str:
    """Returns the DHT key for announcements of a module's replicas, or of peers that serve no module (None)."""
    return f"{KEY_PREFIX}{run}/{'visitors' if module is None else module}"


def encode_record(announcement: Announcement, identity: Identity) -> bytes:
    """Encodes and signs our own announcement. Raises ProtocolViolation if no peer would accept it."""
    if announcement.peer != identity.peer:
        raise ProtocolViolation(f"record: peer {announcement.peer} cannot be announced with the key of {identity.peer}")
    _check_fields(announcement)
    _check_certificate(announcement)
    body = _body_of(announcement)
    record: bytes = records_pb2.SignedRecord(
        public_key=identity.public_key, signature=identity.sign(_signed_bytes(announcement, body)), body=body
    ).SerializeToString(deterministic=True)
    if len(record) > MAX_RECORD_BYTES:
        raise ProtocolViolation(f"record: {len(record)} bytes are more than the {MAX_RECORD_BYTES} allowed")
    return record


# Verified records by their bytes, because both signatures are expensive and every look-up repeats them
_verified = Latest[bytes, Announcement](MAX_RECORDS)


def decode_announced(data: bytes, *, run: RunId, now: float | None, is_verified: bool = False) -> Announcement:
    """Decodes a peer's announcement; checks run, dates, fields, signature and certificate. Raises ProtocolViolation."""
    # `now`: Unix time in seconds, or None on a link from the owner, where a record is always fresh.
    # `is_verified`: this node's DHT process has checked both signatures.
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolViolation(f"record: {len(data)} bytes are more than the {MAX_RECORD_BYTES} allowed")
    data = bytes(data)
    known = _verified.get(data)
    if known is not None:
        _check_run_and_time(known, run, now)
        return known
    envelope = _parse(records_pb2.SignedRecord, data, "record")
    announcement = _announcement_of(_parse(records_pb2.Announcement, envelope.body, "record body"))
    _check_run_and_time(announcement, run, now)
    _check_fields(announcement)
    if not is_verified:
        _check_signature(envelope, announcement)
        _check_certificate(announcement)
    _verified[data] = announcement
    return announcement


def _check_signature(envelope: records_pb2.SignedRecord, announcement: Announcement) -> None:
    if len(envelope.public_key) != 32 or len(envelope.signature) != 64:
        raise ProtocolViolation("record: a public key has 32 bytes and a signature 64")
    if peer_id_of(envelope.public_key) != announcement.peer:
        raise ProtocolViolation(f"record: names {announcement.peer[:64]} but carries another peer's key")
    if not verify(envelope.public_key, envelope.signature, _signed_bytes(announcement, envelope.body)):
        raise ProtocolViolation(f"record: the signature of {announcement.peer} does not match")


def _signed_bytes(announcement: Announcement, body: bytes) -> bytes:
    return _DOMAIN + directory_key(announcement.run, announcement.module).encode() + b"\0" + body


def _parse(kind: type[Parsed], data: bytes, what: str) -> Parsed:
    """Parses a protobuf message. Raises ProtocolViolation unless `data` is the message's canonical encoding."""
    message = parsed(kind, data, f"{what}: not the expected protobuf message")
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != data:
        raise ProtocolViolation(f"{what}: not in canonical form (unknown, repeated or reordered fields)")
    return message


def _body_of(announcement: Announcement) -> bytes:
    module, anchor = announcement.module, announcement.anchor or _NO_ANCHOR
    encoded: bytes = records_pb2.Announcement(
        **{name: getattr(announcement, name) for name in (*_SAME, *_SAME_TUPLES)},
        state=announcement.state.name,
        has_module=module is not None,
        stage=0 if module is None else module.stage,
        expert=0 if module is None else module.expert,
        lowest_version=announcement.versions.lowest,
        highest_version=announcement.versions.highest,
        round=anchor.round,
        anchor_steps=anchor.steps,
        anchor_tokens=anchor.tokens,
        fragment=anchor.fragment,
        digest=anchor.digest,
    ).SerializeToString(deterministic=True)
    return encoded


def _announcement_of(body: records_pb2.Announcement) -> Announcement:
    try:
        state = PeerState(body.state)
    except ValueError:
        raise ProtocolViolation(f"record: unknown state {body.state}") from None
    if not body.has_module and (body.stage or body.expert):
        raise ProtocolViolation("record: names a stage or an expert without a module")
    anchor = AnchorVersion(body.round, body.anchor_steps, body.anchor_tokens, body.fragment, body.digest)
    same: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    same |= {name: tuple(getattr(body, name)) for name in _SAME_TUPLES}
    return Announcement(
        **same,
        state=state,
        module=ModuleId(body.stage, body.expert) if body.has_module else None,
        versions=VersionRange(body.lowest_version, body.highest_version),
        anchor=None if anchor == _NO_ANCHOR else anchor,
    )


def _check_fields(announcement: Announcement) -> None:
    """Checks the bounds of all fields of an announcement, ours or a peer's. Raises ProtocolViolation."""
    for address in announcement.addresses[:MAX_ADDRESSES]:
        if not is_address(address):
            raise ProtocolViolation(f"record: {address[:MAX_ADDRESS_LENGTH]!r} is not an address like host:port")
    for fine, fault in _bounds(announcement):
        if not fine:
            raise ProtocolViolation(f"record: {fault}")
    for peer in announcement.via:
        checked_peer(peer)
    if announcement.anchor is not None:
        checked_version(announcement.anchor)


def _bounds(a: Announcement) -> Iterator[tuple[bool, str]]:
    relay, versions = a.relay, a.versions
    yield bool(_RUN.fullmatch(a.run)), "a run is named by 64 lower-case hexadecimal digits"
    is_visiting = a.state is PeerState.VISITING
    yield (a.module is None) == is_visiting, f"state {a.state.name} does not go with module {a.module}"
    yield len(a.addresses) <= MAX_ADDRESSES, f"{len(a.addresses)} addresses are more than the {MAX_ADDRESSES} allowed"
    yield len(a.via) <= MAX_VIA, f"{len(a.via)} peers to be called through are more than the {MAX_VIA} allowed"
    yield not (a.via and a.addresses), "a peer that has addresses is not called through others"
    once = len(set(a.via)) == len(a.via) and a.peer not in a.via
    yield once, "a peer to be called through is named twice, or is the announced peer itself"
    own = len(relay) <= MAX_RELAY_LENGTH and _MULTIADDR.fullmatch(relay) and relay.endswith(f"/p2p/{a.peer}")
    yield not relay or bool(own), f"{relay[:MAX_RELAY_LENGTH]!r} is not a multiaddr of the peer's own"
    known = 1 <= versions.lowest <= versions.highest <= MAX_VERSION
    yield known, f"protocol versions {versions.lowest} to {versions.highest} make no sense"
    yield 0 <= a.tokens_per_second <= MAX_COUNT, f"{a.tokens_per_second} tokens per second make no sense"  # nor NaN
    yield 0 <= a.free_slots <= a.slots <= MAX_SLOTS, f"{a.free_slots} free of {a.slots} slots make no sense"
    for size in (a.memory_bytes, a.device_bytes):
        yield 0 <= size <= MAX_COUNT, f"{size} bytes of memory make no sense"
    counted = len(a.visits) <= MAX_VISITED_STAGES and all(0 <= count <= MAX_COUNT for count in a.visits)
    yield counted, f"visits of more than {MAX_VISITED_STAGES} stages, or too many of one"
    yield not (a.visits or a.route) or a.module == ModuleId(0), "only a data node launches visits and has a route"
    yield len(a.route) <= MAX_VISITED_STAGES, f"a route of more than {MAX_VISITED_STAGES} stages"
    yield 0 <= a.steps <= MAX_COUNT, f"step {a.steps} is out of range"
    yield 1 <= a.incarnation <= MAX_INCARNATION, f"incarnation {a.incarnation} is not from 1 to {MAX_INCARNATION}"
    yield math.isfinite(a.expires_at), f"expiry {a.expires_at} is no time"
    yield 1 <= a.sequence <= MAX_COUNT, f"sequence {a.sequence} is not from 1 to {MAX_COUNT}"


def _check_certificate(announcement: Announcement) -> None:
    if peer_of_certificate(announcement.certificate, announcement.run) != announcement.peer:
        raise ProtocolViolation(f"record: the certificate does not belong to {announcement.peer}")


def _check_run_and_time(announcement: Announcement, run: RunId, now: float | None) -> None:
    if announcement.run != run:
        raise ProtocolViolation(f"record: belongs to run {announcement.run[:64]}, not {run}")
    if now is None:
        return
    left_s = announcement.expires_at - now
    if not 0 < left_s <= MAX_LIFETIME_S:
        raise ProtocolViolation(f"record: expires in {left_s:.0f} s; not 0 to {MAX_LIFETIME_S:.0f}; is a clock wrong?")


def is_address(address: str) -> bool:
    """Whether `address` is `host:port` that can be dialled, with a name, IPv4 or bracketed IPv6 address."""
    host, colon, port = address.rpartition(":")
    fits = len(address) <= MAX_ADDRESS_LENGTH and bool(colon) and bool(_PORT.fullmatch(port)) and int(port) <= 65_535
    return fits and _is_host(host)


def _is_host(host: str) -> bool:
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.IPv6Address(host[1:-1]) if bracketed else ipaddress.IPv4Address(host)
    except ValueError:
        # A name of only digits and dots is a misspelt address.
        return not bracketed and bool(_HOST_NAME.fullmatch(host)) and not re.fullmatch(r"[0-9.]+", host)
    return not (ip.is_unspecified or ip.is_multicast or "%" in host)  # a zone (`%eth0`) is known on one machine only
