"""Signatures of a round's members: of their entries, and of the pieces that they contribute.

An entry's bytes are written out in link.proto, at Entry. By the signature of a piece its reducer can prove what it was
given: the tensor's BLAKE3 hash stands for the tensor, and a signature holds for one attempt at one round of one module
of one run, and for one piece; the members of a roster share everything else that the piece means. A peer's id is its
key, so nobody has to be asked (`protocol.identity.keys`).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Final

from blake3 import blake3

from protocol.frames.fields import packed
from protocol.identity.keys import Identity, public_key_of, verify
from swarm.vocabulary.averaging_messages import Contribution, Entry
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import AnchorVersion, PeerId, RunId

_ENTRY_DOMAIN: Final = b"skipstone-entry:2\0"
_PIECE_DOMAIN: Final = b"skipstone-piece:2\0"
_PIECE_NUMBERS: Final = struct.Struct("<6Q")


class EntrySeal:
    """Signs and checks entries: `swarm.averaging.round_events.Seal` of one peer in one run. An entry of another run,
    round, attempt or anchor has other bytes, so it cannot be used again.
    """

    def __init__(self, identity: Identity, run: RunId) -> None:
        self._identity = identity
        self._run = run

    def sign(self, entry: Entry) -> Entry:
        return replace(entry, signature=self._identity.sign(entry_statement(self._run, entry)))

    def verify(self, entry: Entry) -> bool:
        """Whether the entry's peer has signed it. Some 0.1 ms. Raises ProtocolViolation when `entry.peer` is no peer
        id, which decoding has excluded.
        """
        return verify(public_key_of(entry.peer), entry.signature, entry_statement(self._run, entry))


def entry_statement(run: RunId, entry: Entry) -> bytes:
    """The bytes that are signed: all of the entry but its peer, which the key names."""
    attempt = entry.round
    return b"".join(
        (
            _ENTRY_DOMAIN,
            run.encode(),
            struct.pack("<IIQI", attempt.module.stage, attempt.module.expert, attempt.number, attempt.attempt),
            attempt.convener.encode(),
            _version(entry.base),
            struct.pack("<QQd", entry.steps, entry.tokens, entry.norm),
            struct.pack(f"<I{len(entry.measured)}I", len(entry.measured), *map(packed, entry.measured)),
            b"\0" if entry.staged is None else b"\1" + _version(entry.staged),
        )
    )


def _version(version: AnchorVersion) -> bytes:
    return struct.pack("<QQQI", version.round, version.steps, version.tokens, version.fragment) + version.digest


class PieceSignatures:
    """Signs and checks pieces as one member of one run."""

    def __init__(self, run: RunId, identity: Identity) -> None:
        self._run = bytes.fromhex(run)
        self._identity = identity

    def sign(self, piece: Contribution, data_hash: bytes) -> bytes:
        """The signature of a piece, 64 bytes. The piece's own signature does not matter."""
        return self._identity.sign(self._statement(piece, data_hash))

    def holds(self, peer: PeerId, piece: Contribution, data_hash: bytes, signature: bytes) -> bool:
        """Whether this peer has signed a contribution with this hash."""
        try:
            key = public_key_of(peer)
        except ProtocolViolation:
            return False
        return verify(key, signature, self._statement(piece, data_hash))

    def _statement(self, piece: Contribution, data_hash: bytes) -> bytes:
        about = piece.round
        numbers = (about.module.stage, about.module.expert, about.number, about.attempt)
        fixed = _PIECE_NUMBERS.pack(*numbers, piece.first_chunk, piece.end_chunk)
        return _PIECE_DOMAIN + self._run + fixed + about.convener.encode() + data_hash


def hash_of_piece(data: memoryview) -> bytes:
    """BLAKE3 of a piece as it is encoded."""
    return blake3(data).digest()
