"""Planning one microbatch when it is launched, and again when a peer on its way is gone.

The lane says which stages the microbatch visits (so that visits stay equal) and its usual peers. The timetables as last heard say who is in the way now. The
planner stays on the lane unless another route for the same stages is clearly cheaper, so that small errors in what is known do not make paths flutter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.paths.booking import Booking, Bookings
from swarm.paths.costs import Costs, Route
from swarm.paths.routing import candidates
from swarm.paths.rules import PathRules, order_tree
from swarm.paths.timetable import Timetable
from swarm.vocabulary import PeerId, Reasoned

WORTH_LEAVING = 0.05
"""Share of the round trip that another route must save before a microbatch leaves its lane."""


@dataclass(frozen=True, slots=True)
class NoRoute:
    """These stages have no peer left, or no legal order joins those that have."""

    stages: frozenset[int]


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be planned.

    Args:
        lane: the microbatch's lane; its stages are what must be visited.
        at: when the first forward starts, on the same clock as the timetables.
        urgency: how much a second of this data node counts, 1 for the one that expects to finish last.
    """

    data_node: PeerId
    lane: Route
    at: float
    urgency: float = 1.0


class MicrobatchPlanner:
    """Plans from what is known now; builds nothing that lasts, so that changed costs only need a new planner.

    Args:
        timetables: of every peer in `costs`, as last heard; peers without one count as free.
    """

    def __init__(self, costs: Costs, rules: PathRules, timetables: Mapping[PeerId, Timetable]) -> None:
        self._costs, self._rules = costs, rules
        self._stage_of = costs.stage_of()
        tables = dict(timetables)
        for peer in self._stage_of:
            if peer not in tables:
                tables[peer] = Timetable(costs.slots[peer], costs.task_overhead_s)
        self._bookings = Bookings(costs, tables)
        self._bare = {peer: (1 + costs.backward_factor) * costs.forward_s[peer] for peer in self._stage_of}
        self._near: dict[PeerId, tuple[Sequence[PeerId], ...]] = {}

    def plan(self, launch: Launch, stages: frozenset[int]) -> Reasoned[Booking | NoRoute]:
        """A route for a microbatch that is about to start.

        Args:
            stages: what the microbatch has to visit: those of its lane, also when a peer of the lane is gone.
        """
        usual = self._usual(launch)
        found = self._bookings.by_set(
            launch.data_node, launch.at, launch.urgency, order_tree(self._rules, stages), self._peers(launch.data_node)
        )
        best = found.get(stages)
        if best is None:
            missing = frozenset(stage for stage in stages if not self._costs.stages[stage])
            return Reasoned(NoRoute(missing or stages), f"no peer for stages {sorted(missing or stages)}")
        if usual is None:
            return Reasoned(best, "a peer of the lane is gone: the cheapest of the others")
        worth = WORTH_LEAVING * launch.urgency * (usual.finish - launch.at)
        if best.cost < usual.cost - worth:
            return Reasoned(
                best,
                f"off the lane: back {usual.finish - best.finish:.2f} s earlier than on it, others' waiting counted",
            )
        return Reasoned(usual, "the lane, as agreed")

    def repair(self, data_node: PeerId, kept: Route, stages: Sequence[int]) -> Reasoned[Route | NoRoute]:
        """A broken route made whole: who was visited stays, and others visit the stages that are left, in their order.

        Args:
            kept: the peers already visited.
            stages: what is left to visit. Dead and busy peers must not be in `costs`.
        """
        here, chosen = kept[-1] if kept else data_node, list(kept)
        for stage in stages:
            live = self._costs.stages[stage]
            if not live:
                return Reasoned(NoRoute(frozenset({stage})), f"stage {stage} has no peer left")
            _, here = min((self._detour(here, peer, data_node), peer) for peer in live)
            chosen.append(here)
        return Reasoned(tuple(chosen), f"stages {list(stages)} by the nearest peers that are left")

    def _detour(self, here: PeerId, peer: PeerId, ahead: PeerId) -> float:
        message = self._costs.message_s
        return 2 * (message[here][peer] + message[peer][ahead]) + self._bare[peer]

    def _usual(self, launch: Launch) -> Booking | None:
        if any(peer not in self._stage_of for peer in launch.lane):
            return None
        return self._bookings.of_route(launch.data_node, launch.at, launch.urgency, launch.lane)

    def _peers(self, data_node: PeerId) -> tuple[Sequence[PeerId], ...]:
        """The replicas nearest to a data node."""
        if data_node not in self._near:
            self._near[data_node] = candidates(self._costs, data_node, self._bare)
        return self._near[data_node]
