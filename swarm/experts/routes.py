"""The route of a document by its scores, the one that can be taken while some experts are not served, and the order in
which routes are given out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.vocabulary.types import Affinity, ModuleId, Reasoned, Route


def best_route(affinity: Affinity) -> Route:
    """The best expert of each stage; of two that fit alike the lower number."""
    return tuple(scores.index(max(scores)) for scores in affinity)


def module_at(route: Route, stage: int) -> ModuleId:
    """The module that a route takes at a stage."""
    return ModuleId(stage, route[stage - 1] if route and stage else 0)


def name_of_route(route: Route) -> str:
    """The modules of a route as one word, such as `1.0,2.1`."""
    return ",".join(str(module_at(route, stage)) for stage in range(1, len(route) + 1))


def in_shares(counts: Sequence[int]) -> list[int]:
    """The order in which routes are given out that have so many microbatches each: every stretch of it has about as
    many of each as its share, so that no expert gets its work in one heap.

    Returns:
        For each turn the index of a route. Of two that are due at once the lower index comes first.
    """
    turns = [((2 * turn + 1) / (2 * count), route) for route, count in enumerate(counts) for turn in range(count)]
    return [route for _, route in sorted(turns)]


def served_route(route: Route, affinity: Affinity, is_served: Callable[[ModuleId], bool]) -> Reasoned[Route | None]:
    """Chooses the route that a microbatch can take now: its own where all its modules are served, else at each stage
    whose expert is not the served one that fits it best.

    Args:
        route: the microbatch's own; empty in a run without experts, where it is returned as it is.
        affinity: its documents' scores, for each stage after stage 0 and each of its experts.

    Returns:
        None when a stage has no served expert at all.
    """
    taken: list[int] = []
    instead: list[str] = []
    for stage, (own, scores) in enumerate(zip(route, affinity, strict=True), start=1):
        if is_served(ModuleId(stage, own)):
            taken.append(own)
            continue
        served = [expert for expert in range(len(scores)) if is_served(ModuleId(stage, expert))]
        if not served:
            return Reasoned(None, f"nobody serves any expert of stage {stage}")
        taken.append(max(served, key=lambda expert: (scores[expert], -expert)))
        instead.append(f"{ModuleId(stage, taken[-1])} for {ModuleId(stage, own)}")
    if not instead:
        return Reasoned(route, "all modules of its route are served")
    return Reasoned(tuple(taken), f"the next best experts: {', '.join(instead)}, which nobody serves")
