"""A swarm in virtual time with the node's own custody, planner, membership and launch window.

Computing and sending are delays, which an `Environment` supplies. Seeded, in one process.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from lab.world.arms import PlannerOf, SwarmPlanner
from swarm.membership.membership import Membership
from swarm.pipeline.custody import (
    Action,
    BrokenOff,
    Compute,
    Computed,
    Confirmed,
    ControlArrived,
    Custody,
    Event,
    Finished,
    Forget,
    Key,
    PeerBack,
    PeerLost,
    Retract,
    SendControl,
    SendOutput,
    SlotState,
    Started,
    TensorArrived,
    Tick,
    Work,
)
from swarm.pipeline.in_flight import InFlight, InFlightRules, InFlightTable, Stragglers
from swarm.routing.attribution import PathTimes
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import NoReplica, Planner, in_flight_by_peer
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Direction,
    Forward,
    MicrobatchControl,
    MicrobatchTensor,
    Purpose,
    Receipt,
    ReceiptStatus,
    Stranded,
)
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId, PeerState, Reasoned, RunId, VersionRange

# ---- links and time -------------------------------------------------------------------------------------------------

Thunk = Callable[[], None]
CONTROL_S = 0.3
"""Longest one-way time of a small message, in seconds: between antipodes, on a loaded link."""


class VirtualTime:
    """Virtual clock with an event queue. Events at equal times run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Thunk]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, what: Thunk) -> None:
        """Schedules a call of `what` after `delay_s` seconds of virtual time."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), what))

    def run_until(self, end: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Runs events until the time `end`, or until `enough` returns true."""
        while self._queue and self._queue[0][0] <= end and not enough():
            self.now, _, what = heapq.heappop(self._queue)
            what()
        if not enough():
            self.now = end


@dataclass(slots=True, eq=False)
class Transfer:
    """Simulated tensor whose header was admitted and whose body is in transit."""

    sender: Peer
    receiver: Peer
    message: MicrobatchTensor


class Links:
    """Simulated FIFO links between pairs of peers. A cut of a link loses everything in transit on it.

    Args:
        message_s: returns the seconds of a small message from one peer to another.
    """

    def __init__(self, time: VirtualTime, message_s: Callable[[PeerId, PeerId], float]) -> None:
        self._time, self._message_s = time, message_s
        self._cuts: Counter[frozenset[PeerId]] = Counter()
        self._last_arrival: dict[tuple[PeerId, PeerId], float] = {}
        self.transfers: defaultdict[frozenset[PeerId], list[Transfer]] = defaultdict(list)

    def cuts(self, one: PeerId, other: PeerId) -> int:
        """Returns how often the link between two peers has been cut."""
        return self._cuts[frozenset((one, other))]

    def deliver(self, sender: PeerId, to: PeerId, what: Thunk) -> None:
        """Calls `what` when a message that is sent now arrives, unless the link is cut before."""
        arrival = self._time.now + self._message_s(sender, to)
        arrival = max(arrival, self._last_arrival.get((sender, to), 0.0))
        self._last_arrival[sender, to] = arrival
        cuts = self.cuts(sender, to)
        self._time.after(arrival - self._time.now, lambda: what() if self.cuts(sender, to) == cuts else None)

    def cut(self, one: PeerId, other: PeerId) -> list[Transfer]:
        """Cuts the link between two peers. Returns the tensors whose bodies were in transit."""
        pair = frozenset((one, other))
        self._cuts[pair] += 1
        return self.transfers.pop(pair, [])


# ---- the data node --------------------------------------------------------------------------------------------------

TOKENS = 1000  # Per microbatch
NUMBERS_A_LIFE = 10**9  # Microbatch numbers per incarnation of a data node


def repaired_positions(planned: Path, taken: Path) -> list[int]:
    """Returns the positions of the planned path at which a substitute served. Skipped hops do not count."""
    peers = {hop.module: hop.peer for hop in taken.hops}
    return [at for at, hop in enumerate(planned.hops) if peers.get(hop.module, hop.peer) != hop.peer]


class DataNode:
    """Simulated data node: launches microbatches on paths chosen by its planner, and records their ends."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.world = peer, peer.world
        rules = self.world.environment.flight_rules(peer.id)
        self.in_flight = InFlightTable(peer.id, rules, first_number=peer.incarnation * NUMBERS_A_LIFE)
        self.stopping = False
        self._stragglers = Stragglers()
        measured = MeasuredTimes(peer.id, TOKENS)
        self._times = PathTimes(peer.id, measured, peer.membership.slots_of)
        self.planner = self.world.planner_of(self.world.environment.path_rules, peer.membership, measured)
        self._swarm = self.planner.rule if isinstance(self.planner, SwarmPlanner) else None
        self.planned: dict[MicrobatchId, Path] = {}

    def launch(self) -> None:
        """Abandons a straggler, then launches microbatches until the window is full or no path exists."""
        now = self.world.time.now
        straggler = self._stragglers.find(self.in_flight.entries, now)
        if straggler is not None and self.planner.passes_by(self._times.holders(straggler.microbatch), now):
            self._lost(straggler.microbatch, "it is late")
        while not self.stopping and self.in_flight.may_start().value:
            now = self.world.time.now
            load = in_flight_by_peer([flight.path for flight in self.in_flight.entries])
            began = time.process_time()
            plan = self.planner.plan(self.in_flight.next_number % NUMBERS_A_LIFE, (), load, now).value
            self.world.ledger.planning_cpu_s += time.process_time() - began
            if isinstance(plan, NoReplica):
                return
            flight = self.in_flight.start(plan, now)
            self._times.launched(flight.microbatch, plan, load, now)
            self.started(flight)
            lifetime_s = self.world.environment.lifetime_s(self.planner.usual_s(plan))
            self.peer.handle(Started(flight.microbatch, plan, Purpose.TRAIN, lifetime_s))

    def loss_known(self, key: Key) -> None:
        entry = self.peer.custody.get(key)
        self._times.loss_known(key.microbatch, self.world.time.now)
        if entry is not None:
            self.in_flight.returned(key.microbatch, entry.path, 1.0)

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        """Updates measured times from a peer's receipt. Ignores receipts for microbatches of other data nodes."""
        if receipt.microbatch.data_node == self.peer.id:
            self.peer.custody.touch(Key(receipt.microbatch, -1), self.world.time.now)
            self.peer.membership.moved(sender)
            self._times.passed(sender, receipt, self.world.time.now)
            if self._swarm is not None:
                self._swarm.passed(sender, receipt, self.world.time.now)

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        """Completes a microbatch, which has taken `path`, and launches more."""
        self._times.completed(microbatch, self.world.time.now)
        flight = self.in_flight.get(microbatch)
        self.in_flight.complete(microbatch)
        if flight is not None:
            self._stragglers.completed(flight, self.world.time.now)
            self.completed(flight, path)
        self.launch()

    def undeliverable(self, message: Stranded) -> None:
        """Abandons an undeliverable microbatch, unless another copy of its forward pass has returned."""
        custody, microbatch = self.peer.custody, message.microbatch
        ends = [custody.get(Key(microbatch, -1)) is not None]
        ends.append(any(held.is_end and held.key.microbatch == microbatch for held in custody.entries()))
        if message.direction is Direction.FORWARD and all(ends) and message.position > -1:
            return
        self._lost(microbatch, message.detail)
        self.launch()

    def _lost(self, microbatch: MicrobatchId, detail: str) -> None:
        self._times.lost(microbatch, self.world.time.now)
        flight = self.in_flight.abandon(microbatch)
        self.peer.carry_out(self.peer.custody.abandon(microbatch, detail))
        if flight is not None:
            self.abandoned(flight)

    def started(self, flight: InFlight) -> None:
        """Records the launch time and the planned path of a microbatch."""
        self.world.ledger.started[flight.microbatch] = self.world.time.now
        self.planned[flight.microbatch] = flight.path
        if self._swarm is not None:
            self._swarm.launched(flight.microbatch, flight.path, self.world.time.now)

    def completed(self, flight: InFlight, path: Path) -> None:
        """Records the path that a completed microbatch has taken, and the positions at which peers were substituted."""
        self.world.ledger.completed[flight.microbatch] = path
        self.world.ledger.repaired_at.update(repaired_positions(self.planned.pop(flight.microbatch), path))

    def abandoned(self, flight: InFlight) -> None:
        """Forgets the planned path of a lost microbatch."""
        del self.planned[flight.microbatch]
        if self._swarm is not None:
            self._swarm.ended(flight.microbatch, None)


# ---- a peer ---------------------------------------------------------------------------------------------------------

RUN = RunId("0" * 64)
BUSY_RETRY_S = 0.1
RECORD_LIFETIME_S = 5.0


class Peer:
    """Simulated peer: custody, view of the membership, a compute thread, and at stage 0 a `DataNode`.

    Args:
        incarnation: number of times that this peer has started.
    """

    def __init__(self, world: World, own: PeerId, module: ModuleId, incarnation: int) -> None:
        self.world, self.id, self.module, self.incarnation = world, own, module, incarnation
        self.alive = True
        self.cut_off = False  # No links, and none can be opened
        self.born = world.time.now
        self.membership = Membership(RUN, own)
        self.custody = Custody(own, world.environment.slots_of(own), self)
        self.data_node = self.new_data_node() if module.stage == 0 else None
        rules = world.environment.path_rules
        alone = Planner(rules, self.membership, MeasuredTimes(own, TOKENS))
        self.planner = alone if self.data_node is None else self.data_node.planner
        self.fewest_hops = rules.fewest
        self._tickets: dict[Key, int] = {}
        self._next_ticket = itertools.count()
        self._busy_until = 0.0

    def new_data_node(self) -> DataNode:
        """Creates this peer's `DataNode`; a subclass may create one that records more."""
        return DataNode(self)

    # ---- being alive ---------------------------------------------------------------------------------------------

    def do(self, what: Thunk) -> None:
        """Calls `what`, an event at this peer, unless the peer is dead."""
        if self.alive:
            what()

    def handle(self, event: Event) -> None:
        """Passes an event to custody and executes the resulting actions."""
        self.carry_out(self.custody.handle(event, self.world.time.now))

    def tick(self) -> None:
        """Removes expired members, lets custody repair paths, and launches microbatches."""
        self.membership.expire(self.world.time.now)
        if len(self.custody):
            self.handle(Tick())
        if self.data_node is not None:
            self.data_node.launch()

    def observe(self, announcement: Announcement) -> None:
        now = self.world.time.now
        self.membership.observe(announcement, now=now, wall=now)
        # A node opens links to all replicas in the background.
        self.membership.linked.add(announcement.peer)

    def link_lost(self, peer: PeerId, detail: str) -> None:
        """Marks a peer as failed after its link broke or was refused, and probes whether it is dead."""
        now = self.world.time.now
        if not self.membership.is_suspect(peer, now):
            delay_s = self.world.environment.message_s(self.id, peer)
            self.world.time.after(delay_s, lambda: self.do(lambda: self._probe(peer)))
        self.membership.fail(peer, now)
        self.handle(PeerLost(peer, detail))

    def _probe(self, peer: PeerId) -> None:
        if self.world.peers[peer].cut_off:
            self.membership.give_up(peer, self.world.time.now)

    def link_restored(self, peer: PeerId) -> None:
        self.membership.recover(peer)
        self.handle(PeerBack(peer))

    def announcement(self) -> Announcement:
        now, slots = self.world.time.now, self.custody.slots
        return Announcement(
            RUN, self.id, PeerState.SERVING, self.module, (), b"", VersionRange(5, 5),
            TOKENS / self.world.environment.service_s(self.id), slots, slots - self.custody.used_slots, 0, None,
            self.incarnation, int(now * 1000) + self.incarnation, now + RECORD_LIFETIME_S,
            visits=self._announced_visits(),
        )  # fmt: skip

    def _announced_visits(self) -> tuple[int, ...]:
        visits = [] if self.data_node is None else self.data_node.planner.prices.launched
        return tuple(int(each * self.world.overstated.get(self.id, 1.0)) for each in visits)

    # ---- swarm.pipeline.custody.Replicas --------------------------------------------------------------------------

    def choose(self, module: ModuleId, without: frozenset[PeerId], busy: PeerId | None) -> Reasoned[PeerId | None]:
        load = in_flight_by_peer([entry.path for entry in self.custody.entries()])
        return self.planner.replica(module, without, load, self.world.time.now, busy)

    def link_took(self, peer: PeerId, since: float) -> None:
        self.planner.sent(peer, self.world.time.now - since)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return self.membership.hosts(peer, module)

    def is_given_up(self, peer: PeerId) -> bool:
        return self.membership.is_given_up(peer)

    def is_linked(self, peer: PeerId) -> bool:
        return not self.world.peers[peer].cut_off

    def goes_round(self, module: ModuleId) -> bool:
        return self.planner.goes_round(module, self.world.time.now)

    def has_other_expert(self, module: ModuleId) -> bool:
        return self.planner.has_other_expert(module, self.world.time.now)

    # ---- messages received ---------------------------------------------------------------------------------------

    def refusal(self, message: MicrobatchTensor) -> Receipt | None:
        """Decides on a tensor by its header: returns a refusal, or reserves a slot and returns None."""
        direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD

        def answer(status: ReceiptStatus, detail: str, retry_after_s: float = 0.0) -> Receipt:
            return Receipt(message.microbatch, direction, message.position, status, retry_after_s, detail)

        if isinstance(message, Backward):
            hops, position = message.path.hops, message.position
            if 0 <= position < len(hops) and hops[position].module != self.module:
                return answer(ReceiptStatus.REFUSED, "not hosted here")
            admission = self.custody.admit_backward(message, self.world.time.now)
        elif self.data_node is not None and self.data_node.in_flight.get(message.microbatch) is None:
            return answer(ReceiptStatus.REFUSED, "this microbatch is not in flight")
        else:
            admission = self.custody.admit_forward(message, self.world.time.now)
        if admission.value is SlotState.FREE:
            return None
        return answer(getattr(ReceiptStatus, admission.value.name), admission.reason, BUSY_RETRY_S)

    def received(self, message: MicrobatchTensor) -> None:
        """Handles the complete body of an admitted tensor."""
        self.handle(TensorArrived(message))

    def broken_off(self, message: MicrobatchTensor) -> None:
        """Handles an admitted tensor whose body was cut off."""
        self.handle(BrokenOff(message))

    def control_received(self, sender: PeerId, message: MicrobatchControl) -> None:
        if isinstance(message, Stranded):
            if self.data_node is not None:
                self.data_node.undeliverable(message)
            return
        if isinstance(message, Receipt) and message.status is ReceiptStatus.PASSED_ON and self.data_node is not None:
            self.data_node.passed(sender, message)
        self.handle(ControlArrived(sender, message))

    # ---- actions -------------------------------------------------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self.act(action)

    def act(self, action: Action) -> None:
        match action:
            case Compute():
                self._compute(action)
            case SendOutput(to=to, message=message):
                self.world.send(self, to, message)
            case SendControl(to, message):
                self.world.send_control(self, to, message)
            case Confirmed(key):
                self.world.ledger.counted[key.microbatch, self.module.stage] += 1
            case Retract(key):
                self.later(Work.REPLAY, lambda _: None)
            case Forget(key):
                self._tickets.pop(key, None)
            case Finished(microbatch, path) if self.data_node is not None:
                self.data_node.finished(microbatch, path)

    def _compute(self, action: Compute) -> None:
        # A task that is forgotten before its turn still takes its time, but has no result.
        ticket = self._tickets.setdefault(action.key, next(self._next_ticket))
        self.later(
            action.work, lambda seconds: self.computed(action, seconds, known=self._tickets.get(action.key) == ticket)
        )

    def later(self, work: Work, done: Callable[[float], None]) -> None:
        """Queues work on the simulated compute thread. When the work ends, `done` is called with its seconds."""
        time, environment = self.world.time, self.world.environment
        seconds = environment.compute_s(self.id, work)
        end = max(time.now, self._busy_until) + seconds
        self._busy_until = end + environment.overhead_s
        time.after(end - time.now, lambda: self.do(lambda: done(seconds)))

    def computed(self, action: Compute, seconds: float, *, known: bool) -> None:
        """Handles the end of a computation. `known`: whether custody still has the computation's microbatch."""
        if known and action.work is Work.LOSS and self.data_node is not None:
            self.data_node.loss_known(action.key)
        if known:
            self.handle(Computed(action.key, seconds))


# ---- the world ------------------------------------------------------------------------------------------------------

TICK_S = 0.2
ANNOUNCE_S = 1.0
REFUSED_S = 0.05
"""Time until a connection attempt fails, in seconds."""


class Environment(Protocol):
    """Provider of the delays of computing and sending in a simulation, in seconds, and of each peer's limits."""

    path_rules: PathRules
    overhead_s: float  # Time that a peer is blocked after each task

    def flight_rules(self, data_node: PeerId) -> InFlightRules: ...

    def slots_of(self, peer: PeerId) -> int: ...

    def service_s(self, peer: PeerId) -> float:
        """Returns the time that a peer announces for a microbatch's forward and backward pass."""

    def compute_s(self, peer: PeerId, work: Work) -> float: ...

    def message_s(self, here: PeerId, there: PeerId) -> float:
        """Returns the one-way time of a small message, such as a tensor's header."""

    def body_s(self, here: PeerId, there: PeerId) -> float:
        """Returns the time from the arrival of a tensor's header to the arrival of its last byte."""

    def silence_s(self) -> float:
        """Returns the time until links to a silent peer break."""

    def lifetime_s(self, path_s: float) -> float:
        """Returns how long a microbatch may be silent, given the expected time of its path with empty queues."""


@dataclass(slots=True)
class Ledger:
    """Totals of a simulation over all peers, including dead ones: launches, completions, repairs and planning time."""

    started: dict[MicrobatchId, float] = field(default_factory=dict)
    completed: dict[MicrobatchId, Path] = field(default_factory=dict)
    repaired_at: Counter[int] = field(default_factory=Counter)
    """Substitutes in completed microbatches, by position."""
    counted: Counter[tuple[MicrobatchId, int]] = field(default_factory=Counter)
    """Peers that count a microbatch's gradient, by microbatch and stage."""
    planning_cpu_s: float = 0.0


class World:
    """Simulated swarm: peers, their links and the virtual time.

    Args:
        stages: the peers of each stage, data nodes first.
        planner_of: makes a data node's planner (`lab.world.arms`).
    """

    def __init__(
        self,
        environment: Environment,
        stages: Sequence[Sequence[PeerId]],
        random: Random,
        ledger: Ledger,
        planner_of: PlannerOf = Planner,
    ) -> None:
        self.environment, self.random = environment, random
        self.ledger, self.planner_of = ledger, planner_of
        self.time = VirtualTime()
        self.links = Links(self.time, environment.message_s)
        self.peers: dict[PeerId, Peer] = {}
        self.overstated: dict[PeerId, float] = {}
        """Factor on the visits that a lying data node announces."""
        self._incarnations: Counter[PeerId] = Counter()
        for stage, peers in enumerate(stages):
            for own in peers:
                self._bring_up(own, ModuleId(stage))
        for peer in self.living:
            self.announce(peer)

    @property
    def living(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.alive]

    def data_nodes(self) -> Iterator[tuple[Peer, InFlightTable]]:
        """Returns living data nodes with their microbatches in flight."""
        return ((peer, peer.data_node.in_flight) for peer in self.living if peer.data_node is not None)

    def run(self, seconds: float) -> None:
        self.time.run_until(self.time.now + seconds)

    # ---- the network ---------------------------------------------------------------------------------------------

    def send_control(self, sender: Peer, to: PeerId, message: MicrobatchControl) -> None:
        """Sends a control message to a peer. A lost message causes no error."""
        receiver = self.peers[to]

        def arrived() -> None:
            receiver.membership.recover(sender.id)
            receiver.control_received(sender.id, message)

        if to == sender.id:
            sender.control_received(to, message)
        elif not receiver.cut_off:
            self.links.deliver(sender.id, to, lambda: receiver.do(arrived))

    def send(self, sender: Peer, to: PeerId, message: MicrobatchTensor) -> None:
        """Sends a tensor to a peer, which may refuse it by its header."""
        receiver = self.peers[to]
        if to == sender.id:
            refusal = sender.refusal(message)
            return sender.received(message) if refusal is None else sender.control_received(to, refusal)
        if receiver.cut_off:
            return self.time.after(REFUSED_S, lambda: sender.do(lambda: sender.link_lost(to, "unreachable")))
        transfer = Transfer(sender, receiver, message)
        header = partial(self._header_arrived, transfer, self.links.cuts(sender.id, to))
        return self.links.deliver(sender.id, to, lambda: receiver.do(header))

    def _header_arrived(self, transfer: Transfer, cuts: int) -> None:
        sender, receiver, message = transfer.sender.id, transfer.receiver, transfer.message
        refusal = receiver.refusal(message)
        if refusal is not None:
            self.send_control(receiver, sender, refusal)
        elif self.links.cuts(sender, receiver.id) != cuts:  # a frozen peer read the header after the cut
            receiver.broken_off(message)
        else:
            self.links.transfers[frozenset((sender, receiver.id))].append(transfer)
            self.time.after(self.environment.body_s(sender, receiver.id), lambda: self._body_arrived(transfer))

    def _body_arrived(self, transfer: Transfer) -> None:
        # A dead sender's tensor hangs until its links break.
        receiver = transfer.receiver
        in_transit = self.links.transfers[frozenset((transfer.sender.id, receiver.id))]
        if transfer in in_transit and transfer.sender.alive:
            in_transit.remove(transfer)
            receiver.do(lambda: receiver.received(transfer.message))

    def cut(self, one: Peer, other: Peer) -> None:
        """Cuts the link between two peers: breaks off the tensors in transit, then notifies both peers."""
        for transfer in self.links.cut(one.id, other.id):
            transfer.receiver.do(partial(transfer.receiver.broken_off, transfer.message))
        one.do(lambda: one.link_lost(other.id, "the link broke"))
        other.do(lambda: other.link_lost(one.id, "the link broke"))

    # ---- failures and returns ------------------------------------------------------------------------------------

    def kill(self, peer: Peer) -> None:
        """Stops a peer without a message. Others notice when their links break."""
        peer.alive = False
        self.time.after(self.environment.silence_s(), lambda: self.cut_off(peer))

    def cut_off(self, peer: Peer) -> None:
        """Breaks all links of a peer and prevents new ones."""
        if self.peers[peer.id] is peer and not peer.cut_off:
            peer.cut_off = True
            for other in self.living:
                if other is not peer:
                    self.cut(peer, other)

    def revive(self, peer: Peer) -> None:
        """Restarts a peer without its earlier state."""
        self.cut_off(peer)
        newcomer = self._bring_up(peer.id, peer.module)
        for other in self.living:
            if other is not newcomer:
                newcomer.observe(other.announcement())
                other.do(partial(other.link_restored, newcomer.id))
        self.announce(newcomer)

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        """Creates a peer; a subclass may extend it."""
        return Peer(self, own, module, incarnation)

    def _bring_up(self, own: PeerId, module: ModuleId) -> Peer:
        self._incarnations[own] += 1
        peer = self.peers[own] = self.new_peer(own, module, self._incarnations[own])
        self.every(TICK_S, peer, peer.tick)
        self.every(ANNOUNCE_S, peer, lambda: self.announce(peer))
        return peer

    def every(self, seconds: float, peer: Peer, what: Thunk) -> None:
        """Calls `what` every `seconds` while the peer lives, from a random phase."""

        def again() -> None:
            if peer.alive:
                peer.do(what)
                self.time.after(seconds, again)

        self.time.after(seconds * self.random.random(), again)

    def announce(self, peer: Peer) -> None:
        """Delivers a peer's announcement to all others."""
        announcement = peer.announcement()
        for other in self.living:
            if other is not peer:
                other.observe(announcement)
