"""A data node's part of a peer of the world: what `node.routing` does around flights, planner and measurements."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from swarm.pipeline.custody_events import Key, Started
from swarm.pipeline.in_flight import Flight, Flights
from swarm.routing.latency_attribution import PathTimes
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.planner import NoReplica, in_flight_by_peer
from swarm.simulation.arms import SwarmPlanner
from swarm.vocabulary.pipeline_messages import Direction, Purpose, Receipt, Stranded
from swarm.vocabulary.types import MicrobatchId, Path, PeerId

if TYPE_CHECKING:
    from swarm.simulation.pipeline_peer import Peer

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
        self.flights = Flights(peer.id, rules, first_number=peer.incarnation * NUMBERS_A_LIFE)
        self.stopping = False
        measured = MeasuredTimes(peer.id, TOKENS)
        self._times = PathTimes(peer.id, measured, peer.membership.slots_of)
        self.planner = self.world.planner_of(self.world.ground.path_rules, peer.membership, measured)
        self._swarm = self.planner.rule if isinstance(self.planner, SwarmPlanner) else None
        self.planned: dict[MicrobatchId, Path] = {}

    # ---- launching -----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """As many microbatches as may start now."""
        while not self.stopping and self.flights.may_start().value:
            now = self.world.time.now
            load = in_flight_by_peer([flight.path for flight in self.flights.in_flight])
            began = time.process_time()
            plan = self.planner.plan(self.flights.next_number % NUMBERS_A_LIFE, (), load, now).value
            self.world.ledger.planning_cpu_s += time.process_time() - began
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
            if self._swarm is not None:
                self._swarm.passed(sender, receipt, self.world.time.now)

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
        if self._swarm is not None:
            self._swarm.launched(flight.microbatch, flight.path, self.world.time.now)

    def completed(self, flight: Flight, path: Path) -> None:
        """Notes what came of it: the path whose gradients count."""
        self.world.ledger.completed[flight.microbatch] = path
        self.world.ledger.repaired_at.update(repaired_positions(self.planned.pop(flight.microbatch), path))
        if self._swarm is not None:
            self._swarm.ended(flight.microbatch, path)

    def abandoned(self, flight: Flight) -> None:
        """Nothing came of it."""
        del self.planned[flight.microbatch]
        if self._swarm is not None:
            self._swarm.ended(flight.microbatch, None)
