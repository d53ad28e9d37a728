"""A data node's part of a peer of the world: what `node.routing` does around flights, planner, measurements and
negotiator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from swarm.pipeline.custody_events import Key, Started
from swarm.pipeline.in_flight import Flight, Flights
from swarm.routing.cost_model import Costs
from swarm.routing.latency_attribution import PathTimes
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.negotiation.negotiation_events import Arrived, Event, Member, SwarmChanged, Tell, Tick
from swarm.routing.negotiation.negotiator import Negotiator
from swarm.routing.planner import NoReplica, Planner, in_flight_by_peer
from swarm.routing.stage_balance import Lanes
from swarm.vocabulary.pipeline_messages import Direction, Purpose, Receipt, Stranded
from swarm.vocabulary.routing_messages import LaneControl
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId

if TYPE_CHECKING:
    from swarm.simulation.pipeline_peer import Peer

TOKENS = 1000
"""Of one microbatch."""
NUMBERS_A_LIFE = 10**9
LOOK_S = 2.0
BETWEEN_LOOKS_S = 0.2


def repaired_positions(planned: Path, taken: Path) -> list[int]:
    """Where another replica of the same module stood in; hops that were skipped do not count."""
    peers = {hop.module: hop.peer for hop in taken.hops}
    return [at for at, hop in enumerate(planned.hops) if peers.get(hop.module, hop.peer) != hop.peer]


class DataNode:
    """Launches microbatches along its lanes, and talks about them."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.world = peer, peer.world
        ground = self.world.ground
        rules = ground.flight_rules(peer.id)
        self.flights = Flights(peer.id, rules, first_number=peer.incarnation * NUMBERS_A_LIFE)
        self.stopping = False
        self.lanes: Lanes = ()
        self._measured = MeasuredTimes(peer.id, TOKENS)
        self._times = PathTimes(peer.id, self._measured, peer.membership.slots_of)
        self.planner = Planner(
            ground.path_rules, peer.membership, self._measured, lambda: self.lanes, lambda: self._costs
        )
        self.negotiator = Negotiator(peer.id, ground.path_rules, ground.talk)
        self._costs: Costs | None = None
        self._wakes = math.inf
        self._looks = False
        self.planned: dict[MicrobatchId, Path] = {}

    def begin(self) -> None:
        """Looks around from now on."""
        self.world.every(LOOK_S, self.peer, self._look)

    # ---- launching -----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """As many microbatches as may start now."""
        while not self.stopping and self.flights.may_start().value:
            now = self.world.time.now
            load = in_flight_by_peer([flight.path for flight in self.flights.in_flight])
            plan = self.planner.plan(self.flights.next_number, (), load, now).value
            if isinstance(plan, NoReplica):
                return
            flight = self.flights.start(plan, now)
            self._times.launched(flight.microbatch, plan, load, now)
            self.started(flight)
            lifetime_s = self.world.ground.lifetime_s(self.planner.usual_s(plan))
            self.peer.handle(Started(flight.microbatch, plan, Purpose.TRAIN, lifetime_s))

    def turned(self, key: Key) -> None:
        """The loss of a microbatch is known."""
        holding = self.peer.custody.get(key)
        self._times.turned(key.microbatch, self.world.time.now)
        if holding is not None:
            self.flights.returned(key.microbatch, holding.path, 1.0)

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        """A hop has passed on a microbatch of ours."""
        if receipt.microbatch.data_node == self.peer.id:
            self.peer.custody.touch(Key(receipt.microbatch, -1), self.world.time.now)
            self._times.passed(sender, receipt, self.world.time.now)

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        """It is home."""
        self._times.completed(microbatch, self.world.time.now)
        flight = self.flights.get(microbatch)
        self.flights.complete(microbatch)
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
        flight = self.flights.abandon(microbatch)
        self.peer.carry_out(custody.abandon(microbatch, message.detail))
        if flight is not None:
            self.abandoned(flight)
        self.launch()

    # ---- accounts ------------------------------------------------------------------------------------------------

    def started(self, flight: Flight) -> None:
        """Notes what was planned."""
        self.world.ledger.started[flight.microbatch] = self.world.time.now
        self.planned[flight.microbatch] = flight.path

    def completed(self, flight: Flight, path: Path) -> None:
        """Notes what came of it: the path whose gradients count."""
        self.world.ledger.completed[flight.microbatch] = path
        self.world.ledger.repaired_at.update(repaired_positions(self.planned.pop(flight.microbatch), path))

    def abandoned(self, flight: Flight) -> None:
        """Nothing came of it."""
        del self.planned[flight.microbatch]

    # ---- lanes ---------------------------------------------------------------------------------------------------

    def look_around(self) -> None:
        """Somebody has come or gone."""
        if not self._looks:
            self._looks = True
            self.world.time.after(BETWEEN_LOOKS_S, lambda: self.peer.do(self._look))

    def _look(self) -> None:
        self._looks = False
        now, own = self.world.time.now, self.peer.announcement()
        stages = range(self.planner.rules.stages)
        live = [self.peer.membership.replicas(ModuleId(stage), now) for stage in stages]
        live[0] = [*live[0], own]
        if all(live):
            ranked = [sorted(announced, key=lambda one: one.peer) for announced in live]
            self._costs = self._measured.costs(ranked, self.flights.rules.most_in_flight)
            members = frozenset(Member(announced.peer, announced.incarnation) for announced in ranked[0])
            self._talk(SwarmChanged(members, self._costs))

    def told(self, sender: PeerId, message: LaneControl) -> None:
        """What another data node says of lanes."""
        self._talk(Arrived(sender, message))

    def _talk(self, event: Event) -> None:
        now = self.world.time.now
        for action in self.negotiator.handle(event, now):
            if isinstance(action, Tell):
                self.world.tell(self.peer, action.to, action.message)
        self.lanes = self.negotiator.lanes
        wakes = max(self.negotiator.wakes_at, now)
        if wakes != self._wakes and wakes < math.inf:
            self.world.time.after(wakes - now, lambda: self.peer.do(lambda: self._wake(wakes)))
        self._wakes = wakes

    def _wake(self, due: float) -> None:
        if self._wakes == due:  # else it wants to be woken at another time by now
            self._wakes = math.inf
            self._talk(Tick())
