"""Routes of documents: the best experts by score, the best served experts, launch order, and statistics of routes."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import Affinity, ModuleId, Path, PeerId, Reasoned, Route


def best_route(affinity: Affinity) -> Route:
    """Returns the expert with the highest score at each stage; ties go to the lower number."""
    return tuple(scores.index(max(scores)) for scores in affinity)


def module_at(route: Route, stage: int) -> ModuleId:
    return ModuleId(stage, route[stage - 1] if route and stage else 0)


def name_of_route(route: Route) -> str:
    """Formats a route's modules, such as `1.0,2.1`."""
    return ",".join(str(module_at(route, stage)) for stage in range(1, len(route) + 1))


def in_shares(counts: Sequence[int]) -> list[int]:
    """Returns the index of a route for each turn, in proportion, so that no expert gets its work in one burst."""
    turns = [((2 * turn + 1) / (2 * count), route) for route, count in enumerate(counts) for turn in range(count)]
    return [route for _, route in sorted(turns)]


def served_route(route: Route, affinity: Affinity, is_served: Callable[[ModuleId], bool]) -> Reasoned[Route | None]:
    """Returns the route with the best served expert in place of each unserved one; None if a stage has none."""
    taken: list[int] = []
    instead: list[str] = []
    for stage, (own, scores) in enumerate(zip(route, affinity, strict=True), start=1):
        if is_served(ModuleId(stage, own)):
            taken.append(own)
            continue
        served = [expert for expert in range(len(scores)) if is_served(ModuleId(stage, expert))]
        if not served:
            return Reasoned(None, f"no expert of stage {stage} is served")
        taken.append(max(served, key=lambda expert: (scores[expert], -expert)))
        instead.append(f"{ModuleId(stage, taken[-1])} for {ModuleId(stage, own)}")
    if not instead:
        return Reasoned(route, "all modules of its route are served")
    return Reasoned(tuple(taken), f"the best served experts: {', '.join(instead)} (not served)")


MOST_COMPARED: Final = 4096  # Routes that a newcomer compares; of more, random ones


def neediest_route(experts: Sequence[int], others: Iterable[Announcement], own: PeerId) -> Reasoned[Route]:
    """Chooses the route of a node with a whole path: the fewest workers, then the fewest replicas of its modules."""
    dice = random.Random(own)  # noqa: S311 - not a secret
    choices, known = [range(count) for count in experts[1:]], list(others)
    workers = Counter(other.route for other in known)
    replicas = Counter(other.module for other in known)
    if math.prod(experts) <= MOST_COMPARED:
        routes = list(product(*choices))
        dice.shuffle(routes)
    else:
        routes = [tuple(map(dice.choice, choices)) for _ in range(MOST_COMPARED)]

    def load(route: Route) -> tuple[int, int]:
        return workers[route], sum(replicas[module_at(route, stage)] for stage in range(1, len(experts)))

    route = min(routes, key=load)
    return Reasoned(route, f"{workers[route]} other nodes have the path {name_of_route(route)}")


def readers_of(affinity: Affinity, routes: Mapping[PeerId, Route]) -> list[PeerId]:
    """Returns the data nodes that share a document: those with its path, else those without one, else the closest."""
    readers: dict[Route, list[PeerId]] = {}
    for peer, route in routes.items():
        readers.setdefault(route, []).append(peer)

    def score(route: Route) -> float:
        fits = len(route) == len(affinity) and all(e < len(scores) for e, scores in zip(route, affinity, strict=True))
        return sum(scores[e] for e, scores in zip(route, affinity, strict=True)) if fits else -math.inf

    best = best_route(affinity)
    return readers.get(best) or readers.get(()) or readers[max(sorted(readers), key=score)]


MAX_ROUTES: Final = 256  # Routes with their own figures; later ones share those of the empty route
OTHERS: Final[Route] = ()


@dataclass(slots=True)
class RouteFigures:
    visits: int = 0
    rerouted: int = 0  # Visits that took a different route than the documents' own
    loss: Ewma = field(default_factory=Ewma)  # Nats per token, of the latest microbatches


def missed_modules(route: Route, path: Path) -> tuple[ModuleId, ...]:
    wanted = ((module_at(route, hop.module.stage), hop.module) for hop in path.hops if route)
    return tuple(own for own, taken in wanted if own != taken)


class RouteTally:
    """Statistics of all routes at one data node."""

    def __init__(self) -> None:
        self.routes: dict[Route, RouteFigures] = {}
        self.rerouted: Counter[ModuleId] = Counter()  # completed microbatches by the module that was replaced

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
