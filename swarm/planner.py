"""The first path choice: which stages a microbatch visits, and for each the replica that should finish it first.

Pure: everything comes in as arguments. A replica's expected finish is its service time (measured here, else announced) times the microbatches it has to
work off before this one's turn and this one: those of ours that are on their way through it, or the slots it announces as taken if that is more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.announcement import Announcement
from swarm.estimates import Estimates
from swarm.membership import Membership
from swarm.paths.balance import ring_stages
from swarm.vocabulary import Hop, ModuleId, Path, PeerId, Reasoned, short


@dataclass(frozen=True, slots=True)
class PathRules:
    """What the manifest says of paths.

    Args:
        stages: number of stages, stage 0 included.
        per_path: how many of the stages after stage 0 a path visits.
    """

    stages: int
    per_path: int


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No path: these modules have no peer left that could be asked."""

    modules: tuple[ModuleId, ...]


def visited_stages(rules: PathRules, number: int) -> tuple[int, ...]:
    """The stages that microbatch `number` of a data node visits, in order.

    The skipped ones move on like a ring, so that over any stages - 1 microbatches in a row every stage is visited equally often: then every stage's
    gradient is a mean over equally many microbatches (SkipPipe's balance rule, held without a search).
    """
    return ring_stages(rules.stages, rules.per_path, number)


class Planner:
    """Chooses paths from a membership view.

    Args:
        tokens: tokens of one microbatch.
    """

    def __init__(self, rules: PathRules, membership: Membership, estimates: Estimates, tokens: int) -> None:
        self.rules = rules
        self._membership = membership
        self._estimates = estimates
        self._tokens = tokens

    def plan(self, number: int, in_flight: Mapping[PeerId, int], now: float) -> Reasoned[Path | NoReplica]:
        """A path for microbatch `number`, or the modules that keep it from one.

        Args:
            in_flight: for each peer, how many of our microbatches are on a path through it.
        """
        return self.plan_through(visited_stages(self.rules, number), in_flight, now)

    def plan_through(
        self, stages: Sequence[int], in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[Path | NoReplica]:
        """As `plan`, through these stages in this order."""
        hops: list[Hop] = []
        missing: list[ModuleId] = []
        reasons: list[str] = []
        for stage in stages:
            module = ModuleId(stage)
            chosen = self.replica(module, frozenset(), in_flight, now)
            if chosen.value is None:
                missing.append(module)
            else:
                hops.append(Hop(module, chosen.value))
            reasons.append(chosen.reason)
        if missing:
            return Reasoned(NoReplica(tuple(missing)), "; ".join(reasons))
        return Reasoned(Path(self._membership.own, tuple(hops)), "; ".join(reasons))

    def expected_s(self, path: Path) -> float:
        """Seconds that the path's peers together should take, out and back, with empty queues."""
        return sum(self._service(hop.peer) for hop in path.hops)

    def _service(self, peer: PeerId) -> float:
        announcement = self._membership.get(peer)
        speed = 0.0 if announcement is None else announcement.tokens_per_second
        return self._estimates.seconds(peer, self._tokens, speed).value

    def unserved(self, now: float) -> tuple[ModuleId, ...]:
        """The modules that no peer serves any more, whether or not the next path would need them."""
        modules = (ModuleId(stage) for stage in range(1, self.rules.stages))
        return tuple(module for module in modules if not self._membership.is_served(module, now))

    def hosts_one_of(self, peer: PeerId, path: Path) -> bool:
        """Whether the peer announces a module that the path visits."""
        announcement = self._membership.get(peer)
        return announcement is not None and any(hop.module == announcement.module for hop in path.hops)

    def replica(
        self, module: ModuleId, without: frozenset[PeerId], in_flight: Mapping[PeerId, int], now: float
    ) -> Reasoned[PeerId | None]:
        """The replica of `module` with the smallest expected finish time, or None when there is none outside `without`."""
        candidates = [a for a in self._membership.replicas(module, now) if a.peer not in without]
        if not candidates:
            return Reasoned(None, f"module {module} has no peer left")
        expected = {a.peer: self._finish(a, in_flight) for a in candidates}
        best = min(candidates, key=lambda a: (expected[a.peer].value, a.peer)).peer
        figure = expected[best]
        return Reasoned(
            best, f"{module} by {short(best)}: {figure.value * 1e3:.0f} ms, {figure.reason}, of {len(candidates)}"
        )

    def _finish(self, announcement: Announcement, in_flight: Mapping[PeerId, int]) -> Reasoned[float]:
        service = self._estimates.seconds(announcement.peer, self._tokens, announcement.tokens_per_second)
        taken = max(0, announcement.slots - announcement.free_slots)
        queue = max(in_flight.get(announcement.peer, 0), taken)
        return Reasoned(service.value * (1 + queue), service.reason)


def in_flight_by_peer(paths: Sequence[Path]) -> dict[PeerId, int]:
    """How many of the paths go through each peer."""
    counts: dict[PeerId, int] = {}
    for path in paths:
        for hop in path.hops:
            counts[hop.peer] = counts.get(hop.peer, 0) + 1
    return counts
