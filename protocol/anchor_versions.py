"""The bounds of an AnchorVersion that somebody names, wherever it stands: in a record, in a round's frames, in a hash list."""

from __future__ import annotations

from typing import Final

from swarm.errors import ProtocolViolation
from swarm.round_messages import MAX_COUNT, MAX_ROUND
from swarm.vocabulary import MAX_FRAGMENTS, AnchorVersion

DIGEST_BYTES: Final = 32


def checked_version(version: AnchorVersion) -> AnchorVersion:
    """The version as it is.

    Raises:
        ProtocolViolation: a number is out of bounds, or the digest has not 32 bytes.
    """
    if not 0 <= version.round <= MAX_ROUND:
        raise ProtocolViolation(f"anchor: round {version.round} is out of range; 0 to {MAX_ROUND} are allowed")
    checked_count(version.steps, "anchor: steps")
    checked_count(version.tokens, "anchor: tokens")
    if not 0 <= version.fragment < MAX_FRAGMENTS:
        raise ProtocolViolation(f"anchor: fragment {version.fragment} is out of range; there are {MAX_FRAGMENTS}")
    checked_digest(version.digest)
    return version


def checked_count(count: int, what: str) -> int:
    """Raises ProtocolViolation unless it is from 0 to MAX_COUNT."""
    if not 0 <= count <= MAX_COUNT:
        raise ProtocolViolation(f"{what}: {count} is out of range; 0 to {MAX_COUNT} are allowed")
    return count


def checked_digest(digest: bytes) -> bytes:
    """Raises ProtocolViolation unless it has 32 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise ProtocolViolation(f"anchor: a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return digest
