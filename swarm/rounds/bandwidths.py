"""How fast each replica can send, as those say that received from it.

A replica's own word counts nothing, because who claims more reduces more. Entries tell of others' links; the lower median of what is said of a
member is believed of it, so that one accomplice lifts nobody above what an honest receiver saw.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from swarm.round_messages import MAX_MEASURED, MAX_RATE, Entry, Measured
from swarm.rounds.rules import lower_median
from swarm.vocabulary import AnchorVersion, PeerId


def mark_of(peer: PeerId) -> int:
    """24 bits of its name's hash: names are long, and a roster tells of many links. Who shares another's mark shares what is measured of it."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:3], "big")


def measured_of(bytes_per_s: Mapping[PeerId, float], base: AnchorVersion) -> tuple[Measured, ...]:
    """What an entry says of the others' links. Of more than MAX_MEASURED links the anchor draws some, other ones each round."""

    def drawn(peer: PeerId) -> bytes:
        return hashlib.sha256(base.digest + peer.encode()).digest()

    known = sorted((peer for peer, rate in bytes_per_s.items() if rate >= 1), key=drawn)[:MAX_MEASURED]
    return tuple(Measured(mark_of(peer), _rate(bytes_per_s[peer])) for peer in known)


def rates(entries: Mapping[PeerId, Entry]) -> dict[PeerId, int]:
    """The rate of each member of which another one says something."""
    said: dict[int, list[tuple[PeerId, int]]] = {}
    for by, entry in entries.items():
        for measured in entry.measured:
            said.setdefault(measured.mark, []).append((by, measured.rate))
    heard = {peer: [rate for by, rate in said.get(mark_of(peer), ()) if by != peer] for peer in entries}
    return {peer: lower_median(found) for peer, found in heard.items() if found}


def slowest_bytes_per_s(entries: Mapping[PeerId, Entry]) -> float:
    """Of the members' links; 0 when nobody has measured any."""
    known = rates(entries)
    return 4.0 ** min(known.values()) if known else 0.0


def _rate(bytes_per_s: float) -> int:
    return max(1, min(MAX_RATE, round(math.log2(min(bytes_per_s, 2.0**64)) / 2)))
