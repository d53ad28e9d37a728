"""Who sent what cannot be used. A first offence costs the round it happened in, every further one the next rounds for a while."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.vocabulary import PeerId

FORGIVEN_AFTER_S = 600.0
EXCLUDED_S = 60.0
LONGEST_S = 3600.0
REMEMBERED = 256


@dataclass(slots=True)
class _Record:
    count: int
    latest: float


class Offences:
    """What this replica has seen itself; what others accuse somebody of is not kept."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}

    def add(self, peer: PeerId, now: float) -> None:
        before = self._records.pop(peer, None)
        stale = before is None or now - before.latest > FORGIVEN_AFTER_S + _sentence_s(before.count)
        self._records[peer] = _Record(1 if before is None or stale else before.count + 1, now)
        while len(self._records) > REMEMBERED:
            del self._records[next(iter(self._records))]

    def excluded(self, now: float) -> frozenset[PeerId]:
        """Who gets no invitation, and whose invitations are not answered."""
        return frozenset(
            peer for peer, record in self._records.items() if now - record.latest < _sentence_s(record.count)
        )


def _sentence_s(count: int) -> float:
    return 0.0 if count < 2 else min(EXCLUDED_S * 2.0 ** min(count - 2, 8), LONGEST_S)
