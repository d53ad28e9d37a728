"""Path choice, microbatch by microbatch: the stages of the lane whose turn it is, in its order, by the replicas that
bring it home soonest.

Pure: everything comes in as arguments. Lanes are agreed among the data nodes (`swarm.routing.negotiation`). Which
stages a data node visits is worth agreeing on; which replicas, it chooses best itself when a microbatch sets out: the
links there and back, a replica's service time, half of it again for each of our own under way through it (of those
about half will be met there), and half of what microbatches of ours have waited there, by its own measurements
(`_home_soonest`). Others show in that waiting; their announcements are old, and data nodes that believed them moved all
at once. Where lanes may step back they are walked as they were told, for else microbatches could wait for each other in
a circle (`swarm.routing.deadlock`); then a peer is only left that is gone, crowded, or whose turn it is to be compared.

Until there are lanes, and wherever one is left, the replica that should finish first is taken. Its expected finish is
its service time (measured here, else announced) times the microbatches that it has to work off before this one's turn
and this one: those of ours that are on their way through it, or, where there is no lane, the slots it announces as
taken if that is more.

A stage that nobody serves any more is left out where the rules allow a path without it, as repair does under way; at
the beginning it is waited for. A module that nobody serves, of a stage where another expert is served, is never left
out: its documents go to that one (`swarm.experts.routes`), and the stage is visited.

In a run with experts there are no lanes: documents come by routes, and the first to finish is as good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from swarm.experts.routes import module_at
from swarm.membership.membership import Membership
from swarm.routing.cost_model import Costs
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.route_search import cheapest_in_order
from swarm.routing.stage_balance import Lanes
from swarm.routing.visit_shares import LEAST_SERVICE_S, VisitShares, equal_shares, reconsidered, share_period
from swarm.vocabulary.announcement import NO_SPEED, Announcement, Speed
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId, Reasoned, Route, short

GATHER_S = 60.0
"""A module that nobody has served yet is waited for so long in a run with experts. What is routed to others meanwhile
is no longer the run that its manifest describes, so it is longer than a swarm needs to start."""
RECONSIDER_S = 5.0
"""Between two looks at how often stages are to be visited, while there are no lanes."""
LEAVE_FACTOR = 1.5
"""A peer of the lane that should finish so many times later than another one is left out: small errors must not make
paths flutter. Less and more was worse in simulated swarms."""
MET = 0.5
"""Of our own microbatches under way through a replica, those that one more will find there."""
BY_OTHERS = 0.5
"""Of the time that ours wait at a replica, what is not for our own. This and MET were the best of four pairs that were
tried in two cells of `benchmarks/paths_virtual.py` (steps with (1, 0), (1, 1), (0.5, 0) took up to 1.06 times as long,
(0.5, 1) as long); less than a half of MET was not tried."""
AT_PEERS = 0.9
"""Of the seconds at a replica, what counts beside a second on a link: how long is waited there is a guess, and of two
ways that should take as long the shorter one leaves the links to others. With 1 as fast, and 6 % more hops between
regions where the swarm is full; with 0.8 slower behind long links (docs/BENCHMARKS.md, "What bounds the cells")."""
TRY_EVERY = 67
"""Every so many microbatches one hop goes to the replica that was not measured for longest: who was slow once may be
fast now. A prime number above that of lanes, so that every lane has its turn."""


def no_lanes() -> Lanes:
    """Of who has not agreed on any."""
    return ()


def no_costs() -> Costs | None:
    """Of who does not plan ahead."""
    return None


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No path: these modules have no peer left that could be asked."""

    modules: tuple[ModuleId, ...]


def visited_stages(rules: PathRules, number: int, shares: VisitShares | None = None) -> tuple[int, ...]:
    """The stages that microbatch `number` of a data node visits while there are no lanes, in order.

    With equal shares (None) the skipped ones move on like a ring, so that over any stages - 1 microbatches in a row
    every stage is visited equally often: then every stage's gradient is a mean over equally many microbatches
    (SkipPipe's balance rule, held without a search).
    """
    return (shares or equal_shares(rules)).stages_at(number)


def hop_to_try(lanes: Lanes, number: int) -> int | None:
    """At which hop of its lane microbatch `number` tries somebody else; each hop of each lane has its turn, and the
    next try is at another hop, so that newcomers of no stage wait until all lanes have had theirs."""
    lane, (turn, rest) = lanes[number % len(lanes)], divmod(number, TRY_EVERY)
    return None if rest or not lane else sum(divmod(turn, len(lanes))) % len(lane)


class Planner:
    """Chooses paths from a membership view.

    Args:
        times: the data node's book.
        lanes: the lanes as they are agreed now.
        costs: what they were agreed by.
    """

    def __init__(
        self,
        rules: PathRules,
        membership: Membership,
        times: MeasuredTimes,
        lanes: Callable[[], Lanes] = no_lanes,
        costs: Callable[[], Costs | None] = no_costs,
    ) -> None:
        self.rules = rules
        self._membership = membership
        self._times = times
        self._lanes, self._costs = lanes, costs
        self._shares, self._reconsider_at = equal_shares(rules), -math.inf
        self._visited: set[ModuleId] = set()
        """On some path so far: who serves them now may have gone, but is not yet to come."""
        self._has_gathered = not rules.has_experts
        self._gathers_since: float | None = None

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """A path for a microbatch, or the modules that keep it from one.

        Args:
            number: of the microbatch; in a run with experts among those of its route, so that whichever routes
                alternate, each visits all stages equally often.
            route: its experts, as they are served.
            in_flight: for each peer, how many of our microbatches are on a path through it.
        """
        lanes = self._lanes()
        if lanes:
            lane, tried = lanes[number % len(lanes)], hop_to_try(lanes, number)
            modules = [hop.module for hop in lane]
            chosen = self._home_soonest(lane, tried, in_flight, now) or [
                self._on_lane(hop, in_flight, now, try_another=place == tried) for place, hop in enumerate(lane)
            ]
        else:
            shares = self._shares_at(now)
            modules = [module_at(route, stage) for stage in visited_stages(self.rules, number, shares)]
            chosen = [self.replica(module, frozenset(), in_flight, now) for module in modules]
        kept = [
            choice.value is not None or not self.leaves_out(module, now)
            for module, choice in zip(modules, chosen, strict=True)
        ]
        if sum(kept) < self.rules.fewest:
            return self._joined(modules, chosen)
        plan = self._joined(list(compress(modules, kept)), list(compress(chosen, kept)))
        if isinstance(plan.value, Path):
            self._visited.update(hop.module for hop in plan.value.hops)
        return plan

    def plan_through(
        self, stages: Sequence[int], route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """A path through the route's modules at these stages in this order, whatever the lanes."""
        modules = [module_at(route, stage) for stage in stages]
        return self._joined(modules, [self.replica(module, frozenset(), in_flight, now) for module in modules])

    def leave_out(self, peer: PeerId, now: float) -> float:
        """No path goes through the peer for so many seconds as are returned (see `Membership.leave_out`)."""
        return self._membership.leave_out(peer, now)

    def usual_s(self, path: Path) -> float:
        """Seconds that the path's peers together take when they bring it back, with empty queues."""
        return sum(self._times.usual_s(hop.peer, self._announced_speed(hop.peer)) for hop in path.hops)

    def unserved(self, now: float) -> tuple[ModuleId, ...]:
        """The modules that no peer serves any more, whether or not the next path would need them."""
        served = self._membership.served(now)
        stages = range(1, self.rules.stages)
        return tuple(module for stage in stages for module in self.rules.modules_at(stage) if module not in served)

    def gathers(self, now: float) -> bool:
        """Whether the peers of a run with experts are still to come: not all modules have been served at once yet, and
        it is less than GATHER_S since this was asked first. From then on documents of an expert that nobody serves go
        to others."""
        if self._has_gathered:
            return False
        self._gathers_since = now if self._gathers_since is None else self._gathers_since
        self._has_gathered = now - self._gathers_since >= GATHER_S or not self.unserved(now)
        return not self._has_gathered

    def open_modules(self, now: float, *, at_once: bool = False) -> Callable[[ModuleId], bool]:
        """Which modules documents may be routed to: those that are served, and all of a stage where none is, which is
        left out or waited for.

        Args:
            at_once: leaves out those that cannot be given work at this moment, too.
        """
        served = self._membership.with_replicas(now) if at_once else self._membership.served(now)

        def is_open(module: ModuleId) -> bool:
            return module in served or served.isdisjoint(self.rules.modules_at(module.stage))

        return is_open

    def without(self, module: ModuleId, now: float) -> str:
        """What is done while nobody serves the module, for a person."""
        if self.leaves_out(module, now):
            until = "skipping it until one joins"
        elif self.has_other_expert(module, now) and not self.gathers(now):
            until = "its documents go to the next best until one joins"
        else:
            until = "waiting for one"
        several = len(self.rules.modules_at(module.stage)) > 1
        return f"{f'expert {module}' if several else f'stage {module.stage}'} has no peer left; {until}"

    def leaves_out(self, module: ModuleId, now: float) -> bool:
        """Whether paths skip the stage of a module that has lost its last peer, until one serves it again."""
        return module in self._visited and not self.has_other_expert(module, now) and self.goes_round(module, now)

    def goes_round(self, module: ModuleId, now: float) -> bool:
        """Whether paths do without a module that they have visited: nobody serves it, and they visit another expert of
        its stage, or the rules allow shorter ones.

        Not where nobody at all is in reach: then it is rather this peer that is cut off.
        """
        if self._membership.is_served(module, now):
            return False
        may_skip = self.rules.fewest < self.rules.per_path and self._membership.reaches_somebody()
        return may_skip or self.has_other_expert(module, now)

    def has_other_expert(self, module: ModuleId, now: float) -> bool:
        """Whether another module of the same stage is served."""
        others = self.rules.modules_at(module.stage)
        return any(other != module and self._membership.is_served(other, now) for other in others)

    def hosts_one_of(self, peer: PeerId, path: Path) -> bool:
        """Whether the peer announces a module that the path visits."""
        announcement = self._membership.get(peer)
        return announcement is not None and any(hop.module == announcement.module for hop in path.hops)

    def replica(
        self, module: ModuleId, without: frozenset[PeerId], in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[PeerId | None]:
        """The replica of `module` with the smallest expected finish time, or None when there is none outside
        `without`."""
        candidates = [a for a in self._membership.replicas(module, now) if a.peer not in without]
        return self._first_to_finish(module, candidates, in_flight, lambda a: self._after_all(a, in_flight))

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _shares_at(self, now: float) -> VisitShares:
        """How often stages are visited without lanes: where visits may be unequal, by what their replicas take."""
        period = share_period(self.rules)
        if period is not None and now >= self._reconsider_at:
            self._reconsider_at = now + RECONSIDER_S
            capacities = [self._stage_capacity(stage, now) for stage in range(1, self.rules.stages)]
            self._shares = reconsidered(self.rules, self._shares, capacities, period).value
        return self._shares

    def _stage_capacity(self, stage: int, now: float) -> float:
        """Visits per second of all experts that are served, which get equally many."""
        capacities = [self._capacity(module, now) for module in self.rules.modules_at(stage)]
        served = [capacity for capacity in capacities if capacity]
        return min(served, default=0.0) * len(served)

    def _capacity(self, module: ModuleId, now: float) -> float:
        """Visits per second."""
        replicas = self._membership.replicas(module, now)
        visits_s = (self._times.visit_s(a.peer, a.speed).value for a in replicas)
        return sum(1 / max(LEAST_SERVICE_S, seconds) for seconds in visits_s)

    def _first_to_finish(
        self,
        module: ModuleId,
        candidates: Sequence[Announcement],
        in_flight: Mapping[PeerId, int],
        finish: Callable[[Announcement], Reasoned[float]],
    ) -> Reasoned[PeerId | None]:
        if not candidates:
            return Reasoned(None, f"module {module} has no peer left")
        expected = {a.peer: finish(a) for a in candidates}
        on_trial = self._on_trial([a.peer for a in candidates], in_flight)
        best = min(candidates, key=lambda a: (a.peer in on_trial, expected[a.peer].value, a.peer)).peer
        figure = expected[best]
        return Reasoned(
            best, f"{module} by {short(best)}: {figure.value * 1e3:.0f} ms, {figure.reason}, of {len(candidates)}"
        )

    def _home_soonest(
        self, lane: Sequence[Hop], tried: int | None, in_flight: Mapping[PeerId, int], now: float
    ) -> list[Reasoned[PeerId | None]]:
        """The replicas by whom a microbatch that visits the lane's stages should be home first; nothing where lanes are
        walked as they were told, or a stage has nobody whose costs are known."""
        costs = self._costs()
        if costs is None or not lane or self.rules.max_back_stops:
            return []
        among: list[Sequence[PeerId]] = [()] * self.rules.stages
        for place, hop in enumerate(lane):
            live = [a.peer for a in self._membership.replicas(hop.module, now) if a.peer in costs.forward_s]
            if not live:
                return []
            on_trial = self._on_trial(live, in_flight)
            asked = [peer for peer in live if peer not in on_trial] or live
            among[hop.module.stage] = [self._times.longest_unmeasured(sorted(live))] if place == tried else asked
        stay_s = {peer: self._stay_s(costs, peer, in_flight) for peers in among for peer in peers}
        found = cheapest_in_order(costs, self._membership.own, [hop.module.stage for hop in lane], stay_s, among)
        reasons = ("to measure it again" if place == tried else "home soonest" for place in range(len(lane)))
        return [
            Reasoned(peer, f"{hop.module} by {short(peer)}, {why}")
            for hop, peer, why in zip(lane, found.route, reasons, strict=True)
        ]

    def _stay_s(self, costs: Costs, peer: PeerId, in_flight: Mapping[PeerId, int]) -> float:
        """At a replica, out and back: its service, and what is waited for there, as they count beside links."""
        queue = 1 + MET * in_flight.get(peer, 0)
        return AT_PEERS * (costs.service_s(peer) * queue + BY_OTHERS * 2 * self._times.wait_s(peer))

    def _on_lane(
        self, hop: Hop, in_flight: Mapping[PeerId, int], now: float, *, try_another: bool
    ) -> Reasoned[PeerId | None]:
        """Who serves a hop of the lane this time."""
        live = {a.peer: a for a in self._membership.replicas(hop.module, now)}

        def finish(announcement: Announcement) -> Reasoned[float]:
            return self._after(announcement, in_flight.get(announcement.peer, 0))

        best = self._first_to_finish(hop.module, tuple(live.values()), in_flight, finish)
        if hop.peer not in live or best.value is None:
            return Reasoned(best.value, f"{short(hop.peer)} of the lane is not there; {best.reason}")
        if try_another:
            oldest = self._times.longest_unmeasured(sorted(live))
            return Reasoned(oldest, f"{hop.module} by {short(oldest)}, to measure it again")
        if hop.peer in self._on_trial(list(live), in_flight) and best.value != hop.peer:
            return Reasoned(
                best.value, f"{short(hop.peer)} of the lane has not brought anything back yet; {best.reason}"
            )
        usual, fastest = finish(live[hop.peer]), finish(live[best.value])
        if usual.value > LEAVE_FACTOR * fastest.value:
            return Reasoned(best.value, f"{short(hop.peer)} of the lane is crowded; {best.reason}")
        return Reasoned(hop.peer, f"{hop.module} by {short(hop.peer)}, its lane")

    def _on_trial(self, replicas: Sequence[PeerId], in_flight: Mapping[PeerId, int]) -> frozenset[PeerId]:
        """Of a module's replicas those that have a microbatch of ours and have never brought one back, if others have.

        Announcing any speed costs nothing: whoever did would have everything that we have under way.
        """
        unmeasured = frozenset(peer for peer in replicas if not self._times.has_brought_back(peer))
        if len(unmeasured) == len(replicas):
            return frozenset()
        return frozenset(peer for peer in unmeasured if in_flight.get(peer, 0))

    def _joined(
        self, modules: Sequence[ModuleId], chosen: Sequence[Reasoned[PeerId | None]]
    ) -> Reasoned[Path | NoReplica]:
        reason = "; ".join(choice.reason for choice in chosen)
        peers = [choice.value for choice in chosen]
        missing = tuple(module for module, peer in zip(modules, peers, strict=True) if peer is None)
        if missing:
            return Reasoned(NoReplica(missing), reason)
        hops = tuple(Hop(module, peer) for module, peer in zip(modules, peers, strict=True) if peer is not None)
        return Reasoned(Path(self._membership.own, hops), reason)

    def _announced_speed(self, peer: PeerId) -> Speed:
        announcement = self._membership.get(peer)
        return NO_SPEED if announcement is None else announcement.speed

    def _after_all(self, announcement: Announcement, in_flight: Mapping[PeerId, int]) -> Reasoned[float]:
        """Its expected finish after what it says that it has, or what we know that it has."""
        taken = max(0, announcement.slots - announcement.free_slots)
        return self._after(announcement, max(in_flight.get(announcement.peer, 0), taken))

    def _after(self, announcement: Announcement, queue: int) -> Reasoned[float]:
        """Its expected finish after so many others."""
        service = self._times.visit_s(announcement.peer, announcement.speed)
        return Reasoned(service.value * (1 + queue), service.reason)


def in_flight_by_peer(paths: Sequence[Path]) -> dict[PeerId, int]:
    """How many of the paths go through each peer."""
    counts: dict[PeerId, int] = {}
    for path in paths:
        for hop in path.hops:
            counts[hop.peer] = counts.get(hop.peer, 0) + 1
    return counts
