"""Arrivals on a microbatch's path: hidden states from the hop before, the gradient from the hop after.

A hop takes one gradient, the first that comes from a replica of the module after it, and lets every later one go: what
it answers, PASSED_ON, is true, the microbatch is past it. When what has come in is computed it is handed over
(`swarm.pipeline.handover`), or the microbatch has come to its end.
"""

from __future__ import annotations

from dataclasses import replace

from swarm.pipeline.custody_states import (
    BEFORE_BACKWARD,
    ON_THE_WAY_BACK,
    Action,
    Compute,
    Finished,
    Holding,
    Key,
    Phase,
    Place,
    Started,
    Tell,
    Work,
)
from swarm.pipeline.handover import Handover
from swarm.pipeline.ledger import RETRY_S, Ledger, Replicas, joined, receipt_for, same_modules, same_way
from swarm.pipeline.settlement import Settling
from swarm.vocabulary.pipeline_messages import Backward, Forward, Purpose, ReceiptStatus
from swarm.vocabulary.types import PeerId, Reasoned

_PASSED = (ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON)


class Arrivals:
    """Handles tensors that have come in, and their computations."""

    def __init__(self, ledger: Ledger, handover: Handover, settling: Settling, replicas: Replicas) -> None:
        self._ledger = ledger
        self._handover = handover
        self._settling = settling
        self._replicas = replicas

    def start(self, event: Started, now: float) -> list[Action]:
        """Starts a microbatch at its data node."""
        key = Key(event.microbatch, -1)
        deadline = now + event.lifetime_s
        self._ledger.put(Holding(key, event.path, event.purpose, Phase.FORWARD, event.lifetime_s, deadline, came=now))
        return [Compute(key, Work.FORWARD, event.purpose)]

    def computed(self, holding: Holding, now: float) -> list[Action]:
        """Hands a computation's output over. What is only evaluated ends with its loss, all else with the gradient at
        its start.
        """
        if holding.is_start and holding.phase is Phase.BACKWARD:
            return self._completed(holding)
        if not holding.is_end:
            return self._handover.hand(holding, now)
        if holding.purpose is Purpose.EVALUATE:
            return [self._ledger.drop(holding.key, "evaluated")]
        return self._handover.hand(replace(holding, phase=Phase.BACKWARD), now)

    def _completed(self, start: Holding) -> list[Action]:
        microbatch = start.key.microbatch
        ends = [h.key for h in self._ledger.all() if h.key.microbatch == microbatch]
        forgotten = [self._ledger.drop(end, "completed") for end in ends]
        return [Finished(microbatch, start.path), *forgotten, *self._settling.completed(microbatch, start.path)]

    # ---- hidden states -------------------------------------------------------------------------------------------

    def forward(self, known: Holding, message: Forward, now: float) -> list[Action]:
        """Takes hidden states that are complete and have a place."""
        sender = message.path.peer_at(message.position - 1)
        if known.is_end and known.phase is Phase.RECEIVING and self._has_turned(known):
            # By a path of another length: one of the two has skipped a hop that was only out of reach.
            gone = self._ledger.drop(known.key, "another copy came first")
            return [gone, *(Tell(sender, receipt_for(message, status)) for status in _PASSED)]
        if known.phase in (Phase.RECEIVING, Phase.RECEIVING_GRADIENT):
            return self._take(message, sender, now)
        return self._another_copy(known, message, sender, now)

    def _has_turned(self, end: Holding) -> bool:
        """Whether another copy has come to its end before this one."""
        return any(
            other.is_end and other.key != end.key and other.phase is not Phase.RECEIVING
            for other in self._ledger.all()
            if other.key.microbatch == end.key.microbatch
        )

    def _take(self, message: Forward, sender: PeerId, now: float) -> list[Action]:
        self._ledger.reserve(replace(received(message, sender, now), phase=Phase.FORWARD, came=now), now)
        work = Work.LOSS if message.position == len(message.path.hops) else Work.FORWARD
        accepted = receipt_for(message, ReceiptStatus.ACCEPTED)
        told = [Tell(sender, accepted)]
        if self._ledger.has_lost(message.path.data_node):  # to speak to it makes the link that shows that it exists
            told.append(Tell(message.path.data_node, accepted))
        return [*told, Compute(Key(message.microbatch, message.position), work, message.purpose)]

    def _another_copy(self, known: Holding, message: Forward, sender: PeerId, now: float) -> list[Action]:
        """The same microbatch again: a sender that lost its link to us, or a repaired path that comes by a second
        way."""
        accepted = Tell(sender, receipt_for(message, ReceiptStatus.ACCEPTED))
        passed = Tell(sender, receipt_for(message, ReceiptStatus.PASSED_ON))
        if same_way(known.path, message.path, message.position):
            return [accepted] if known.phase in (Phase.FORWARD, Phase.HANDING_ON) else [accepted, passed]
        if known.phase in BEFORE_BACKWARD and not known.is_end:
            return [self._ledger.drop(known.key, "replaced by a repaired path"), *self._take(message, sender, now)]
        if known.phase is Phase.SETTLING or (known.target is None and known.phase is Phase.GUARDING_BACK):
            # The gradient has gone further back than the peer that this copy is meant to replace.
            return [Tell(sender, receipt_for(message, ReceiptStatus.REFUSED, "another copy came first"))]
        return [accepted, passed, *self._adopt(known, message, now)]

    def _adopt(self, known: Holding, message: Forward, now: float) -> list[Action]:
        """The peer before has been replaced, and what it replaces has not the gradient yet or not for sure: the new one
        gets it."""
        path = joined(message.path, known.path, message.position)
        adopted = replace(known, path=path, tried=frozenset(), busy=frozenset())
        self._ledger.put_touched(adopted, now)
        return self._handover.hand(adopted, now) if known.phase in ON_THE_WAY_BACK else []

    # ---- gradients -----------------------------------------------------------------------------------------------

    def expects(self, holding: Holding, message: Backward) -> Reasoned[Place]:
        """Whether this gradient is wanted by a holding."""
        sender = message.path.peer_at(message.position + 1)
        if holding.purpose is Purpose.EVALUATE:
            return Reasoned(Place.REFUSED, "this microbatch is only evaluated")
        if not same_modules(holding.path, message.path, message.position + 1):
            return Reasoned(Place.REFUSED, "this microbatch is held here on another path")
        if holding.path.peer_at(message.position + 1) == sender:
            later = holding.phase in (Phase.RECEIVING, Phase.FORWARD)
        elif self._replicas.hosts(sender, message.path.hops[message.position + 1].module):
            later = holding.phase in (Phase.RECEIVING, Phase.FORWARD, Phase.RECEIVING_GRADIENT, Phase.RECALLING)
        else:
            return Reasoned(Place.REFUSED, "it does not come from a replica of the next module")
        return Reasoned(Place.BUSY, "this microbatch is not that far yet") if later else Reasoned(Place.FREE, "awaited")

    def backward(self, holding: Holding, message: Backward, now: float) -> list[Action]:
        """Takes a gradient: the first one is computed, any other let go."""
        sender = message.path.peer_at(message.position + 1)
        expected = self.expects(holding, message)
        if expected.value is not Place.FREE:
            status = ReceiptStatus.BUSY if expected.value is Place.BUSY else ReceiptStatus.REFUSED
            return [Tell(sender, receipt_for(message, status, expected.reason, RETRY_S))]
        if holding.phase not in BEFORE_BACKWARD:
            known = holding.path.peer_at(message.position + 1) == sender
            statuses = [ReceiptStatus.ACCEPTED] if known else []
            if not known or holding.phase in (Phase.GUARDING_BACK, Phase.SETTLING):
                statuses.append(ReceiptStatus.PASSED_ON)
            return [Tell(sender, receipt_for(message, status)) for status in statuses]
        path = joined(holding.path, message.path, message.position + 1)
        # Whom the way out has tried were replicas of another module.
        fresh = replace(holding, path=path, target=None, tried=frozenset(), busy=frozenset(), came=now)
        self._ledger.put_touched(replace(fresh, phase=Phase.BACKWARD, retry_at=None, failing_since=None), now)
        accepted = Tell(sender, receipt_for(message, ReceiptStatus.ACCEPTED))
        return [accepted, Compute(holding.key, Work.BACKWARD, holding.purpose)]


def received(message: Forward, sender: PeerId, now: float) -> Holding:
    """A new holding for a tensor about to come. How long it is kept is the ledger's affair."""
    key = Key(message.microbatch, message.position)
    return Holding(key, message.path, message.purpose, Phase.RECEIVING, message.lifetime_s, now, sender)
