"""Chooses the cheapest stages and replicas for each microbatch (SkipPipe, arXiv 2502.19913; SWARM, arXiv 2301.11913).

A route's price sums link times, service times, expected waits, stage prices and the risk that no slot is free.
Paths skip an unserved stage if the rules allow. Documents of an unserved expert go to another expert of its stage.
The search is dynamic programming over stages and stages visited so far, linear in replicas and quadratic in stages.
Repair and evaluation, whose stages are fixed, choose the replica that should finish first (`Planner.replica`).

Stage prices balance the visits of stages without an agreement: a stage costs more if it has had more visits than its
share, by all data nodes, which announce theirs. One may visit near stages more often if others compensate.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from statistics import median_low
from types import MappingProxyType
from typing import Final

from swarm.experts.routes import module_at
from swarm.membership.membership import Membership
from swarm.routing.measured_times import Costs, MeasuredTimes, PeerRoute
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.statistics import ExponentialBackoff, Latest
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId, PeerState, Reasoned, Route, short

AHEAD: Final = (8.0, 64.0)  # Smallest and largest value of `visits_a_route`
BEHIND_S: Final = 60.0  # Seconds in which a stage gets the visits that, in excess, raise its price by a whole route
MOST_ROUTES: Final = 2.0  # Largest absolute price of a stage, in routes
MOST_TRUSTED: Final = 1.3  # Largest announced launch rate that counts, in median rates. At 2, a lie cost others 8 %.
RATE_OVER_S: Final = 60.0  # Time over which launch rates are averaged, in seconds
MAX_ROUTES: Final = 4096
LEAST_SERVICE_S: Final = 1e-9


def visit_shares(rules: PathRules, capacities: Sequence[float]) -> list[float]:
    """Returns the share of microbatches that should visit each stage after stage 0. The sum is `rules.per_path`.

    If `visit_ratio` allows unequal shares: the most equal ones with the highest throughput, by visits per second.
    """
    per_path, stages = rules.per_path, rules.skippable
    even = per_path / max(1, stages)
    if rules.visit_ratio <= 1 or not 0 < per_path < stages or min(capacities, default=0.0) <= 0:
        return [even] * stages

    def caps(rate: float) -> list[float]:
        """Returns the largest possible share of visits of each stage at `rate` microbatches per second."""
        full = [min(1.0, capacity / rate) for capacity in capacities]
        return [min(cap, rules.visit_ratio * min(*full, even)) for cap in full]

    rate = _largest(lambda rate: sum(caps(rate)) >= per_path, math.fsum(capacities) / per_path)
    most = caps(rate)
    level = _largest(lambda level: math.fsum(min(cap, level) for cap in most) <= per_path, 1.0)
    return [min(cap, level) for cap in most]


def _largest(holds: Callable[[float], bool], high: float) -> float:
    """Returns the largest number up to `high` for which a monotone condition holds, by bisection."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class _Rate:
    """Launches per second, averaged over RATE_OVER_S, or over the time since the first sample if shorter."""

    def __init__(self, now: float) -> None:
        self._since = self._last = now
        self.value = 0.0

    def add(self, launched: float, now: float) -> None:
        passed_s, self._last = now - self._last, now
        if passed_s > 0:
            gain = max(1 - math.exp(-passed_s / RATE_OVER_S), passed_s / (now - self._since))
            self.value += gain * (launched / passed_s - self.value)


@dataclass(slots=True)
class _Known:
    """Visits of each stage that another data node announced, and its launch rate."""

    incarnation: int
    visits: tuple[int, ...]
    rate: _Rate


class StagePrices:
    """Prices of stages. They follow from our visits and from the visits that other data nodes announced."""

    def __init__(self, rules: PathRules) -> None:
        self._rules = rules
        self.launched = [0] * rules.skippable  # Visits of our launched microbatches by stage, as announced
        self.shares = visit_shares(rules, ())
        self.excess = [0.0] * rules.skippable  # Visits of each stage after stage 0 beyond its share
        # With experts each route balances its own visits: routes of other data nodes are unknown.
        self._by_route = Latest[Route, list[float]](MAX_ROUTES)
        self._others: dict[PeerId, _Known] = {}
        self._own = 0
        self._own_rate: _Rate | None = None

    @property
    def visits_a_route(self) -> float:
        """Visits beyond a stage's share at which its price equals the cost of a whole route."""
        own = 0.0 if self._own_rate is None else self._own_rate.value
        rate = own + sum(known.rate.value for known in self._others.values())
        least, most = AHEAD
        return min(most, max(least, BEHIND_S * rate * self._rules.per_path / max(1, self._rules.skippable)))

    def prices(self, route: Route, route_s: float) -> list[float]:
        """Returns the price of a visit to each stage after stage 0, in seconds. `route_s`: cost of a cheapest route."""
        excess = self._by_route.get(route, [0.0] * len(self.shares)) if route else self.excess
        return [route_s * each / self.visits_a_route for each in excess]

    def launch(self, stages: Iterable[int], route: Route, among: Collection[int]) -> None:
        """Counts the stages visited by our launched microbatch. `among`: the stages that it could have visited."""
        visits = [0] * self._rules.skippable
        for stage in stages:
            visits[stage - 1] = 1
            self.launched[stage - 1] += 1
        self._own += 1
        if route:
            excess = self._by_route[route] = self._by_route.get(route) or [0.0] * len(self.shares)
        else:
            excess = self.excess
        self._add(excess, visits, 1.0, among)

    def look(self, data_nodes: Iterable[Announcement], among: Collection[int], now: float) -> None:
        """Counts the visits that other data nodes announced since the last call, up to MOST_TRUSTED launch rates."""
        if self._own_rate is None:
            self._own_rate = _Rate(now)
        self._own_rate.add(self._own, now)
        self._own = 0
        before, self._others = self._others, {}
        updates: list[tuple[_Known, list[int]]] = []
        for announced in data_nodes:
            if len(announced.visits) != self._rules.skippable:
                continue
            known = before.get(announced.peer)
            if known is None or known.incarnation != announced.incarnation:
                known = _Known(announced.incarnation, announced.visits, _Rate(now))
            self._others[announced.peer] = known
            visits = [max(0, new - old) for new, old in zip(announced.visits, known.visits, strict=True)]
            known.visits = announced.visits
            known.rate.add(sum(visits) / max(1, self._rules.per_path), now)
            updates.append((known, visits))
        most = MOST_TRUSTED * median_low([self._own_rate.value, *(known.rate.value for known, _ in updates)])
        for known, visits in updates:
            self._add(self.excess, visits, min(1.0, most / (known.rate.value or 1.0)), among)

    def _add(self, excess: list[float], visits: Sequence[int], weight: float, among: Collection[int]) -> None:
        """Adds visits to the excess of the stages in `among`. Other stages could not be visited and keep theirs."""
        total = weight * sum(visits[stage - 1] for stage in among)
        if not total:
            return
        shares = sum(self.shares[stage - 1] for stage in among)
        most = MOST_ROUTES * self.visits_a_route
        for stage in among:
            more = weight * visits[stage - 1] - total * self.shares[stage - 1] / shares
            excess[stage - 1] = min(most, max(-most, excess[stage - 1] + more))


GATHER_S = 60.0  # Time that a run with experts waits for all modules at its start, in seconds
FULL_ROUTES = 3.0  # Price of a replica without a free slot, in routes
# Weight of one update in a replica's mean share of taken slots, which smooths over about 20 s. With only the latest
# announcements, all data nodes would change replicas at once.
FULL_GAIN = 0.1
LOOK_S = 2.0  # Interval between updates of costs and of other data nodes' visits, in seconds
MET = 0.5  # Share of our microbatches in flight through a replica that a new one finds there
BY_OTHERS = 0.5  # Share of our waiting time at a replica that microbatches of other data nodes cause
AT_PEERS = 0.9  # Weight of a second at a replica, over one on a link: waits are estimates, so a shorter link wins
WAIT_FOR = 3.0  # A substitute that would take so many times as long as a busy replica is not asked
TRY_EVERY = 67  # Microbatches between two that visit the idle replica with the oldest measurement
CANDIDATES: Final = (10, 6, 4, 4)  # Replicas of a module that are compared: nearest, fastest, least busy, random

TRIAL_PAUSE_S: Final = ExponentialBackoff(2.0, 60.0)  # Pause of a module's trials after failed ones in a row

Live = Mapping[ModuleId, Sequence[Announcement]]  # Replicas of each module that accept work


@dataclass(frozen=True, slots=True)
class NoReplica:
    """Result of planning without a path: the modules that have no reachable replica."""

    modules: tuple[ModuleId, ...]


@dataclass(slots=True)
class _Trial:
    """Trials of one module's unproven replicas by our microbatches: one at a time, and none after failures."""

    peer: PeerId | None = None
    failures: int = 0
    paused_until: float = -math.inf


class Planner:
    """Planner of paths and substitutes for one peer, from membership, measured times and stage prices."""

    def __init__(
        self,
        rules: PathRules,
        membership: Membership,
        times: MeasuredTimes,
        home: Mapping[ModuleId, PeerId] = MappingProxyType({}),
    ) -> None:
        self.rules = rules
        self._home = home  # Of a node with a whole path: its own replicas, which get its work while they serve

        self.prices = StagePrices(rules)
        self._membership = membership
        self._times = times
        self._costs = Costs({}, {}, {})
        self._look_at = -math.inf
        self._few: dict[ModuleId, frozenset[PeerId]] = {}  # Of modules with many replicas: those that launches compare
        self._taken: dict[PeerId, float] = {}  # Mean share of each replica's slots that is taken, as announced
        self._route_s = 0.0  # Cost of the cheapest route at the last update, without stage prices
        # A module that was on a path has lost its peers if it is unserved; another one may still wait for its first.
        self._visited: set[ModuleId] = set()
        self._has_gathered = not (rules.has_experts or home)
        self._gathers_since: float | None = None
        self._trials: dict[ModuleId, _Trial] = {}

    def plan(
        self, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float, *, proven_only: bool = False
    ) -> Reasoned[Path | NoReplica]:
        """Returns a path for microbatch `number` of a served `route`, or the modules that prevent one.

        `in_flight`: our microbatches through each peer. `proven_only` leaves out replicas on trial, if others serve.
        """
        live = self._membership.all_replicas(now)
        modules = [module_at(route, stage) for stage in range(1, self.rules.stages)]
        lost = [module for module in modules if module not in live]
        left_out = [module for module in lost if self.leaves_out(module, now)]
        awaited = [module for module in lost if module not in left_out and not self._membership.is_served(module, now)]
        if awaited:
            return Reasoned(NoReplica(tuple(awaited)), "; ".join(f"module {each} has no peer left" for each in awaited))
        costs = self._costs_now(live, modules, in_flight, now)
        among = self._candidates(modules, live, in_flight, now, proven_only=proven_only)
        rules, whims = self.rules, stage_whims(self.rules, self._membership.own, number)
        found = self._cheapest(costs, among, route, in_flight, rules, rules.length(number), whims)
        if found is None and rules.length(number) != rules.per_path:
            found = self._cheapest(costs, among, route, in_flight, rules, rules.per_path, whims)
        if found is None and left_out:
            rules = rules.repaired(rules.fewest)
            found = self._cheapest(costs, among, route, in_flight, rules, rules.per_path, whims)
        if found is None:
            return Reasoned(NoReplica(tuple(lost)), f"too few stages have a reachable replica: {len(lost)} have none")
        stage_of = {peer: stage for stage, peers in enumerate(among) for peer in peers}
        stages = [stage_of[peer] for peer in found.route]
        why = f"the cheapest of {len(modules) - len(lost)} stages, {found.price:.3f} s"
        # Not at 0: the first microbatches of all data nodes would meet at one replica.
        is_try = not self._home and number % TRY_EVERY == TRY_EVERY - 1
        if is_try and (idle := {peer for stage in stages for peer in among[stage] if not in_flight.get(peer)}):
            oldest = self._times.longest_unmeasured(idle)
            same: list[Sequence[PeerId]] = [among[stage] if stage in stages else () for stage in range(len(among))]
            same[stage_of[oldest]] = [oldest]
            if (through := self._cheapest(costs, same, route, in_flight, rules, len(stages))) is not None:
                found, why = through, f"{short(oldest)} of stage {stage_of[oldest]} to measure it again; {why}"
                self._times.doubt(oldest, found.route)
        hops = tuple(Hop(modules[stage - 1], peer) for stage, peer in zip(stages, found.route, strict=True))
        self.prices.launch(stages, route, [stage for stage in range(1, len(among)) if among[stage]])
        self._visited.update(hop.module for hop in hops)
        for hop in hops:
            if not self._times.has_completed(hop.peer):
                self._trials.setdefault(hop.module, _Trial()).peer = hop.peer
        return Reasoned(Path(self._membership.own, hops), why)

    def plan_through(
        self, stages: Sequence[int], route: Route, in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """Returns a path through the route's modules at given stages, each by the replica that should finish first."""
        modules = [module_at(route, stage) for stage in stages]
        chosen = [self.replica(module, frozenset(), in_flight, now) for module in modules]
        reason = "; ".join(choice.reason for choice in chosen)
        pairs = [(module, choice.value) for module, choice in zip(modules, chosen, strict=True)]
        missing = tuple(module for module, peer in pairs if peer is None)
        if missing:
            return Reasoned(NoReplica(missing), reason)
        return Reasoned(Path(self._membership.own, tuple(Hop(module, peer) for module, peer in pairs if peer)), reason)

    def stage_prices(self) -> list[float]:
        return self.prices.prices((), self._route_s)

    def usual_s(self, path: Path) -> float:
        """Returns the seconds that a completed microbatch spends at the path's peers with empty queues."""
        announced = ((hop.peer, self._membership.get(hop.peer)) for hop in path.hops)
        return sum(
            self._times.usual_s(peer, 0.0 if known is None else known.tokens_per_second) for peer, known in announced
        )

    def unserved(self, now: float) -> tuple[ModuleId, ...]:
        served = self._membership.served(now)
        stages = range(1, self.rules.stages)
        return tuple(module for stage in stages for module in self.rules.modules_at(stage) if module not in served)

    def gathers(self, now: float) -> bool:
        """Whether a run with experts still waits for its first peers: until all modules are served, or for GATHER_S.

        A node with a whole path waits for its own replicas.
        """
        if self._has_gathered:
            return False
        if self._home:
            announced = ((module, self._membership.get(peer)) for module, peer in self._home.items())
            # One that does not fit hosts another module in the end.
            ready = (a is not None and (a.module != module or a.state is PeerState.SERVING) for module, a in announced)
            self._has_gathered = all(ready)
            return not self._has_gathered
        self._gathers_since = now if self._gathers_since is None else self._gathers_since
        self._has_gathered = now - self._gathers_since >= GATHER_S or not self.unserved(now)
        return not self._has_gathered

    def open_modules(self, now: float, *, at_once: bool = False) -> Callable[[ModuleId], bool]:
        """Returns a test whether documents may go to a module: it is served (`at_once`: now), or none of its stage."""
        served = self._membership.with_replicas(now) if at_once else self._membership.served(now)

        def is_open(module: ModuleId) -> bool:
            return module in served or served.isdisjoint(self.rules.modules_at(module.stage))

        return is_open

    def without(self, module: ModuleId, now: float) -> str:
        """Describes, for a message to the user, how paths cope with an unserved module."""
        if self.leaves_out(module, now):
            until = "skipping it until one joins"
        elif self.has_other_expert(module, now) and not self.gathers(now):
            until = "its documents go to the next best until one joins"
        else:
            until = "waiting for one"
        what = f"expert {module}" if len(self.rules.modules_at(module.stage)) > 1 else f"stage {module.stage}"
        return f"{what} has no peer {'left' if module in self._visited else 'yet'}; {until}"

    def leaves_out(self, module: ModuleId, now: float) -> bool:
        """Whether paths skip the stage of a module that has lost its last peer."""
        return module in self._visited and not self.has_other_expert(module, now) and self.goes_round(module, now)

    def goes_round(self, module: ModuleId, now: float) -> bool:
        """Whether paths avoid an unserved module: by another expert of its stage, or by skipping the stage."""
        if self._membership.is_served(module, now):
            return False
        # If no peer is reachable, this one is probably partitioned itself.
        may_skip = self.rules.fewest < self.rules.per_path and self._membership.reaches_somebody()
        return may_skip or self.has_other_expert(module, now)

    def has_other_expert(self, module: ModuleId, now: float) -> bool:
        others = self.rules.modules_at(module.stage)
        return any(other != module and self._membership.is_served(other, now) for other in others)

    def passes_by(self, holders: Mapping[Hop, bool], now: float) -> bool:
        """Gives silent `holders` of a late microbatch no work for a moment. False: no other replica could replace one.

        `holders`: see `PathTimes.holders`. Our own node's hops are never replaced: they would be as slow again.
        """
        served, own = self._membership.all_replicas(now), self._home.values()
        others = (
            other.peer != hop.peer for hop in holders if hop.peer not in own for other in served.get(hop.module, ())
        )
        if not any(others):
            return False
        for hop, is_silent in holders.items():
            if is_silent:
                self._membership.stalled(hop.peer, now)
        return True

    def hosts_one_of(self, peer: PeerId, path: Path) -> bool:
        announcement = self._membership.get(peer)
        return announcement is not None and any(hop.module == announcement.module for hop in path.hops)

    def replica(
        self,
        module: ModuleId,
        without: frozenset[PeerId],
        in_flight: Mapping[PeerId, int],
        now: float,
        busy: PeerId | None = None,
    ) -> Reasoned[PeerId | None]:
        """Returns the replica of `module`, not in `without`, that should finish a visit first; None if none is left.

        Also None if all others are so much slower than `busy`, which has no free slot, that waiting for it is better.
        """
        candidates = [a for a in self._membership.replicas(module, now) if a.peer not in without]
        own = self._home.get(module)
        if busy is not None and busy == own:
            return Reasoned(None, f"this node's own replica {short(own)} is busy")
        candidates = [a for a in candidates if a.peer == own] or candidates
        if not candidates:
            return Reasoned(None, f"module {module} has no peer left")
        awaited = None if busy is None else self._membership.get(busy)
        compared = candidates if awaited is None else [*candidates, awaited]
        sending_s = self._times.sending_s(a.peer for a in compared)
        expected = {a.peer: self._finish_s(a, in_flight, sending_s[a.peer]) for a in compared}
        proven, linked = self._times.has_completed, self._membership.linked
        best = min(
            candidates, key=lambda a: (not proven(a.peer), a.peer not in linked, expected[a.peer].value, a.peer)
        ).peer
        figure = expected[best]
        if awaited is not None and figure.value > WAIT_FOR * expected[awaited.peer].value:
            return Reasoned(None, f"waiting for the busy {short(awaited.peer)} is better than {short(best)}")
        return Reasoned(
            best, f"{module} by {short(best)}: {figure.value * 1e3:.0f} ms, {figure.reason}, of {len(candidates)}"
        )

    def _costs_now(self, live: Live, modules: Sequence[ModuleId], in_flight: Mapping[PeerId, int], now: float) -> Costs:
        """Returns the costs of all live replicas. Updates costs and stage prices if older than LOOK_S or incomplete."""
        costs = self._costs
        known = all(a.peer in costs.forward_s for module in modules for a in live.get(module, ()))
        if known and now < self._look_at:
            return costs
        self._look_at = now + LOOK_S
        stages = range(1, self.rules.stages)
        by_stage = [[a for module in self.rules.modules_at(stage) for a in live.get(module, ())] for stage in stages]
        self._costs = costs = self._times.costs(list(chain.from_iterable(by_stage)))
        if self.rules.visit_ratio > 1:
            self.prices.shares = visit_shares(self.rules, [self._stage_capacity(stage, live) for stage in stages])
        served = [stage for stage in stages if by_stage[stage - 1]]
        self._taken, self._few = {a.peer: self._mean_taken(a, in_flight) for each in by_stage for a in each}, {}
        self.prices.look(live.get(ModuleId(0), ()), served, now)
        among = self._candidates(modules, live, in_flight, now, proven_only=True)
        length = min(self.rules.per_path, len(served))
        cheapest = self._cheapest(costs, among, None, in_flight, self.rules, length)
        self._route_s = 0.0 if cheapest is None else cheapest.price
        return costs

    def _candidates(
        self, modules: Sequence[ModuleId], live: Live, in_flight: Mapping[PeerId, int], now: float, *, proven_only: bool
    ) -> list[Sequence[PeerId]]:
        """Returns the replicas that may be chosen, by stage."""
        # Records and links are free. While a linked replica serves the module that has completed microbatches of ours,
        # the others get one on trial at a time, over a link.
        among: list[Sequence[PeerId]] = [()]
        linked = self._membership.linked
        for module in modules:
            peers = [a.peer for a in live.get(module, ())]
            if (own := self._home.get(module)) in peers:
                among.append([own])
                continue
            proven = [peer for peer in peers if self._times.has_completed(peer)]
            new = [peer for peer in peers if peer in linked and not self._times.has_completed(peer)]
            if not linked.isdisjoint(proven) and (proven_only or not self._may_try(module, new, in_flight, now)):
                new = []
            among.append([*self._compared(module, proven, now), *new] or self._compared(module, peers, now))
        return among

    def _compared(self, module: ModuleId, peers: Sequence[PeerId], now: float) -> Sequence[PeerId]:
        """Returns at most sum(CANDIDATES) of a module's replicas."""
        if len(peers) <= sum(CANDIDATES):
            return peers
        known = self._few.get(module, frozenset())
        if known.isdisjoint(peers):
            own, costs, (near, fast, idle, any_of) = self._membership.own, self._costs, CANDIDATES
            few = heapq.nsmallest(near, peers, key=lambda peer: 2 * costs.message_s[own][peer] + costs.service_s(peer))
            few += heapq.nsmallest(fast, peers, key=costs.service_s)
            few += heapq.nsmallest(idle, peers, key=lambda peer: self._taken.get(peer, 0.0))
            few += Random(f"{own} {module} {now}").sample(peers, any_of)  # noqa: S311 - not a secret
            known = self._few[module] = frozenset(few)
        return [peer for peer in peers if peer in known]

    def _may_try(self, module: ModuleId, new: Sequence[PeerId], in_flight: Mapping[PeerId, int], now: float) -> bool:
        """Whether an unproven replica of the module may get a microbatch. Settles the module's last trial."""
        trial = self._trials.setdefault(module, _Trial())
        if trial.peer is not None and not in_flight.get(trial.peer, 0):
            trial.failures = 0 if self._times.has_completed(trial.peer) else trial.failures + 1
            trial.paused_until = now + TRIAL_PAUSE_S.seconds(trial.failures) if trial.failures else now
            trial.peer = None
        return now >= trial.paused_until and not any(in_flight.get(peer, 0) for peer in new)

    def _cheapest(
        self,
        costs: Costs,
        among: Sequence[Sequence[PeerId]],
        route: Route | None,
        in_flight: Mapping[PeerId, int],
        rules: PathRules,
        length: int,
        whims: Sequence[float] | None = None,
    ) -> "Priced | None":
        """Returns the cheapest peers for `length` stages; without prices of stages and slots if `route` is None."""
        if not length:
            return Priced(0.0, ())
        if route is None:
            price = {peer: self._residence_s(costs, peer, in_flight) for peers in among for peer in peers}
        else:
            extra = [0.0, *self.prices.prices(route, self._route_s)]
            if whims is not None:
                extra = [each + self._route_s * whim for each, whim in zip(extra, whims, strict=True)]
            price = {
                peer: extra[stage] + self._residence_s(costs, peer, in_flight) + self._slot_s(costs, peer, in_flight)
                for stage, peers in enumerate(among)
                for peer in peers
            }
        return cheapest_route(costs, self._membership.own, price, among, length, rules)

    def _residence_s(self, costs: Costs, peer: PeerId, in_flight: Mapping[PeerId, int]) -> float:
        """Returns the expected time of both passes at a replica, service and waiting, weighted by AT_PEERS."""
        queue = 1 + MET * in_flight.get(peer, 0)
        return AT_PEERS * (costs.service_s(peer) * queue + BY_OTHERS * 2 * self._times.wait_s(peer))

    def _slot_s(self, costs: Costs, peer: PeerId, in_flight: Mapping[PeerId, int]) -> float:
        """Returns the price of the risk that a replica has no free slot, in seconds, if slots are taken at random."""
        free = costs.slots[peer] - in_flight.get(peer, 0)
        return FULL_ROUTES * self._route_s * _at_least(free, self._taken.get(peer, 0.0) * costs.slots[peer])

    def _mean_taken(self, announced: Announcement, in_flight: Mapping[PeerId, int]) -> float:
        """Returns the smoothed share of a replica's slots that microbatches of other data nodes take."""
        others = announced.slots - announced.free_slots - in_flight.get(announced.peer, 0)
        now, before = max(0, others) / max(1, announced.slots), self._taken.get(announced.peer, 0.0)
        return before + FULL_GAIN * (now - before)

    def _stage_capacity(self, stage: int, live: Live) -> float:
        """Returns the visits per second that a stage can serve, if each served expert gets equally many visits."""
        capacities = [
            sum(1 / max(LEAST_SERVICE_S, self._times.visit_s(a.peer, a.tokens_per_second).value) for a in live[module])
            for module in self.rules.modules_at(stage)
            if module in live
        ]
        return min(capacities, default=0.0) * len(capacities)

    def sent(self, peer: PeerId, seconds: float) -> None:
        """Adds the time that a tensor of ours took to a peer, or after which it was given up."""
        self._times.sent(self._membership.own, peer, seconds)

    def _finish_s(self, announcement: Announcement, in_flight: Mapping[PeerId, int], link_s: float) -> Reasoned[float]:
        """Returns the expected seconds of a new visit with both ways, after the announced or known queue."""
        queue = max(in_flight.get(announcement.peer, 0), announcement.slots - announcement.free_slots)
        service = self._times.visit_s(announcement.peer, announcement.tokens_per_second)
        return Reasoned(service.value * (1 + queue) + 2 * link_s, service.reason)


def _at_least(count: int, mean: float) -> float:
    """Returns the probability that a Poisson variable of this mean is `count` or more."""
    if count <= 0:
        return 1.0
    term = below = math.exp(-mean)
    for each in range(1, count):
        term *= mean / each
        below += term
    return max(0.0, 1.0 - below)


WHIM: Final = 0.1  # Largest random preference for a stage, in routes


def stage_whims(rules: PathRules, own: PeerId, number: int) -> list[float] | None:
    """Returns a microbatch's random preferences for stages, in routes, from stage 0; None if it visits all stages."""
    # With few different sets of stages, the sets become models that never meet: half of one is worthless then.
    if rules.per_path in (0, rules.skippable):
        return None
    draw = Random(f"{own} {number}").random  # noqa: S311 - not a secret
    return [0.0, *(WHIM * draw() for _ in range(rules.skippable))]


class AlikeStages:
    """Stages that a data node visits whose peers are all alike, for a model in one process."""

    def __init__(self, rules: PathRules) -> None:
        self._rules, self._own = rules, PeerId("0")
        self._prices = StagePrices(rules)
        self._among = [(), *((PeerId(str(stage)),) for stage in range(1, rules.stages))]
        peers = dict.fromkeys([self._own, *chain.from_iterable(self._among)], 0.0)
        self._costs = Costs(peers, dict.fromkeys(peers, peers), {})

    def __call__(self, number: int) -> tuple[int, ...]:
        """Returns the stages of the next microbatch, which has this number."""
        whims = stage_whims(self._rules, self._own, number) or [0.0] * self._rules.stages
        extra = zip(self._prices.prices((), 1.0), whims[1:], strict=True)
        price = {peers[0]: sum(each) for peers, each in zip(self._among[1:], extra, strict=True)}
        length = self._rules.length(number)
        found = cheapest_route(self._costs, self._own, price, self._among, length, self._rules) if length else None
        stages = () if found is None else tuple(map(int, found.route))
        self._prices.launch(stages, (), range(1, self._rules.stages))
        return stages


def in_flight_by_peer(paths: Sequence[Path]) -> dict[PeerId, int]:
    return Counter(hop.peer for path in paths for hop in path.hops)


NEAREST = 6  # Largest number of replicas per stage in a search: those with the cheapest detour from the data node

_Front = list[tuple[float, PeerId, PeerRoute]]


@dataclass(frozen=True, slots=True)
class Priced:
    """A route, as the peers to visit in order, and its price in seconds."""

    price: float
    route: PeerRoute


def cheapest_route(
    costs: Costs,
    data_node: PeerId,
    price: Mapping[PeerId, float],
    among: Sequence[Sequence[PeerId]],
    length: int,
    rules: PathRules,
) -> Priced | None:
    """Returns the cheapest route through `length` stages whose jumps the rules allow, or None.

    `price`: seconds of a visit to each peer, without links. `among`: replicas by stage; entry 0 is not read.
    """
    message, from_data_node = costs.message_s, costs.message_s[data_node]
    # By stage and number of stages visited so far: the cheapest route to each of the stage's peers.
    fronts: list[list[_Front]] = [[[(0.0, data_node, ())]]]
    best: Priced | None = None
    for stage in range(1, len(among)):
        near = among[stage]
        if len(near) > NEAREST:
            near = heapq.nsmallest(NEAREST, near, key=lambda peer: 2 * from_data_node[peer] + price[peer])
        here: list[_Front] = [[]]
        for visited in range(1, length + 1):
            first = max(0, stage - rules.max_forward_jump)
            fronts_near = (front for front in fronts[first:stage] if len(front) >= visited)
            before = [entry for front in fronts_near for entry in front[visited - 1]]
            here.append(_extended(message, price, before, near) if before else [])
        for cost, peer, route in here[length] if len(among) - stage <= rules.max_end_jump else ():
            total = cost + 2 * from_data_node[peer]
            if best is None or total < best.price:
                best = Priced(total, route)
        fronts.append(here)
    return best


def _extended(
    links: Mapping[PeerId, Mapping[PeerId, float]], price: Mapping[PeerId, float], before: _Front, to: Sequence[PeerId]
) -> _Front:
    """Returns the cheapest extension of the routes in `before` to each of `to`."""
    extended: _Front = []
    for peer in to:
        best: PeerRoute = ()
        own, least = links[peer], math.inf
        for cost, last, route in before:
            total = cost + 2 * own[last]
            if total < least:
                least, best = total, route
        extended.append((least + price[peer], peer, (*best, peer)))
    return extended
