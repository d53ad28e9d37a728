"""Peers of a rough world: they also freeze, drain and fail to compute, and account for all that they do."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from lab.world.world import NUMBERS_A_LIFE, DataNode, Peer, Thunk, repaired_positions
from swarm.pipeline.custody_events import (
    Action,
    Compute,
    ComputeFailed,
    Confirmed,
    Forget,
    KeepGradient,
    Key,
    Retract,
    Work,
)
from swarm.pipeline.in_flight import InFlight
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.pipeline_messages import Direction, Forward, MicrobatchTensor, Receipt, ReceiptStatus
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId, PeerState

if TYPE_CHECKING:
    from tests.swarm.pipeline.pipeline_world import RoughWorld


class RoughPeer(Peer):
    """What a frozen one is to do, it does when it thaws."""

    world: RoughWorld
    data_node: AccountingDataNode | None

    def __init__(self, world: RoughWorld, own: PeerId, module: ModuleId, incarnation: int) -> None:
        super().__init__(world, own, module, incarnation)
        self.frozen = self.draining = False
        self.added: set[MicrobatchId] = set()
        """The microbatches in its sums, those of past steps included."""
        self.visits: Counter[MicrobatchId] = Counter()
        self.gradients: set[Key] = set()
        """Kept for the input that has been recalled."""
        self._inbox: list[Thunk] = []

    def new_data_node(self) -> AccountingDataNode:
        return AccountingDataNode(self)

    # ---- being alive ---------------------------------------------------------------------------------------------

    def do(self, what: Thunk) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._inbox.append(what)
        else:
            what()
            self.world.check_account(self)

    def thaw(self) -> None:
        self.frozen = self.cut_off = False
        inbox, self._inbox = self._inbox, []
        for what in inbox:
            self.do(what)

    def observe(self, announcement: Announcement) -> None:
        if not self.frozen:
            super().observe(announcement)

    def announcement(self) -> Announcement:
        usual = super().announcement()
        return replace(usual, state=PeerState.DRAINING) if self.draining else usual

    def refusal(self, message: MicrobatchTensor) -> Receipt | None:
        held = self.custody.get(Key(message.microbatch, message.position)) is not None
        ours = self.data_node is not None if isinstance(message, Forward) else held
        if self.draining and not ours:
            direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
            return Receipt(message.microbatch, direction, message.position, ReceiptStatus.REFUSED, 0.0, "leaving")
        return super().refusal(message)

    # ---- carrying out --------------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        match action:
            case KeepGradient(key):
                self.gradients.add(key)
            case Forget(key):
                self.gradients.discard(key)
            case Confirmed(key):
                assert key.microbatch in self.added
                self.visits[key.microbatch] += 1
            case Retract(key):
                self.later(Work.REPLAY, lambda _: self.added.discard(key.microbatch))
                self.world.ledger.retracted += 1
                return
            case Compute(key, Work.REPLAY):
                assert key in self.gradients
        super().act(action)

    def computed(self, action: Compute, seconds: float, *, known: bool) -> None:
        if self.world.random.random() < self.world.compute_failures:
            if known:
                self.handle(ComputeFailed(action.key, "a non-finite gradient"))
            return
        if action.work in (Work.BACKWARD, Work.REPLAY):
            self.added.add(action.key.microbatch)
        if action.work is Work.LOSS:
            self.world.ledger.losses[action.key.microbatch] += 1
        super().computed(action, seconds, known=known)


class AccountingDataNode(DataNode):
    """Every piece of data is learned from at most once; what was abandoned before its loss sets out again."""

    world: RoughWorld

    def __init__(self, peer: RoughPeer) -> None:
        super().__init__(peer)
        self._data = itertools.count()
        self._again: deque[int] = deque()
        self._cargo: dict[MicrobatchId, int] = {}

    def started(self, entry: InFlight) -> None:
        self._cargo[entry.microbatch] = self._again.popleft() if self._again else next(self._data)
        super().started(entry)

    def completed(self, entry: InFlight, path: Path) -> None:
        ledger, planned = self.world.ledger, self.planned[entry.microbatch]
        ledger.skipped += len(planned.hops) - len(path.hops)
        ledger.left_out += self.world.shape.per_path - len(planned.hops)
        ledger.repaired_back.update(repaired_positions(entry.path, path))
        data = self.peer.incarnation * NUMBERS_A_LIFE + self._cargo.pop(entry.microbatch)
        ledger.data_completed[self.peer.id, data] += 1
        super().completed(entry, path)

    def abandoned(self, entry: InFlight) -> None:
        self.world.ledger.abandoned += 1
        data = self._cargo.pop(entry.microbatch)
        if entry.loss is None:
            self._again.append(data)
        super().abandoned(entry)
