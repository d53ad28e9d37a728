"""A data node's part in the talk about lanes, carried out: what it sees of the swarm goes in, messages to the other
data nodes and its lanes come out.

Decisions are in `swarm.routing.negotiation`; here are the clock, the links and the tasks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from node.concurrency.pending_messages import PendingMessages
from node.concurrency.task_groups import set_or_after, task_scope
from node.network.local_peer import LocalPeer
from node.observability.status import LaneStatus, PathStatus
from protocol.interfaces.transport import Transport
from swarm.membership.membership import Membership
from swarm.routing.cost_model import Costs, Route
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.negotiation.negotiation_events import (
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
from swarm.routing.planner import Lanes
from swarm.routing.stage_balance import spread
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.routing_messages import LaneControl
from swarm.vocabulary.types import Hop, ModuleId, PeerId, PeerState

log = logging.getLogger(__name__)

SHORTEST_S: Final = 0.01
"""Between two ticks."""
LOOK_S: Final = 2.0
"""Between two looks at what has been measured."""
BETWEEN_LOOKS_S: Final = 0.2
"""However often somebody comes, goes, or says how it is."""
MAX_WAITING_TELLS: Final = 32
"""Messages on the way to one data node; what is more is dropped, as a network drops it: the talk repeats what
matters."""


class NegotiationRunner:
    """Of one data node.

    Args:
        in_flight: microbatches that a data node has under way at most.
    """

    def __init__(
        self, own: LocalPeer, membership: Membership, times: MeasuredTimes, rules: PathRules, in_flight: int
    ) -> None:
        self._own, self._membership, self._times = own, membership, times
        self._rules, self._in_flight = rules, in_flight
        self._negotiator = Negotiator(own.peer, rules, TalkRules(microbatches=None))
        self._costs: Costs | None = None
        self._taken: tuple[tuple[Route, ...], tuple[tuple[PeerId, ...], ...]] = (), ()
        """The routes, and the peers of each stage, from which the lanes were made."""
        self._wake = asyncio.Event()
        self._looked = self._look_at = 0.0
        self._transport: Transport | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._tellings = PendingMessages(MAX_WAITING_TELLS)
        self.lanes: Lanes = ()
        """The standing routes of our microbatches, taken in turn; none before the first look, and while a stage has
        nobody."""

    # ---- running -------------------------------------------------------------------------------------------------

    async def run(self, transport: Transport) -> None:
        """Until cancelled."""
        async with task_scope() as tasks:
            self._transport, self._tasks = transport, tasks
            try:
                while True:
                    now = self._own.clock.monotonic()
                    if now >= self._look_at:
                        self._looked, self._look_at = now, now + LOOK_S
                        self._look()
                    self._handle(Tick())
                    due = min(self._look_at, self._negotiator.wakes_at)
                    await set_or_after(self._wake, max(SHORTEST_S, due - self._own.clock.monotonic()))
            finally:
                self._tasks = None

    def look_around(self) -> None:
        """Somebody has come or gone."""
        self._look_at = min(self._look_at, self._looked + BETWEEN_LOOKS_S)
        self._wake.set()

    def _look(self) -> None:
        """Takes in how the swarm is now. Who is not serving (any more) has no part in it, and keeps what it knew."""
        if self._own.state is not PeerState.SERVING:
            return
        stages = self._live()
        if all(stages):
            self._costs = costs = self._times.costs(stages, self._in_flight)
            members = frozenset(Member(announced.peer, announced.incarnation) for announced in stages[0])
            self._handle(SwarmChanged(members, costs))

    def told(self, sender: PeerId, message: LaneControl) -> None:
        """What another data node says. Strangers and other times are the negotiator's business; it ignores them."""
        self._handle(Arrived(sender, message))
        self._wake.set()  # it may want to be woken at another time now

    def _live(self) -> list[list[Announcement]]:
        """The serving replicas of each stage, ourselves among the data nodes."""
        now = self._own.clock.monotonic()
        stages = [self._membership.replicas(ModuleId(stage), now) for stage in range(self._rules.stages)]
        stages[0] = [*stages[0], self._own.announcement()]
        return [sorted(announced, key=lambda a: a.peer) for announced in stages]

    # ---- carrying out --------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for action in self._negotiator.handle(event, self._own.clock.monotonic()):
            match action:
                case Tell():
                    self._tell(action)
                case LanesChanged(routes, why):
                    log.info("%d lanes: %s", len(routes), why)
        self._take(self._negotiator.launches)

    def _take(self, routes: tuple[Route, ...]) -> None:
        """A hop knows its module; a peer that is not in the costs any more is not on a lane that can be launched."""
        if self._costs is not None and (routes, self._costs.stages) != self._taken:
            self._taken = routes, self._costs.stages
            stage_of = self._costs.stage_of()
            self.lanes = spread(
                [
                    tuple(Hop(ModuleId(stage_of[peer]), peer) for peer in route)
                    for route in routes
                    if all(peer in stage_of for peer in route)
                ]
            )

    def _tell(self, action: Tell) -> None:
        if self._tasks is not None and self._tellings.begin(action.to):
            self._tasks.create_task(self._telling(action))

    async def _telling(self, action: Tell) -> None:
        assert self._transport is not None
        try:
            await self._transport.tell(action.to, action.message)
        except PeerError as error:
            log.debug("could not tell %s of lanes: %s", action.to, error)
        finally:
            self._tellings.end(action.to)

    # ---- looking -------------------------------------------------------------------------------------------------

    def describe(self) -> PathStatus:
        """For `status`."""
        skippable = set(range(1, self._rules.stages))
        lanes = []
        for lane in self.lanes:
            stages, peers = tuple(hop.module.stage for hop in lane), tuple(hop.peer for hop in lane)
            skipped = tuple(sorted(skippable.difference(stages)))
            lanes.append(LaneStatus(stages, skipped, peers, self._round_trip_s(peers)))
        waiting = sorted(self._times.waiting_s().items())
        waits = {str(peer): round(seconds, 4) for peer, seconds in waiting if self._is_on_a_lane(peer)}
        return PathStatus(self._negotiator.describe(), tuple(lanes), waits)

    def _round_trip_s(self, route: Route) -> float | None:
        return None if self._costs is None else round(self._costs.round_trip_s(self._own.peer, route), 4)

    def _is_on_a_lane(self, peer: PeerId) -> bool:
        return any(hop.peer == peer for lane in self.lanes for hop in lane)
