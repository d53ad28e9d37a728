"""The frames of a round and of catching up: `swarm.vocabulary.averaging_messages` as link.proto has it.

What one message says by itself is checked here; whether it fits the round, the roster and the module is checked by
those who know them. Norms are doubles on the wire, so that both sides compute with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.frames.fields import (
    DETAIL_CHARACTERS,
    TensorFrame,
    checked_count,
    checked_measure,
    checked_peer,
    checked_version,
    packed,
    read_detail,
    read_enum,
    read_header,
    read_module,
    wire_header,
    wire_module,
    wire_number,
)
from protocol.frames.hash_list import HASH_BYTES
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType
from swarm.vocabulary.averaging_messages import (
    MAX_ATTEMPTS,
    MAX_MEASURED,
    MAX_MEMBERS,
    MAX_RATE,
    MAX_ROUND,
    Accepting,
    Accusation,
    AuditRefused,
    AuditRequest,
    Commit,
    Contribution,
    Declined,
    DeclineReason,
    Dissolved,
    Entry,
    Evidence,
    Invitation,
    Measured,
    Prepared,
    Progress,
    Pulse,
    Reduced,
    RoundControl,
    RoundId,
    RoundPiece,
    SignedHash,
    SignedRoster,
)
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import SIGNATURE_BYTES, AnchorVersion, Codec, PeerId

MAX_CHUNKS: Final = 2**20
"""Of a module, and of its state; their numbers are lower."""


# ---- writing ------------------------------------------------------------------------------------------------------


def encode_piece(message: RoundPiece, frame: TensorFrame) -> wire.Frame:
    """The frame of link.proto for a message of a round with a tensor."""
    round_id, tensor = _wire_round(message.round), wire_header(frame)
    first, end = message.first_chunk, message.end_chunk
    if isinstance(message, Contribution):
        piece = wire.Contribution(
            round=round_id, first_chunk=first, end_chunk=end, tensor=tensor, signature=message.signature
        )
        return wire.Frame(contribution=piece)
    return wire.Frame(reduced=wire.Reduced(round=round_id, first_chunk=first, end_chunk=end, tensor=tensor))


def encode_round(message: RoundControl) -> wire.Frame:
    """The frame of link.proto for a small message of a round."""
    match message:
        case Progress():
            return wire.Frame(progress=_wire_progress(message))
        case Invitation(number, base):
            return wire.Frame(invitation=wire.Invitation(round=_wire_round(number), base=_wire_version(base)))
        case Accepting(number):
            return wire.Frame(accepting=wire.Accepting(round=_wire_round(number)))
        case Entry():
            entry = _wire_entry(message)
            entry.round.CopyFrom(_wire_round(message.round))
            entry.base.CopyFrom(_wire_version(message.base))
            return wire.Frame(entry=entry)
        case Declined(number, reason, version):
            return wire.Frame(
                declined=wire.Declined(
                    round=_wire_round(number), reason=wire_number(reason), version=_wire_version(version)
                )
            )
        case SignedRoster():
            return wire.Frame(roster=_wire_roster(message))
        case Pulse(number, waiting_for, rejected):
            return wire.Frame(pulse=wire.Pulse(round=_wire_round(number), waiting_for=waiting_for, rejected=rejected))
        case Prepared(number, version):
            return wire.Frame(prepared=wire.Prepared(round=_wire_round(number), version=_wire_version(version)))
        case Commit(number, version, holders):
            return wire.Frame(
                commit=wire.Commit(round=_wire_round(number), version=_wire_version(version), holders=holders)
            )
        case Dissolved(number, detail):
            return wire.Frame(dissolved=wire.Dissolved(round=_wire_round(number), detail=detail[:DETAIL_CHARACTERS]))
        case AuditRequest(number, first, end):
            return wire.Frame(
                audit_request=wire.AuditRequest(round=_wire_round(number), first_chunk=first, end_chunk=end)
            )
        case AuditRefused(number, first, end):
            return wire.Frame(
                audit_refused=wire.AuditRefused(round=_wire_round(number), first_chunk=first, end_chunk=end)
            )
        case Evidence(number, first, end, signed):
            return wire.Frame(
                evidence=wire.Evidence(
                    round=_wire_round(number), first_chunk=first, end_chunk=end, signed=_wire_signed(signed)
                )
            )
        case Accusation(number, first, end, signed):
            return wire.Frame(
                accusation=wire.Accusation(
                    round=_wire_round(number), first_chunk=first, end_chunk=end, signed=_wire_signed(signed)
                )
            )


def _wire_signed(signed: Sequence[SignedHash]) -> list[wire.SignedHash]:
    return [wire.SignedHash(peer=one.peer, hash=one.hash, signature=one.signature) for one in signed]


def _wire_progress(progress: Progress) -> wire.Progress:
    return wire.Progress(
        module=wire_module(progress.module),
        base=_wire_version(progress.base),
        steps=progress.steps,
        tokens=progress.tokens,
    )


def _wire_entry(entry: Entry) -> wire.Entry:
    """Without the round and the base, which a roster says once."""
    return wire.Entry(
        peer=entry.peer,
        steps=entry.steps,
        tokens=entry.tokens,
        norm=entry.norm,
        measured=[packed(measured) for measured in entry.measured],
        staged=None if entry.staged is None else _wire_version(entry.staged),
        signature=entry.signature,
    )


def _wire_roster(roster: SignedRoster) -> wire.Roster:
    return wire.Roster(
        round=_wire_round(roster.round),
        base=_wire_version(roster.base),
        codec=wire_number(roster.codec),
        codec_reason=roster.codec_reason[:DETAIL_CHARACTERS],
        entries=[_wire_entry(entry) for entry in roster.entries],
    )


def _wire_round(round_id: RoundId) -> wire.RoundId:
    return wire.RoundId(
        module=wire_module(round_id.module),
        number=round_id.number,
        attempt=round_id.attempt,
        convener=round_id.convener,
    )


def _wire_version(version: AnchorVersion) -> wire.AnchorVersion:
    return wire.AnchorVersion(
        round=version.round,
        steps=version.steps,
        tokens=version.tokens,
        fragment=version.fragment,
        digest=version.digest,
    )


# ---- reading ------------------------------------------------------------------------------------------------------


def read_progress(progress: wire.Progress) -> Progress:
    return Progress(
        read_module(progress.module),
        _read_version(progress.base),
        checked_count(progress.steps, "progress: steps"),
        checked_count(progress.tokens, "progress: tokens"),
    )


def read_invitation(invitation: wire.Invitation) -> Invitation:
    return Invitation(_read_round(invitation.round), _read_version(invitation.base))


def read_accepting(accepting: wire.Accepting) -> Accepting:
    return Accepting(_read_round(accepting.round))


def read_entry(entry: wire.Entry) -> Entry:
    return _read_entry(entry, _read_round(entry.round), _read_version(entry.base))


def read_declined(declined: wire.Declined) -> Declined:
    reason = read_enum(DeclineReason, declined.reason, "reason to decline")
    return Declined(_read_round(declined.round), reason, _read_version(declined.version))


def read_roster(roster: wire.Roster) -> SignedRoster:
    """The entries' signatures are checked by `swarm.averaging.roster.objection`, after everything that costs less."""
    if not 1 <= len(roster.entries) <= MAX_MEMBERS:
        raise ProtocolViolation(f"a roster of {len(roster.entries)} members; 1 to {MAX_MEMBERS} are allowed")
    if any(entry.HasField("round") or entry.HasField("base") for entry in roster.entries):
        raise ProtocolViolation("an entry in a roster that names a round or an anchor of its own")
    number, base = _read_round(roster.round), _read_version(roster.base)
    entries = tuple(_read_entry(entry, number, base) for entry in roster.entries)
    if len({entry.peer for entry in entries}) < len(entries):
        raise ProtocolViolation("a roster names a member twice")
    codec = read_enum(Codec, roster.codec, "codec")
    return SignedRoster(number, base, entries, codec, read_detail(roster.codec_reason))


def read_contribution(piece: wire.Contribution) -> TensorFrame:
    first, end = _read_chunks_of_piece(piece.first_chunk, piece.end_chunk)
    _check_length(piece.signature, SIGNATURE_BYTES, "contribution: a signature")
    return _read_vector(Contribution(_read_round(piece.round), first, end, piece.signature), piece.tensor)


def read_reduced(piece: wire.Reduced) -> TensorFrame:
    first, end = _read_chunks_of_piece(piece.first_chunk, piece.end_chunk)
    return _read_vector(Reduced(_read_round(piece.round), first, end), piece.tensor)


def read_pulse(pulse: wire.Pulse) -> Pulse:
    return Pulse(_read_round(pulse.round), _read_peers(pulse.waiting_for), _read_peers(pulse.rejected))


def read_prepared(prepared: wire.Prepared) -> Prepared:
    return Prepared(_read_round(prepared.round), _read_version(prepared.version))


def read_commit(commit: wire.Commit) -> Commit:
    return Commit(_read_round(commit.round), _read_version(commit.version), _read_peers(commit.holders))


def read_dissolved(dissolved: wire.Dissolved) -> Dissolved:
    return Dissolved(_read_round(dissolved.round), read_detail(dissolved.detail))


def read_audit_request(request: wire.AuditRequest) -> AuditRequest:
    return AuditRequest(_read_round(request.round), *_read_chunks_of_piece(request.first_chunk, request.end_chunk))


def read_audit_refused(refused: wire.AuditRefused) -> AuditRefused:
    return AuditRefused(_read_round(refused.round), *_read_chunks_of_piece(refused.first_chunk, refused.end_chunk))


def read_evidence(evidence: wire.Evidence) -> Evidence:
    first, end = _read_chunks_of_piece(evidence.first_chunk, evidence.end_chunk)
    return Evidence(_read_round(evidence.round), first, end, _read_signed(evidence.signed))


def read_accusation(accusation: wire.Accusation) -> Accusation:
    first, end = _read_chunks_of_piece(accusation.first_chunk, accusation.end_chunk)
    return Accusation(_read_round(accusation.round), first, end, _read_signed(accusation.signed))


def _read_signed(signed: Sequence[wire.SignedHash]) -> tuple[SignedHash, ...]:
    """A peer may be named twice: that it has signed two things is what it is accused of."""
    if len(signed) > MAX_MEMBERS:
        raise ProtocolViolation(f"{len(signed)} signed hashes of one piece are more than {MAX_MEMBERS}")
    for one in signed:
        _check_length(one.hash, HASH_BYTES, "a hash")
        _check_length(one.signature, SIGNATURE_BYTES, "a signature")
    return tuple(SignedHash(checked_peer(one.peer), one.hash, one.signature) for one in signed)


def _check_length(data: bytes, length: int, what: str) -> None:
    if len(data) != length:
        raise ProtocolViolation(f"{what} of {len(data)} bytes has not {length}")


def _read_round(round_id: wire.RoundId) -> RoundId:
    if not 1 <= round_id.number <= MAX_ROUND:
        raise ProtocolViolation(f"round {round_id.number} is out of range; 1 to {MAX_ROUND} are allowed")
    if round_id.attempt > MAX_ATTEMPTS:
        raise ProtocolViolation(f"attempt {round_id.attempt} at a round is beyond {MAX_ATTEMPTS}")
    return RoundId(read_module(round_id.module), round_id.number, round_id.attempt, checked_peer(round_id.convener))


def _read_version(version: wire.AnchorVersion) -> AnchorVersion:
    return checked_version(
        AnchorVersion(version.round, version.steps, version.tokens, version.fragment, version.digest)
    )


def _read_entry(entry: wire.Entry, number: RoundId, base: AnchorVersion) -> Entry:
    if len(entry.measured) > MAX_MEASURED:
        raise ProtocolViolation(f"entry: {len(entry.measured)} measured links; at most {MAX_MEASURED} are allowed")
    if len(entry.signature) != SIGNATURE_BYTES:
        raise ProtocolViolation(f"entry: a signature has {SIGNATURE_BYTES} bytes, not {len(entry.signature)}")
    return Entry(
        checked_peer(entry.peer),
        number,
        base,
        checked_count(entry.steps, "entry: steps"),
        checked_count(entry.tokens, "entry: tokens"),
        checked_measure(entry.norm, "entry: a norm"),
        tuple(_read_measured(figure) for figure in entry.measured),
        _read_version(entry.staged) if entry.HasField("staged") else None,
        entry.signature,
    )


def _read_measured(figure: int) -> Measured:
    mark, rate = figure >> 8, figure & 0xFF
    if not 1 <= rate <= MAX_RATE:
        raise ProtocolViolation(f"entry: a rate of {rate} is not from 1 to {MAX_RATE}")
    return Measured(mark, rate)


def _read_peers(peers: Sequence[str]) -> tuple[PeerId, ...]:
    if len(peers) > MAX_MEMBERS:
        raise ProtocolViolation(f"a list of {len(peers)} peers is longer than {MAX_MEMBERS}")
    if len(set(peers)) < len(peers):
        raise ProtocolViolation("a list of peers names one of them twice")
    return tuple(checked_peer(peer) for peer in peers)


def _read_chunks(first: int, end: int) -> tuple[int, int]:
    if not first <= end <= MAX_CHUNKS:
        raise ProtocolViolation(f"chunks {first} to {end} are no range below {MAX_CHUNKS}")
    return first, end


def _read_chunks_of_piece(first: int, end: int) -> tuple[int, int]:
    if first == end:
        raise ProtocolViolation("a piece of a round without chunks")
    return _read_chunks(first, end)


def _read_vector(message: RoundPiece, header: wire.TensorHeader) -> TensorFrame:
    frame = read_header(message, header)
    if len(frame.tensor.shape) != 1 or frame.tensor.dtype is not DType.FLOAT32:
        raise ProtocolViolation(
            f"a piece of a round is a float32 vector, not {frame.tensor.dtype.name} {frame.tensor.shape}"
        )
    return frame
