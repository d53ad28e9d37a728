"""Penalties of replicas that cost rounds, by sending what cannot be used or by keeping the others waiting. Only what
this replica has seen itself counts; what others accuse somebody of is not kept.

It stands alone because what is held against a replica outlives attempts and anchors.
"""

from __future__ import annotations

from typing import Final

from swarm.vocabulary.statistics import Exclusions, ExponentialBackoff
from swarm.vocabulary.types import PeerId

FORGIVEN_AFTER_S: Final = 600.0
"""After the end of the last pause."""
FOR_RUBBISH: Final = ExponentialBackoff(60.0, 3600.0, free=1)
"""The first time costs only the attempt in which it happened."""
FOR_FRAUD: Final = ExponentialBackoff(3600.0, 86_400.0)
"""An audit leaves no honest explanation."""
FOR_SILENCE: Final = ExponentialBackoff(300.0, 3600.0)
"""No answers to audits, or groundless accusations, several times: that may happen to honest ones too."""
FOR_STRAYING: Final = ExponentialBackoff(60.0, 600.0)
"""Two honest parts of a module may be that far from each other after a long time."""
FOR_WAITING: Final = ExponentialBackoff(30.0, 600.0, free=1)
"""Milder: a link between two honest peers may be at fault."""


class Penalties:
    """This replica's record of the others' offences."""

    def __init__(self) -> None:
        self._rubbish = Exclusions(FOR_RUBBISH, FORGIVEN_AFTER_S)
        self._waiting = Exclusions(FOR_WAITING, FORGIVEN_AFTER_S)
        self._fraud = Exclusions(FOR_FRAUD, FORGIVEN_AFTER_S)
        self._silence = Exclusions(FOR_SILENCE, FORGIVEN_AFTER_S)
        self._straying = Exclusions(FOR_STRAYING, FORGIVEN_AFTER_S)

    def sent_rubbish(self, peer: PeerId, now: float) -> None:
        """Notes that a replica sent what cannot be used."""
        self._rubbish.add(peer, now)

    def was_caught(self, peer: PeerId, certain: bool, now: float) -> None:
        """Notes that an audit caught a replica; what is not certain costs less."""
        (self._fraud if certain else self._silence).add(peer, now)

    def strayed(self, peer: PeerId, now: float) -> None:
        """Notes that a replica stands on an anchor that is farther from ours than an honest one can be."""
        self._straying.add(peer, now)

    def kept_waiting(self, peer: PeerId, now: float) -> None:
        """Notes that an exchange ended while overdue pieces of a replica had not come."""
        self._waiting.add(peer, now)

    def delivered(self, peer: PeerId) -> None:
        """Notes that an exchange with a replica has succeeded: what kept us waiting before has passed."""
        self._waiting.forgive(peer)

    def excluded(self, now: float) -> frozenset[PeerId]:
        """The replicas that get no invitation, and whose invitations are not answered."""
        return self.distrusted(now).union(*(kind.excluded(now) for kind in (self._waiting, self._silence)))

    def distrusted(self, now: float) -> frozenset[PeerId]:
        """Those of them whose state nobody should take over because of their word alone."""
        kinds = (self._rubbish, self._fraud, self._straying)
        return frozenset[PeerId]().union(*(kind.excluded(now) for kind in kinds))
