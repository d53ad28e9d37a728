"""What became of each route's microbatches at one data node: how many it has completed, how many of them by another
route, and their loss.

It stands alone because it is about routes as documents have them, whatever paths were taken.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from swarm.experts.routes import module_at
from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import ModuleId, Path, Route

MAX_ROUTES: Final = 256
"""Counted one by one; those that come later are counted together, as the route of no experts."""
OTHERS: Final[Route] = ()


@dataclass(slots=True)
class RouteFigures:
    """Of one route's completed microbatches."""

    visits: int = 0
    rerouted: int = 0
    """Of these, by another route than their own."""
    loss: Ewma = field(default_factory=Ewma)
    """Of the latest, nats per token."""


def missed_modules(route: Route, path: Path) -> tuple[ModuleId, ...]:
    """The modules of a route for which a path visits other experts."""
    wanted = ((module_at(route, hop.module.stage), hop.module) for hop in path.hops if route)
    return tuple(own for own, taken in wanted if own != taken)


class RouteTally:
    """The figures of one data node's routes."""

    def __init__(self) -> None:
        self.routes: dict[Route, RouteFigures] = {}
        self.rerouted: Counter[ModuleId] = Counter()
        """Completed microbatches that another expert has taken, by the module of their own route."""

    def completed(self, route: Route, path: Path, loss: float | None) -> None:
        """Counts a microbatch that has come back.

        Args:
            route: its own.
            path: that it took.
        """
        known = route if route in self.routes or len(self.routes) < MAX_ROUTES else OTHERS
        figures = self.routes.setdefault(known, RouteFigures())
        missed = missed_modules(route, path)
        figures.visits += 1
        figures.rerouted += bool(missed)
        self.rerouted.update(missed)
        if loss is not None:
            figures.loss.add(loss)
