"""One peer of the world: the real decision code, and what `node.pipeline.microbatch_runner` and `node.routing.launcher`
do around it, without bytes or numbers."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from swarm.membership.membership import Membership
from swarm.pipeline.custody import Custody
from swarm.pipeline.custody_states import (
    Action,
    Arrived,
    BrokenOff,
    Compute,
    Computed,
    ComputeFailed,
    Confirmed,
    Event,
    Finished,
    Forget,
    KeepGradient,
    Key,
    PeerLost,
    Place,
    Retract,
    SendOutput,
    Started,
    Tell,
    TensorArrived,
    Tick,
    Work,
)
from swarm.pipeline.in_flight import Flights
from swarm.routing.measured_times import MeasuredTimes
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
from tests.swarm.virtual_network import Thunk

if TYPE_CHECKING:
    from tests.swarm.pipeline.pipeline_world import World

RUN = RunId("0" * 64)
BUSY_RETRY_S = 0.05
LIFETIME_S = 10.0
NUMBERS_A_LIFE = 10**9


def repaired_positions(planned: Path, taken: Path) -> list[int]:
    """Where another replica of the same module stood in; hops that were skipped do not count."""
    peers = {hop.module: hop.peer for hop in taken.hops}
    return [at for at, hop in enumerate(planned.hops) if peers.get(hop.module, hop.peer) != hop.peer]


def _answer_to(place: Reasoned[Place], answer: Callable[..., Receipt]) -> Receipt | None:
    """What the sender is told, if it may not send."""
    if place.value is Place.FREE:
        return None
    return answer(getattr(ReceiptStatus, place.value.name), place.reason, BUSY_RETRY_S)


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
        self.membership = Membership(RUN, own)
        self.fewest_hops = shape.path_rules.fewest
        self.custody = Custody(own, shape.slots, self)
        self.planner = Planner(shape.path_rules, self.membership, MeasuredTimes(own, tokens=1000))
        self.flights = (
            Flights(own, shape.rules, first_number=incarnation * NUMBERS_A_LIFE) if module.stage == 0 else None
        )
        self.incarnation = incarnation
        self.born = world.time.now
        self.added: set[MicrobatchId] = set()
        """The microbatches in its sums, those of past steps included."""
        self.visits: Counter[MicrobatchId] = Counter()
        self._inbox: list[Thunk] = []
        self._tickets: dict[Key, int] = {}
        self.gradients: set[Key] = set()
        """Kept for the input that has been recalled."""
        self._next_ticket = itertools.count()
        self._busy_until = 0.0
        self._data = itertools.count()
        self._again: deque[int] = deque()
        self._cargo: dict[MicrobatchId, int] = {}
        self._planned: dict[MicrobatchId, Path] = {}

    # ---- being alive ---------------------------------------------------------------------------------------------

    def do(self, what: Thunk) -> None:
        """Whatever happens to a peer comes through here: a dead one does nothing, a frozen one does it when it
        thaws."""
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
            RUN, self.id, state, self.module, (), b"", VersionRange(2, 2), 1000 / self.speed_s,
            self.world.shape.slots, free, 0, None, self.incarnation, int(now * 1000) + self.incarnation, now + 5.0,
        )  # fmt: skip

    # ---- swarm.pipeline.ledger.Replicas ------------------------------------------------------------------------------

    def choose(self, module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        load = in_flight_by_peer([holding.path for holding in self.custody.holdings()])
        return self.planner.replica(module, without, load, self.world.time.now)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return self.membership.hosts(peer, module)

    def is_given_up(self, peer: PeerId) -> bool:
        return self.membership.is_given_up(peer)

    def is_linked(self, peer: PeerId) -> bool:
        other = self.world.peers[peer]
        return other.alive and not other.stalled

    def goes_round(self, module: ModuleId) -> bool:
        return self.planner.goes_round(module, self.world.time.now)

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
            self.world.ledger.started[flight.microbatch] = now
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

    def _finished(self, microbatch: MicrobatchId, path: Path) -> None:
        assert self.flights is not None
        flight = self.flights.get(microbatch)
        self.flights.complete(microbatch)
        if flight is not None:
            ledger = self.world.ledger
            ledger.completed[microbatch] = path
            planned = self._planned[microbatch]
            ledger.skipped += len(planned.hops) - len(path.hops)
            ledger.left_out += self.world.shape.per_path - len(planned.hops)
            ledger.repaired_at.update(repaired_positions(planned, path))
            ledger.repaired_back.update(repaired_positions(flight.path, path))
            ledger.data_completed[self.id, self.incarnation * NUMBERS_A_LIFE + self._cargo.pop(microbatch)] += 1
        self.launch()

    # ---- what comes in -------------------------------------------------------------------------------------------

    def refusal(self, message: MicrobatchTensor) -> Receipt | None:
        """The answer to a tensor's header when the tensor is not wanted."""
        direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD

        def answer(status: ReceiptStatus, detail: str, retry_after_s: float = 0.0) -> Receipt:
            return Receipt(message.microbatch, direction, message.position, status, retry_after_s, detail)

        if isinstance(message, Backward):
            return self._refusal_of_gradient(message, answer)
        if self.flights is not None:
            if self.flights.get(message.microbatch) is None:
                return answer(ReceiptStatus.REFUSED, "this microbatch is not under way")
        elif self.draining:
            return answer(ReceiptStatus.REFUSED, "leaving")
        place = self.custody.admit_forward(message, self.world.time.now)
        return _answer_to(place, answer)

    def _refusal_of_gradient(self, message: Backward, answer: Callable[..., Receipt]) -> Receipt | None:
        hops, position = message.path.hops, message.position
        if 0 <= position < len(hops) and hops[position].module != self.module:
            return answer(ReceiptStatus.REFUSED, "not hosted here")
        if self.draining and self.custody.get(Key(message.microbatch, position)) is None:
            return answer(ReceiptStatus.REFUSED, "leaving")
        place = self.custody.admit_backward(message, self.world.time.now)
        return _answer_to(place, answer)

    def received(self, message: MicrobatchTensor) -> None:
        self.handle(TensorArrived(message))

    def broken_off(self, message: MicrobatchTensor) -> None:
        self.handle(BrokenOff(message))

    def told(self, sender: PeerId, message: MicrobatchControl) -> None:
        match message:
            case Receipt():
                if message.status is ReceiptStatus.PASSED_ON and message.microbatch.data_node == self.id:
                    self.custody.touch(Key(message.microbatch, -1), self.world.time.now)
                self.handle(Arrived(sender, message))
            case Stranded():
                if self.flights is not None:
                    self._stranded(message)
            case _:
                self.handle(Arrived(sender, message))

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
                case KeepGradient(key):
                    self.gradients.add(key)
                case Confirmed(key):
                    assert key.microbatch in self.added
                    self.visits[key.microbatch] += 1
                case Retract(key):
                    self._later(partial(self.added.discard, key.microbatch))
                    self.world.ledger.retracted += 1
                case Forget(key):
                    self._tickets.pop(key, None)
                    self.gradients.discard(key)
                case Finished(microbatch, path):
                    self._finished(microbatch, path)

    def _compute(self, action: Compute) -> None:
        """One thing after another. What has been forgotten meanwhile is computed all the same, and then not
        reported."""
        if action.work is Work.REPLAY:
            assert action.key in self.gradients
        ticket = self._tickets.setdefault(action.key, next(self._next_ticket))
        self._later(lambda: self._computed(action, ticket))

    def _later(self, what: Thunk) -> None:
        """On the compute thread, which does one thing after another."""
        time = self.world.time
        duration = self.speed_s * self.world.random.uniform(0.5, 2.0)
        self._busy_until = max(time.now, self._busy_until) + duration
        time.after(self._busy_until - time.now, lambda: self.do(what))

    def _computed(self, action: Compute, ticket: int) -> None:
        key, known = action.key, self._tickets.get(action.key) == ticket
        if self.world.random.random() < self.world.compute_failures:
            if known:
                self.handle(ComputeFailed(key, "a non-finite gradient"))
            return
        if action.work in (Work.BACKWARD, Work.REPLAY):
            self.added.add(key.microbatch)
        if action.work is Work.LOSS:
            self.world.ledger.losses[key.microbatch] += 1
        if not known:
            return
        holding = self.custody.get(key)
        if action.work is Work.LOSS and holding is not None and self.flights is not None:
            self.flights.returned(key.microbatch, holding.path, 1.0)
        self.handle(Computed(key))
