"""Who is responsible for a microbatch: the state machine that every peer on a path runs, data node included.

Whoever sends a microbatch on keeps it in custody until the receiver says PASSED_ON, so that at any moment exactly one
living peer knows that it has to act when somebody dies. One `Holding` stands for one microbatch at one position:

    RECEIVING -> FORWARD -> HANDING_ON -> GUARDING -> AWAITING -> BACKWARD -> HANDING_BACK -> GUARDING_BACK -> (gone)

* position -1 (the data node at the start) has no RECEIVING: its tokens are at home. Its BACKWARD ends the microbatch.
* position len(hops) (the data node at the end) turns round: after FORWARD, which is the loss, comes HANDING_BACK. It stays in
  GUARDING_BACK until its start ends too: a microbatch turns round once, whatever copies of it arrive later.
* a microbatch that is only evaluated is gone as soon as the next peer has accepted it.

On the way out a lost, busy or refusing peer is replaced by another replica of the same module, from the output that is
kept. Where there is no stand-in (on the way back there never is) the holder tries the same peer again for PATIENCE_S, and
then reports the microbatch Stranded; its data node abandons it.

Nothing here does IO. `handle` takes what happened and the time, and returns what is to be done, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from swarm.holdings import (
    Action,
    BackwardArrived,
    BrokenOff,
    CloseArrived,
    Compute,
    Computed,
    ComputeFailed,
    Event,
    Finished,
    Forget,
    ForwardArrived,
    Holding,
    Key,
    PeerLost,
    Phase,
    ReceiptArrived,
    SendOutput,
    Started,
    Tell,
    Tick,
    Work,
)
from swarm.messages import (
    Backward,
    Close,
    Direction,
    Forward,
    Purpose,
    Receipt,
    ReceiptStatus,
    Stranded,
)
from swarm.vocabulary import MicrobatchId, ModuleId, Path, PeerId, Reasoned

PATIENCE_S = 5.0
"""How long a holder tries again when the only peer it could hand a microbatch to cannot be reached."""
RETRY_S = 0.3
KEPT_FOR_OTHERS = 4
"""One slot in so many is closed to a data node that has all the others: one that never finishes does not shut the rest out."""
DATA_NODE_GRACE_S = 20.0
"""How long a hop keeps a data node's microbatches after the link to it broke: a reconnect may come."""

ChooseReplica = Callable[[ModuleId, frozenset[PeerId]], Reasoned[PeerId | None]]
"""Names the best replica of a module outside the given set, or None."""


_ON_THE_WAY_OUT = frozenset({Phase.HANDING_ON, Phase.GUARDING})
_ON_THE_WAY_BACK = frozenset({Phase.HANDING_BACK, Phase.GUARDING_BACK})
_BEFORE_BACKWARD = frozenset({Phase.RECEIVING, Phase.FORWARD, Phase.HANDING_ON, Phase.GUARDING, Phase.AWAITING})


class Custody:
    """All holdings of one peer.

    Args:
        own: this peer.
        slots: how many microbatches of other peers may be held at once (a data node's own are not counted).
        choose: names a stand-in for a hop on the way out.
    """

    def __init__(self, own: PeerId, slots: int, choose: ChooseReplica) -> None:
        self.own = own
        self.slots = slots
        self._choose = choose
        self._holdings: dict[Key, Holding] = {}

    # ---- looking ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._holdings)

    def get(self, key: Key) -> Holding | None:
        return self._holdings.get(key)

    def holdings(self) -> Iterable[Holding]:
        return tuple(self._holdings.values())

    @property
    def used_slots(self) -> int:
        return sum(key.microbatch.data_node != self.own for key in self._holdings)

    # ---- admission -------------------------------------------------------------------------------------------

    def admit_forward(self, message: Forward, now: float) -> Reasoned[bool]:
        """Whether there is a place for this Forward; reserves it. The caller has checked it against the manifest."""
        key = Key(message.microbatch, message.position)
        if key in self._holdings:
            return Reasoned(True, "it has a slot")
        data_node = message.microbatch.data_node
        if data_node != self.own:
            if self.used_slots >= self.slots:
                return Reasoned(False, f"all {self.slots} slots are taken")
            share = self.slots - self.slots // KEPT_FOR_OTHERS
            if sum(held.microbatch.data_node == data_node for held in self._holdings) >= share:
                return Reasoned(False, f"{share} slots are taken by this data node, the rest is for others")
        self._put(_received(message, now))
        return Reasoned(True, "a slot is free")

    def expects_backward(self, message: Backward) -> Reasoned[bool]:
        """Whether a gradient for this microbatch is awaited here from the peer it was handed to, on the way it came."""
        holding = self._holdings.get(Key(message.microbatch, message.position))
        if holding is None:
            return Reasoned(False, "this microbatch is not, or no longer, held here")
        if not _same_way(holding.path, message.path, message.position + 1):
            return Reasoned(False, "this microbatch is held here on another path")
        if holding.phase in (Phase.RECEIVING, Phase.FORWARD):
            return Reasoned(False, "this microbatch has not been passed on yet")
        if holding.purpose is Purpose.EVALUATE:
            return Reasoned(False, "this microbatch is only evaluated")
        return Reasoned(True, "awaited")

    # ---- the machine -----------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """What follows from `event`. Events about microbatches that are not held are answered or ignored, never an error."""
        match event:
            case Started():
                return self._start(event, now)
            case ForwardArrived(message):
                return self._forward_arrived(message, now)
            case BackwardArrived(message):
                return self._backward_arrived(message, now)
            case BrokenOff(key):
                holding = self._holdings.get(key)
                return (
                    [] if holding is None or holding.phase is not Phase.RECEIVING else [self._drop(key, "broken off")]
                )
            case Computed(key):
                return self._computed(key, now)
            case ComputeFailed(key, detail):
                return self._compute_failed(key, detail)
            case ReceiptArrived(sender, receipt):
                return self._receipt(sender, receipt, now)
            case PeerLost(peer, detail):
                return self._peer_lost(peer, detail, now)
            case CloseArrived(sender, message):
                return self._close(sender, message)
            case Tick():
                return self._tick(now)

    def abandon(self, microbatch: MicrobatchId, detail: str) -> list[Action]:
        """At its data node: forget both ends and tell every hop."""
        held = [h for h in self._holdings.values() if h.key.microbatch == microbatch]
        peers = dict.fromkeys(hop.peer for h in held for hop in h.path.hops if hop.peer != self.own)
        gone: list[Action] = [self._drop(h.key, detail) for h in held]
        return [*gone, *(Tell(peer, Close(microbatch, detail)) for peer in peers)]

    def touch(self, key: Key, now: float) -> None:
        """Somewhere on its path the microbatch has moved: put its deadline off."""
        holding = self._holdings.get(key)
        if holding is not None:
            self._put(_touched(holding, now))

    # ---- one event each --------------------------------------------------------------------------------------

    def _start(self, event: Started, now: float) -> list[Action]:
        key = Key(event.microbatch, -1)
        deadline = now + event.lifetime_s
        self._put(Holding(key, event.path, event.purpose, Phase.FORWARD, event.lifetime_s, deadline))
        return [Compute(key, Work.FORWARD, event.purpose)]

    def _forward_arrived(self, message: Forward, now: float) -> list[Action]:
        key = Key(message.microbatch, message.position)
        sender = message.path.peer_at(message.position - 1)
        known = self._holdings.get(key)
        if known is None:  # forgotten while the tensor was on its way
            return [Tell(sender, _receipt(message, Direction.FORWARD, ReceiptStatus.REFUSED, "forgotten meanwhile"))]
        if known.phase is not Phase.RECEIVING:
            return self._another_copy(known, message, sender, now)
        return self._take(message, sender, now)

    def _another_copy(self, known: Holding, message: Forward, sender: PeerId, now: float) -> list[Action]:
        """The same microbatch again: a sender that lost its link to us, or a repaired path that comes by a second way."""
        if _same_way(known.path, message.path, message.position):
            statuses = [ReceiptStatus.ACCEPTED]
            if known.phase not in (Phase.FORWARD, Phase.HANDING_ON):
                statuses.append(ReceiptStatus.PASSED_ON)
            return [Tell(sender, _receipt(message, Direction.FORWARD, status)) for status in statuses]
        if known.phase in _BEFORE_BACKWARD and not known.is_end:
            return [self._drop(known.key, "replaced by a repaired path"), *self._take(message, sender, now)]
        return [Tell(sender, _receipt(message, Direction.FORWARD, ReceiptStatus.REFUSED, "another copy came first"))]

    def _take(self, message: Forward, sender: PeerId, now: float) -> list[Action]:
        holding = replace(_received(message, now), phase=Phase.FORWARD)
        self._put(holding)
        work = Work.LOSS if holding.is_end else Work.FORWARD
        accepted = Tell(sender, _receipt(message, Direction.FORWARD, ReceiptStatus.ACCEPTED))
        return [accepted, Compute(holding.key, work, message.purpose)]

    def _backward_arrived(self, message: Backward, now: float) -> list[Action]:
        key = Key(message.microbatch, message.position)
        sender = message.path.peer_at(message.position + 1)
        holding = self._holdings.get(key)
        expected = self.expects_backward(message)
        if holding is None or not expected.value:
            return [Tell(sender, _receipt(message, Direction.BACKWARD, ReceiptStatus.REFUSED, expected.reason))]
        accepted = Tell(sender, _receipt(message, Direction.BACKWARD, ReceiptStatus.ACCEPTED))
        if holding.phase not in _BEFORE_BACKWARD:  # a second copy; the first is being worked on
            return [accepted]
        awaited = replace(holding, path=message.path, phase=Phase.BACKWARD, target=None, retry_at=None)
        self._put(_touched(awaited, now))
        return [accepted, Compute(key, Work.BACKWARD, holding.purpose)]

    def _computed(self, key: Key, now: float) -> list[Action]:
        holding = self._holdings.get(key)
        if holding is None:
            return []
        if holding.phase is Phase.FORWARD and not holding.is_end:
            position = key.position + 1
            return self._hand_on(holding, holding.path.peer_at(position), now)
        if holding.phase is Phase.FORWARD and holding.purpose is Purpose.EVALUATE:
            return [self._drop(key, "evaluated")]
        if holding.is_start:
            held = [h.key for h in self.holdings() if h.key.microbatch == key.microbatch]
            return [Finished(key.microbatch), *(self._drop(end, "completed") for end in held)]
        return self._hand_back(holding, now)

    def _compute_failed(self, key: Key, detail: str) -> list[Action]:
        holding = self._holdings.get(key)
        if holding is None:
            return []
        direction = Direction.FORWARD if holding.phase is Phase.FORWARD else Direction.BACKWARD
        return self._strand(holding, direction, key.position, detail)

    def _receipt(self, sender: PeerId, receipt: Receipt, now: float) -> list[Action]:
        onward = receipt.direction is Direction.FORWARD
        key = Key(receipt.microbatch, receipt.position - 1 if onward else receipt.position + 1)
        holding = self._holdings.get(key)
        phases = _ON_THE_WAY_OUT if onward else _ON_THE_WAY_BACK
        if holding is None or holding.target != sender or holding.phase not in phases:
            return []
        match receipt.status:
            case ReceiptStatus.ACCEPTED:
                return self._accepted(holding, now)
            case ReceiptStatus.PASSED_ON:
                return self._passed_on(holding, now)
            case ReceiptStatus.BUSY:
                return self._busy(holding, receipt, now)
            case ReceiptStatus.REFUSED:
                return self._refused(holding, receipt.detail, now)

    def _peer_lost(self, peer: PeerId, detail: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for holding in self.holdings():
            if holding.target == peer:
                actions += self._target_failed(holding, detail, now)
            elif holding.path.data_node == peer:
                self._put(replace(holding, deadline=min(holding.deadline, now + DATA_NODE_GRACE_S)))
        return actions

    def _close(self, sender: PeerId, message: Close) -> list[Action]:
        if message.microbatch.data_node != sender:
            return []  # only its data node may close a microbatch
        keys = [key for key in self._holdings if key.microbatch == message.microbatch]
        return [self._drop(key, f"closed: {message.detail}") for key in keys]

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for holding in self.holdings():
            if holding.deadline <= now:
                actions += self._overdue(holding)
            elif holding.retry_at is not None and holding.retry_at <= now and holding.target is not None:
                actions += self._retry(holding, holding.target, now)
        return actions

    def _retry(self, holding: Holding, target: PeerId, now: float) -> list[Action]:
        """Offers it again to the same peer, or to a replica that has come up meanwhile."""
        if holding.failing_since is not None and (elsewhere := self._elsewhere(holding, now)):
            return elsewhere
        retried = replace(holding, retry_at=None)
        self._put(retried)
        return [self._sending(retried, target)]

    def _overdue(self, holding: Holding) -> list[Action]:
        gone = self._drop(holding.key, f"nothing happened to it for {holding.lifetime_s:.0f} s")
        if holding.path.data_node != self.own:
            return [gone]
        lost = Stranded(holding.key.microbatch, Direction.FORWARD, holding.key.position, "lost on its path")
        return [gone, Tell(self.own, lost)]

    # ---- steps -----------------------------------------------------------------------------------------------

    def _hand_on(self, holding: Holding, target: PeerId, now: float) -> list[Action]:
        position = holding.key.position + 1
        path = holding.path if position == len(holding.path.hops) else holding.path.with_peer(position, target)
        handed = _touched(replace(holding, path=path, phase=Phase.HANDING_ON, target=target, retry_at=None), now)
        self._put(handed)
        return [self._sending(handed, target)]

    def _hand_back(self, holding: Holding, now: float) -> list[Action]:
        target = holding.path.peer_at(holding.key.position - 1)
        handed = _touched(replace(holding, phase=Phase.HANDING_BACK, target=target), now)
        self._put(handed)
        return [self._sending(handed, target)]

    def _sending(self, holding: Holding, target: PeerId) -> SendOutput:
        microbatch, position = holding.key.microbatch, holding.key.position
        message: Forward | Backward
        if holding.phase in _ON_THE_WAY_OUT:
            message = Forward(microbatch, holding.path, position + 1, holding.purpose, holding.lifetime_s)
        else:
            message = Backward(microbatch, holding.path, position - 1)
        return SendOutput(holding.key, target, message)

    def _accepted(self, holding: Holding, now: float) -> list[Action]:
        if holding.phase is Phase.HANDING_ON:
            told = self._tell_passed(holding, Direction.FORWARD, holding.key.position - 1)
            if holding.purpose is Purpose.EVALUATE:
                return [*told, self._drop(holding.key, "passed on")]
            accepted = replace(holding, phase=Phase.GUARDING, retry_at=None, failing_since=None)
            if holding.key.position + 1 == len(holding.path.hops):  # the data node cannot be replaced
                accepted = replace(accepted, phase=Phase.AWAITING, target=None)
            self._put(_touched(accepted, now))
            return told
        if holding.phase is Phase.HANDING_BACK:
            told = self._tell_passed(holding, Direction.BACKWARD, holding.key.position + 1)
            if holding.key.position == 0:
                return [*told, self._drop(holding.key, "gradient accepted by its data node")]
            guarding = replace(holding, phase=Phase.GUARDING_BACK, retry_at=None, failing_since=None)
            self._put(_touched(guarding, now))
            return told
        return []

    def _passed_on(self, holding: Holding, now: float) -> list[Action]:
        told = self._accepted(holding, now)  # when the ACCEPTED was overtaken or lost
        current = self._holdings.get(holding.key)
        if current is None:
            return told
        if current.phase is Phase.GUARDING:
            self._put(_touched(replace(current, phase=Phase.AWAITING, target=None), now))
        elif current.phase is Phase.GUARDING_BACK and current.is_end:
            # Kept until its start completes or is given up, so that no later copy can turn round a second time.
            self._put(replace(current, target=None, deadline=math.inf))
        elif current.phase is Phase.GUARDING_BACK:
            return [*told, self._drop(holding.key, "gradient passed on")]
        return told

    def _busy(self, holding: Holding, receipt: Receipt, now: float) -> list[Action]:
        """Elsewhere if there is an elsewhere; else the same peer again when it asked to be."""
        if holding.phase not in (Phase.HANDING_ON, Phase.HANDING_BACK) or holding.target is None:
            return []
        if holding.phase is Phase.HANDING_ON and holding.key.position + 1 < len(holding.path.hops):
            module = holding.path.hops[holding.key.position + 1].module
            busy = holding.busy | {holding.target}
            other = self._choose(module, holding.tried | busy).value
            if other is not None:
                return self._hand_on(replace(holding, busy=busy), other, now)
        self._put(replace(holding, retry_at=now + receipt.retry_after_s, busy=frozenset()))
        return []

    def _target_failed(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Elsewhere if there is an elsewhere; else the same peer again for a while: links break and come back."""
        if holding.phase not in _ON_THE_WAY_OUT | _ON_THE_WAY_BACK or holding.target is None:
            return []
        elsewhere = self._elsewhere(holding, now)
        if elsewhere:
            return elsewhere
        since = now if holding.failing_since is None else holding.failing_since
        if now - since >= PATIENCE_S:
            return self._strand_on(holding, detail)
        phase = Phase.HANDING_ON if holding.phase in _ON_THE_WAY_OUT else Phase.HANDING_BACK
        self._put(replace(holding, phase=phase, failing_since=since, retry_at=now + RETRY_S))
        return []

    def _refused(self, holding: Holding, detail: str, now: float) -> list[Action]:
        """Elsewhere if there is an elsewhere: sending it there again would not help."""
        return self._elsewhere(holding, now) or self._strand_on(holding, f"refused: {detail}")

    def _elsewhere(self, holding: Holding, now: float) -> list[Action]:
        """Hands it to another replica of the next hop's module, if it is on the way out and there is one."""
        position = holding.key.position + 1
        if holding.phase not in _ON_THE_WAY_OUT or holding.target is None or position == len(holding.path.hops):
            return []
        tried = holding.tried | {holding.target}
        module = holding.path.hops[position].module
        other = self._choose(module, tried | holding.busy)
        if other.value is None:
            other = self._choose(module, tried)  # one that was busy is better than none
        if other.value is None:
            return []
        return self._hand_on(replace(holding, tried=tried), other.value, now)

    def _strand_on(self, holding: Holding, detail: str) -> list[Action]:
        """Strands it at the hop that it was being handed to."""
        if holding.phase in _ON_THE_WAY_BACK:
            return self._strand(holding, Direction.BACKWARD, holding.key.position - 1, detail)
        position = holding.key.position + 1
        if position < len(holding.path.hops):
            detail = f"{detail}; module {holding.path.hops[position].module} has no peer left to stand in"
        return self._strand(holding, Direction.FORWARD, position, detail)

    def _strand(self, holding: Holding, direction: Direction, position: int, detail: str) -> list[Action]:
        message = Stranded(holding.key.microbatch, direction, position, detail[:256])
        return [self._drop(holding.key, detail), Tell(holding.path.data_node, message)]

    def _tell_passed(self, holding: Holding, direction: Direction, custodian: int) -> list[Action]:
        """PASSED_ON, to the peer that had custody and to the data node, which times its peers by it."""
        receipt = Receipt(holding.key.microbatch, direction, holding.key.position, ReceiptStatus.PASSED_ON)
        told = []
        if -1 <= custodian <= len(holding.path.hops):
            told.append(holding.path.peer_at(custodian))
        told.append(holding.path.data_node)
        return [Tell(peer, receipt) for peer in dict.fromkeys(told)]

    def _put(self, holding: Holding) -> None:
        self._holdings[holding.key] = holding

    def _drop(self, key: Key, reason: str) -> Forget:
        del self._holdings[key]
        return Forget(key, reason)


def _received(message: Forward, now: float) -> Holding:
    key = Key(message.microbatch, message.position)
    return Holding(
        key, message.path, message.purpose, Phase.RECEIVING, message.lifetime_s, deadline=now + message.lifetime_s
    )


def _same_way(one: Path, other: Path, position: int) -> bool:
    """Whether two paths have the same hops up to and including `position`. What comes after may have been repaired by others since."""
    return len(one.hops) == len(other.hops) and one.hops[: position + 1] == other.hops[: position + 1]


def _touched(holding: Holding, now: float) -> Holding:
    return replace(holding, deadline=now + holding.lifetime_s)


def _receipt(message: Forward | Backward, direction: Direction, status: ReceiptStatus, detail: str = "") -> Receipt:
    return Receipt(message.microbatch, direction, message.position, status, detail=detail[:256])
