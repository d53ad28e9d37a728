"""What we know of the other replicas of our module: who is there, on which version each stands, how far each has worked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.round_messages import MAX_MEMBERS
from swarm.rounds.rosters import MOST_STEPS
from swarm.rounds.words import Fellow
from swarm.vocabulary import AnchorVersion, PeerId

WORD_HOLDS_S = 30.0
"""What a fellow told us itself is worth more than an announcement for so long: announcements come late and out of order."""

PRESUMED_S = 5.0
"""A member of a round that we have committed is taken to stand on its result for so long without having said so: it is about to."""

OVERTAKEN_S = 5.0
"""For so long after a fellow has named a round, lower ones come from messages that were overtaken on the way. Later, it has started anew."""


@dataclass(slots=True)
class _Known:
    serving: bool
    announced: AnchorVersion
    said: AnchorVersion | None = None
    said_at: float = 0.0
    presumed: bool = False
    """Nobody has said it."""
    base: AnchorVersion | None = None
    """Of the work below."""
    steps: int = 0

    def version(self, now: float) -> AnchorVersion:
        return self.said if self.said is not None and now - self.said_at < WORD_HOLDS_S else self.announced


class Fellows:
    """The live replicas besides us, at most one less than a roster can hold."""

    def __init__(self) -> None:
        self._known: dict[PeerId, _Known] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._known

    def changed(self, fellows: Iterable[Fellow], now: float) -> frozenset[PeerId]:
        """Takes over a new view; returns who is gone."""
        before = self._known
        listed = sorted(fellows, key=lambda fellow: (not fellow.serving, fellow.peer))[: MAX_MEMBERS - 1]
        self._known = {fellow.peer: _renewed(before.get(fellow.peer), fellow, now) for fellow in listed}
        return frozenset(before) - frozenset(self._known)

    def said(self, peer: PeerId, version: AnchorVersion, now: float) -> None:
        """A fellow told us where it stands. What strangers say is not kept."""
        known = self._known.get(peer)
        if known is None:
            return
        recent = known.said is not None and not known.presumed and now - known.said_at < OVERTAKEN_S
        if not (recent and known.said is not None and version.round < known.said.round):
            known.said, known.said_at, known.presumed = version, now, False

    def presume(self, members: Iterable[PeerId], version: AnchorVersion, now: float) -> None:
        """We have committed this version with these members. Whoever commits first would otherwise be alone on it for a moment, and could
        find the next round due for itself."""
        for peer in members:
            known = self._known.get(peer)
            if known is not None and known.version(now).round < version.round:
                known.said, known.said_at, known.presumed = version, now - WORD_HOLDS_S + PRESUMED_S, True

    def worked(self, peer: PeerId, base: AnchorVersion, steps: int) -> None:
        known = self._known.get(peer)
        if known is not None and 0 <= steps <= MOST_STEPS:
            known.base, known.steps = base, steps

    @property
    def serving(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, known in self._known.items() if known.serving)

    @property
    def all(self) -> frozenset[PeerId]:
        return frozenset(self._known)

    def versions(self, now: float) -> dict[PeerId, AnchorVersion]:
        """Of the serving ones."""
        return {peer: known.version(now) for peer, known in self._known.items() if known.serving}

    def on(self, version: AnchorVersion, now: float) -> frozenset[PeerId]:
        """The serving ones that stand on it."""
        return frozenset(peer for peer, stands in self.versions(now).items() if stands == version)

    def donors(self, version: AnchorVersion, now: float) -> tuple[PeerId, ...]:
        """All that have it, whether they serve or not."""
        return tuple(sorted(peer for peer, known in self._known.items() if known.version(now) == version))

    def steps(self, base: AnchorVersion, now: float) -> list[int]:
        """The work that those on `base` have reported."""
        return [self._known[peer].steps for peer in self.on(base, now) if self._known[peer].base == base]


def _renewed(known: _Known | None, fellow: Fellow, now: float) -> _Known:
    if known is None:
        return _Known(fellow.serving, fellow.version)
    news = fellow.version != known.announced
    known.serving, known.announced = fellow.serving, fellow.version
    if news and known.said is not None and fellow.version.round >= known.said.round:
        known.said = None
    return known
