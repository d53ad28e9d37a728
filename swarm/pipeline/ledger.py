"""The ledger of one peer's holdings and their bounds, and the steps that their transitions share."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Protocol

from swarm.pipeline.custody_states import HANDED_OVER, Action, Forget, Holding, Key, Phase, Tell
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Direction,
    Forward,
    Purpose,
    Recall,
    Receipt,
    ReceiptStatus,
    Stranded,
)
from swarm.vocabulary.types import ModuleId, Path, PeerId, Reasoned

DEFAULT_SLOTS = 16


PATIENCE_S = 5.0
"""How long a holder tries again when the only peer it could hand a microbatch to cannot be reached."""
RETRY_S = 0.3
DATA_NODE_GRACE_S = 20.0
"""How long a hop keeps a data node's microbatches after the link to it broke, and after each step of theirs while it is
gone: a reconnect may come."""
MOST_DOUBLINGS = 3
BUSY_JITTER = 0.5
KEPT_FOR_OTHERS = 4
"""One slot in so many is closed to a data node that has all the others, and to a neighbour that all the others came
from: one that never finishes does not shut the rest out."""
LONGEST_LIFETIME_S = 900.0
SHORTEST_LIFETIME_S = 60.0
LIFETIME_IN_STAYS = 20
"""A microbatch without news is kept for so many times as long as its data node's microbatches stay, within these
bounds; what is only evaluated for the shortest, since nobody repairs it."""
MAX_TIMED = 256
"""Data nodes whose microbatches' stay is remembered."""
UNLINKED_SHARE = 4
"""One slot in so many, all together, for microbatches of data nodes to which there is no link: whoever invents data
nodes has no more."""
UNSETTLED_PER_SLOT = 2
"""A hop that has so many microbatches a slot whose data node has not said that they count takes no new ones."""
OTHER_ROUTE = "this microbatch is held here on another route"
STRANGER = "its sender does not announce the module before"


class Replicas(Protocol):
    """The interface to who could take a microbatch over, as far as this peer knows."""

    @property
    def fewest_hops(self) -> int:
        """The fewest hops of a path: one that nobody stands in for is skipped where at least so many are left; with
        MAX_HOPS none is.
        """

    def choose(self, module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        """The best replica of a module outside the given set, or None."""

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        """Whether a peer says of itself that it hosts the module; gradients and recalls are taken from replicas
        only."""

    def is_given_up(self, peer: PeerId) -> bool:
        """Whether the peer does not answer any more, so that more than a link has broken."""

    def is_linked(self, peer: PeerId) -> bool:
        """Whether there is a link to a peer just now."""

    def goes_round(self, module: ModuleId) -> bool:
        """Whether new paths do without the module, because nobody who serves it can be reached: then nobody waits for
        it."""

    def has_other_expert(self, module: ModuleId) -> bool:
        """Whether another module of its stage is served: then no path skips the stage, and what cannot visit the
        module sets out anew to that one."""


class Stays:
    """The time that the microbatches of each data node stay here, and by that how long one of them may lie without
    news, whatever its data node asks for.

    A data node of which nothing is known yet is taken to be as slow as the slowest of the others, or as one may be.
    What one of them does changes nothing for those that are known.
    """

    def __init__(self) -> None:
        self._mean_s: dict[PeerId, float] = {}

    def note(self, data_node: PeerId, seconds: float) -> None:
        """Notes the stay of a microbatch that has gone back the way it came."""
        known = self._mean_s.pop(data_node, seconds)
        self._mean_s[data_node] = known + (seconds - known) / 8
        if len(self._mean_s) > MAX_TIMED:
            del self._mean_s[next(iter(self._mean_s))]

    def longest_s(self, data_node: PeerId) -> float:
        """The seconds for which news of one of its microbatches is waited for."""
        if not self._mean_s:
            return LONGEST_LIFETIME_S
        usual_s = self._mean_s.get(data_node) or max(self._mean_s.values())
        return min(LONGEST_LIFETIME_S, max(SHORTEST_LIFETIME_S, LIFETIME_IN_STAYS * usual_s))


class Ledger:
    """The holdings of one peer.

    Args:
        slots: how many microbatches of other peers may be held at once (a data node's own are not counted).
    """

    def __init__(self, own: PeerId, slots: int, replicas: Replicas) -> None:
        self.own = own
        self.slots = slots
        self._replicas = replicas
        self._stays = Stays()
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
        """Puts a holding with a new deadline: its lifetime as far as that is usual here, or the grace while nobody is
        there who could want it.
        """
        self.put(replace(holding, deadline=now + self._allowed_s(holding)))

    def _allowed_s(self, holding: Holding) -> float:
        data_node = holding.path.data_node
        if data_node == self.own:
            return holding.lifetime_s
        if data_node in self._lost:
            most_s = DATA_NODE_GRACE_S
        elif holding.purpose is Purpose.EVALUATE:
            most_s = SHORTEST_LIFETIME_S
        else:
            most_s = self._stays.longest_s(data_node)
        return min(holding.lifetime_s, most_s)

    def reserve(self, holding: Holding, now: float) -> None:
        """Reserves a place for what is about to come. Of a data node to which there is no link nobody knows whether it
        exists: its grace begins.
        """
        self.put(holding)
        data_node = holding.path.data_node
        if self._is_unlinked(data_node):
            self._note_lost(data_node)
        self.put_touched(replace(holding, since=now), now)

    def _is_unlinked(self, data_node: PeerId) -> bool:
        return data_node != self.own and not self._replicas.is_linked(data_node)

    def _note_lost(self, data_node: PeerId) -> None:
        held = {h.path.data_node for h in self.all()}
        self._lost = (self._lost | {data_node}) & held  # so that it is bounded as the holdings are

    def has_lost(self, data_node: PeerId) -> bool:
        """Whether there is no link to the data node of something that is held."""
        return data_node in self._lost

    def note_stay(self, holding: Holding, now: float) -> None:
        """Notes the stay of a holding whose part here is done."""
        self._stays.note(holding.path.data_node, now - holding.since)

    def lose_data_node(self, peer: PeerId, now: float) -> None:
        """Limits the microbatches of a data node without a link to the grace, unless they move or it comes back."""
        self._note_lost(peer)
        for holding in self._of(peer):
            self.put(replace(holding, deadline=min(holding.deadline, now + DATA_NODE_GRACE_S)))

    def regain_data_node(self, peer: PeerId, now: float) -> None:
        """Ends the grace of a data node's microbatches: they are kept as others are."""
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

    def place_for(self, data_node: PeerId, sender: PeerId) -> Reasoned[bool]:
        """Whether one more microbatch of this data node, come by the link to `sender`, may be held."""
        if data_node == self.own:
            return Reasoned(True, "its own need no slot")
        others = [h for h in self.all() if h.key.microbatch.data_node != self.own]
        share = self.slots - self.slots // KEPT_FOR_OTHERS
        unlinked = max(1, self.slots // UNLINKED_SHARE)
        lost = sum(h.path.data_node in self._lost and h.phase is not Phase.SETTLING for h in others)
        if self._is_unlinked(data_node) and lost >= unlinked:
            return Reasoned(False, f"{unlinked} slots are taken by data nodes to which there is no link")
        for unsettled, factor, what in (
            (False, 1, "slots"),
            (True, UNSETTLED_PER_SLOT, "places of unsettled gradients"),
        ):
            held = [h for h in others if (h.phase is Phase.SETTLING) is unsettled]
            if len(held) >= factor * self.slots:
                return Reasoned(False, f"all {factor * self.slots} {what} are taken")
            if sum(h.path.data_node == data_node for h in held) >= factor * share:
                return Reasoned(False, f"{factor * share} {what} are taken by this data node, the rest is for others")
            if sum(h.sender == sender for h in held) >= factor * share:
                return Reasoned(
                    False, f"{factor * share} {what} are taken by what came by this link, the rest is for others"
                )
        return Reasoned(True, "a slot is free")

    def strand(self, holding: Holding, position: int, detail: str) -> list[Action]:
        """Forgets a holding and tells its data node, which abandons it."""
        return [self.drop(holding.key, detail), stranded(holding, position, detail)]


def is_from_neighbour(replicas: Replicas, message: Forward | Backward, sender: PeerId, own: PeerId) -> bool:
    """Whether the sender announces the module of the hop that it claims to be, stage 0 at either end. Who has just
    changed its module may be honest: it is put off, not refused."""
    hops, position = message.path.hops, message.position + (-1 if isinstance(message, Forward) else 1)
    module = hops[position].module if 0 <= position < len(hops) else ModuleId(0)
    return sender == own or replicas.hosts(sender, module)


def stranded(holding: Holding, position: int, detail: str) -> Tell:
    """The message to the data node that nobody at this position can take the microbatch."""
    signature = b"" if holding.path.route is None else holding.path.route.signature
    message = Stranded(holding.key.microbatch, holding.direction, position, detail[:256], signature)
    return Tell(holding.path.data_node, message)


def offered(holding: Holding, now: float) -> Holding:
    """The holding with its output offered to its target now; what an earlier offer took that came to nothing was
    waiting.
    """
    in_vain_s = now - holding.handed if holding.phase in HANDED_OVER else 0.0
    return replace(holding, handed=now, waited_s=holding.waited_s + in_vain_s)


def put_off(holding: Holding, asked_s: float, now: float) -> Holding:
    """The holding with the time of its next offer, when everybody who could take it is busy. The first time as asked;
    then twice as long each time, up to a bound, and a share more that differs from microbatch to microbatch, so that
    those who were refused together do not all come back together.
    """
    doublings = min(holding.refusals, MOST_DOUBLINGS)
    chance = zlib.crc32(f"{holding.key} {holding.refusals}".encode()) / 2**32 if doublings else 0.0
    pause_s = asked_s * 2.0**doublings * (1 + BUSY_JITTER * chance)
    return replace(holding, retry_at=now + pause_s, busy=frozenset(), refusals=holding.refusals + 1)


def passed_on(holding: Holding, now: float) -> list[Action]:
    """The receipts PASSED_ON, to the peer that had custody and to the data node, which times its peers by it."""
    receipt = Receipt(
        holding.key.microbatch,
        holding.direction,
        holding.key.position,
        ReceiptStatus.PASSED_ON,
        waited_s=holding.waited_s,
        computed_s=holding.computed_s,
        sent_s=max(0.0, now - holding.handed),
    )
    told = [holding.path.data_node]
    if -1 <= holding.previous_position <= len(holding.path.hops):
        told.insert(0, holding.path.peer_at(holding.previous_position))
    return [Tell(peer, receipt) for peer in dict.fromkeys(told)]


def receipt_for(
    message: Forward | Backward | Recall, status: ReceiptStatus, detail: str = "", retry_after_s: float = 0.0
) -> Receipt:
    """The receipt for a message. A Recall is answered as what it leads to, a gradient's way back."""
    direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
    return Receipt(message.microbatch, direction, message.position, status, retry_after_s, detail[:256])


def same_way(one: Path, other: Path, position: int) -> bool:
    """Whether two paths have the same hops up to and including `position`. What comes after may have been repaired
    since."""
    return one.hops[: position + 1] == other.hops[: position + 1]


def same_modules(one: Path, other: Path, position: int) -> bool:
    """Whether two paths differ at most in the replicas up to and including `position`. Of what comes after, repair may
    have skipped a stage since."""
    modules, others = ([hop.module for hop in path.hops[: position + 1]] for path in (one, other))
    return modules == others


def joined(before: Path, after: Path, position: int) -> Path:
    """The path with the hops before `position` from one path, from `position` on from the other.

    Each side of a hop knows the repairs of its own side: what came in knows the way here, what comes back the way
    after.
    """
    return replace(before, hops=(*before.hops[:position], *after.hops[position:]))
