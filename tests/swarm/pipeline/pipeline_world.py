"""A small swarm in virtual time: peers made of the real decision code, on a network that loses links, kills and freezes
peers.

Everything follows from a seed. A peer carries out custody's actions as `node.pipeline.microbatch_runner` does; what a
node would compute or send is here only a delay. What a run of it must keep is checked while it runs (`World.check`) and
at its end (`World.drain`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random

from swarm.pipeline.custody_states import Key, Phase
from swarm.pipeline.in_flight import FlightRules, Flights
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.pipeline_messages import MicrobatchControl, MicrobatchTensor
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId
from tests.swarm.pipeline.pipeline_peer import LIFETIME_S, NUMBERS_A_LIFE, Peer
from tests.swarm.virtual_network import Links, Thunk, Transfer, VirtualTime

TICK_S = 0.2
ANNOUNCE_S = 1.0
STALL_S = 1.5
"""After so much silence the others take a frozen peer's links for broken."""
LONGEST_FREEZE_S = 4.0
ORDINARY_RULES = FlightRules(per_step=4, staleness=1, window=5)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a world is.

    Args:
        replicas: of each stage after 0.
        per_path: of those stages, how many a path visits.
    """

    data_nodes: int = 2
    replicas: tuple[int, ...] = (2, 2, 2)
    per_path: int = 3
    slots: int = 3
    rules: FlightRules = ORDINARY_RULES
    compute_failures: float = 0.01
    """Share of the computations that fail."""

    @property
    def path_rules(self) -> PathRules:
        return PathRules(len(self.replicas) + 1, self.per_path)


@dataclass(slots=True)
class Ledger:
    """What really happened, all peers together, dead ones included."""

    started: dict[MicrobatchId, float] = field(default_factory=dict)
    losses: Counter[MicrobatchId] = field(default_factory=Counter)
    completed: dict[MicrobatchId, Path] = field(default_factory=dict)
    data_completed: Counter[tuple[PeerId, int]] = field(default_factory=Counter)
    repaired_at: Counter[int] = field(default_factory=Counter)
    """Of the completed ones, how often another peer stood in at each position."""
    repaired_back: Counter[int] = field(default_factory=Counter)
    """The same, only those that the path has taken in since its loss was known."""
    skipped: int = 0
    """Of the completed ones, hops that were planned and skipped on the way."""
    left_out: int = 0
    """Likewise, hops that were not even planned, because nobody served their module any more."""
    abandoned: int = 0
    retracted: int = 0


class World:
    """The peers, what lies between them, and what goes wrong."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.random = Random(seed)
        self.time = VirtualTime()
        self.links = Links(self.time, self.random)
        self.ledger = Ledger()
        self.compute_failures = self.shape.compute_failures
        self.peers: dict[PeerId, Peer] = {}
        self._orphaned: dict[MicrobatchId, float] = {}
        self._incarnations: Counter[PeerId] = Counter()
        for stage, count in enumerate((self.shape.data_nodes, *self.shape.replicas)):
            for number in range(count):
                self._bring_up(PeerId(f"stage{stage}-peer{number}"), ModuleId(stage))
        self._spread_announcements()

    @property
    def living(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.alive]

    def data_nodes(self) -> Iterator[tuple[Peer, Flights]]:
        """Those alive."""
        return ((peer, peer.flights) for peer in self.living if peer.flights is not None)

    # ---- the network ---------------------------------------------------------------------------------------------

    def tell(self, sender: Peer, to: PeerId, message: MicrobatchControl) -> None:
        receiver = self.peers[to]
        if to == sender.id:
            sender.told(to, message)
        elif receiver.alive and not receiver.stalled:
            self.links.deliver(sender.id, to, lambda: receiver.do(lambda: self._told(sender.id, receiver, message)))

    def _told(self, sender: PeerId, receiver: Peer, message: MicrobatchControl) -> None:
        receiver.membership.recover(sender)
        receiver.told(sender, message)

    def send(self, sender: Peer, to: PeerId, message: MicrobatchTensor) -> None:
        receiver = self.peers[to]
        if to == sender.id:
            refusal = sender.refusal(message)
            return sender.received(message) if refusal is None else sender.told(to, refusal)
        if not receiver.alive or receiver.stalled:
            return self.time.after(0.05, lambda: sender.do(lambda: sender.lose(to, "cannot be reached")))
        cuts = self.links.cuts(sender.id, to)
        header = partial(self._header_arrived, sender.id, receiver, message, cuts)
        return self.links.deliver(sender.id, to, lambda: receiver.do(header))

    def _header_arrived(self, sender: PeerId, receiver: Peer, message: MicrobatchTensor, cuts: int) -> None:
        refusal = receiver.refusal(message)
        if refusal is not None:
            self.tell(receiver, sender, refusal)
        elif self.links.cuts(sender, receiver.id) != cuts:  # it lay in a frozen peer's socket; the rest never came
            receiver.broken_off(message)
        else:
            transfer = Transfer(receiver, message)
            self.links.transfers[frozenset((sender, receiver.id))].append(transfer)
            self.time.after(self.random.uniform(0.005, 0.05), lambda: self._body_arrived(sender, transfer))

    def _body_arrived(self, sender: PeerId, transfer: Transfer) -> None:
        under_way = self.links.transfers[frozenset((sender, transfer.receiver.id))]
        if transfer in under_way:
            under_way.remove(transfer)
            transfer.receiver.do(lambda: transfer.receiver.received(transfer.message))

    # ---- what goes wrong -----------------------------------------------------------------------------------------

    def cut(self, one: Peer, other: Peer) -> None:
        """Both ends notice; a tensor that was half received is broken off first."""
        for transfer in self.links.cut(one.id, other.id):
            transfer.receiver.do(partial(transfer.receiver.broken_off, transfer.message))
        one.do(lambda: one.lose(other.id, "the link broke"))
        other.do(lambda: other.lose(one.id, "the link broke"))

    def kill(self, peer: Peer) -> None:
        """At once and without a word. The others learn of it when their links break."""
        peer.alive = False
        self.time.after(self.random.uniform(0.0, STALL_S), lambda: self._cut_all(peer))

    def revive(self, peer: Peer) -> None:
        """The same peer comes back and knows nothing of before."""
        self._cut_all(peer)
        newcomer = self._bring_up(peer.id, peer.module)
        for other in self.living:
            if other is not newcomer:
                newcomer.membership.observe(other.announcement(), now=self.time.now, wall=self.time.now)

    def freeze(self, peer: Peer, seconds: float) -> None:
        peer.frozen = True
        self.time.after(STALL_S, lambda: self._stall(peer))
        self.time.after(seconds, peer.thaw)

    def _stall(self, peer: Peer) -> None:
        if peer.alive and peer.frozen:
            peer.stalled = True
            self._cut_all(peer)

    def _cut_all(self, peer: Peer) -> None:
        if self.peers[peer.id] is peer:
            for other in self.living:
                if other is not peer:
                    self.cut(peer, other)

    def drain_peer(self, peer: Peer, seconds: float) -> None:
        """For a while it refuses whatever is new."""
        peer.draining = True

        def serve_again() -> None:
            peer.draining = False

        self.time.after(seconds, serve_again)

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

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self.time.run_until(self.time.now + seconds)

    def run_with_faults(self, seconds: float, every_s: float) -> None:
        end = self.time.now + seconds
        while self.time.now < end:
            self.run(self.random.expovariate(1 / every_s))
            self.random_fault()

    def progresses(self, within_s: float) -> bool:
        """Whether every data node completes something new, at least a step's worth, within this time."""
        wanted = {peer.id: flights.counts.completed + 4 for peer, flights in self.data_nodes()}

        def enough() -> bool:
            return all(flights.counts.completed >= wanted[peer.id] for peer, flights in self.data_nodes())

        self.time.run_until(self.time.now + within_s, enough)
        return enough()

    def drain(self) -> None:
        """Nothing new sets out; what is under way comes home or runs out. Then nothing may be left anywhere."""
        for peer in self.living:
            peer.stopping = True
        self.time.run_until(self.time.now + 10 * LIFETIME_S, lambda: not any(len(peer.custody) for peer in self.living))
        left = {peer.id: list(peer.custody.holdings()) for peer in self.living if len(peer.custody)}
        assert not left, left
        assert all(peer.custody.used_slots == 0 for peer in self.living)
        assert not any(flights.in_flight for _, flights in self.data_nodes())
        self.time.run_until(self.time.now + 10.0)  # the last gradients are taken back
        self.check_settled()

    # ---- what must hold ------------------------------------------------------------------------------------------

    def check_account(self, peer: Peer) -> None:
        """After everything that happens to a peer."""
        assert peer.custody.used_slots <= peer.custody.slots
        if peer.flights is not None:
            counts, flying = peer.flights.counts, peer.flights.in_flight
            assert counts.started == counts.completed + counts.abandoned + len(flying), counts
            assert counts.duplicated == 0
            for flight in flying:  # so that its deadline will come, whatever has become of it elsewhere
                assert peer.custody.get(Key(flight.microbatch, -1)) is not None, flight

    def check_all(self) -> None:
        """Nothing turns round twice, completes twice, or outlives its deadline when nobody acts for it."""
        assert max(self.ledger.losses.values(), default=0) <= 1
        assert max(self.ledger.data_completed.values(), default=0) <= 1
        self._check_orphans()

    def check_settled(self) -> None:
        """When all is over: of each completed microbatch exactly the replicas on its final path have added the
        gradient, and count it once.

        A replica that was restarted since has lost what it had; a data node that died or was restarted can tell nobody
        any more.
        """
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
            h.key.microbatch for peer in self.living for h in peer.custody.holdings() if h.phase is not Phase.AWAITING
        }
        flying = {f.microbatch for _, flights in self.data_nodes() for f in flights.in_flight}
        self._orphaned = {m: self._orphaned.get(m, self.time.now) for m in flying - acting}
        for microbatch, since in self._orphaned.items():
            assert self.time.now - since <= LIFETIME_S + LONGEST_FREEZE_S + 2 * TICK_S, microbatch

    # ---- making peers --------------------------------------------------------------------------------------------

    def _bring_up(self, own: PeerId, module: ModuleId) -> Peer:
        self._incarnations[own] += 1
        peer = self.peers[own] = Peer(self, own, module, self._incarnations[own])
        self._every(TICK_S, peer, peer.tick)
        self._every(ANNOUNCE_S, peer, lambda: self._announce(peer))
        return peer

    def _every(self, seconds: float, peer: Peer, what: Thunk) -> None:
        def again() -> None:
            if peer.alive:
                if not peer.frozen:
                    peer.do(what)
                self.time.after(seconds, again)

        self.time.after(seconds * self.random.random(), again)

    def _announce(self, peer: Peer) -> None:
        announcement = peer.announcement()
        for other in self.living:
            if other is not peer and not other.frozen:
                other.membership.observe(announcement, now=self.time.now, wall=self.time.now)
        if peer.module.stage == 0:
            self.check_all()

    def _spread_announcements(self) -> None:
        for peer in self.living:
            self._announce(peer)
