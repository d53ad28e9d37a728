"""A data node's part in the talk about lanes, carried out: what it sees of the swarm goes in, messages to the other
data nodes and its lanes come out.

Decisions are in `swarm.routing.negotiation`; here are the clock, the links and the tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from node.concurrency.machine_runner import MachineRunner
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.observability.status import LaneStatus, PathStatus, ShareStatus
from protocol.interfaces.transport import Transport
from swarm.membership.membership import Membership
from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.negotiation.negotiation_events import (
    Action,
    Arrived,
    Event,
    LanesChanged,
    Member,
    SwarmChanged,
    TalkRules,
    Tell,
    Tick,
)
from swarm.routing.negotiation.negotiator import Negotiator
from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import Lanes
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.routing_messages import LaneControl
from swarm.vocabulary.types import ModuleId, PeerId, PeerState

log = logging.getLogger(__name__)

SHORTEST_S: Final = 0.01
"""Between two ticks."""
LOOK_S: Final = 2.0
"""Between two looks at what has been measured."""
BETWEEN_LOOKS_S: Final = 0.2
"""However often somebody comes, goes, or says how it is."""
MAX_WAITING_MESSAGES: Final = 32
"""Messages on the way to one data node; what is more is dropped, as a network drops it: the talk repeats what
matters."""

NO_LANES: Final = "no lanes in a run with experts: documents come by routes, each hop goes to the first to finish"


class NegotiationRunner(MachineRunner[Event, Action]):
    """Of one data node.

    Args:
        in_flight: microbatches that a data node has under way at most.
    """

    def __init__(
        self,
        own: LocalPeer,
        membership: Membership,
        times: MeasuredTimes,
        rules: PathRules,
        in_flight: int,
        transport: Transport,
    ) -> None:
        self._own, self._membership, self._times = own, membership, times
        self._rules, self._in_flight = rules, in_flight
        self._negotiator = Negotiator(own.peer, rules, TalkRules(microbatches=None))
        super().__init__(self._negotiator, Tick(), transport, own.clock, MAX_WAITING_MESSAGES)
        self.costs: Costs | None = None
        """As they were at the last look."""
        self._looked = self._look_at = 0.0
        self.lanes: Lanes = ()
        """The standing routes of our microbatches, taken in turn; none before the first look, and while a stage has
        nobody."""

    # ---- running -------------------------------------------------------------------------------------------------

    def receiving(self, dispatcher: Dispatcher) -> AbstractContextManager[None]:
        """Within it, what other data nodes say of lanes comes here."""
        return dispatcher.registered(messages={LaneControl: self.receive})

    def _look_around(self) -> None:
        now = self.clock.monotonic()
        if now >= self._look_at:
            self._looked, self._look_at = now, now + LOOK_S
            self._look()

    def _pause_s(self) -> float:
        return max(SHORTEST_S, min(self._look_at, self._negotiator.wakes_at) - self.clock.monotonic())

    def look_soon(self) -> None:
        """Somebody has come or gone."""
        self._look_at = min(self._look_at, self._looked + BETWEEN_LOOKS_S)
        self.wake()

    def _look(self) -> None:
        """Takes in how the swarm is now. Who is not serving (any more) has no part in it, and keeps what it knew. In a
        run with experts there is nothing to agree on: lanes are lists of stages."""
        if self._rules.has_experts or self._own.state is not PeerState.SERVING:
            return
        stages = self._live()
        if all(stages):
            self.costs = costs = self._times.costs(stages, self._in_flight)
            members = frozenset(Member(announced.peer, announced.incarnation) for announced in stages[0])
            self.handle(SwarmChanged(members, costs))

    def receive(self, sender: PeerId, message: LaneControl) -> None:
        """Takes in a small message. Strangers and other times are the negotiator's business; it ignores them."""
        self.handle(Arrived(sender, message))
        self.wake()  # it may want to be woken at another time now

    def _live(self) -> list[list[Announcement]]:
        """The serving replicas of each stage, ourselves among the data nodes."""
        now = self.clock.monotonic()
        stages = [self._membership.replicas(ModuleId(stage), now) for stage in range(self._rules.stages)]
        stages[0] = [*stages[0], self._own.announcement()]
        return [sorted(announced, key=lambda a: a.peer) for announced in stages]

    # ---- carrying out --------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """See `MachineRunner`; lanes are taken over at once."""
        super().handle(event)
        self.lanes = self._negotiator.lanes

    def _carry_out(self, action: Action) -> None:
        match action:
            case Tell(to, message):
                self.send(to, message)
            case LanesChanged(routes, why):
                log.info("%d lanes: %s", len(routes), why)

    # ---- looking -------------------------------------------------------------------------------------------------

    def describe(self, visits: Mapping[int, int]) -> PathStatus:
        """For `status`.

        Args:
            visits: completed ones of our microbatches, by stage after 0.
        """
        if self._rules.has_experts:
            return PathStatus(NO_LANES)
        skippable = set(range(1, self._rules.stages))
        lanes = []
        for lane in self.lanes:
            stages, peers = tuple(hop.module.stage for hop in lane), tuple(hop.peer for hop in lane)
            skipped = tuple(sorted(skippable.difference(stages)))
            lanes.append(LaneStatus(stages, skipped, peers, self._round_trip_s(peers)))
        waiting = sorted(self._times.waiting_s().items())
        waits = {str(peer): round(seconds, 4) for peer, seconds in waiting if self._is_on_a_lane(peer)}
        return PathStatus(self._negotiator.describe(), tuple(lanes), waits, self._shares(visits))

    def _shares(self, visits: Mapping[int, int]) -> ShareStatus | None:
        shares = self._negotiator.shares
        if shares is None:
            return None
        completed = sum(visits.values()) / max(1, self._rules.per_path)
        stages = range(1, self._rules.stages)
        wanted = {str(stage): round(shares.value.share(stage), 4) for stage in stages}
        made = {str(stage): round(visits.get(stage, 0) / completed, 4) for stage in stages if completed}
        return ShareStatus(wanted, made, shares.reason)

    def _round_trip_s(self, route: PeerRoute) -> float | None:
        return None if self.costs is None else round(self.costs.round_trip_s(self._own.peer, route), 4)

    def _is_on_a_lane(self, peer: PeerId) -> bool:
        return any(hop.peer == peer for lane in self.lanes for hop in lane)
