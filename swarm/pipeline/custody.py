"""Custody of microbatches: the state machine that every peer on a path runs, data node included.

Whoever sends a microbatch on keeps it in custody until the receiver says PASSED_ON, so that at any moment exactly one
living peer knows that it has to act when somebody dies. One `Holding` stands for one microbatch at one position:

    RECEIVING -> FORWARD -> HANDING_ON -> GUARDING -> AWAITING -> BACKWARD -> HANDING_BACK -> GUARDING_BACK -> SETTLING
    -> (gone) RECEIVING_GRADIENT -> RECALLING ------------------------------^   (a stand-in)

* position -1 (the data node at the start) has no RECEIVING: its tokens are at home. Its BACKWARD ends the microbatch.
* position len(hops) (the data node at the end) turns round: after FORWARD, which is the loss, comes HANDING_BACK. It
  stays in GUARDING_BACK until its start ends too: a microbatch turns round once, whatever copies of it arrive later.
* a microbatch that is only evaluated is gone as soon as the next peer has accepted it.

What follows from them is in modules of their own: `swarm.pipeline.arrival` (of hidden states and gradients),
`swarm.pipeline.handover` (to the next peer, and who replaces it), `swarm.pipeline.backward_failover` (repair of the way
back) and `swarm.pipeline.settlement` (whose gradient counts). This one receives the events and asks the right of them.

Nothing here does IO. `handle` takes what happened and the time, and returns what is to be done, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swarm.pipeline.arrival import Arrivals, received
from swarm.pipeline.backward_failover import StandingIn
from swarm.pipeline.custody_states import (
    ADDED,
    HANDED_OVER,
    Action,
    Arrived,
    BrokenOff,
    Computed,
    ComputeFailed,
    Event,
    Holding,
    Key,
    PeerBack,
    PeerLost,
    Phase,
    Place,
    Retract,
    Started,
    Tell,
    TensorArrived,
    Tick,
)
from swarm.pipeline.handover import Handover
from swarm.pipeline.ledger import OTHER_ROUTE, STRANGER, Ledger, Replicas, is_from_neighbour, receipt_for
from swarm.pipeline.settlement import Settling
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    Direction,
    Forward,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
    Unsettled,
)
from swarm.vocabulary.types import MicrobatchId, PeerId, Reasoned


class Custody:
    """The state machine of all holdings of one peer.

    Args:
        own: this peer.
        slots: how many microbatches of other peers may be held at once (a data node's own are not counted).
    """

    def __init__(self, own: PeerId, slots: int, replicas: Replicas) -> None:
        self.own = own
        self.slots = slots
        self._ledger = Ledger(own, slots, replicas)
        self._replicas = replicas
        self._settling = Settling(self._ledger)
        self._handover = Handover(self._ledger, self._settling, replicas)
        self._arrivals = Arrivals(self._ledger, self._handover, self._settling, replicas)
        self._standing_in = StandingIn(self._ledger, self._settling, self._handover, replicas)

    # ---- looking ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._ledger)

    def get(self, key: Key) -> Holding | None:
        return self._ledger.get(key)

    def holdings(self) -> Iterable[Holding]:
        return self._ledger.all()

    @property
    def used_slots(self) -> int:
        return self._ledger.used_slots

    # ---- admission -------------------------------------------------------------------------------------------

    def admit_forward(self, message: Forward, now: float) -> Reasoned[Place]:
        """Admits a Forward if there is a place for it, and reserves that. The caller has checked it against the
        manifest, and its route's signature.
        """
        known = self._ledger.get(Key(message.microbatch, message.position))
        sender = message.path.peer_at(message.position - 1)
        if known is not None and known.path.route != message.path.route:
            return Reasoned(Place.REFUSED, OTHER_ROUTE)
        if not is_from_neighbour(self._replicas, message, sender, self.own):
            return Reasoned(Place.BUSY, STRANGER)
        if known is not None:
            if known.phase is Phase.RECALLING:
                self._standing_in.input_announced(known)
            return Reasoned(Place.FREE, "it has a slot")
        place = self._ledger.place_for(message.microbatch.data_node, sender)
        if place.value:
            self._ledger.reserve(received(message, sender, now), now)
        return Reasoned(Place.FREE if place.value else Place.BUSY, place.reason)

    def admit_backward(self, message: Backward, now: float) -> Reasoned[Place]:
        """Admits a gradient if it is wanted. Where it is not awaited the peer may stand in for a lost hop; that takes a
        slot.
        """
        holding = self._ledger.get(Key(message.microbatch, message.position))
        if holding is None:
            return self._standing_in.admit(message, now)
        if holding.path.route != message.path.route:
            return Reasoned(Place.REFUSED, OTHER_ROUTE)
        return self._arrivals.expects(holding, message)

    # ---- the machine -----------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from `event`. Events about microbatches that are not held are answered or ignored,
        never an error.
        """
        match event:
            case Started():
                return self._arrivals.start(event, now)
            case TensorArrived(message):
                return self._tensor_arrived(message, now)
            case BrokenOff(message):
                return self._broken_off(message, now)
            case Computed(key, seconds):
                return self._computed(key, seconds, now)
            case ComputeFailed(key, detail):
                return self._compute_failed(key, detail)
            case Arrived():
                return self._arrived(event, now)
            case PeerLost(peer, detail):
                return self._peer_lost(peer, detail, now)
            case PeerBack(peer):
                self._ledger.regain_data_node(peer, now)
                return self._settling.ask_again(peer, now)
            case Tick():
                return [action for holding in self._ledger.all() for action in self._tick(holding, now)]

    def abandon(self, microbatch: MicrobatchId, detail: str) -> list[Action]:
        """Abandons a microbatch at its data node: forgets both ends and tells every hop."""
        held = [h for h in self._ledger.all() if h.key.microbatch == microbatch]
        peers = dict.fromkeys(hop.peer for h in held for hop in h.path.hops if hop.peer != self.own)
        gone: list[Action] = [self._ledger.drop(h.key, detail) for h in held]
        return [*gone, *(Tell(peer, Close(microbatch, detail)) for peer in peers)]

    def touch(self, key: Key, now: float) -> None:
        """Puts off the deadline of a microbatch that has moved somewhere on its path."""
        holding = self._ledger.get(key)
        if holding is not None:
            self._ledger.put_touched(holding, now)

    # ---- one event each --------------------------------------------------------------------------------------

    def _tensor_arrived(self, message: Forward | Backward, now: float) -> list[Action]:
        holding = self._ledger.get(Key(message.microbatch, message.position))
        if holding is None:
            sender = message.path.peer_at(message.position + (-1 if isinstance(message, Forward) else 1))
            return [Tell(sender, receipt_for(message, ReceiptStatus.REFUSED, "not, or no longer, held here"))]
        match message:
            case Forward():
                if holding.phase is Phase.RECALLING:
                    return self._standing_in.input_arrived(holding, message, now)
                return self._arrivals.forward(holding, message, now)
            case Backward():
                if holding.phase is Phase.RECEIVING_GRADIENT:
                    return self._standing_in.gradient_arrived(holding, message, now)
                return self._arrivals.backward(holding, message, now)

    def _broken_off(self, message: Forward | Backward, now: float) -> list[Action]:
        holding = self._ledger.get(Key(message.microbatch, message.position))
        reserved = Phase.RECEIVING if isinstance(message, Forward) else Phase.RECEIVING_GRADIENT
        if holding is not None and holding.phase is reserved:
            return [self._ledger.drop(holding.key, "broken off")]
        if holding is not None and holding.phase is Phase.RECALLING and isinstance(message, Forward):
            self._standing_in.input_lost(holding, now)
        return []

    def _computed(self, key: Key, seconds: float, now: float) -> list[Action]:
        held = self._ledger.get(key)
        if held is None:
            return []
        holding = replace(held, waited_s=max(0.0, now - held.came - seconds), computed_s=seconds)
        return self._arrivals.computed(holding, now)

    def _compute_failed(self, key: Key, detail: str) -> list[Action]:
        holding = self._ledger.get(key)
        return [] if holding is None else self._ledger.strand(holding, key.position, detail)

    def _arrived(self, event: Arrived, now: float) -> list[Action]:
        sender = event.sender
        self._ledger.regain_data_node(sender, now)
        match event.message:
            case Receipt() as message:
                return self._receipt(sender, message, now)
            case Close() as message:
                return self._close(sender, message)
            case Recall() as message:
                return self._standing_in.recalled(sender, message, now)
            case Settled() as message:
                return self._settling.settled(sender, message)
            case Unsettled(microbatch):
                return self._settling.asked(sender, microbatch)

    def _receipt(self, sender: PeerId, receipt: Receipt, now: float) -> list[Action]:
        onward = receipt.direction is Direction.FORWARD
        key = Key(receipt.microbatch, receipt.position - 1 if onward else receipt.position + 1)
        holding = self._ledger.get(key)
        if holding is None or holding.target != sender or holding.direction is not receipt.direction:
            return []
        if holding.phase is Phase.RECALLING:
            return self._standing_in.answered(holding, receipt)
        return self._handover.receipt(holding, receipt, now) if holding.phase in HANDED_OVER else []

    def _peer_lost(self, peer: PeerId, detail: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for holding in self._ledger.all():
            # One that recalls its input asks again by the clock, whatever the link does.
            if holding.target == peer and holding.phase in HANDED_OVER:
                actions += self._handover.target_failed(holding, detail, now)
        self._ledger.lose_data_node(peer, now)
        return actions

    def _close(self, sender: PeerId, message: Close) -> list[Action]:
        if message.microbatch.data_node != sender:
            return []  # only its data node may close a microbatch
        actions: list[Action] = []
        for holding in [h for h in self._ledger.all() if h.key.microbatch == message.microbatch]:
            # What is being computed just now will have been added by the time that it is taken back.
            if holding.phase in ADDED | {Phase.BACKWARD} and not holding.is_end:
                actions.append(Retract(holding.key))
            actions.append(self._ledger.drop(holding.key, f"closed: {message.detail}"))
        return actions

    def _tick(self, holding: Holding, now: float) -> list[Action]:
        if holding.phase is Phase.SETTLING:
            return self._settling.tick(holding, now)
        # A computation always ends. What it adds must not be forgotten before, however long the machine slept
        # meanwhile.
        if holding.deadline <= now and holding.phase is not Phase.BACKWARD:
            return self._overdue(holding, now)
        if holding.phase is Phase.RECALLING:
            return self._standing_in.tick(holding, now)
        if holding.retry_at is None or holding.retry_at > now or holding.target is None:
            return []
        return self._handover.retry(holding, holding.target, now)

    def _overdue(self, holding: Holding, now: float) -> list[Action]:
        if holding.phase in ADDED and not holding.is_end:
            self._settling.enter(holding, now)
            return []
        gone = self._ledger.drop(holding.key, f"nothing happened to it for {holding.lifetime_s:.0f} s")
        if holding.path.data_node != self.own:
            return [gone]
        lost = Stranded(holding.key.microbatch, Direction.FORWARD, holding.key.position, "lost on its path")
        return [gone, Tell(self.own, lost)]
