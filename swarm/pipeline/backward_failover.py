"""Failover on the way back: a replica that never saw the microbatch takes a lost hop's place.

Of the lost hop at p, the hop after it has the gradient, the hop before it the input. The stand-in gets the gradient
first (RECEIVING_GRADIENT), then recalls the input (RECALLING) and computes both passes in one. The hop before it
decides: as long as it has no gradient it sends its output again, to the stand-in; when it has one already, nothing is
missing, and the stand-in lets its gradient go without adding it.
"""

from __future__ import annotations

from dataclasses import replace

from swarm.pipeline.custody_states import Action, Compute, Holding, KeepGradient, Key, Phase, Place, Tell, Work
from swarm.pipeline.handover import Handover
from swarm.pipeline.ledger import (
    OTHER_ROUTE,
    RETRY_S,
    STRANGER,
    Ledger,
    Replicas,
    is_from_neighbour,
    joined,
    receipt_for,
    same_modules,
)
from swarm.pipeline.settlement import Settling
from swarm.vocabulary.pipeline_messages import Backward, Forward, Purpose, Recall, Receipt, ReceiptStatus
from swarm.vocabulary.types import Path, PeerId, Reasoned

RECALL_AGAIN_S = 1.0
RECALL_PATIENCE_S = 8.0
"""How long a stand-in asks for its input before it gives the gradient back to whoever sent it."""
LIFETIME_S = 60.0
"""Of a gradient that waits for its input; the input brings the microbatch's own lifetime."""

_UNDER_WAY = (Phase.HANDING_ON, Phase.GUARDING, Phase.AWAITING)
_NOT_YET = (Phase.RECEIVING, Phase.FORWARD, Phase.RECEIVING_GRADIENT, Phase.RECALLING)


class StandingIn:
    """Both roles of the failover: the stand-in, and the hop before it."""

    def __init__(self, ledger: Ledger, settling: Settling, handover: Handover, replicas: Replicas) -> None:
        self._ledger = ledger
        self._settling = settling
        self._handover = handover
        self._replicas = replicas

    # ---- the stand-in --------------------------------------------------------------------------------------------

    def admit(self, message: Backward, now: float) -> Reasoned[Place]:
        """Whether there is a place for the gradient of a microbatch that is not held here; reserves it."""
        if not 0 <= message.position < len(message.path.hops):
            return Reasoned(Place.REFUSED, "this microbatch is not, or no longer, held here")
        sender = message.path.peer_at(message.position + 1)
        if not is_from_neighbour(self._replicas, message, sender, self._ledger.own):
            return Reasoned(Place.BUSY, STRANGER)
        place = self._ledger.place_for(message.microbatch.data_node, sender)
        if not place.value:
            return Reasoned(Place.BUSY, place.reason)
        key = Key(message.microbatch, message.position)
        phase = Phase.RECEIVING_GRADIENT
        self._ledger.reserve(Holding(key, message.path, Purpose.TRAIN, phase, LIFETIME_S, now, sender), now)
        return Reasoned(Place.FREE, "stands in")

    def gradient_arrived(self, holding: Holding, message: Backward, now: float) -> list[Action]:
        """Asks for the input that belongs to a gradient that is complete."""
        before = message.path.peer_at(message.position - 1)
        recalling = replace(holding, path=message.path, phase=Phase.RECALLING, target=before)
        self._ledger.put_touched(replace(recalling, failing_since=now, retry_at=now + RECALL_AGAIN_S), now)
        sender = message.path.peer_at(message.position + 1)
        accepted = Tell(sender, receipt_for(message, ReceiptStatus.ACCEPTED))
        return [KeepGradient(holding.key), accepted, _recall(recalling, before)]

    def input_announced(self, holding: Holding) -> None:
        """Stops asking for the input, which is on its way."""
        self._ledger.put(replace(holding, retry_at=None))

    def input_lost(self, holding: Holding, now: float) -> None:
        """Asks again for an input that broke off."""
        self._ledger.put(replace(holding, retry_at=now))

    def input_arrived(self, holding: Holding, message: Forward, now: float) -> list[Action]:
        """Starts the computation of input and gradient: from now on a hop like any other."""
        path = joined(message.path, holding.path, message.position + 1)
        ready = replace(holding, path=path, phase=Phase.BACKWARD, lifetime_s=message.lifetime_s, came=now)
        self._ledger.put_touched(replace(ready, target=None, retry_at=None, failing_since=None), now)
        sender = message.path.peer_at(message.position - 1)
        receipts = [receipt_for(message, status) for status in (ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON)]
        told = [Tell(sender, receipt) for receipt in receipts]  # passed on: the hop after has had it long since
        return [*told, Compute(holding.key, Work.REPLAY, Purpose.TRAIN)]

    def answered(self, holding: Holding, receipt: Receipt) -> list[Action]:
        """Handles the receipt with which the hop before answers instead of sending the input."""
        match receipt.status:
            case ReceiptStatus.PASSED_ON:
                return self._give_back(holding, ReceiptStatus.PASSED_ON, "the gradient is there already")
            case ReceiptStatus.REFUSED:
                return self._give_back(holding, ReceiptStatus.REFUSED, f"no input: {receipt.detail}")
            case _:
                return []

    def tick(self, holding: Holding, now: float) -> list[Action]:
        """Asks again for what is late, or gives up."""
        if holding.retry_at is None or holding.retry_at > now or holding.target is None:
            return []
        if holding.failing_since is not None and now - holding.failing_since >= RECALL_PATIENCE_S:
            return self._give_back(holding, ReceiptStatus.REFUSED, "the input cannot be had")
        self._ledger.put(replace(holding, retry_at=now + RECALL_AGAIN_S))
        return [_recall(holding, holding.target)]

    def _give_back(self, holding: Holding, status: ReceiptStatus, detail: str) -> list[Action]:
        gradient = Backward(holding.key.microbatch, holding.path, holding.key.position)
        sender = holding.path.peer_at(holding.key.position + 1)
        return [Tell(sender, receipt_for(gradient, status, detail)), self._ledger.drop(holding.key, detail)]

    # ---- the hop before ------------------------------------------------------------------------------------------

    def recalled(self, sender: PeerId, message: Recall, now: float) -> list[Action]:
        """Sends the hop's output to the stand-in, or refuses with the reason. Its own view of the path up to here
        counts, not the other's.
        """
        holding = self._ledger.get(Key(message.microbatch, message.position))
        if holding is None and self._settling.has_completed(message.microbatch):
            return [Tell(sender, receipt_for(message, ReceiptStatus.PASSED_ON, "complete"))]
        objection = self._objection(holding, sender, message)
        if holding is None or objection:
            return [Tell(sender, receipt_for(message, ReceiptStatus.REFUSED, objection))]
        if holding.phase in _NOT_YET:
            return [Tell(sender, receipt_for(message, ReceiptStatus.BUSY, "not that far yet", RETRY_S))]
        if holding.phase not in _UNDER_WAY:
            return [Tell(sender, receipt_for(message, ReceiptStatus.PASSED_ON, "the gradient is here already"))]
        if holding.phase is Phase.HANDING_ON and holding.target == sender and holding.retry_at is None:
            return []  # it is on its way
        replaced = holding.path.hops[message.position + 1].peer
        tried = holding.tried if replaced == sender else holding.tried | {replaced}
        return self._handover.hand_to(sender, replace(holding, tried=tried), now)

    def _objection(self, holding: Holding | None, sender: PeerId, message: Recall) -> str:
        if holding is None:
            return "this microbatch is not, or no longer, held here"
        if holding.purpose is Purpose.EVALUATE or holding.is_end or not _names(message.path, message.position, sender):
            return "there is nothing to recall"
        if holding.path.route != message.path.route:
            return OTHER_ROUTE  # what is held here has been checked
        if not same_modules(holding.path, message.path, message.position + 1):
            return "this microbatch is held here on another path"
        known = holding.path.hops[message.position + 1]
        if known.peer != sender and not self._replicas.hosts(sender, known.module):
            return "a stand-in has to host the module of the hop that it replaces"
        return ""


def _names(path: Path, position: int, sender: PeerId) -> bool:
    return position + 1 < len(path.hops) and path.hops[position + 1].peer == sender


def _recall(holding: Holding, before: PeerId) -> Tell:
    return Tell(before, Recall(holding.key.microbatch, holding.path, holding.key.position - 1))
