"""Whether this replica is behind its module, and whom it follows when it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.rounds.rules import standing
from swarm.rounds.words import RoundRules
from swarm.vocabulary import AnchorVersion, PeerId, Reasoned

PATIENCE_PULSES = 2
"""So long a difference lasts before a replica acts on it: most are a commit's messages under way."""
RETRY_S = 5.0
LONGEST_RETRY_S = 60.0
REMEMBERED = 16


@dataclass(slots=True)
class _Failure:
    until: float
    count: int


class Lag:
    """Compares our anchor with the others', with patience: most differences are gone in a moment.

    Versions never go back: a module that stands on a lower or equal round, but on another anchor, is not followed before its next
    round, which gets a number above all that are seen.
    """

    def __init__(self, rules: RoundRules) -> None:
        self._rules = rules
        self._failures: dict[AnchorVersion, _Failure] = {}
        self._since: float | None = None
        self.catching: AnchorVersion | None = None
        """What we are getting now."""

    def standing(
        self, own: AnchorVersion, others: Mapping[PeerId, AnchorVersion], now: float
    ) -> Reasoned[AnchorVersion]:
        """What the module stands on, but for what could not be had lately."""
        vain = {version for version, failure in self._failures.items() if now < failure.until}
        return standing(self._rules, own, {peer: version for peer, version in others.items() if version not in vain})

    def may_convene(self, own: AnchorVersion, best: AnchorVersion, now: float) -> bool:
        """Not for an anchor that the module has left. If nothing comes of waiting, it goes on after `longest_s`."""
        if self.catching is not None:
            return False
        return best == own or (self._since is not None and now - self._since > self._rules.longest_s)

    def target(
        self, own: AnchorVersion, best: AnchorVersion, now: float, certain: bool, busy: bool
    ) -> AnchorVersion | None:
        """What to get now; None when there is no need, no way, or when it may settle by itself.

        Args:
            certain: more than half of all replicas stand there.
            busy: a round is under way here; it comes first.
        """
        if best == own or self.catching is not None:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        patient = not certain and now - self._since < PATIENCE_PULSES * self._rules.pulse_s
        return None if busy or patient or best.round <= own.round else best

    def started(self, version: AnchorVersion) -> None:
        self.catching, self._since = version, None

    def failed(self, version: AnchorVersion, now: float) -> None:
        """Tried again later and later; of the versions that failed the latest few are remembered."""
        self.catching = None
        before = self._failures.pop(version, None)
        count = 1 if before is None else before.count + 1
        self._failures[version] = _Failure(now + min(RETRY_S * 2.0 ** min(count - 1, 8), LONGEST_RETRY_S), count)
        while len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def moved(self) -> None:
        """We stand on another anchor."""
        self.catching = self._since = None
