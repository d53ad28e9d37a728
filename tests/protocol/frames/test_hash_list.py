"""Hash lists come back as they were, and only for the module that was asked about."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames.frames import MAX_ANSWER_BYTES, HashList, decode_hash_list, encode_hash_list
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import MAX_ROUND, AnchorVersion

DIGEST = b"d" * 32
HONEST = HashList(AnchorVersion(7, 350, 10**9, 1, DIGEST), 10_000, 4096, tuple(bytes([n]) * 32 for n in range(6)))


def decoded(data: bytes, elements: int = 10_000, chunk_elements: int = 4096) -> HashList:
    return decode_hash_list(data, digest=DIGEST, elements=elements, chunk_elements=chunk_elements)


def changed(**changes: object) -> bytes:
    message = wire.HashList.FromString(encode_hash_list(HONEST))
    for name, value in changes.items():
        setattr(message, name, value)
    return message.SerializeToString()


def test_it_comes_back_as_it_was() -> None:
    assert decoded(encode_hash_list(HONEST)) == HONEST


@given(st.integers(1, 300_000), st.sampled_from([4096, 8192]), st.integers(0, 2**48), st.randoms(use_true_random=False))
def test_of_any_module(elements: int, chunk: int, steps: int, random: object) -> None:
    count = 2 * -(-elements // chunk)
    hashes = tuple(random.randbytes(32) for _ in range(count))  # type: ignore[attr-defined]
    honest = HashList(AnchorVersion(1, steps, 0, 63, DIGEST), elements, chunk, hashes)
    assert decoded(encode_hash_list(honest), elements, chunk) == honest


def test_the_list_of_a_module_of_a_billion_elements_fits_an_answer() -> None:
    elements, chunk = 10**9, 2**20
    count = 2 * -(-elements // chunk)
    version = AnchorVersion(MAX_ROUND, 2**48, 2**48, 63, DIGEST)
    data = encode_hash_list(HashList(version, elements, chunk, (b"h" * 32,) * count))
    assert len(data) <= MAX_ANSWER_BYTES
    assert decoded(data, elements, chunk).version == version


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        bytes(MAX_ANSWER_BYTES + 1),
        changed(elements=9_999),
        changed(chunk_elements=8192),
        changed(hashes=b""),
        changed(hashes=bytes(32 * 5)),
        changed(hashes=bytes(32 * 6 + 1)),
        changed(round=2**48),
        changed(steps=2**48 + 1),
        changed(tokens=2**64 - 1),
        changed(fragment=64),
    ],
)
def test_another_modules_list_or_none_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decoded(data)


@given(st.binary(max_size=300))
def test_garbage_is_a_violation_and_nothing_else(data: bytes) -> None:
    with suppress(ProtocolViolation):
        decoded(data)
