"""What became of each route's microbatches."""

from __future__ import annotations

from swarm.experts.route_tally import MAX_ROUTES, OTHERS, RouteTally, missed_modules
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId, Route


def path(*modules: ModuleId) -> Path:
    return Path(PeerId("data"), tuple(Hop(module, PeerId(str(module))) for module in modules))


def test_the_modules_that_others_stand_for_are_those_of_visited_stages() -> None:
    assert missed_modules((1, 0), path(ModuleId(1, 1), ModuleId(2))) == ()
    assert missed_modules((1, 0), path(ModuleId(1, 0), ModuleId(2))) == (ModuleId(1, 1),)
    assert missed_modules((1, 1), path(ModuleId(2))) == (ModuleId(2, 1),), "a skipped stage is no other's"
    assert missed_modules((), path(ModuleId(1))) == (), "without experts"


def test_microbatches_are_counted_by_their_own_route() -> None:
    tally = RouteTally()
    tally.completed((1,), path(ModuleId(1, 1)), 2.0)
    tally.completed((1,), path(ModuleId(1, 0)), 4.0)
    tally.completed((0,), path(ModuleId(1, 0)), None)
    assert (tally.routes[1,].visits, tally.routes[1,].rerouted, tally.routes[1,].loss.mean) == (2, 1, 3.0)
    assert tally.routes[0,].loss.samples == 0
    assert tally.rerouted == {ModuleId(1, 1): 1}


def test_routes_beyond_those_that_are_counted_are_one() -> None:
    tally = RouteTally()
    routes: list[Route] = [(number,) for number in range(MAX_ROUTES + 5)]
    for route in routes:
        tally.completed(route, path(ModuleId(1, route[0])), 1.0)
    assert len(tally.routes) == MAX_ROUTES + 1
    assert tally.routes[OTHERS].visits == 5
