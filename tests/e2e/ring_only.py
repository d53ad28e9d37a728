"""A node whose paths follow the ring, as one process has them: `python -m tests.e2e.ring_only join ...`."""

from collections.abc import Mapping

from lab.world.arms import ring_stages
from node.__main__ import main
from node.runtime import role
from swarm.routing.planner import NoReplica, Planner
from swarm.vocabulary.types import Path, PeerId, Reasoned, Route


def by_the_ring(
    self: Planner, number: int, route: Route, in_flight: Mapping[PeerId, int], now: float, **_others: object
) -> Reasoned[Path | NoReplica]:
    """In place of the choice by prices. Waits for all stages: else a text whose stages start first goes first."""
    whole = self.plan_through(range(1, self.rules.stages), route, in_flight, now)
    if isinstance(whole.value, NoReplica):
        return whole
    return self.plan_through(ring_stages(self.rules, number), route, in_flight, now)


def zero(below: int) -> int:
    return 0


if __name__ == "__main__":
    Planner.plan = by_the_ring  # type: ignore[method-assign]
    role.randbelow = zero  # type: ignore[attr-defined]
    main()
