"""What one peer holds, how many of it there may be, and the small steps that the ways out and back have in common."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Protocol

from swarm.holdings import ON_THE_WAY_BACK, ON_THE_WAY_OUT, Action, Forget, Holding, Key, Phase, Tell
from swarm.messages import Backward, Direction, Forward, Recall, Receipt, ReceiptStatus, Stranded
from swarm.vocabulary import ModuleId, Path, PeerId, Reasoned

PATIENCE_S = 5.0
"""How long a holder tries again when the only peer it could hand a microbatch to cannot be reached."""
RETRY_S = 0.3
DATA_NODE_GRACE_S = 20.0
"""How long a hop keeps a data node's microbatches after the link to it broke, and after each step of theirs while it is gone: a reconnect may come."""
MOST_DOUBLINGS = 3
BUSY_JITTER = 0.5
KEPT_FOR_OTHERS = 4
"""One slot in so many is closed to a data node that has all the others: one that never finishes does not shut the rest out."""
UNSETTLED_PER_SLOT = 2
"""A hop that has so many microbatches a slot whose data node has not said that they count takes no new ones."""


class Replicas(Protocol):
    """Whom a holder could hand a microbatch to, as far as this peer knows."""

    @property
    def fewest_hops(self) -> int:
        """A hop that nobody stands in for is skipped where at least so many are left; with MAX_HOPS none is."""

    def choose(self, module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        """The best replica of a module outside the given set, or None."""

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        """Whether a peer says of itself that it hosts the module; gradients and recalls are taken from replicas only."""

    def is_given_up(self, peer: PeerId) -> bool:
        """Whether it does not answer any more, so that more than a link has broken."""

    def goes_round(self, module: ModuleId) -> bool:
        """Whether new paths do without the module, because nobody who serves it can be reached: then nobody waits for it."""


class Shelf:
    """The holdings of one peer.

    Args:
        slots: how many microbatches of other peers may be held at once (a data node's own are not counted).
    """

    def __init__(self, own: PeerId, slots: int) -> None:
        self.own = own
        self.slots = slots
        self._holdings: dict[Key, Holding] = {}
        self._lost: set[PeerId] = set()
        """Data nodes of what is held to which there is no link."""

    def __len__(self) -> int:
        return len(self._holdings)

    def get(self, key: Key) -> Holding | None:
        return self._holdings.get(key)

    def all(self) -> tuple[Holding, ...]:
        return tuple(self._holdings.values())

    def put(self, holding: Holding) -> None:
        self._holdings[holding.key] = holding

    def put_touched(self, holding: Holding, now: float) -> None:
        """Puts it, its deadline off by its lifetime, or by the grace while nobody is there who could want it."""
        lost = holding.path.data_node in self._lost
        allowed_s = min(holding.lifetime_s, DATA_NODE_GRACE_S) if lost else holding.lifetime_s
        self.put(replace(holding, deadline=now + allowed_s))

    def lose_data_node(self, peer: PeerId, now: float) -> None:
        """Its microbatches are kept for the grace, unless they move or it comes back."""
        held = {h.path.data_node for h in self.all()}
        self._lost = (self._lost | {peer}) & held  # so that it is bounded as the holdings are
        for holding in self._of(peer):
            self.put(replace(holding, deadline=min(holding.deadline, now + DATA_NODE_GRACE_S)))

    def regain_data_node(self, peer: PeerId, now: float) -> None:
        """Its microbatches are kept as others are."""
        if peer in self._lost:
            self._lost.remove(peer)
            for holding in self._of(peer):
                self.put_touched(holding, now)

    def _of(self, data_node: PeerId) -> list[Holding]:
        """But those that only wait for its word on whether they count: these wait for it however long it takes."""
        return [h for h in self.all() if h.path.data_node == data_node and h.phase is not Phase.SETTLING]

    def drop(self, key: Key, reason: str) -> Forget:
        del self._holdings[key]
        return Forget(key, reason)

    @property
    def used_slots(self) -> int:
        return sum(h.key.microbatch.data_node != self.own and h.phase is not Phase.SETTLING for h in self.all())

    def place_for(self, data_node: PeerId) -> Reasoned[bool]:
        """Whether one more microbatch of this data node may be held."""
        if data_node == self.own:
            return Reasoned(True, "its own need no slot")
        others = [h for h in self.all() if h.key.microbatch.data_node != self.own]
        share = self.slots - self.slots // KEPT_FOR_OTHERS
        for unsettled, factor, what in (
            (False, 1, "slots"),
            (True, UNSETTLED_PER_SLOT, "places of unsettled gradients"),
        ):
            held = [h.key.microbatch.data_node for h in others if (h.phase is Phase.SETTLING) is unsettled]
            if len(held) >= factor * self.slots:
                return Reasoned(False, f"all {factor * self.slots} {what} are taken")
            if held.count(data_node) >= factor * share:
                return Reasoned(False, f"{factor * share} {what} are taken by this data node, the rest is for others")
        return Reasoned(True, "a slot is free")

    def strand(self, holding: Holding, direction: Direction, position: int, detail: str) -> list[Action]:
        """Forgets it and tells its data node, which abandons it."""
        return [self.drop(holding.key, detail), stranded(holding, direction, position, detail)]


def stranded(holding: Holding, direction: Direction, position: int, detail: str) -> Tell:
    """To the data node: nobody takes it from here."""
    message = Stranded(holding.key.microbatch, direction, position, detail[:256])
    return Tell(holding.path.data_node, message)


def offered(holding: Holding, now: float) -> Holding:
    """Its output is offered to its target now; what an earlier offer took that came to nothing was waiting."""
    in_vain_s = now - holding.handed if holding.phase in ON_THE_WAY_OUT | ON_THE_WAY_BACK else 0.0
    return replace(holding, handed=now, waited_s=holding.waited_s + in_vain_s)


def put_off(holding: Holding, asked_s: float, now: float) -> Holding:
    """Everybody who could take it is busy: when to ask again. The first time as asked; then twice as long each time, up to a bound, and a share more
    that differs from microbatch to microbatch, so that those who were refused together do not all come back together."""
    doublings = min(holding.refusals, MOST_DOUBLINGS)
    chance = zlib.crc32(f"{holding.key} {holding.refusals}".encode()) / 2**32 if doublings else 0.0
    pause_s = asked_s * 2.0**doublings * (1 + BUSY_JITTER * chance)
    return replace(holding, retry_at=now + pause_s, busy=frozenset(), refusals=holding.refusals + 1)


def passed_on(holding: Holding, direction: Direction, custodian: int, now: float) -> list[Action]:
    """PASSED_ON, to the peer that had custody and to the data node, which times its peers by it."""
    microbatch, position = holding.key.microbatch, holding.key.position
    waited_s, computed_s = holding.waited_s, holding.computed_s
    sent_s = max(0.0, now - holding.handed)
    receipt = Receipt(microbatch, direction, position, ReceiptStatus.PASSED_ON, 0.0, "", waited_s, computed_s, sent_s)
    told = []
    if -1 <= custodian <= len(holding.path.hops):
        told.append(holding.path.peer_at(custodian))
    told.append(holding.path.data_node)
    return [Tell(peer, receipt) for peer in dict.fromkeys(told)]


def receipt_for(
    message: Forward | Backward | Recall, status: ReceiptStatus, detail: str = "", retry_after_s: float = 0.0
) -> Receipt:
    """The answer of whoever the message was for. A Recall is answered as what it leads to, a gradient's way back."""
    direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
    return Receipt(message.microbatch, direction, message.position, status, retry_after_s, detail[:256])


def same_way(one: Path, other: Path, position: int) -> bool:
    """Whether two paths have the same hops up to and including `position`. What comes after may have been repaired since."""
    return one.hops[: position + 1] == other.hops[: position + 1]


def same_modules(one: Path, other: Path, position: int) -> bool:
    """Whether two paths differ at most in the replicas up to and including `position`. Of what comes after, repair may have skipped a stage since."""
    modules, others = ([hop.module for hop in path.hops[: position + 1]] for path in (one, other))
    return modules == others


def joined(before: Path, after: Path, position: int) -> Path:
    """The hops before `position` from one path, from `position` on from the other.

    Each side of a hop knows the repairs of its own side: what came in knows the way here, what comes back the way after.
    """
    return Path(before.data_node, (*before.hops[:position], *after.hops[position:]))
