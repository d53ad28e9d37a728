"""Signatures of round entries: what a member signs, and how it is checked. The bytes are written out in link.proto, at
Entry.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Final

from protocol.frames.fields import packed
from protocol.identity.keys import Identity, public_key_of, verify
from swarm.vocabulary.averaging_messages import Entry
from swarm.vocabulary.types import AnchorVersion, RunId

_DOMAIN: Final = b"skipstone-entry:2\0"


class EntrySeal:
    """Signs and checks entries: `swarm.averaging.round_events.Seal` of one peer in one run. An entry of another run,
    round, attempt or anchor has other bytes, so it cannot be used again.
    """

    def __init__(self, identity: Identity, run: RunId) -> None:
        self._identity = identity
        self._run = run

    def sign(self, entry: Entry) -> Entry:
        return replace(entry, signature=self._identity.sign(statement(self._run, entry)))

    def verify(self, entry: Entry) -> bool:
        """Whether the entry's peer has signed it. Some 0.1 ms. Raises ProtocolViolation when `entry.peer` is no peer
        id, which decoding has excluded.
        """
        return verify(public_key_of(entry.peer), entry.signature, statement(self._run, entry))


def statement(run: RunId, entry: Entry) -> bytes:
    """The bytes that are signed: all of the entry but its peer, which the key names."""
    attempt = entry.round
    return b"".join(
        (
            _DOMAIN,
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
