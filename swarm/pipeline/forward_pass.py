"""A microbatch's way out: RECEIVING -> FORWARD -> HANDING_ON -> GUARDING -> AWAITING.

A lost, busy or refusing peer is replaced by another replica of the same module, from the output that is kept. Where
there is none, the holder tries the same peer again for PATIENCE_S, or until new paths go round that stage, and then
skips it if the run's rules allow a path without it; else it reports the microbatch Stranded.
"""

from __future__ import annotations

from dataclasses import replace

from swarm.pipeline.backward_pass import WayBack
from swarm.pipeline.custody_states import (
    BEFORE_BACKWARD,
    ON_THE_WAY_BACK,
    Action,
    Compute,
    Holding,
    Key,
    Phase,
    SendOutput,
    Started,
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
    same_way,
)
from swarm.vocabulary.pipeline_messages import Direction, Forward, Purpose, Receipt, ReceiptStatus
from swarm.vocabulary.types import PeerId

_PASSED = (ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON)


class WayOut:
    """What follows from events about hidden states."""

    def __init__(self, shelf: Ledger, way_back: WayBack, replicas: Replicas) -> None:
        self._shelf = shelf
        self._way_back = way_back
        self._replicas = replicas

    def start(self, event: Started, now: float) -> list[Action]:
        """At the data node: a microbatch sets out."""
        key = Key(event.microbatch, -1)
        deadline = now + event.lifetime_s
        self._shelf.put(Holding(key, event.path, event.purpose, Phase.FORWARD, event.lifetime_s, deadline, came=now))
        return [Compute(key, Work.FORWARD, event.purpose)]

    def arrived(self, known: Holding, message: Forward, now: float) -> list[Action]:
        """A whole tensor for which there is a place."""
        sender = message.path.peer_at(message.position - 1)
        if known.is_end and known.phase is Phase.RECEIVING and self._has_turned(known):
            # By a path of another length: one of the two has skipped a hop that was only out of reach.
            gone = self._shelf.drop(known.key, "another copy came first")
            return [gone, *(Tell(sender, receipt_for(message, status)) for status in _PASSED)]
        if known.phase in (Phase.RECEIVING, Phase.RECEIVING_GRADIENT):
            return self._take(message, sender, now)
        return self._another_copy(known, message, sender, now)

    def computed(self, holding: Holding, now: float) -> list[Action]:
        """Hands the output on; what is only evaluated ends with its loss."""
        if not holding.is_end:
            return self.hand_on(holding, holding.path.peer_at(holding.key.position + 1), now)
        if holding.purpose is Purpose.EVALUATE:
            return [self._shelf.drop(holding.key, "evaluated")]
        return self._way_back.computed(holding, now)

    def hand_on(self, holding: Holding, target: PeerId, now: float) -> list[Action]:
        """Offers its output to `target` as the next hop."""
        position = holding.key.position + 1
        path = holding.path if position == len(holding.path.hops) else holding.path.with_peer(position, target)
        handed = replace(offered(holding, now), path=path, phase=Phase.HANDING_ON, target=target, retry_at=None)
        if holding.phase is Phase.HANDING_ON:  # that one was busy and another is asked is no news
            self._shelf.put(handed)
        else:
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
            case ReceiptStatus.REFUSED:  # sending it there again would not help
                return self._elsewhere(holding, now) or self._past(holding, f"refused: {receipt.detail}", now)

    def target_failed(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Elsewhere if there is an elsewhere; else the same peer again for a while: links break and come back."""
        elsewhere = self._elsewhere(holding, now)
        if elsewhere:
            return elsewhere
        since = now if holding.failing_since is None else holding.failing_since
        if now - since >= PATIENCE_S or self._goes_round(holding):
            return self._past(holding, detail, now)
        self._shelf.put(replace(holding, phase=Phase.HANDING_ON, failing_since=since, retry_at=now + RETRY_S))
        return []

    def retry(self, holding: Holding, target: PeerId, now: float) -> list[Action]:
        """Offers it again to the same peer, or to a replica that has come up meanwhile."""
        if holding.failing_since is not None:
            if elsewhere := self._elsewhere(holding, now):
                return elsewhere
            if self._goes_round(holding):
                return self._past(holding, "nobody serves it", now)
        retried = replace(offered(holding, now), retry_at=None)
        self._shelf.put(retried)
        return [_sending(retried, target)]

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _has_turned(self, end: Holding) -> bool:
        """Whether another copy has come to its end before this one."""
        return any(
            other.is_end and other.key != end.key and other.phase is not Phase.RECEIVING
            for other in self._shelf.all()
            if other.key.microbatch == end.key.microbatch
        )

    def _take(self, message: Forward, sender: PeerId, now: float) -> list[Action]:
        self._shelf.reserve(replace(received(message, sender, now), phase=Phase.FORWARD, came=now), now)
        work = Work.LOSS if message.position == len(message.path.hops) else Work.FORWARD
        accepted = receipt_for(message, ReceiptStatus.ACCEPTED)
        told = [Tell(sender, accepted)]
        if self._shelf.has_lost(message.path.data_node):  # to speak to it makes the link that shows that it exists
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
            return [self._shelf.drop(known.key, "replaced by a repaired path"), *self._take(message, sender, now)]
        if known.phase is Phase.SETTLING or (known.target is None and known.phase is Phase.GUARDING_BACK):
            # The gradient has gone further back than the peer that this copy is meant to replace.
            return [Tell(sender, receipt_for(message, ReceiptStatus.REFUSED, "another copy came first"))]
        return [accepted, passed, *self._adopt(known, message, sender, now)]

    def _adopt(self, known: Holding, message: Forward, sender: PeerId, now: float) -> list[Action]:
        """The peer before has been replaced, and what it replaces has not the gradient yet or not for sure: the new one
        gets it."""
        path = joined(message.path, known.path, message.position)
        adopted = replace(known, path=path, tried=frozenset(), busy=frozenset())
        self._shelf.put_touched(adopted, now)
        return self._way_back.hand_back(adopted, sender, now) if known.phase in ON_THE_WAY_BACK else []

    def _accepted(self, holding: Holding, now: float) -> list[Action]:
        if holding.phase is not Phase.HANDING_ON:
            return []
        told = passed_on(holding, Direction.FORWARD, holding.key.position - 1, now)
        if holding.purpose is Purpose.EVALUATE:
            return [*told, self._shelf.drop(holding.key, "passed on")]
        accepted = replace(holding, phase=Phase.GUARDING, retry_at=None, failing_since=None, refusals=0)
        if holding.key.position + 1 == len(holding.path.hops):  # the data node cannot be replaced
            accepted = replace(accepted, phase=Phase.AWAITING, target=None)
        self._shelf.put_touched(accepted, now)
        return told

    def _passed_on(self, holding: Holding, now: float) -> list[Action]:
        told = self._accepted(holding, now)  # when the ACCEPTED was overtaken or lost
        current = self._shelf.get(holding.key)
        if current is not None and current.phase is Phase.GUARDING:
            self._shelf.put_touched(replace(current, phase=Phase.AWAITING, target=None), now)
        return told

    def _busy(self, holding: Holding, receipt: Receipt, now: float) -> list[Action]:
        """Elsewhere if there is an elsewhere; else the same peer again when it asked to be."""
        if holding.phase is not Phase.HANDING_ON or holding.target is None:
            return []
        if holding.key.position + 1 < len(holding.path.hops):
            module = holding.path.hops[holding.key.position + 1].module
            busy = holding.busy | {holding.target}
            other = self._replicas.choose(module, holding.tried | busy).value
            if other is not None:
                return self.hand_on(replace(holding, busy=busy), other, now)
        self._shelf.put(put_off(holding, receipt.retry_after_s, now))
        return []

    def _elsewhere(self, holding: Holding, now: float) -> list[Action]:
        """Hands it to another replica of the next hop's module, if there is one."""
        position = holding.key.position + 1
        if holding.target is None or position == len(holding.path.hops):
            return []
        tried = holding.tried | {holding.target}
        module = holding.path.hops[position].module
        other = self._replicas.choose(module, tried | holding.busy)
        if other.value is None:
            other = self._replicas.choose(module, tried)  # one that was busy is better than none
        if other.value is None:
            return []
        return self.hand_on(replace(holding, tried=tried, refusals=0), other.value, now)

    def _may_skip(self, holding: Holding) -> bool:
        hops = len(holding.path.hops)
        return holding.key.position + 1 < hops > self._replicas.fewest_hops and holding.purpose is Purpose.TRAIN

    def _goes_round(self, holding: Holding) -> bool:
        """Whether it skips the next hop now, as new paths do."""
        return self._may_skip(holding) and self._replicas.goes_round(holding.path.hops[holding.key.position + 1].module)

    def _past(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Skips the hop that nobody can take, or strands it there."""
        position, hops = holding.key.position + 1, len(holding.path.hops)
        if self._may_skip(holding):
            path = holding.path.without(position)
            fresh = replace(holding, path=path, tried=frozenset(), busy=frozenset(), refusals=0, failing_since=None)
            return self.hand_on(fresh, path.peer_at(position), now)
        if position < hops:
            detail = f"{detail}; module {holding.path.hops[position].module} has no peer left to stand in"
        return self._shelf.strand(holding, Direction.FORWARD, position, detail)


def received(message: Forward, sender: PeerId, now: float) -> Holding:
    """A holding for what is about to come. How long it is kept is the shelf's affair."""
    key = Key(message.microbatch, message.position)
    return Holding(key, message.path, message.purpose, Phase.RECEIVING, message.lifetime_s, now, sender)


def _sending(holding: Holding, target: PeerId) -> SendOutput:
    microbatch, position = holding.key.microbatch, holding.key.position
    message = Forward(microbatch, holding.path, position + 1, holding.purpose, holding.lifetime_s)
    return SendOutput(holding.key, target, message)
