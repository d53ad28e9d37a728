"""A small swarm in virtual time (`lab.world.world`), on a network that loses links, kills and freezes peers."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random

from lab.world.world import NUMBERS_A_LIFE, TICK_S, DataNode, Ledger, Peer, Thunk, World, repaired_positions
from swarm.pipeline import custody
from swarm.pipeline.in_flight import InFlight, InFlightRules
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.pipeline_messages import Direction, Forward, MicrobatchTensor, Receipt, ReceiptStatus
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId, PeerState

STALL_S = 1.5  # Silence after which the others take a peer's links for broken
LONGEST_FREEZE_S = 4.0
LIFETIME_S = 10.0
ORDINARY_RULES = InFlightRules(per_step=4, staleness=1, window=5)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a world is. `replicas` are those of each stage after 0; a path visits `per_path` of these stages."""

    data_nodes: int = 2
    replicas: tuple[int, ...] = (2, 2, 2)
    per_path: int = 3
    slots: int = 3
    rules: InFlightRules = ORDINARY_RULES
    compute_failures: float = 0.01  # Share of the computations that fail

    @property
    def stages(self) -> list[list[PeerId]]:
        counts = enumerate((self.data_nodes, *self.replicas))
        return [[PeerId(f"stage{stage}-peer{number}") for number in range(count)] for stage, count in counts]


class ChanceEnvironment:
    overhead_s = 0.0

    def __init__(self, shape: Shape, random: Random) -> None:
        self._shape, self._random = shape, random
        self.path_rules = PathRules(len(shape.replicas) + 1, shape.per_path)
        self._speed_s = {peer: random.uniform(0.02, 0.3) for stage in shape.stages for peer in stage}
        self._delay_s: dict[frozenset[PeerId], float] = {}

    def flight_rules(self, data_node: PeerId) -> InFlightRules:
        return self._shape.rules

    def slots_of(self, peer: PeerId) -> int:
        return self._shape.slots

    def service_s(self, peer: PeerId) -> float:
        return self._speed_s[peer]

    def compute_s(self, peer: PeerId, work: custody.Work) -> float:
        return self._speed_s[peer] * self._random.uniform(0.5, 2.0)

    def message_s(self, here: PeerId, there: PeerId) -> float:
        delay = self._delay_s.setdefault(frozenset((here, there)), self._random.uniform(0.002, 0.08))
        return delay * self._random.uniform(1.0, 2.0)

    def body_s(self, here: PeerId, there: PeerId) -> float:
        return self._random.uniform(0.005, 0.05)

    def silence_s(self) -> float:
        return self._random.uniform(0.0, STALL_S)

    def lifetime_s(self, path_s: float) -> float:
        return LIFETIME_S


@dataclass(slots=True)
class FullLedger(Ledger):
    losses: Counter[MicrobatchId] = field(default_factory=Counter)
    data_completed: Counter[tuple[PeerId, int]] = field(default_factory=Counter)
    repaired_back: Counter[int] = field(default_factory=Counter)
    """As `repaired_at`, only those that the path has taken in since its loss was known."""
    skipped: int = 0  # Planned hops of completed microbatches that were skipped on the way
    left_out: int = 0  # Hops that were not planned, because no peer served their module
    abandoned: int = 0
    retracted: int = 0


class RoughWorld(World):
    ledger: FullLedger
    peers: dict[PeerId, RoughPeer]

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.compute_failures = self.shape.compute_failures
        self._orphaned: dict[MicrobatchId, float] = {}
        random = Random(seed)
        super().__init__(ChanceEnvironment(self.shape, random), self.shape.stages, random, FullLedger())

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> RoughPeer:
        return RoughPeer(self, own, module, incarnation)

    def freeze(self, peer: RoughPeer, seconds: float) -> None:
        peer.frozen = True
        self.time.after(STALL_S, lambda: self.cut_off(peer) if peer.alive and peer.frozen else None)
        self.time.after(seconds, peer.thaw)

    def drain_peer(self, peer: RoughPeer, seconds: float) -> None:
        peer.draining = True
        self.time.after(seconds, lambda: setattr(peer, "draining", False))

    def random_fault(self) -> None:
        victim, other = self.random.sample(list(self.peers.values()), 2)
        kind = self.random.random()
        if not victim.alive:
            self.revive(victim)
        elif kind < 0.4:
            self.cut(victim, other)
        elif kind < 0.6 and not victim.frozen:
            self.freeze(victim, self.random.uniform(0.1, LONGEST_FREEZE_S))
        elif kind < 0.75:
            self.drain_peer(victim, self.random.uniform(0.5, 3.0))
        elif not victim.frozen:
            self.kill(victim)

    def heal(self) -> None:
        """No fault from now on. Of every stage at least one peer lives; others may stay dead."""
        self.compute_failures = 0.0
        for peer in list(self.peers.values()):
            alone = not any(p.module == peer.module for p in self.living)
            if not peer.alive and (alone or self.random.random() < 0.5):
                self.revive(peer)

    def run_with_faults(self, seconds: float, every_s: float) -> None:
        end = self.time.now + seconds
        while self.time.now < end:
            self.run(self.random.expovariate(1 / every_s))
            self.random_fault()

    def progresses(self, within_s: float) -> bool:
        """Whether every data node completes something new, at least a step's worth, within this time."""
        wanted = {peer.id: in_flight.counts.completed + 4 for peer, in_flight in self.data_nodes()}

        def enough() -> bool:
            return all(in_flight.counts.completed >= wanted[peer.id] for peer, in_flight in self.data_nodes())

        self.time.run_until(self.time.now + within_s, enough)
        return enough()

    def drain(self) -> None:
        """Nothing new sets out; what is under way comes home or runs out. Then nothing may be left anywhere."""
        for peer in self.living:
            if peer.data_node is not None:
                peer.data_node.stopping = True
        self.time.run_until(self.time.now + 10 * LIFETIME_S, lambda: not any(len(peer.custody) for peer in self.living))
        left = {peer.id: list(peer.custody.entries()) for peer in self.living if len(peer.custody)}
        assert not left, left
        assert all(peer.custody.used_slots == 0 for peer in self.living)
        assert not any(in_flight.entries for _, in_flight in self.data_nodes())
        self.time.run_until(self.time.now + 10.0)  # the last gradients are taken back
        self.check_settled()
        self.check_all()

    def announce(self, peer: RoughPeer) -> None:
        super().announce(peer)
        if peer.module.stage == 0:
            self.check_all()

    def check_account(self, peer: RoughPeer) -> None:
        assert peer.custody.used_slots <= peer.custody.slots
        if peer.data_node is not None:
            counts, flying = peer.data_node.in_flight.counts, peer.data_node.in_flight.entries
            assert counts.started == counts.completed + counts.abandoned + len(flying), counts
            assert counts.duplicated == 0
            for entry in flying:  # so that its deadline will come, whatever has become of it elsewhere
                assert peer.custody.get(custody.Key(entry.microbatch, -1)) is not None, entry

    def check_all(self) -> None:
        """Nothing turns round twice, completes twice, or outlives its deadline when nobody acts for it."""
        assert max(self.ledger.losses.values(), default=0) <= 1
        assert max(self.ledger.data_completed.values(), default=0) <= 1
        self._check_orphans()

    def check_settled(self) -> None:
        """Of each completed microbatch exactly the replicas on its final path have added the gradient, once."""
        for microbatch, path in self.ledger.completed.items():
            data_node = self.peers[microbatch.data_node]
            if not data_node.alive or microbatch.number // NUMBERS_A_LIFE != data_node.incarnation:
                continue
            for peer in self.living:
                counts = peer.id == path.data_node or any(hop.peer == peer.id for hop in path.hops)
                if peer.born > self.ledger.started[microbatch]:
                    continue
                assert (microbatch in peer.added) is counts, (microbatch, peer.id, path)
                if peer.module.stage:
                    assert peer.visits[microbatch] == counts, (microbatch, peer.id, path)
        for microbatch, started in self.ledger.started.items():  # what was abandoned, no hop has learnt from
            data_node = self.peers[microbatch.data_node]
            if data_node.alive and data_node.born <= started and microbatch not in self.ledger.completed:
                assert not any(p.module.stage and microbatch in p.added for p in self.living), microbatch

    def _check_orphans(self) -> None:
        """A holding that AWAITS acts for nobody. Without any other, only the data node's deadline is left."""
        acting = {
            h.key.microbatch
            for peer in self.living
            for h in peer.custody.entries()
            if h.phase is not custody.Phase.AWAITING
        }
        flying = {f.microbatch for _, in_flight in self.data_nodes() for f in in_flight.entries}
        self._orphaned = {m: self._orphaned.get(m, self.time.now) for m in flying - acting}
        for microbatch, since in self._orphaned.items():
            assert self.time.now - since <= LIFETIME_S + LONGEST_FREEZE_S + 2 * TICK_S, microbatch


class RoughPeer(Peer):
    """What a frozen one is to do, it does when it thaws."""

    world: RoughWorld
    data_node: AccountingDataNode | None

    def __init__(self, world: RoughWorld, own: PeerId, module: ModuleId, incarnation: int) -> None:
        super().__init__(world, own, module, incarnation)
        self.frozen = self.draining = False
        self.added: set[MicrobatchId] = set()  # The microbatches in its sums, those of past steps included
        self.visits: Counter[MicrobatchId] = Counter()
        self.gradients: set[custody.Key] = set()  # Kept for the input that has been recalled
        self._inbox: list[Thunk] = []

    def new_data_node(self) -> AccountingDataNode:
        return AccountingDataNode(self)

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
        held = self.custody.get(custody.Key(message.microbatch, message.position)) is not None
        ours = self.data_node is not None if isinstance(message, Forward) else held
        if self.draining and not ours:
            direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
            return Receipt(message.microbatch, direction, message.position, ReceiptStatus.REFUSED, 0.0, "leaving")
        return super().refusal(message)

    def act(self, action: custody.Action) -> None:
        match action:
            case custody.KeepGradient(key):
                self.gradients.add(key)
            case custody.Forget(key):
                self.gradients.discard(key)
            case custody.Confirmed(key):
                assert key.microbatch in self.added
                self.visits[key.microbatch] += 1
            case custody.Retract(key):
                self.later(custody.Work.REPLAY, lambda _: self.added.discard(key.microbatch))
                self.world.ledger.retracted += 1
                return
            case custody.Compute(key, custody.Work.REPLAY):
                assert key in self.gradients
        super().act(action)

    def computed(self, action: custody.Compute, seconds: float, *, known: bool) -> None:
        if self.world.random.random() < self.world.compute_failures:
            if known:
                self.handle(custody.ComputeFailed(action.key, "a non-finite gradient"))
            return
        if action.work in (custody.Work.BACKWARD, custody.Work.REPLAY):
            self.added.add(action.key.microbatch)
        if action.work is custody.Work.LOSS:
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
