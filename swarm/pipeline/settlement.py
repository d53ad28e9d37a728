"""Settlement: which of the gradients that were added count, as the microbatch's data node decides.

When peers die or freeze in mid-way, two replicas of a module may both have added the gradient of one microbatch. Each
peer on the way back takes one gradient from the hop after it and lets every other one go, so one chain reaches the data
node; the path that comes with it names the replicas of that chain. The data node tells them (`Settled`). A hop keeps
input and gradient until it hears that: named, its visit counts; not named, it takes its gradient back. A hop that hears
nothing asks.
"""

from __future__ import annotations

import math
from dataclasses import replace

from swarm.pipeline.custody_states import ADDED, Action, Confirmed, Holding, Phase, Retract, Tell
from swarm.pipeline.ledger import Ledger
from swarm.vocabulary.pipeline_messages import Close, Settled, Unsettled
from swarm.vocabulary.types import MicrobatchId, Path, PeerId

ASK_S = 3.0
MAX_ASKS = 20
"""After so many questions without an answer the gradient is taken back: at most once goes before exactly once. Counted,
not timed, so that a machine that slept does not take its own sleep for the data node's silence."""
REMEMBERED = 16_384
"""Completed microbatches that a data node can still tell about."""


class Settling:
    """Both roles of settlement: the hop that waits for the decision, and the data node that gives it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._settled: dict[MicrobatchId, Path] = {}

    # ---- a hop ---------------------------------------------------------------------------------------------------

    def enter(self, holding: Holding, now: float) -> None:
        """Begins the wait of a hop whose part is done but for the decision."""
        self._ledger.note_stay(holding, now)
        waiting = replace(holding, phase=Phase.SETTLING, target=None, failing_since=None, asked=0)
        self._ledger.put(replace(waiting, retry_at=now + ASK_S, deadline=math.inf))

    def tick(self, holding: Holding, now: float) -> list[Action]:
        """Asks the data node for decisions that are due."""
        if holding.retry_at is None or holding.retry_at > now:
            return []
        if holding.asked >= MAX_ASKS:
            return [Retract(holding.key), self._ledger.drop(holding.key, "nobody says that its gradient counts")]
        self._ledger.put(replace(holding, asked=holding.asked + 1, retry_at=now + ASK_S))
        return [Tell(holding.path.data_node, Unsettled(holding.key.microbatch))]

    def ask_again(self, data_node: PeerId, now: float) -> list[Action]:
        """Asks a data node to which there is a link again at once: its word may have been lost with the one before, and
        it may be about to leave. That is none of the counted questions, for links may break as often as they like.
        """
        asked: list[Action] = []
        for holding in self._ledger.all():
            if holding.phase is Phase.SETTLING and holding.path.data_node == data_node:
                self._ledger.put(replace(holding, retry_at=now + ASK_S))
                asked.append(Tell(data_node, Unsettled(holding.key.microbatch)))
        return asked

    def settled(self, sender: PeerId, message: Settled) -> list[Action]:
        """Applies the data node's decision at a hop. A gradient that is being computed just now is not there yet: it
        will be asked about later.
        """
        actions: list[Action] = []
        for holding in self._ledger.all():
            if holding.key.microbatch != message.microbatch or holding.path.data_node != sender:
                continue
            if holding.phase in ADDED:
                counts = _names(message.path, holding.key.position, self._ledger.own)
                actions.append(Confirmed(holding.key) if counts else Retract(holding.key))
            if holding.phase is not Phase.BACKWARD:
                actions.append(self._ledger.drop(holding.key, "complete"))
        return actions

    # ---- the data node -------------------------------------------------------------------------------------------

    def completed(self, microbatch: MicrobatchId, path: Path) -> list[Action]:
        """Tells every hop of the path that its gradient counts, and remembers it for those that ask."""
        self._settled[microbatch] = path
        if len(self._settled) > REMEMBERED:
            del self._settled[next(iter(self._settled))]
        word = Settled(microbatch, path)
        return [Tell(peer, word) for peer in dict.fromkeys(hop.peer for hop in path.hops)]

    def has_completed(self, microbatch: MicrobatchId) -> bool:
        """Whether this data node has completed it, as far back as it remembers."""
        return microbatch in self._settled

    def asked(self, sender: PeerId, microbatch: MicrobatchId) -> list[Action]:
        """Answers a hop that asks; not while the microbatch is under way. One that is neither under way nor complete
        was abandoned.
        """
        if microbatch.data_node != self._ledger.own:
            return []
        path = self._settled.get(microbatch)
        if path is not None:
            return [Tell(sender, Settled(microbatch, path))]
        if any(holding.key.microbatch == microbatch for holding in self._ledger.all()):
            return []
        return [Tell(sender, Close(microbatch, "not under way any more"))]


def _names(path: Path, position: int, peer: PeerId) -> bool:
    return 0 <= position < len(path.hops) and path.hops[position].peer == peer
