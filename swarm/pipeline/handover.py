"""Handover of a microbatch: the holder offers its output to the next peer, and keeps it until that one has passed it
on.

    FORWARD -> HANDING_ON -> GUARDING -> AWAITING            to the hop after, on the way out
    BACKWARD -> HANDING_BACK -> GUARDING_BACK -> SETTLING    to the hop before, on the way back

A lost, busy or refusing peer is replaced by another replica of its module, from the output that is kept. Where there is
none, the holder tries the same peer again for PATIENCE_S, or until new paths go round that stage. What differs:

* On the way out any replica will do, and is asked at once. Where there is none the hop is skipped, if the run's rules
  allow a path without it. Not so where another expert of its stage is served: a route's modules are never replaced
  under way, so the microbatch is stranded, and its data node sends the text out anew by the next-best route.
* On the way back the peer that it came from has the input. A replica that stands in for it has to fetch that and to
  compute the visit anew (`swarm.pipeline.backward_failover`), so the peer is waited for first. No hop is skipped.
"""

from __future__ import annotations

import math
from dataclasses import replace

from swarm.pipeline.custody_states import Action, Holding, Phase, SendOutput, Tell
from swarm.pipeline.ledger import PATIENCE_S, RETRY_S, Ledger, Replicas, offered, passed_on, put_off, stranded
from swarm.pipeline.settlement import Settling
from swarm.vocabulary.pipeline_messages import Backward, Direction, Forward, Purpose, Receipt, ReceiptStatus
from swarm.vocabulary.types import PeerId

STAND_IN_AFTER_S = 1.0
"""On the way back a peer that cannot be reached for so long is replaced, or as soon as it is given up."""
UNSERVED = "nobody serves its module"

_HANDING = {Direction.FORWARD: Phase.HANDING_ON, Direction.BACKWARD: Phase.HANDING_BACK}
_GUARDING = {Direction.FORWARD: Phase.GUARDING, Direction.BACKWARD: Phase.GUARDING_BACK}


class Handover:
    """Offers of holdings to their targets, in either direction. At any time a microbatch is offered to one peer only,
    its target.
    """

    def __init__(self, ledger: Ledger, settling: Settling, replicas: Replicas) -> None:
        self._ledger = ledger
        self._settling = settling
        self._replicas = replicas

    def hand(self, holding: Holding, now: float) -> list[Action]:
        """Offers a holding to the next peer on its path."""
        handing, target = _HANDING[holding.direction], holding.path.peer_at(holding.next_position)
        handed = replace(offered(holding, now), phase=handing, target=target, retry_at=None, failing_since=None)
        if holding.phase is handing:  # that one was busy and another is asked is no news
            self._ledger.put(handed)
        else:
            self._ledger.put_touched(handed, now)
        return [_sending(handed, target)]

    def hand_to(self, replica: PeerId, holding: Holding, now: float) -> list[Action]:
        """Offers a holding to another replica of the next hop's module."""
        return self.hand(replace(holding, path=holding.path.with_peer(holding.next_position, replica)), now)

    def receipt(self, holding: Holding, receipt: Receipt, now: float) -> list[Action]:
        """Handles the target's answer."""
        match receipt.status:
            case ReceiptStatus.ACCEPTED:
                return self._accepted(holding, now)
            case ReceiptStatus.PASSED_ON:
                told = self._accepted(holding, now)  # when the ACCEPTED was overtaken or lost
                current = self._ledger.get(holding.key)
                if current is not None and current.phase in _GUARDING.values():
                    self._release(current, now)
                return told
            case ReceiptStatus.BUSY:
                return self._busy(holding, receipt, now)
            case ReceiptStatus.REFUSED:  # sending it there again would not help
                return self._elsewhere(holding, now) or self._give_up(holding, f"refused: {receipt.detail}", now)

    def target_failed(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Offers a holding whose target failed elsewhere, or nowhere; else the same peer again for a while: links break
        and come back.
        """
        since = now if holding.failing_since is None else holding.failing_since
        if instead := self._instead_of_waiting(holding, since, detail, now):
            return instead
        if now - since >= PATIENCE_S:
            return self._give_up(holding, detail, now)
        handing = _HANDING[holding.direction]
        self._ledger.put(replace(holding, phase=handing, failing_since=since, retry_at=now + RETRY_S))
        return []

    def retry(self, holding: Holding, target: PeerId, now: float) -> list[Action]:
        """Offers a holding again to the same peer, or to a replica that has come up meanwhile."""
        since = holding.failing_since
        if since is not None and (instead := self._instead_of_waiting(holding, since, UNSERVED, now)):
            return instead
        retried = replace(offered(holding, now), retry_at=None)
        self._ledger.put(retried)
        return [_sending(retried, target)]

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _accepted(self, holding: Holding, now: float) -> list[Action]:
        if holding.phase not in _HANDING.values():
            return []
        told = passed_on(holding, now)
        if holding.purpose is Purpose.EVALUATE:
            return [*told, self._ledger.drop(holding.key, "passed on")]
        guarding = _GUARDING[holding.direction]
        guarded = replace(holding, phase=guarding, retry_at=None, failing_since=None, refusals=0)
        self._ledger.put_touched(guarded, now)
        if holding.next_module is None:  # the data node cannot be replaced
            self._release(guarded, now)
        return told

    def _release(self, guarded: Holding, now: float) -> None:
        """Another one guards it now."""
        if guarded.direction is Direction.FORWARD:
            self._ledger.put_touched(replace(guarded, phase=Phase.AWAITING, target=None), now)
        elif guarded.is_end:
            # Kept until its start completes or is given up, so that no later copy can turn round a second time.
            self._ledger.put(replace(guarded, target=None, deadline=math.inf))
        else:
            self._settling.enter(guarded, now)

    def _busy(self, holding: Holding, receipt: Receipt, now: float) -> list[Action]:
        """Elsewhere if there is an elsewhere; else the same peer again when it asked to be. On the way back the peer
        that it came from is waited for; of stand-ins one is as good as another."""
        module, target = holding.next_module, holding.target
        if holding.phase not in _HANDING.values() or target is None:
            return []
        if module is not None and (holding.direction is Direction.FORWARD or holding.tried):
            busy = holding.busy | {target}
            other = self._replicas.choose(module, holding.tried | busy).value
            if other is not None:
                return self.hand_to(other, replace(holding, busy=busy), now)
        self._ledger.put(put_off(holding, receipt.retry_after_s, now))
        return []

    def _instead_of_waiting(self, holding: Holding, since: float, detail: str, now: float) -> list[Action]:
        """What to do at once about a target that cannot be reached; nothing if it is waited for."""
        if self._may_be_replaced(holding, since, now) and (elsewhere := self._elsewhere(holding, now)):
            return elsewhere
        return self._give_up(holding, detail, now) if self._goes_round(holding) else []

    def _may_be_replaced(self, holding: Holding, since: float, now: float) -> bool:
        if holding.direction is Direction.FORWARD or now - since >= STAND_IN_AFTER_S:
            return True
        return holding.target is not None and self._replicas.is_given_up(holding.target)

    def _elsewhere(self, holding: Holding, now: float) -> list[Action]:
        """Hands it to another replica of the next hop's module, if there is one. Nobody stands in for the data node."""
        module, target = holding.next_module, holding.target
        if module is None or target is None:
            return []
        tried = holding.tried | {target}
        for without in (tried | holding.busy, tried):  # one that was busy is better than none
            other = self._replicas.choose(module, without).value
            if other is not None:
                return self.hand_to(other, replace(holding, tried=tried, refusals=0), now)
        return []

    def _goes_round(self, holding: Holding) -> bool:
        """Whether the next hop is done without, as new paths do: out, it is skipped; back, or where another expert is
        visited instead, a microbatch sent anew would be home before one that waits for somebody to stand in."""
        module = holding.next_module
        if module is None or not self._replicas.goes_round(module):
            return False
        anew = holding.direction is Direction.BACKWARD or self._replicas.has_other_expert(module)
        return anew or self._may_skip(holding)

    def _may_skip(self, holding: Holding) -> bool:
        module, longer = holding.next_module, len(holding.path.hops) > self._replicas.fewest_hops
        if module is None or not longer or holding.purpose is not Purpose.TRAIN:
            return False
        return not self._replicas.has_other_expert(module)

    def _give_up(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Nobody can take it: skips the next hop, or strands it there."""
        if holding.direction is Direction.BACKWARD:
            return self._give_up_gradient(holding, detail, now)
        position, module = holding.next_position, holding.next_module
        if self._may_skip(holding):
            path = holding.path.without(position)
            return self.hand(replace(holding, path=path, tried=frozenset(), busy=frozenset(), refusals=0), now)
        if module is not None:
            detail = f"{detail}; module {module} has no peer left to stand in"
        return self._ledger.strand(holding, position, detail)

    def _give_up_gradient(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Its data node abandons it, unless it came home by another way; then the word that settles it comes back.
        Whoever still guards it after us has nothing more to do either but to ask for that word."""
        if holding.is_end:
            return self._ledger.strand(holding, holding.next_position, detail)
        self._settling.enter(holding, now)
        released = Receipt(holding.key.microbatch, Direction.BACKWARD, holding.key.position, ReceiptStatus.PASSED_ON)
        guard = holding.path.peer_at(holding.previous_position)
        return [stranded(holding, holding.next_position, detail), Tell(guard, released)]


def _sending(holding: Holding, target: PeerId) -> SendOutput:
    microbatch, path, position = holding.key.microbatch, holding.path, holding.next_position
    if holding.direction is Direction.FORWARD:
        return SendOutput(holding.key, target, Forward(microbatch, path, position, holding.purpose, holding.lifetime_s))
    return SendOutput(holding.key, target, Backward(microbatch, path, position))
