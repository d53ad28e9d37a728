"""What a replica knows at this moment: where it stands, how far it is, who the others are and where they stand."""

from __future__ import annotations

from swarm.round_messages import Progress
from swarm.rounds.ballots import Ballots
from swarm.rounds.fellows import Fellows
from swarm.rounds.lag import Lag
from swarm.rounds.offences import Offences
from swarm.rounds.rules import convener_order, due, next_number
from swarm.rounds.words import RoundRules, Seal, Tell
from swarm.vocabulary import AnchorVersion, ModuleId, PeerId, Reasoned


class Outlook:
    """Shared by the parts of one `RoundMachine`, which keeps `now` up to date."""

    def __init__(self, own: PeerId, module: ModuleId, rules: RoundRules, version: AnchorVersion, seal: Seal) -> None:
        self.own = own
        self.seal = seal
        self.module = module
        self.rules = rules
        self.version = version
        self.now = 0.0
        self.steps = 0
        """Our own since our anchor."""
        self.anchored_at: float | None = None
        """Since when we stand on our anchor; None before the first event."""
        self._highest = 0
        self.fellows = Fellows()
        self.ballots = Ballots(rules)
        self.offences = Offences()
        self.lag = Lag(rules)

    def standing(self) -> Reasoned[AnchorVersion]:
        """What the module stands on, as we see it."""
        return self.lag.standing(self.version, self.fellows.versions(self.now), self.now)

    def may_convene(self) -> bool:
        """Whether a round from our anchor is what the module needs."""
        return self.lag.may_convene(self.version, self.standing().value, self.now)

    @property
    def anchored_s(self) -> float:
        """How long we have stood on our anchor."""
        return 0.0 if self.anchored_at is None else self.now - self.anchored_at

    def due(self) -> Reasoned[bool]:
        on = self.fellows.on(self.version, self.now)
        return due(self.rules, self.steps, self.fellows.steps(self.version, self.now), len(on) + 1, self.anchored_s)

    def next_number(self) -> int:
        """Of the next round: above every version we have ever seen, also of replicas that are gone now, so that no number gets two
        results only because somebody was away."""
        self._highest = max(self._highest, next_number(self.version, self.fellows.versions(self.now).values()))
        return max(self._highest, self.ballots.highest[0])

    def order(self) -> tuple[PeerId, ...]:
        """Who convenes the next round: the serving replicas on our anchor, we included."""
        others = self.fellows.on(self.version, self.now) - self.offences.excluded(self.now)
        return convener_order(self.module, self.version, self.next_number(), {self.own, *others})

    def stand_on(self, version: AnchorVersion) -> list[Tell]:
        """We stand on another anchor from now on, and all others learn it from ourselves."""
        self.version, self.steps, self.anchored_at = version, 0, self.now
        self.ballots.new_anchor()
        self.lag.moved()
        report = Progress(self.module, version, 0, 0)
        return [Tell(peer, report) for peer in sorted(self.fellows.all)]
