"""A swarm in virtual time that is made of the machines of the node: custody, planner, membership, measurements.

Peers carry out what the machines decide as the node does (`swarm.simulation.pipeline_peer`); what a node would compute
or send is here only a delay. Everything follows from a seed. The tests have a world of this kind with worse faults, and
check in it what must hold whatever happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from swarm.pipeline.custody_events import Work
from swarm.pipeline.in_flight import FlightRules, Flights
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import Planner
from swarm.simulation.arms import PlannerOf
from swarm.simulation.pipeline_peer import Peer
from swarm.simulation.virtual_network import Links, Thunk, Transfer, VirtualTime
from swarm.vocabulary.pipeline_messages import MicrobatchControl, MicrobatchTensor
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId

TICK_S = 0.2
ANNOUNCE_S = 1.0
REFUSED_S = 0.05
"""Until a connection that cannot be made has failed."""


class Ground(Protocol):
    """What machines and lines are like. Seconds."""

    path_rules: PathRules
    overhead_s: float
    """A peer is blocked so long after each task."""

    def flight_rules(self, data_node: PeerId) -> FlightRules: ...

    def slots_of(self, peer: PeerId) -> int: ...

    def service_s(self, peer: PeerId) -> float:
        """Forward and backward of one microbatch, as the peer announces it."""

    def compute_s(self, peer: PeerId, work: Work) -> float: ...

    def message_s(self, here: PeerId, there: PeerId) -> float:
        """One way of a small message, such as a tensor's header."""

    def body_s(self, here: PeerId, there: PeerId) -> float:
        """From a tensor's header until all of it is there."""

    def silence_s(self) -> float:
        """Until the others take the links to a silent peer for broken."""

    def lifetime_s(self, path_s: float) -> float:
        """Of a microbatch without news, by what its path should take with empty queues."""


@dataclass(slots=True)
class Ledger:
    """What really happened, all peers together, dead ones included."""

    started: dict[MicrobatchId, float] = field(default_factory=dict)
    completed: dict[MicrobatchId, Path] = field(default_factory=dict)
    repaired_at: Counter[int] = field(default_factory=Counter)
    """Of the completed ones, how often another peer stood in at each position."""
    counted: Counter[tuple[MicrobatchId, int]] = field(default_factory=Counter)
    """How many peers of each stage count a microbatch's gradient."""
    planning_cpu_s: float = 0.0


class World:
    """The peers, and what lies between them.

    Args:
        stages: the peers of each stage, data nodes first.
        planner_of: makes a data node's planner (`swarm.simulation.arms`).
    """

    def __init__(
        self,
        ground: Ground,
        stages: Sequence[Sequence[PeerId]],
        random: Random,
        ledger: Ledger,
        planner_of: PlannerOf = Planner,
    ) -> None:
        self.ground, self.random, self.ledger, self.planner_of = ground, random, ledger, planner_of
        self.time = VirtualTime()
        self.links = Links(self.time, ground.message_s)
        self.peers: dict[PeerId, Peer] = {}
        self._incarnations: Counter[PeerId] = Counter()
        for stage, peers in enumerate(stages):
            for own in peers:
                self._bring_up(own, ModuleId(stage))
        for peer in self.living:
            self.announce(peer)

    @property
    def living(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.alive]

    def data_nodes(self) -> Iterator[tuple[Peer, Flights]]:
        """Those alive."""
        return ((peer, peer.data_node.flights) for peer in self.living if peer.data_node is not None)

    def run(self, seconds: float) -> None:
        """Lets so much time pass."""
        self.time.run_until(self.time.now + seconds)

    # ---- the network ---------------------------------------------------------------------------------------------

    def tell(self, sender: Peer, to: PeerId, message: MicrobatchControl) -> None:
        """A small message; nobody learns that it is lost."""
        receiver = self.peers[to]
        if to == sender.id:
            sender.told(to, message)
        elif not receiver.cut_off:
            self.links.deliver(sender.id, to, lambda: receiver.do(lambda: self._told(sender.id, receiver, message)))

    def _told(self, sender: PeerId, receiver: Peer, message: MicrobatchControl) -> None:
        receiver.membership.recover(sender)
        receiver.told(sender, message)

    def send(self, sender: Peer, to: PeerId, message: MicrobatchTensor) -> None:
        """A tensor: its header is answered before the rest comes."""
        receiver = self.peers[to]
        if to == sender.id:
            refusal = sender.refusal(message)
            return sender.received(message) if refusal is None else sender.told(to, refusal)
        if receiver.cut_off:
            return self.time.after(REFUSED_S, lambda: sender.do(lambda: sender.lose(to, "cannot be reached")))
        transfer = Transfer(sender, receiver, message)
        header = partial(self._header_arrived, transfer, self.links.cuts(sender.id, to))
        return self.links.deliver(sender.id, to, lambda: receiver.do(header))

    def _header_arrived(self, transfer: Transfer, cuts: int) -> None:
        sender, receiver, message = transfer.sender.id, transfer.receiver, transfer.message
        refusal = receiver.refusal(message)
        if refusal is not None:
            self.tell(receiver, sender, refusal)
        elif self.links.cuts(sender, receiver.id) != cuts:  # it lay in a frozen peer's socket; the rest never came
            receiver.broken_off(message)
        else:
            self.links.transfers[frozenset((sender, receiver.id))].append(transfer)
            self.time.after(self.ground.body_s(sender, receiver.id), lambda: self._body_arrived(transfer))

    def _body_arrived(self, transfer: Transfer) -> None:
        """Unless it was cut off before. What a dead peer was sending hangs until its links break."""
        receiver = transfer.receiver
        under_way = self.links.transfers[frozenset((transfer.sender.id, receiver.id))]
        if transfer in under_way and transfer.sender.alive:
            under_way.remove(transfer)
            receiver.do(lambda: receiver.received(transfer.message))

    def cut(self, one: Peer, other: Peer) -> None:
        """Both ends notice; a tensor that was half received is broken off first."""
        for transfer in self.links.cut(one.id, other.id):
            transfer.receiver.do(partial(transfer.receiver.broken_off, transfer.message))
        one.do(lambda: one.lose(other.id, "the link broke"))
        other.do(lambda: other.lose(one.id, "the link broke"))

    # ---- coming and going ----------------------------------------------------------------------------------------

    def kill(self, peer: Peer) -> None:
        """At once and without a word. The others learn of it when their links break."""
        peer.alive = False
        self.time.after(self.ground.silence_s(), lambda: self.cut_off(peer))

    def cut_off(self, peer: Peer) -> None:
        """All its links break, and no new one can be made."""
        if self.peers[peer.id] is peer and not peer.cut_off:
            peer.cut_off = True
            for other in self.living:
                if other is not peer:
                    self.cut(peer, other)

    def revive(self, peer: Peer) -> None:
        """The same peer comes back and knows nothing of before."""
        self.cut_off(peer)
        newcomer = self._bring_up(peer.id, peer.module)
        for other in self.living:
            if other is not newcomer:
                newcomer.observe(other.announcement())
                other.do(partial(other.regain, newcomer.id))
        self.announce(newcomer)

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        """A seam for worlds whose peers can do more."""
        return Peer(self, own, module, incarnation)

    def _bring_up(self, own: PeerId, module: ModuleId) -> Peer:
        self._incarnations[own] += 1
        peer = self.peers[own] = self.new_peer(own, module, self._incarnations[own])
        self.every(TICK_S, peer, peer.tick)
        self.every(ANNOUNCE_S, peer, lambda: self.announce(peer))
        return peer

    def every(self, seconds: float, peer: Peer, what: Thunk) -> None:
        """Again and again while the peer lives."""

        def again() -> None:
            if peer.alive:
                peer.do(what)
                self.time.after(seconds, again)

        self.time.after(seconds * self.random.random(), again)

    def announce(self, peer: Peer) -> None:
        """Tells all that are there how the peer is."""
        announcement = peer.announcement()
        for other in self.living:
            if other is not peer:
                other.observe(announcement)
