"""One peer of the world: the machines of the node, and what `node.pipeline.runner` and
`node.network.session` do around them, without bytes or numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm.membership.membership import Membership
from swarm.pipeline.custody import Custody
from swarm.pipeline.custody_events import (
    Action,
    Arrived,
    BrokenOff,
    Compute,
    Computed,
    Confirmed,
    Event,
    Finished,
    Forget,
    Key,
    PeerBack,
    PeerLost,
    Place,
    Retract,
    SendOutput,
    Tell,
    TensorArrived,
    Tick,
    Work,
)
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.planner import Planner, in_flight_by_peer
from swarm.simulation.pipeline_data_node import TOKENS, DataNode
from swarm.simulation.virtual_network import Thunk
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Direction,
    Forward,
    MicrobatchControl,
    MicrobatchTensor,
    Receipt,
    ReceiptStatus,
    Stranded,
)
from swarm.vocabulary.routing_messages import LaneControl
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, Reasoned, RunId, VersionRange

if TYPE_CHECKING:
    from swarm.simulation.pipeline_world import World

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
        self._look_around()

    def _probe(self, peer: PeerId) -> None:
        if self.world.peers[peer].cut_off:
            self.membership.give_up(peer, self.world.time.now)
            self._look_around()

    def regain(self, peer: PeerId) -> None:
        """There is a link to it again."""
        self.membership.recover(peer)
        self.handle(PeerBack(peer))
        self._look_around()

    def _look_around(self) -> None:
        if self.data_node is not None:
            self.data_node.look_around()

    def announcement(self) -> Announcement:
        """What it says of itself now."""
        now, slots = self.world.time.now, self.custody.slots
        return Announcement(
            RUN, self.id, PeerState.SERVING, self.module, (), b"", VersionRange(2, 2),
            TOKENS / self.world.ground.service_s(self.id), slots, slots - self.custody.used_slots, 0, None,
            self.incarnation, int(now * 1000) + self.incarnation, now + RECORD_LIFETIME_S,
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
        if self.data_node is not None and self.data_node.flights.get(message.microbatch) is None:
            return answer(ReceiptStatus.REFUSED, "this microbatch is not under way")
        return _answer_to(self.custody.admit_forward(message, self.world.time.now), answer)

    def received(self, message: MicrobatchTensor) -> None:
        """All of an admitted tensor is here."""
        self.handle(TensorArrived(message))

    def broken_off(self, message: MicrobatchTensor) -> None:
        """The rest of an admitted tensor will not come."""
        self.handle(BrokenOff(message))

    def told(self, sender: PeerId, message: MicrobatchControl | LaneControl) -> None:
        """A small message."""
        match message:
            case Receipt():
                if message.status is ReceiptStatus.PASSED_ON and self.data_node is not None:
                    self.data_node.passed(sender, message)
                self.handle(Arrived(sender, message))
            case Stranded():
                if self.data_node is not None:
                    self.data_node.stranded(message)
            case _ if isinstance(message, LaneControl):
                if self.data_node is not None:
                    self.data_node.told(sender, message)
            case _:
                self.handle(Arrived(sender, message))

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
            case Tell(to, message):
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


def _answer_to(place: Reasoned[Place], answer: Callable[..., Receipt]) -> Receipt | None:
    """What the sender is told, if it may not send."""
    if place.value is Place.FREE:
        return None
    return answer(getattr(ReceiptStatus, place.value.name), place.reason, BUSY_RETRY_S)
