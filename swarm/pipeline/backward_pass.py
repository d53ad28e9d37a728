"""A gradient's way back: BACKWARD -> HANDING_BACK -> GUARDING_BACK -> SETTLING.

A hop takes one gradient, the first that comes from a replica of the module after it, and lets every later one go: what
it answers, PASSED_ON, is true, the microbatch is past it. When the peer before it is lost, another replica of that
peer's module stands in: it gets the gradient and fetches the input from the hop before
(`swarm.pipeline.backward_failover`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from swarm.pipeline.custody_states import (
    BEFORE_BACKWARD,
    Action,
    Compute,
    Finished,
    Holding,
    Key,
    Phase,
    Place,
    SendOutput,
    Tell,
    Work,
)
from swarm.pipeline.ledger import (
    PATIENCE_S,
    RETRY_S,
    Ledger,
    Replicas,
    joined,
    offered,
    passed_on,
    put_off,
    receipt_for,
    same_modules,
    stranded,
)
from swarm.pipeline.settlement import Settling
from swarm.vocabulary.pipeline_messages import Backward, Direction, Purpose, Receipt, ReceiptStatus
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned

STAND_IN_AFTER_S = 1.0
"""A peer that cannot be reached for so long is replaced, or as soon as it is given up. Not at once as on the way out: a
stand-in computes the visit anew."""


class WayBack:
    """What follows from events about gradients."""

    def __init__(self, shelf: Ledger, settling: Settling, replicas: Replicas) -> None:
        self._shelf = shelf
        self._settling = settling
        self._replicas = replicas

    def expects(self, holding: Holding, message: Backward) -> Reasoned[Place]:
        """Whether this gradient is wanted by one that is held."""
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

    def arrived(self, holding: Holding, message: Backward, now: float) -> list[Action]:
        """The first one is computed, any other let go."""
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
        self._shelf.put_touched(replace(fresh, phase=Phase.BACKWARD, retry_at=None, failing_since=None), now)
        accepted = Tell(sender, receipt_for(message, ReceiptStatus.ACCEPTED))
        return [accepted, Compute(holding.key, Work.BACKWARD, holding.purpose)]

    def computed(self, holding: Holding, now: float) -> list[Action]:
        """Hands it back; at the data node's start the microbatch has completed."""
        if not holding.is_start:
            return self.hand_back(holding, holding.path.peer_at(holding.key.position - 1), now)
        microbatch = holding.key.microbatch
        ends: list[Key] = [h.key for h in self._shelf.all() if h.key.microbatch == microbatch]
        forgotten = [self._shelf.drop(end, "completed") for end in ends]
        word = self._settling.completed(microbatch, holding.path)
        return [Finished(microbatch, holding.path), *forgotten, *word]

    def hand_back(self, holding: Holding, target: PeerId, now: float) -> list[Action]:
        """Offers it to `target` as the hop before, be it the one it came from or another."""
        position = holding.key.position - 1
        path = holding.path if position < 0 else holding.path.with_peer(position, target)
        handed = replace(offered(holding, now), path=path, phase=Phase.HANDING_BACK, target=target)
        handed = replace(handed, retry_at=None, failing_since=None)
        self._shelf.put_touched(handed, now)
        return [_sending(handed, target)]

    def receipt(self, holding: Holding, receipt: Receipt, now: float) -> list[Action]:
        """The target's answer."""
        match receipt.status:
            case ReceiptStatus.ACCEPTED:
                return self._accepted(holding, now)
            case ReceiptStatus.PASSED_ON:
                return self._passed_on(holding, now)
            case ReceiptStatus.BUSY:
                return self._busy(holding, receipt, now)
            case ReceiptStatus.REFUSED:
                return self._elsewhere(holding, now) or self._give_up(holding, f"refused: {receipt.detail}", now)

    def target_failed(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """The same peer again for a moment, because links break and come back; then another; in the end nobody."""
        since = now if holding.failing_since is None else holding.failing_since
        if self._may_be_replaced(holding, since, now) and (elsewhere := self._elsewhere(holding, now)):
            return elsewhere
        if now - since >= PATIENCE_S or self._waits_for_nobody(holding):
            return self._give_up(holding, detail, now)
        self._shelf.put(replace(holding, phase=Phase.HANDING_BACK, failing_since=since, retry_at=now + RETRY_S))
        return []

    def retry(self, holding: Holding, target: PeerId, now: float) -> list[Action]:
        """Offers it again to the same peer, or to a replica that has come up meanwhile."""
        since = holding.failing_since
        if since is not None:
            if self._may_be_replaced(holding, since, now) and (elsewhere := self._elsewhere(holding, now)):
                return elsewhere
            if self._waits_for_nobody(holding):
                return self._give_up(holding, "nobody serves the module before", now)
        retried = replace(offered(holding, now), retry_at=None)
        self._shelf.put(retried)
        return [_sending(retried, target)]

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _accepted(self, holding: Holding, now: float) -> list[Action]:
        if holding.phase is not Phase.HANDING_BACK:
            return []
        told = passed_on(holding, Direction.BACKWARD, holding.key.position + 1, now)
        if holding.key.position > 0:
            guarding = replace(holding, phase=Phase.GUARDING_BACK, retry_at=None, failing_since=None)
            self._shelf.put_touched(guarding, now)
        elif holding.is_end:
            return [*told, self._shelf.drop(holding.key, "gradient accepted by its start")]
        else:
            self._settling.enter(holding, now)
        return told

    def _passed_on(self, holding: Holding, now: float) -> list[Action]:
        told = self._accepted(holding, now)  # when the ACCEPTED was overtaken or lost
        current = self._shelf.get(holding.key)
        if current is None or current.phase is not Phase.GUARDING_BACK:
            return told
        if current.is_end:
            # Kept until its start completes or is given up, so that no later copy can turn round a second time.
            self._shelf.put(replace(current, target=None, deadline=math.inf))
        else:
            self._settling.enter(current, now)
        return told

    def _busy(self, holding: Holding, receipt: Receipt, now: float) -> list[Action]:
        """The peer it came from is waited for; of stand-ins one is as good as another."""
        if holding.phase is not Phase.HANDING_BACK or holding.target is None:
            return []
        if holding.tried:
            busy = holding.busy | {holding.target}
            other = self._replicas.choose(_module_before(holding), holding.tried | busy).value
            if other is not None:
                return self.hand_back(replace(holding, busy=busy), other, now)
        self._shelf.put(put_off(holding, receipt.retry_after_s, now))
        return []

    def _elsewhere(self, holding: Holding, now: float) -> list[Action]:
        """Hands it to another replica of the module before, if there is one. Nobody stands in for the data node."""
        if holding.key.position < 1 or holding.target is None:
            return []
        tried, module = holding.tried | {holding.target}, _module_before(holding)
        other = self._replicas.choose(module, tried | holding.busy)
        if other.value is None:
            other = self._replicas.choose(module, tried)  # one that was busy is better than none
        if other.value is None:
            return []
        return self.hand_back(replace(holding, tried=tried, refusals=0), other.value, now)

    def _may_be_replaced(self, holding: Holding, since: float, now: float) -> bool:
        gone = holding.target is not None and self._replicas.is_given_up(holding.target)
        return gone or now - since >= STAND_IN_AFTER_S

    def _waits_for_nobody(self, holding: Holding) -> bool:
        """Whether a microbatch sent anew would be home before one that waits for somebody to stand in."""
        return holding.key.position >= 1 and self._replicas.goes_round(_module_before(holding))

    def _give_up(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Its data node abandons it, unless it came home by another way; then the word that settles it comes back.
        Whoever still guards it after us has nothing more to do either but to ask for that word."""
        told = stranded(holding, Direction.BACKWARD, holding.key.position - 1, detail)
        if holding.is_end:
            return [self._shelf.drop(holding.key, detail), told]
        self._settling.enter(holding, now)
        released = Receipt(holding.key.microbatch, Direction.BACKWARD, holding.key.position, ReceiptStatus.PASSED_ON)
        return [told, Tell(holding.path.peer_at(holding.key.position + 1), released)]


def _module_before(holding: Holding) -> ModuleId:
    return holding.path.hops[holding.key.position - 1].module


def _sending(holding: Holding, target: PeerId) -> SendOutput:
    message = Backward(holding.key.microbatch, holding.path, holding.key.position - 1)
    return SendOutput(holding.key, target, message)
