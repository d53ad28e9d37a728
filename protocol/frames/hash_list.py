"""The hash list of a module's state, the answer to a STATE question: what a digest stands for, and each chunk's
hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from protocol.frames.codec import checked_version
from protocol.frames.rpc import MAX_ANSWER_BYTES
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import AnchorVersion

HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class HashList:
    """The content that a digest covers, but for the chunks themselves."""

    version: AnchorVersion
    elements: int
    """Of the parameters; the outer momentum has as many."""
    chunk_elements: int
    hashes: tuple[bytes, ...]
    """BLAKE3, 32 bytes: of each chunk of the parameters, then of each chunk of the momentum."""


def encode_hash_list(hash_list: HashList) -> bytes:
    """Serialises a hash list. At most 64 KiB for a layout whose chunks are as large as `node.averaging.anchor.layout`
    makes them, up to 10^9 elements.
    """
    version = hash_list.version
    data: bytes = wire.HashList(
        round=version.round,
        steps=version.steps,
        tokens=version.tokens,
        fragment=version.fragment,
        elements=hash_list.elements,
        chunk_elements=hash_list.chunk_elements,
        hashes=b"".join(hash_list.hashes),
    ).SerializeToString()
    return data


def decode_hash_list(data: bytes, *, digest: bytes, elements: int, chunk_elements: int) -> HashList:
    """Parses a peer's answer to the question for `digest`, which the version takes over.

    Whether the list leads to that digest is not checked here: the caller hashes it
    (`node.averaging.anchor.anchor.version_of`).

    Args:
        elements: what the module has, and `chunk_elements` what its chunks have; another cut is none of ours.

    Raises:
        ProtocolViolation: not a hash list, or not of such a module.
    """
    if len(data) > MAX_ANSWER_BYTES:
        raise ProtocolViolation(f"hash list: {len(data)} bytes are more than {MAX_ANSWER_BYTES}")
    try:
        said = wire.HashList.FromString(data)
    except DecodeError:
        raise ProtocolViolation(f"hash list: {len(data)} bytes are none") from None
    if (said.elements, said.chunk_elements) != (elements, chunk_elements):
        raise ProtocolViolation(
            f"hash list: {said.elements} elements in chunks of {said.chunk_elements};"
            f" this module has {elements} in chunks of {chunk_elements}"
        )
    count = 2 * -(-elements // chunk_elements)
    if len(said.hashes) != count * HASH_BYTES:
        raise ProtocolViolation(f"hash list: {len(said.hashes)} bytes are not {count} hashes of {HASH_BYTES} bytes")
    version = checked_version(AnchorVersion(said.round, said.steps, said.tokens, said.fragment, digest))
    hashes = tuple(said.hashes[at : at + HASH_BYTES] for at in range(0, len(said.hashes), HASH_BYTES))
    return HashList(version, elements, chunk_elements, hashes)
