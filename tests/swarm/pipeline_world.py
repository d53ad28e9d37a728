"""A small swarm in virtual time: peers made of the real decision code, on a network that loses links, kills and freezes peers.

Everything follows from a seed. A peer carries out custody's actions as `node.carrier` does; what a node would compute or send is here
only a delay. What a run of it must keep is checked while it runs (`World.check`) and at its end (`World.drain`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from swarm.announcement import Announcement
from swarm.custody import Custody
from swarm.estimates import Estimates
from swarm.flights import FlightRules, Flights
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
from swarm.membership import Membership
from swarm.messages import (
    Backward,
    Close,
    ControlMessage,
    Direction,
    Forward,
    Purpose,
    Receipt,
    ReceiptStatus,
    Stranded,
    TensorMessage,
)
from swarm.planner import NoReplica, PathRules, Planner, in_flight_by_peer
from swarm.vocabulary import MicrobatchId, ModuleId, Path, PeerId, PeerState, RunId, VersionRange

RUN = RunId("0" * 64)
TICK_S = 0.2
ANNOUNCE_S = 1.0
BUSY_RETRY_S = 0.05
STALL_S = 1.5
"""After so much silence the others take a frozen peer's links for broken."""
LIFETIME_S = 10.0
LONGEST_FREEZE_S = 4.0

Thunk = Callable[[], None]


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
    rules: FlightRules = FlightRules(per_step=4, staleness=1, window=5)
    compute_failures: float = 0.01
    """Share of the computations that fail."""

    @property
    def path_rules(self) -> PathRules:
        return PathRules(len(self.replicas) + 1, self.per_path)


class VirtualTime:
    """A queue of what happens when. Equal times happen in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Thunk]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, what: Thunk) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), what))

    def run_until(self, end: float, enough: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= end and not enough():
            self.now, _, what = heapq.heappop(self._queue)
            what()
        if not enough():
            self.now = end


@dataclass(slots=True, eq=False)
class Transfer:
    """A tensor whose header has been admitted and whose body is under way."""

    receiver: Peer
    message: TensorMessage


class Links:
    """One stream for each pair of peers: first in, first out, until it is cut. Then what was under way is lost."""

    def __init__(self, time: VirtualTime, random: Random) -> None:
        self._time = time
        self._random = random
        self._cuts: Counter[frozenset[PeerId]] = Counter()
        self._last_arrival: dict[tuple[PeerId, PeerId], float] = {}
        self._delay_s: dict[frozenset[PeerId], float] = {}
        self.transfers: defaultdict[frozenset[PeerId], list[Transfer]] = defaultdict(list)

    def cuts(self, one: PeerId, other: PeerId) -> int:
        """How often this link has been cut: two equal answers mean that it stood all the time between."""
        return self._cuts[frozenset((one, other))]

    def deliver(self, sender: PeerId, to: PeerId, what: Thunk) -> None:
        delay = self._delay_s.setdefault(frozenset((sender, to)), self._random.uniform(0.002, 0.08))
        arrival = self._time.now + delay * self._random.uniform(1.0, 2.0)
        arrival = max(arrival, self._last_arrival.get((sender, to), 0.0))
        self._last_arrival[sender, to] = arrival
        cuts = self.cuts(sender, to)
        self._time.after(arrival - self._time.now, lambda: what() if self.cuts(sender, to) == cuts else None)

    def cut(self, one: PeerId, other: PeerId) -> list[Transfer]:
        """Loses all that is under way; returns the tensors that were half received."""
        pair = frozenset((one, other))
        self._cuts[pair] += 1
        return self.transfers.pop(pair, [])


@dataclass(slots=True)
class Ledger:
    """What really happened, all peers together, dead ones included."""

    accumulated: defaultdict[MicrobatchId, list[tuple[int, PeerId]]] = field(default_factory=lambda: defaultdict(list))
    """Of each microbatch, every (stage, peer) whose backward was computed."""
    losses: Counter[MicrobatchId] = field(default_factory=Counter)
    completed: dict[MicrobatchId, Path] = field(default_factory=dict)
    data_completed: Counter[tuple[PeerId, int]] = field(default_factory=Counter)
    repaired_at: Counter[int] = field(default_factory=Counter)
    """Of the completed ones, how often another peer stood in at each position."""
    abandoned: int = 0


def repaired_positions(planned: Path, taken: Path) -> list[int]:
    return [at for at, hop in enumerate(planned.hops) if hop != taken.hops[at]]


class Peer:
    """One node: a custody, a view of the swarm, one compute thread. `flights` is None but at a data node."""

    def __init__(self, world: World, own: PeerId, module: ModuleId, incarnation: int) -> None:
        shape = world.shape
        self.world = world
        self.id = own
        self.module = module
        self.alive = True
        self.frozen = False
        self.stalled = False
        self.draining = False
        self.stopping = False
        self.speed_s = world.random.uniform(0.02, 0.3)
        self.custody = Custody(own, shape.slots, self._stand_in)
        self.membership = Membership(RUN, own)
        self.planner = Planner(shape.path_rules, self.membership, Estimates(), tokens=1000)
        self.flights = Flights(own, shape.rules, first_number=incarnation * 10**9) if module.stage == 0 else None
        self._incarnation = incarnation
        self._inbox: list[Thunk] = []
        self._tickets: dict[Key, int] = {}
        self._next_ticket = itertools.count()
        self._busy_until = 0.0
        self._data = itertools.count()
        self._again: deque[int] = deque()
        self._cargo: dict[MicrobatchId, int] = {}
        self._planned: dict[MicrobatchId, Path] = {}

    # ---- being alive ---------------------------------------------------------------------------------------------

    def do(self, what: Thunk) -> None:
        """Whatever happens to a peer comes through here: a dead one does nothing, a frozen one does it when it thaws."""
        if not self.alive:
            return
        if self.frozen:
            self._inbox.append(what)
        else:
            what()
            self.world.check_account(self)

    def thaw(self) -> None:
        self.frozen = self.stalled = False
        inbox, self._inbox = self._inbox, []
        for what in inbox:
            self.do(what)

    def handle(self, event: Event) -> None:
        self._carry_out(self.custody.handle(event, self.world.time.now))

    def tick(self) -> None:
        self.membership.expire(self.world.time.now)
        if len(self.custody):
            self.handle(Tick())
        self.launch()

    def lose(self, peer: PeerId, detail: str) -> None:
        self.membership.fail(peer, self.world.time.now)
        self.handle(PeerLost(peer, detail))

    def announcement(self) -> Announcement:
        now, free = self.world.time.now, self.world.shape.slots - self.custody.used_slots
        state = PeerState.DRAINING if self.draining else PeerState.SERVING
        return Announcement(
            RUN, self.id, state, self.module, (), b"", VersionRange(1, 1), 1000 / self.speed_s,
            self.world.shape.slots, free, 0, 0, b"", int(now * 1000) + self._incarnation, now + 5.0,
        )  # fmt: skip

    def _stand_in(self, module: ModuleId, without: frozenset[PeerId]):  # type: ignore[no-untyped-def]
        load = in_flight_by_peer([holding.path for holding in self.custody.holdings()])
        return self.planner.replica(module, without, load, self.world.time.now)

    # ---- a data node's part --------------------------------------------------------------------------------------

    def launch(self) -> None:
        while self.flights is not None and not self.stopping and self.flights.may_start().value:
            now = self.world.time.now
            load = in_flight_by_peer([flight.path for flight in self.flights.in_flight])
            plan = self.planner.plan(self.flights.next_number, load, now).value
            if isinstance(plan, NoReplica):
                return
            flight = self.flights.start(plan, now)
            self._cargo[flight.microbatch] = self._again.popleft() if self._again else next(self._data)
            self._planned[flight.microbatch] = plan
            self.handle(Started(flight.microbatch, plan, Purpose.TRAIN, LIFETIME_S))

    def _stranded(self, message: Stranded) -> None:
        """As the carrier: a copy that strands on the way out after another has come back does no harm."""
        ends = [self.custody.get(Key(message.microbatch, -1)) is not None]
        ends.append(any(h.is_end and h.key.microbatch == message.microbatch for h in self.custody.holdings()))
        if message.direction is Direction.FORWARD and all(ends) and message.position > -1:
            return
        self._lost(message.microbatch, message.detail)

    def _lost(self, microbatch: MicrobatchId, detail: str) -> None:
        assert self.flights is not None
        flight = self.flights.abandon(microbatch)
        self._carry_out(self.custody.abandon(microbatch, detail))
        if flight is not None:
            self.world.ledger.abandoned += 1
            data = self._cargo.pop(microbatch)
            if flight.loss is None:
                self._again.append(data)
        self.launch()

    def _finished(self, microbatch: MicrobatchId) -> None:
        assert self.flights is not None
        flight = self.flights.get(microbatch)
        self.flights.complete(microbatch)
        if flight is not None:
            ledger = self.world.ledger
            ledger.completed[microbatch] = flight.path
            ledger.repaired_at.update(repaired_positions(self._planned[microbatch], flight.path))
            ledger.data_completed[self.id, self._incarnation * 10**9 + self._cargo.pop(microbatch)] += 1
            self.world.check_completed(microbatch)
        self.launch()

    # ---- what comes in -------------------------------------------------------------------------------------------

    def refusal(self, message: TensorMessage) -> Receipt | None:
        """The answer to a tensor's header when the tensor is not wanted."""
        direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD

        def answer(status: ReceiptStatus, detail: str, retry_after_s: float = 0.0) -> Receipt:
            return Receipt(message.microbatch, direction, message.position, status, retry_after_s, detail)

        if isinstance(message, Backward):
            expected = self.custody.expects_backward(message)
            return None if expected.value else answer(ReceiptStatus.REFUSED, expected.reason)
        if self.flights is not None:
            if self.flights.get(message.microbatch) is None:
                return answer(ReceiptStatus.REFUSED, "this microbatch is not under way")
        elif self.draining:
            return answer(ReceiptStatus.REFUSED, "leaving")
        place = self.custody.admit_forward(message, self.world.time.now)
        return None if place.value else answer(ReceiptStatus.BUSY, place.reason, BUSY_RETRY_S)

    def received(self, message: TensorMessage) -> None:
        self.handle(ForwardArrived(message) if isinstance(message, Forward) else BackwardArrived(message))

    def broken_off(self, message: TensorMessage) -> None:
        if isinstance(message, Forward):
            self.handle(BrokenOff(Key(message.microbatch, message.position)))

    def told(self, sender: PeerId, message: ControlMessage) -> None:
        match message:
            case Receipt():
                if message.status is ReceiptStatus.PASSED_ON and message.microbatch.data_node == self.id:
                    self.custody.touch(Key(message.microbatch, -1), self.world.time.now)
                self.handle(ReceiptArrived(sender, message))
            case Close():
                self.handle(CloseArrived(sender, message))
            case Stranded() if self.flights is not None:
                self._stranded(message)

    # ---- carrying out --------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Compute():
                    self._compute(action)
                case SendOutput(to=to, message=message):
                    self.world.send(self, to, message)
                case Tell(to, message):
                    self.world.tell(self, to, message)
                case Forget(key):
                    self._tickets.pop(key, None)
                case Finished(microbatch):
                    self._finished(microbatch)

    def _compute(self, action: Compute) -> None:
        """One thing after another. What has been forgotten meanwhile is computed all the same, and then not reported."""
        time = self.world.time
        ticket = self._tickets.setdefault(action.key, next(self._next_ticket))
        duration = self.speed_s * self.world.random.uniform(0.5, 2.0)
        self._busy_until = max(time.now, self._busy_until) + duration
        time.after(self._busy_until - time.now, lambda: self.do(lambda: self._computed(action, ticket)))

    def _computed(self, action: Compute, ticket: int) -> None:
        key, known = action.key, self._tickets.get(action.key) == ticket
        if self.world.random.random() < self.world.compute_failures:
            if known:
                self.handle(ComputeFailed(key, "a non-finite gradient"))
            return
        if action.work is Work.BACKWARD:
            self.world.ledger.accumulated[key.microbatch].append((self.module.stage, self.id))
        if action.work is Work.LOSS:
            self.world.ledger.losses[key.microbatch] += 1
        if not known:
            return
        holding = self.custody.get(key)
        if action.work is Work.LOSS and holding is not None and self.flights is not None:
            self.flights.returned(key.microbatch, holding.path, 1.0)
        self.handle(Computed(key))


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

    def tell(self, sender: Peer, to: PeerId, message: ControlMessage) -> None:
        receiver = self.peers[to]
        if to == sender.id:
            sender.told(to, message)
        elif receiver.alive and not receiver.stalled:
            self.links.deliver(sender.id, to, lambda: receiver.do(lambda: self._told(sender.id, receiver, message)))

    def _told(self, sender: PeerId, receiver: Peer, message: ControlMessage) -> None:
        receiver.membership.recover(sender)
        receiver.told(sender, message)

    def send(self, sender: Peer, to: PeerId, message: TensorMessage) -> None:
        receiver = self.peers[to]
        if to == sender.id:
            refusal = sender.refusal(message)
            return sender.received(message) if refusal is None else sender.told(to, refusal)
        if not receiver.alive or receiver.stalled:
            return self.time.after(0.05, lambda: sender.do(lambda: sender.lose(to, "cannot be reached")))
        cuts = self.links.cuts(sender.id, to)
        header = lambda: self._header_arrived(sender.id, receiver, message, cuts)  # noqa: E731
        return self.links.deliver(sender.id, to, lambda: receiver.do(header))

    def _header_arrived(self, sender: PeerId, receiver: Peer, message: TensorMessage, cuts: int) -> None:
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
            transfer.receiver.do(lambda transfer=transfer: transfer.receiver.broken_off(transfer.message))  # type: ignore[misc]
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
        enough = lambda: all(f.counts.completed >= wanted[p.id] for p, f in self.data_nodes())  # noqa: E731
        self.time.run_until(self.time.now + within_s, enough)
        return enough()

    def drain(self) -> None:
        """Nothing new sets out; what is under way comes home or runs out. Then nothing may be left anywhere."""
        for peer in self.living:
            peer.stopping = True
        empty = lambda: not any(len(peer.custody) for peer in self.living)  # noqa: E731
        self.time.run_until(self.time.now + 10 * LIFETIME_S, empty)
        left = {peer.id: list(peer.custody.holdings()) for peer in self.living if len(peer.custody)}
        assert not left, left
        assert all(peer.custody.used_slots == 0 for peer in self.living)
        assert not any(flights.in_flight for _, flights in self.data_nodes())

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

    def check_completed(self, microbatch: MicrobatchId) -> None:
        """Exactly once at every stage of its final path, by the peer that the path names."""
        path = self.ledger.completed[microbatch]
        visits = [(hop.module.stage, hop.peer) for hop in path.hops]
        assert sorted(self.ledger.accumulated[microbatch]) == sorted([(0, path.data_node), *visits])

    def check_all(self) -> None:
        """Over all peers: nothing accumulated twice, and nothing that nobody acts for outlives its deadline."""
        for microbatch, visits in self.ledger.accumulated.items():
            stages = [stage for stage, _ in visits]
            assert len(stages) == len(set(stages)), (microbatch, visits)
        assert max(self.ledger.losses.values(), default=0) <= 1
        assert max(self.ledger.data_completed.values(), default=0) <= 1
        self._check_orphans()

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
