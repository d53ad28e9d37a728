"""Routes of documents: the best experts by score, the best served experts, and a fair launch order of routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.vocabulary.types import Affinity, ModuleId, Reasoned, Route


def best_route(affinity: Affinity) -> Route:
    """Returns the expert with the highest score at each stage; ties go to the lower number."""
    return tuple(scores.index(max(scores)) for scores in affinity)


def module_at(route: Route, stage: int) -> ModuleId:
    """Returns the module that a route visits at a stage."""
    return ModuleId(stage, route[stage - 1] if route and stage else 0)


def name_of_route(route: Route) -> str:
    """Formats a route's modules, such as `1.0,2.1`."""
    return ",".join(str(module_at(route, stage)) for stage in range(1, len(route) + 1))


def in_shares(counts: Sequence[int]) -> list[int]:
    """Interleaves routes in proportion to their microbatches, so that no expert gets its work in one burst.

    Returns:
        The index of a route for each turn. Ties go to the lower index.
    """
    turns = [((2 * turn + 1) / (2 * count), route) for route, count in enumerate(counts) for turn in range(count)]
    return [route for _, route in sorted(turns)]


def served_route(route: Route, affinity: Affinity, is_served: Callable[[ModuleId], bool]) -> Reasoned[Route | None]:
    """Returns the microbatch's route, with the best served expert in place of each unserved one.

    Args:
        route: experts with the best scores; empty in a run without experts.
        affinity: score of each expert of each stage after stage 0.

    Returns:
        None if a stage has no served expert.
    """
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
