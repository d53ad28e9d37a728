"""A swarm in virtual time of the machines that the node runs: custody, planner, membership, flights, compute queue.

Only computing and sending are delays, as an instance or a setting gives them. One process, seeded.
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
from swarm.pipeline.custody import Custody
from swarm.pipeline.custody_events import (
    Action,
    BrokenOff,
    Compute,
    Computed,
    Confirmed,
    ControlArrived,
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
from swarm.pipeline.in_flight import InFlight, InFlightRules, InFlightTable
from swarm.routing.latency_attribution import PathTimes
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
"""One way for a small message, when not measured: over the longest way round the earth, on a loaded link."""


def never() -> bool:
    """Run to the end."""
    return False


class VirtualTime:
    """A queue of what happens when. Equal times happen in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Thunk]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, what: Thunk) -> None:
        """Has it happen so many seconds from now."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), what))

    def run_until(self, end: float, enough: Callable[[], bool] = never) -> None:
        """Lets time pass up to `end`, or until there is enough."""
        while self._queue and self._queue[0][0] <= end and not enough():
            self.now, _, what = heapq.heappop(self._queue)
            what()
        if not enough():
            self.now = end


@dataclass(slots=True, eq=False)
class Transfer:
    """A tensor whose header has been admitted and whose body is under way."""

    sender: Peer
    receiver: Peer
    message: MicrobatchTensor


class Links:
    """One stream for each pair of peers: first in, first out, until it is cut. Then what was under way is lost.

    Args:
        message_s: how long a small message takes from one peer to another.
    """

    def __init__(self, time: VirtualTime, message_s: Callable[[PeerId, PeerId], float]) -> None:
        self._time, self._message_s = time, message_s
        self._cuts: Counter[frozenset[PeerId]] = Counter()
        self._last_arrival: dict[tuple[PeerId, PeerId], float] = {}
        self.transfers: defaultdict[frozenset[PeerId], list[Transfer]] = defaultdict(list)

    def cuts(self, one: PeerId, other: PeerId) -> int:
        """How often this link has been cut: two equal answers mean that it stood all the time between."""
        return self._cuts[frozenset((one, other))]

    def deliver(self, sender: PeerId, to: PeerId, what: Thunk) -> None:
        """Has it happen when a message that is sent now arrives, if the link stands until then."""
        arrival = self._time.now + self._message_s(sender, to)
        arrival = max(arrival, self._last_arrival.get((sender, to), 0.0))
        self._last_arrival[sender, to] = arrival
        cuts = self.cuts(sender, to)
        self._time.after(arrival - self._time.now, lambda: what() if self.cuts(sender, to) == cuts else None)

    def cut(self, one: PeerId, other: PeerId) -> list[Transfer]:
        """Loses all that is under way; returns the tensors that were half received."""
        pair = frozenset((one, other))
        self._cuts[pair] += 1
        return self.transfers.pop(pair, [])


# ---- the data node --------------------------------------------------------------------------------------------------

TOKENS = 1000
"""Of one microbatch."""
NUMBERS_A_LIFE = 10**9


def repaired_positions(planned: Path, taken: Path) -> list[int]:
    """Where another replica of the same module stood in; hops that were skipped do not count."""
    peers = {hop.module: hop.peer for hop in taken.hops}
    return [at for at, hop in enumerate(planned.hops) if peers.get(hop.module, hop.peer) != hop.peer]


class DataNode:
    """Launches microbatches on the paths that its planner chooses."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.world = peer, peer.world
        rules = self.world.ground.flight_rules(peer.id)
        self.in_flight = InFlightTable(peer.id, rules, first_number=peer.incarnation * NUMBERS_A_LIFE)
        self.stopping = False
        measured = MeasuredTimes(peer.id, TOKENS)
        self._times = PathTimes(peer.id, measured, peer.membership.slots_of)
        self.planner = self.world.planner_of(self.world.ground.path_rules, peer.membership, measured)
        self._swarm = self.planner.rule if isinstance(self.planner, SwarmPlanner) else None
        self.planned: dict[MicrobatchId, Path] = {}

    # ---- launching -----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """As many microbatches as may start now."""
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
            lifetime_s = self.world.ground.lifetime_s(self.planner.usual_s(plan))
            self.peer.handle(Started(flight.microbatch, plan, Purpose.TRAIN, lifetime_s))

    def turned(self, key: Key) -> None:
        """The loss of a microbatch is known."""
        holding = self.peer.custody.get(key)
        self._times.turned(key.microbatch, self.world.time.now)
        if holding is not None:
            self.in_flight.returned(key.microbatch, holding.path, 1.0)

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        """A hop has passed on a microbatch of ours."""
        if receipt.microbatch.data_node == self.peer.id:
            self.peer.custody.touch(Key(receipt.microbatch, -1), self.world.time.now)
            self._times.passed(sender, receipt, self.world.time.now)
            if self._swarm is not None:
                self._swarm.passed(sender, receipt, self.world.time.now)

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        """It is home."""
        self._times.completed(microbatch, self.world.time.now)
        flight = self.in_flight.get(microbatch)
        self.in_flight.complete(microbatch)
        if flight is not None:
            self.completed(flight, path)
        self.launch()

    def stranded(self, message: Stranded) -> None:
        """A copy that strands on the way out after another has come back does no harm."""
        custody, microbatch = self.peer.custody, message.microbatch
        ends = [custody.get(Key(microbatch, -1)) is not None]
        ends.append(any(held.is_end and held.key.microbatch == microbatch for held in custody.entries()))
        if message.direction is Direction.FORWARD and all(ends) and message.position > -1:
            return
        self._times.lost(microbatch, self.world.time.now)
        flight = self.in_flight.abandon(microbatch)
        self.peer.carry_out(custody.abandon(microbatch, message.detail))
        if flight is not None:
            self.abandoned(flight)
        self.launch()

    # ---- accounts ------------------------------------------------------------------------------------------------

    def started(self, flight: InFlight) -> None:
        """Notes what was planned."""
        self.world.ledger.started[flight.microbatch] = self.world.time.now
        self.planned[flight.microbatch] = flight.path
        if self._swarm is not None:
            self._swarm.launched(flight.microbatch, flight.path, self.world.time.now)

    def completed(self, flight: InFlight, path: Path) -> None:
        """Notes what came of it: the path whose gradients count."""
        self.world.ledger.completed[flight.microbatch] = path
        self.world.ledger.repaired_at.update(repaired_positions(self.planned.pop(flight.microbatch), path))
        if self._swarm is not None:
            self._swarm.ended(flight.microbatch, path)

    def abandoned(self, flight: InFlight) -> None:
        """Nothing came of it."""
        del self.planned[flight.microbatch]
        if self._swarm is not None:
            self._swarm.ended(flight.microbatch, None)


# ---- a peer ---------------------------------------------------------------------------------------------------------

RUN = RunId("0" * 64)
BUSY_RETRY_S = 0.1
RECORD_LIFETIME_S = 5.0


class Peer:
    """One node: a custody, a view of the swarm, one compute thread, and at stage 0 a data node's part.

    Args:
        incarnation: how often it has come up.
    """

    def __init__(self, world: World, own: PeerId, module: ModuleId, incarnation: int) -> None:
        self.world, self.id, self.module, self.incarnation = world, own, module, incarnation
        self.alive = True
        self.cut_off = False
        """No link to it stands, and none can be made."""
        self.born = world.time.now
        self.membership = Membership(RUN, own)
        self.custody = Custody(own, world.ground.slots_of(own), self)
        self.data_node = self.new_data_node() if module.stage == 0 else None
        rules = world.ground.path_rules
        alone = Planner(rules, self.membership, MeasuredTimes(own, TOKENS))
        self.planner = alone if self.data_node is None else self.data_node.planner
        self.fewest_hops = rules.fewest
        self._tickets: dict[Key, int] = {}
        self._next_ticket = itertools.count()
        self._busy_until = 0.0

    def new_data_node(self) -> DataNode:
        """A seam for worlds whose data nodes keep more accounts."""
        return DataNode(self)

    # ---- being alive ---------------------------------------------------------------------------------------------

    def do(self, what: Thunk) -> None:
        """Whatever happens to a peer comes through here: a dead one does nothing."""
        if self.alive:
            what()

    def handle(self, event: Event) -> None:
        """Gives the event to custody and carries out what follows."""
        self.carry_out(self.custody.handle(event, self.world.time.now))

    def tick(self) -> None:
        """Time has passed."""
        self.membership.expire(self.world.time.now)
        if len(self.custody):
            self.handle(Tick())
        if self.data_node is not None:
            self.data_node.launch()

    def observe(self, announcement: Announcement) -> None:
        """What another peer says of itself."""
        now = self.world.time.now
        self.membership.observe(announcement, now=now, wall=now)

    def lose(self, peer: PeerId, detail: str) -> None:
        """The link to it broke, or could not be made. Is it gone? It is asked at once."""
        now = self.world.time.now
        if not self.membership.is_suspect(peer, now):
            self.world.time.after(
                self.world.ground.message_s(self.id, peer), lambda: self.do(lambda: self._probe(peer))
            )
        self.membership.fail(peer, now)
        self.handle(PeerLost(peer, detail))

    def _probe(self, peer: PeerId) -> None:
        if self.world.peers[peer].cut_off:
            self.membership.give_up(peer, self.world.time.now)

    def regain(self, peer: PeerId) -> None:
        """There is a link to it again."""
        self.membership.recover(peer)
        self.handle(PeerBack(peer))

    def announcement(self) -> Announcement:
        """What it says of itself now."""
        now, slots = self.world.time.now, self.custody.slots
        return Announcement(
            RUN, self.id, PeerState.SERVING, self.module, (), b"", VersionRange(2, 2),
            TOKENS / self.world.ground.service_s(self.id), slots, slots - self.custody.used_slots, 0, None,
            self.incarnation, int(now * 1000) + self.incarnation, now + RECORD_LIFETIME_S,
            visits=() if self.data_node is None else tuple(self.data_node.planner.prices.launched),
        )  # fmt: skip

    # ---- swarm.pipeline.custody.Replicas --------------------------------------------------------------------------

    def choose(self, module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        load = in_flight_by_peer([holding.path for holding in self.custody.entries()])
        return self.planner.replica(module, without, load, self.world.time.now)

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

    # ---- what comes in -------------------------------------------------------------------------------------------

    def refusal(self, message: MicrobatchTensor) -> Receipt | None:
        """The answer to a tensor's header when the tensor is not wanted; else a place for it is reserved."""
        direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD

        def answer(status: ReceiptStatus, detail: str, retry_after_s: float = 0.0) -> Receipt:
            return Receipt(message.microbatch, direction, message.position, status, retry_after_s, detail)

        if isinstance(message, Backward):
            hops, position = message.path.hops, message.position
            if 0 <= position < len(hops) and hops[position].module != self.module:
                return answer(ReceiptStatus.REFUSED, "not hosted here")
            return _answer_to(self.custody.admit_backward(message, self.world.time.now), answer)
        if self.data_node is not None and self.data_node.in_flight.get(message.microbatch) is None:
            return answer(ReceiptStatus.REFUSED, "this microbatch is not under way")
        return _answer_to(self.custody.admit_forward(message, self.world.time.now), answer)

    def received(self, message: MicrobatchTensor) -> None:
        """All of an admitted tensor is here."""
        self.handle(TensorArrived(message))

    def broken_off(self, message: MicrobatchTensor) -> None:
        """The rest of an admitted tensor will not come."""
        self.handle(BrokenOff(message))

    def told(self, sender: PeerId, message: MicrobatchControl) -> None:
        """A small message."""
        match message:
            case Receipt():
                if message.status is ReceiptStatus.PASSED_ON and self.data_node is not None:
                    self.data_node.passed(sender, message)
                self.handle(ControlArrived(sender, message))
            case Stranded():
                if self.data_node is not None:
                    self.data_node.stranded(message)
            case _:
                self.handle(ControlArrived(sender, message))

    # ---- carrying out --------------------------------------------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        """In their order."""
        for action in actions:
            self.act(action)

    def act(self, action: Action) -> None:
        """Carries out one action."""
        match action:
            case Compute():
                self._compute(action)
            case SendOutput(to=to, message=message):
                self.world.send(self, to, message)
            case SendControl(to, message):
                self.world.tell(self, to, message)
            case Confirmed(key):
                self.world.ledger.counted[key.microbatch, self.module.stage] += 1
            case Retract(key):
                self.later(Work.REPLAY, lambda _: None)
            case Forget(key):
                self._tickets.pop(key, None)
            case Finished(microbatch, path) if self.data_node is not None:
                self.data_node.finished(microbatch, path)

    def _compute(self, action: Compute) -> None:
        """What has been forgotten meanwhile is computed all the same, and then not reported."""
        ticket = self._tickets.setdefault(action.key, next(self._next_ticket))
        self.later(
            action.work,
            lambda seconds: self.computed(action, seconds, known=self._tickets.get(action.key) == ticket),
        )

    def later(self, work: Work, done: Callable[[float], None]) -> None:
        """On the compute thread, which does one thing after another."""
        time, ground = self.world.time, self.world.ground
        seconds = ground.compute_s(self.id, work)
        end = max(time.now, self._busy_until) + seconds
        self._busy_until = end + ground.overhead_s
        time.after(end - time.now, lambda: self.do(lambda: done(seconds)))

    def computed(self, action: Compute, seconds: float, *, known: bool) -> None:
        """A computation has ended; `known` if its holding is still there."""
        if known and action.work is Work.LOSS and self.data_node is not None:
            self.data_node.turned(action.key)
        if known:
            self.handle(Computed(action.key, seconds))


def _answer_to(place: Reasoned[SlotState], answer: Callable[..., Receipt]) -> Receipt | None:
    """What the sender is told, if it may not send."""
    if place.value is SlotState.FREE:
        return None
    return answer(getattr(ReceiptStatus, place.value.name), place.reason, BUSY_RETRY_S)


# ---- the world ------------------------------------------------------------------------------------------------------

TICK_S = 0.2
ANNOUNCE_S = 1.0
REFUSED_S = 0.05
"""Until a connection that cannot be made has failed."""


class Ground(Protocol):
    """What machines and lines are like. Seconds."""

    path_rules: PathRules
    overhead_s: float
    """A peer is blocked so long after each task."""

    def flight_rules(self, data_node: PeerId) -> InFlightRules: ...

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
        planner_of: makes a data node's planner (`lab.world.arms`).
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

    def data_nodes(self) -> Iterator[tuple[Peer, InFlightTable]]:
        """Those alive."""
        return ((peer, peer.data_node.in_flight) for peer in self.living if peer.data_node is not None)

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
