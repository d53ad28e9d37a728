"""The count of completed microbatches by module and by route, in a run with experts: who has seen what, and what had to
go elsewhere.

It stands alone because it judges nothing: which expert is visited is the data node's choice.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from node.observability.events import Completed, Event
from swarm.vocabulary.types import Route


def is_rerouted(event: Event | None) -> bool:
    """Whether a microbatch has visited another expert than one of its own route."""
    if not isinstance(event, Completed) or event.route is None:
        return False
    own = {f"{stage}.{expert}" for stage, expert in enumerate(event.route, start=1)}
    return not own.issuperset(hop.partition("@")[0] for hop in event.hops)


class RouteCount:
    """The count as a fold over the events of all logs."""

    def __init__(self) -> None:
        self._modules: Counter[str] = Counter()
        self._routes: Counter[Route] = Counter()
        self._rerouted: Counter[Route] = Counter()

    def take(self, event: Event) -> None:
        """Takes one event of a log."""
        if not isinstance(event, Completed) or event.route is None:
            return
        modules = [hop.partition("@")[0] for hop in event.hops]
        self._modules.update(modules)
        self._routes[event.route] += 1
        self._rerouted[event.route] += is_rerouted(event)

    @property
    def counts(self) -> dict[str, int]:
        """For the report's counts; nothing for a run without experts."""
        return {"rerouted": sum(self._rerouted.values())} if self._routes else {}

    def as_json(self) -> dict[str, Any]:
        """`modules` and `routes`; nothing for a run without experts."""
        if not self._routes:
            return {}
        routes = [
            {"experts": list(route), "completed": count, "rerouted": self._rerouted[route]}
            for route, count in sorted(self._routes.items())
        ]
        return {"modules": dict(sorted(self._modules.items())), "routes": routes}
