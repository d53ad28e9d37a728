"""Path choice, microbatch by microbatch: of all sets of stages and replicas the cheapest.

A route costs its links there and back, the service time of each replica, half of that again for each of our own
microbatches in flight through it (about half of those will be met there), half of the time that microbatches of ours
have waited there, and the price of each stage (`swarm.routing.prices`). All times are this data node's own
measurements, announcements only where it has none. Other data nodes show in the waiting: their announcements are old,
and data nodes that believed them moved all at once.

A stage that nobody serves any more is left out where the rules allow a path without it; at the beginning it is waited
for. A module that nobody serves, of a stage where another expert is served, is never left out: its documents go to that
one (`swarm.experts.routes`), and the stage is visited.

Repair and evaluation, which know their stages, take the replica that should finish first (`Planner.replica`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.experts.routes import module_at
from swarm.membership.membership import Membership
from swarm.routing.cost_model import Costs
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.prices import LEAST_SERVICE_S, StagePrices, visit_shares
from swarm.routing.route_search import Priced, cheapest_route
from swarm.vocabulary.announcement import NO_SPEED, Announcement, Speed
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId, Reasoned, Route, short

GATHER_S = 60.0
"""A module that nobody has served yet is waited for so long in a run with experts. What is routed to others meanwhile
is no longer the run that its manifest describes, so it is longer than a swarm needs to start."""
FULL_ROUTES = 3.0
"""Price of a replica without a free slot, in routes."""
FULL_GAIN = 0.1
"""Weight of one look in a replica's mean share of taken slots: about 20 s. Data nodes that go by the last announcement
move all at once."""
LOOK_S = 2.0
"""Interval between two looks at costs and at other data nodes' visits, in seconds."""
MET = 0.5
"""Of our own microbatches under way through a replica, those that one more will find there."""
BY_OTHERS = 0.5
"""Of the time that ours wait at a replica, what is not for our own. This and MET were the best of four pairs that were
tried in two cells of `benchmarks/paths_virtual.py` (steps with (1, 0), (1, 1), (0.5, 0) took up to 1.06 times as long,
(0.5, 1) as long); less than a half of MET was not tried."""
AT_PEERS = 0.9
"""Weight of a second at a replica relative to one on a link: waiting times are estimates, so a shorter way wins."""
TRY_EVERY = 67
"""Microbatches after which one hop goes to the replica that was not measured for longest: who was slow once may be fast
now. A prime number, so that all hops have their turn."""

Live = Mapping[ModuleId, Sequence[Announcement]]
"""The replicas of each module that may be given work."""


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No path: these modules have no peer left that could be asked."""

    modules: tuple[ModuleId, ...]


class Planner:
    """Chooses paths from a membership view.

    Args:
        times: the data node's book.
    """

    def __init__(self, rules: PathRules, membership: Membership, times: MeasuredTimes) -> None:
        self.rules = rules
        self.prices = StagePrices(rules)
        self._membership = membership
        self._times = times
        self._costs: Costs | None = None
        self._look_at = -math.inf
        self._taken: dict[PeerId, float] = {}
        """Mean share of each replica's slots that is taken, as announced."""
        self._route_s = 0.0
        """What the cheapest route cost at the last look, without the prices of stages."""
        self._visited: set[ModuleId] = set()
        """On some path so far: who serves them now may have gone, but is not yet to come."""
        self._has_gathered = not rules.has_experts
        self._gathers_since: float | None = None

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """A path for a microbatch that is launched now, or the modules that keep it from one.

        Args:
            number: of the microbatch.
            route: its experts, as they are served.
            in_flight: for each peer, how many of our microbatches are on a path through it.
        """
        live = self._membership.all_replicas(now)
        modules = [module_at(route, stage) for stage in range(1, self.rules.stages)]
        lost = [module for module in modules if module not in live]
        left_out = [module for module in lost if self.leaves_out(module, now)]
        waited_for = [
            module for module in lost if module not in left_out and not self._membership.is_served(module, now)
        ]
        if waited_for:
            return Reasoned(
                NoReplica(tuple(waited_for)), "; ".join(f"module {module} has no peer left" for module in waited_for)
            )
        costs = self._look(live, modules, in_flight, now)
        among = self._among(modules, live, in_flight)
        found = self._cheapest(costs, among, route, in_flight, self.rules.per_path)
        if found is None and left_out:
            found = self._cheapest(costs, among, route, in_flight, self.rules.fewest)
        if found is None:
            return Reasoned(NoReplica(tuple(lost)), f"too few stages have a replica in reach: not {len(lost)}")
        stage_of = {peer: stage for stage, peers in enumerate(among) for peer in peers}
        stages = [stage_of[peer] for peer in found.route]
        why = f"the cheapest of {len(modules) - len(lost)} stages, {found.price:.3f} s"
        turn, rest = divmod(number, TRY_EVERY)
        if not rest and stages:
            tried = stages[turn % len(stages)]
            oldest = self._times.longest_unmeasured(sorted(a.peer for a in live[modules[tried - 1]]))
            same: list[Sequence[PeerId]] = [among[stage] if stage in stages else () for stage in range(len(among))]
            same[tried] = [oldest]
            found = self._cheapest(costs, same, route, in_flight, len(stages)) or found
            why = f"{short(oldest)} of stage {tried} to measure it again; {why}"
        hops = tuple(Hop(modules[stage - 1], peer) for stage, peer in zip(stages, found.route, strict=True))
        self.prices.launch(stages, route, [stage for stage in range(1, len(among)) if among[stage]])
        self._visited.update(hop.module for hop in hops)
        return Reasoned(Path(self._membership.own, hops), why)

    def plan_through(
        self, stages: Sequence[int], route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """A path through the route's modules at these stages in this order, whatever the lanes."""
        modules = [module_at(route, stage) for stage in stages]
        return self._joined(modules, [self.replica(module, frozenset(), in_flight, now) for module in modules])

    def stage_prices(self) -> list[float]:
        """Seconds that a visit to each stage after stage 0 costs beyond links and computing."""
        return self.prices.prices((), self._route_s)

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

    def _look(self, live: Live, modules: Sequence[ModuleId], in_flight: Mapping[PeerId, int], now: float) -> Costs:
        """Costs as they are known, at most LOOK_S old and with all peers that may be chosen."""
        costs = self._costs
        known = costs is not None and all(a.peer in costs.forward_s for module in modules for a in live.get(module, ()))
        if costs is not None and known and now < self._look_at:
            return costs
        self._look_at = now + LOOK_S
        stages = range(1, self.rules.stages)
        by_stage = [[a for module in self.rules.modules_at(stage) for a in live.get(module, ())] for stage in stages]
        self._costs = costs = self._times.costs(by_stage)
        if self.rules.visit_ratio > 1:
            self.prices.shares = visit_shares(self.rules, [self._stage_capacity(stage, live) for stage in stages])
        served = [stage for stage in stages if by_stage[stage - 1]]
        self._taken = {a.peer: self._mean_taken(a, in_flight) for announced in by_stage for a in announced}
        self.prices.look(live.get(ModuleId(0), ()), served, now)
        among = self._among(modules, live, in_flight)
        cheapest = self._cheapest(costs, among, None, in_flight, min(self.rules.per_path, len(served)))
        self._route_s = 0.0 if cheapest is None else cheapest.price
        return costs

    def _among(
        self, modules: Sequence[ModuleId], live: Live, in_flight: Mapping[PeerId, int]
    ) -> list[Sequence[PeerId]]:
        """By stage, the replicas that may be chosen."""
        among: list[Sequence[PeerId]] = [()]
        for module in modules:
            peers = [a.peer for a in live.get(module, ())]
            on_trial = self._on_trial(peers, in_flight)
            among.append([peer for peer in peers if peer not in on_trial] or peers)
        return among

    def _cheapest(
        self,
        costs: Costs,
        among: Sequence[Sequence[PeerId]],
        route: Route | None,
        in_flight: Mapping[PeerId, int],
        length: int,
    ) -> Priced | None:
        """The cheapest route; `route` None leaves the prices of stages out."""
        if not length:
            return Priced(0.0, ())
        if route is None:
            price = {peer: self._stay_s(costs, peer, in_flight) for peers in among for peer in peers}
        else:
            extra = [0.0, *self.prices.prices(route, self._route_s)]
            price = {
                peer: extra[stage] + self._stay_s(costs, peer, in_flight) + self._slot_s(costs, peer, in_flight)
                for stage, peers in enumerate(among)
                for peer in peers
            }
        return cheapest_route(costs, self._membership.own, price, among, length, self.rules.max_forward_jump)

    def _stay_s(self, costs: Costs, peer: PeerId, in_flight: Mapping[PeerId, int]) -> float:
        """At a replica, out and back: its service, and what is waited for there, as they count beside links."""
        queue = 1 + MET * in_flight.get(peer, 0)
        return AT_PEERS * (costs.service_s(peer) * queue + BY_OTHERS * 2 * self._times.wait_s(peer))

    def _slot_s(self, costs: Costs, peer: PeerId, in_flight: Mapping[PeerId, int]) -> float:
        """Expected cost of finding no free slot, in seconds. Microbatches of others are taken to arrive at random."""
        free = costs.slots[peer] - in_flight.get(peer, 0)
        return FULL_ROUTES * self._route_s * at_least(free, self._taken.get(peer, 0.0) * costs.slots[peer])

    def _mean_taken(self, announced: Announcement, in_flight: Mapping[PeerId, int]) -> float:
        """By others: a data node keeps to replicas that are full of its own, and others go elsewhere."""
        others = announced.slots - announced.free_slots - in_flight.get(announced.peer, 0)
        now, before = max(0, others) / max(1, announced.slots), self._taken.get(announced.peer, 0.0)
        return before + FULL_GAIN * (now - before)

    def _stage_capacity(self, stage: int, live: Live) -> float:
        """Visits per second of all experts that are served, which get equally many."""
        capacities = [self._capacity(live[module]) for module in self.rules.modules_at(stage) if module in live]
        return min(capacities, default=0.0) * len(capacities)

    def _capacity(self, replicas: Sequence[Announcement]) -> float:
        """Visits per second."""
        return sum(1 / max(LEAST_SERVICE_S, self._times.visit_s(a.peer, a.speed).value) for a in replicas)

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


def at_least(count: int, mean: float) -> float:
    """The chance that a Poisson variable with this mean is `count` or more."""
    if count <= 0:
        return 1.0
    term = below = math.exp(-mean)
    for each in range(1, count):
        term *= mean / each
        below += term
    return max(0.0, 1.0 - below)


def in_flight_by_peer(paths: Sequence[Path]) -> dict[PeerId, int]:
    """How many of the paths go through each peer."""
    counts: dict[PeerId, int] = {}
    for path in paths:
        for hop in path.hops:
            counts[hop.peer] = counts.get(hop.peer, 0) + 1
    return counts
