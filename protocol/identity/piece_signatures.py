"""Signatures of the pieces that a member contributes to a round, by which their reducer can prove what it was given.

The tensor's BLAKE3 hash stands for the tensor. A signature holds for one attempt at one round of one module of one run,
and for one piece; the members of a roster share everything else that the piece means. A peer's id is its key, so nobody
has to be asked (`protocol.identity.keys`).
"""

from __future__ import annotations

import struct
from typing import Final

from blake3 import blake3

from protocol.identity.keys import Identity, public_key_of, verify
from swarm.vocabulary.averaging_messages import Contribution
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import PeerId, RunId

_DOMAIN: Final = b"skipstone-piece:2\0"
_NUMBERS: Final = struct.Struct("<6Q")


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
        packed = _NUMBERS.pack(*numbers, piece.first_chunk, piece.end_chunk)
        return _DOMAIN + self._run + packed + about.convener.encode() + data_hash


def hash_of_piece(data: memoryview) -> bytes:
    """BLAKE3 of a piece as it is encoded."""
    return blake3(data).digest()
