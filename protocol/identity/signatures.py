"""Ed25519 signatures (RFC 8032) of link.proto's Route, Entry, WorkTally and Contribution, which specify the bytes."""

import hashlib
import struct
import time
from dataclasses import replace
from typing import Final

from protocol.frames.codec import milliseconds, packed
from protocol.identity.invitations import HOW_TO_BE_INVITED, Guests
from protocol.identity.keys import Identity, public_key_of, verify
from swarm.vocabulary.averaging_messages import Contribution, Entry, WorkTally
from swarm.vocabulary.errors import ProtocolViolation, Rejected
from swarm.vocabulary.pipeline_messages import Forward, MicrobatchTensor, Purpose
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import AnchorVersion, MicrobatchId, ModuleId, Path, PeerId, RunId, SignedRoute


class EntrySigner:
    """Signs and verifies a run's roster entries and tallies of work (`Signer`)."""

    def __init__(self, identity: Identity, run: RunId, guests: Guests | None = None, invitation: bytes = b"") -> None:
        self._identity = identity
        self._run = run
        self._guests = guests
        self._invitation = invitation
        self._verified = Latest[WorkTally, bool](64)

    def sign_tally(self, tally: WorkTally) -> WorkTally:
        signature = self._identity.sign(tally_statement(self._run, tally))
        return replace(tally, invitation=self._invitation, signature=signature)

    def vouches(self, tally: WorkTally) -> bool:
        """Whether an invited data node has signed the tally. The cache includes failures: each is paid for once."""
        if tally not in self._verified:
            self._verified[tally] = self._guests is not None and is_vouched(tally, self._run, self._guests)
        return self._verified[tally]

    def sign(self, entry: Entry) -> Entry:
        return replace(entry, signature=self._identity.sign(entry_statement(self._run, entry)))

    def verify(self, entry: Entry) -> bool:
        """Whether the entry's signature is valid (0.1 ms). Raises ProtocolViolation for a malformed peer id."""
        return verify(public_key_of(entry.peer), entry.signature, entry_statement(self._run, entry))


def entry_statement(run: RunId, entry: Entry) -> bytes:
    """Returns the bytes that a member signs for its roster entry: run and all fields but its peer id."""
    attempt = entry.round
    return b"".join(
        (
            b"skipstone-entry:2\0",
            run.encode(),
            struct.pack("<IIQI", attempt.module.stage, attempt.module.expert, attempt.number, attempt.attempt),
            attempt.convener.encode(),
            _version(entry.base),
            struct.pack("<QQd", entry.steps, entry.tokens, entry.norm),
            struct.pack(f"<I{len(entry.measured)}I", len(entry.measured), *map(packed, entry.measured)),
            b"\0" if entry.staged is None else b"\1" + _version(entry.staged),
        )
    )


def is_vouched(tally: WorkTally, run: RunId, guests: Guests) -> bool:
    """Whether a data node that was invited at the tally's own time has signed it."""
    invited = guests.is_invited(tally.data_node, tally.invitation, tally.at)  # all members of a round must agree
    return invited and verify(public_key_of(tally.data_node), tally.signature, tally_statement(run, tally))


def tally_statement(run: RunId, tally: WorkTally) -> bytes:
    head = struct.pack("<IIQdd", tally.module.stage, tally.module.expert, tally.number, tally.at, tally.window_s)
    rows = (row.peer.encode() + struct.pack("<3Q", row.visits, row.tokens, row.recent) for row in tally.rows)
    return b"".join((b"skipstone-tally:1\0", bytes.fromhex(run), head, *rows))


def _version(version: AnchorVersion) -> bytes:
    return struct.pack("<QQQI", version.round, version.steps, version.tokens, version.fragment) + version.digest


class PieceSignatures:
    """Signs our pieces of a round's pseudo-gradients, and verifies the pieces of other members."""

    def __init__(self, run: RunId, identity: Identity) -> None:
        self._run = bytes.fromhex(run)
        self._identity = identity

    def sign(self, piece: Contribution, data_hash: bytes) -> bytes:
        return self._identity.sign(self._statement(piece, data_hash))

    def holds(self, peer: PeerId, piece: Contribution, data_hash: bytes, signature: bytes) -> bool:
        try:
            key = public_key_of(peer)
        except ProtocolViolation:
            return False
        return verify(key, signature, self._statement(piece, data_hash))

    def _statement(self, piece: Contribution, data_hash: bytes) -> bytes:
        about = piece.round
        numbers = (about.module.stage, about.module.expert, about.number, about.attempt)
        fixed = struct.pack("<6Q", *numbers, piece.first_chunk, piece.end_chunk)
        return b"skipstone-piece:2\0" + self._run + fixed + about.convener.encode() + data_hash


DOMAIN: Final = b"skipstone-route:2\0"
DOCUMENTS_DOMAIN: Final = b"skipstone-route-documents:1\0"
LABELS_DOMAIN: Final = b"skipstone-route-labels:1\0"
REMEMBERED: Final = 4096  # Verified signatures in the cache, because each microbatch returns in the backward pass


class Routes:
    """Signs this node's routes and verifies all peers' routes, in one run."""

    def __init__(self, identity: Identity, run: RunId, guests: Guests, invitation: bytes = b"") -> None:
        self._identity = identity
        self._run = run
        self._guests = guests
        self._invitation = invitation
        self._good = Latest[bytes, None](REMEMBERED)

    def signed(
        self,
        microbatch: MicrobatchId,
        path: Path,
        purpose: Purpose,
        lifetime_s: float,
        documents: tuple[int, ...] = (),
        labels: int = 0,
    ) -> Path:
        """Returns the path with its signed route; rounds `lifetime_s` to 1 ms. Raises Rejected: we are not invited."""
        if (fault := self._guests.fault(self._identity.peer, self._invitation, time.time())) is not None:
            raise Rejected(f"this node can no longer be a data node: {fault}", hint=HOW_TO_BE_INVITED)
        lifetime_s = milliseconds(lifetime_s) / 1000
        modules = tuple(hop.module for hop in path.hops)
        data = signed_bytes(self._run, microbatch, purpose, lifetime_s, modules, documents, labels)
        signature = self._identity.sign(data)
        self._good[_name_of(microbatch.data_node, signature, data)] = None
        return replace(path, route=SignedRoute(modules, lifetime_s, signature, documents, labels, self._invitation))

    def uninvited(self, message: MicrobatchTensor) -> str | None:
        """Returns why the data node of a message may not act as one; None if it may. Hops can differ in this."""
        invitation = b"" if message.path.route is None else message.path.route.invitation
        return self._guests.fault(message.microbatch.data_node, invitation, time.time())

    def fault(self, message: MicrobatchTensor) -> str | None:
        """Returns why a message violates its signed route; None if valid. Takes 0.2 ms, or 10 us for a known route."""
        route, microbatch = message.path.route, message.microbatch
        if route is None:
            return "its data node has not signed the route"
        if not route.allows(message.path):
            return "the path visits other modules than its data node has signed"
        purpose = message.purpose if isinstance(message, Forward) else Purpose.TRAIN  # evaluated ones never return
        said = route.lifetime_s, route.modules, route.documents, route.labels
        data = signed_bytes(self._run, microbatch, purpose, *said)
        name = _name_of(microbatch.data_node, route.signature, data)
        if name in self._good:
            return None
        if not verify(public_key_of(microbatch.data_node), route.signature, data):
            return "the route's signature is not its data node's"
        self._good[name] = None
        return None


def signed_bytes(
    run: RunId,
    microbatch: MicrobatchId,
    purpose: Purpose,
    lifetime_s: float,
    modules: tuple[ModuleId, ...],
    documents: tuple[int, ...] = (),
    labels: int = 0,
) -> bytes:
    """Returns the bytes that a data node signs for a route: run and all fields but its peer id."""
    parts = [LABELS_DOMAIN if labels else DOCUMENTS_DOMAIN if documents else DOMAIN]
    parts += [bytes.fromhex(run), microbatch.number.to_bytes(8), purpose.value.to_bytes(1)]
    parts.append(milliseconds(lifetime_s).to_bytes(4))
    if documents or labels:
        parts.append(len(modules).to_bytes(2))
    parts += [module.stage.to_bytes(2) + module.expert.to_bytes(2) for module in modules]
    if labels:
        parts.append(labels.to_bytes(4))
    parts += [tokens.to_bytes(4) for tokens in documents]
    return b"".join(parts)


def _name_of(data_node: PeerId, signature: bytes, data: bytes) -> bytes:
    return hashlib.sha256(b"".join((data_node.encode(), signature, data))).digest()
