"""Statistics of each route's microbatches at one data node: completed, rerouted, loss."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from swarm.experts.routes import module_at
from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import ModuleId, Path, Route

MAX_ROUTES: Final = 256  # Routes with their own figures; later ones share those of the empty route
OTHERS: Final[Route] = ()


@dataclass(slots=True)
class RouteFigures:
    """Statistics of one route's completed microbatches."""

    visits: int = 0
    rerouted: int = 0  # Visits that took a different route than the documents' own
    loss: Ewma = field(default_factory=Ewma)  # Nats per token, of the latest microbatches


def missed_modules(route: Route, path: Path) -> tuple[ModuleId, ...]:
    """Returns the modules of a route that a path replaces by other experts."""
    wanted = ((module_at(route, hop.module.stage), hop.module) for hop in path.hops if route)
    return tuple(own for own, taken in wanted if own != taken)


class RouteTally:
    """Statistics of all routes at one data node."""

    def __init__(self) -> None:
        self.routes: dict[Route, RouteFigures] = {}
        # Completed microbatches by the module that was replaced
        self.rerouted: Counter[ModuleId] = Counter()

    def completed(self, route: Route, path: Path, loss: float | None) -> None:
        """Counts a completed microbatch. `route`: experts with the best scores; `path`: the path actually taken."""
        known = route if route in self.routes or len(self.routes) < MAX_ROUTES else OTHERS
        figures = self.routes.setdefault(known, RouteFigures())
        missed = missed_modules(route, path)
        figures.visits += 1
        figures.rerouted += bool(missed)
        self.rerouted.update(missed)
        if loss is not None:
            figures.loss.add(loss)
