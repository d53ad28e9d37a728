"""Who costs rounds: by sending what cannot be used, or by keeping the others waiting. Only what this replica has seen
itself counts; what others accuse somebody of is not kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.types import PeerId

FORGIVEN_AFTER_S = 600.0
"""After the end of the last sentence."""
REMEMBERED = 256
"""Peers, of each kind."""
MOST_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class Sentence:
    """How long somebody is left out of rounds after so many offences in a row."""

    free: int
    """Offences that cost only the attempt in which they happened."""
    first_s: float
    longest_s: float

    def seconds(self, count: int) -> float:
        """Doubles with every further offence."""
        if count <= self.free:
            return 0.0
        return min(self.first_s * 2.0 ** min(count - self.free - 1, MOST_DOUBLINGS), self.longest_s)


FOR_RUBBISH: Final = Sentence(free=1, first_s=60.0, longest_s=3600.0)
FOR_FRAUD: Final = Sentence(free=0, first_s=3600.0, longest_s=86_400.0)
"""An audit leaves no honest explanation."""
FOR_SILENCE: Final = Sentence(free=0, first_s=300.0, longest_s=3600.0)
"""No answers to audits, or groundless accusations, several times: that may happen to honest ones too."""
FOR_WAITING: Final = Sentence(free=1, first_s=30.0, longest_s=600.0)
"""Milder: a link between two honest peers may be at fault."""


@dataclass(slots=True)
class _Record:
    count: int
    latest: float


class _Docket:
    """Offences of one kind."""

    def __init__(self, sentence: Sentence) -> None:
        self._sentence = sentence
        self._records: dict[PeerId, _Record] = {}

    def add(self, peer: PeerId, now: float) -> None:
        before = self._records.pop(peer, None)
        stale = before is None or now - before.latest > FORGIVEN_AFTER_S + self._sentence.seconds(before.count)
        self._records[peer] = _Record(1 if before is None or stale else before.count + 1, now)
        while len(self._records) > REMEMBERED:
            del self._records[next(iter(self._records))]

    def forgive(self, peer: PeerId) -> None:
        self._records.pop(peer, None)

    def excluded(self, now: float) -> frozenset[PeerId]:
        return frozenset(
            peer for peer, record in self._records.items() if now - record.latest < self._sentence.seconds(record.count)
        )


class Penalties:
    """What this replica remembers of its fellows."""

    def __init__(self) -> None:
        self._rubbish = _Docket(FOR_RUBBISH)
        self._waiting = _Docket(FOR_WAITING)
        self._fraud = _Docket(FOR_FRAUD)
        self._silence = _Docket(FOR_SILENCE)

    def sent_rubbish(self, peer: PeerId, now: float) -> None:
        """Something that cannot be used."""
        self._rubbish.add(peer, now)

    def was_caught(self, peer: PeerId, certain: bool, now: float) -> None:
        """By an audit; what is not certain costs less."""
        (self._fraud if certain else self._silence).add(peer, now)

    def kept_waiting(self, peer: PeerId, now: float) -> None:
        """An exchange ended while pieces of it that were overdue had not come."""
        self._waiting.add(peer, now)

    def delivered(self, peer: PeerId) -> None:
        """An exchange with it has succeeded: what kept us waiting before has passed."""
        self._waiting.forgive(peer)

    def excluded(self, now: float) -> frozenset[PeerId]:
        """Who gets no invitation, and whose invitations are not answered."""
        dockets = (self._rubbish, self._waiting, self._fraud, self._silence)
        return frozenset[PeerId]().union(*(docket.excluded(now) for docket in dockets))
