import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.experts import routes as routing
from swarm.vocabulary.types import Affinity, Hop, ModuleId, Path, PeerId, Route
from tests.swarm.membership.announcements import announcement

AFFINITY: Affinity = ((5, 9, 7), (1, 1))
OWN: Route = (1, 0)


def taken(unserved: set[ModuleId]) -> Route | None:
    return routing.served_route(OWN, AFFINITY, lambda module: module not in unserved).value


@pytest.mark.parametrize(
    ("unserved", "expected"),
    [
        ({ModuleId(1, 0), ModuleId(1, 2), ModuleId(2, 1)}, OWN),
        ({ModuleId(1, 1)}, (2, 0)),
        ({ModuleId(1, 1), ModuleId(1, 2)}, (0, 0)),
        ({ModuleId(2, 0)}, (1, 1)),
        ({ModuleId(1, 1), ModuleId(2, 0)}, (2, 1)),
    ],
)
def test_the_served_expert_that_fits_best_stands_in(unserved: set[ModuleId], expected: Route) -> None:
    assert taken(unserved) == expected


def test_the_lower_number_is_taken_of_two_that_fit_alike_and_a_stage_without_any_leaves_no_route() -> None:
    chosen = routing.served_route((2,), ((4, 4, 9),), lambda module: module.expert != 2)
    assert chosen.value == (0,)
    assert chosen.reason == "the best served experts: 1.0 for 1.2 (not served)"
    chosen = routing.served_route(OWN, AFFINITY, lambda module: module.stage != 2)
    assert chosen.value is None
    assert chosen.reason == "no expert of stage 2 is served"


def test_a_documents_route_is_its_best_experts_and_the_lower_of_two_alike() -> None:
    assert routing.best_route(((5, 9, 7), (1, 1), (0,))) == (1, 0, 0)
    assert routing.best_route(()) == routing.served_route((), (), lambda module: False).value == (), "without experts"


def test_modules_of_a_route_have_names() -> None:
    assert [routing.module_at((1, 0), stage) for stage in range(3)] == [ModuleId(0), ModuleId(1, 1), ModuleId(2)]
    assert routing.module_at((), 2) == ModuleId(2)
    assert routing.name_of_route((1, 0)) == "1.1,2.0"


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any))
def test_every_stretch_of_turns_has_about_each_routes_share(counts: list[int]) -> None:
    turns = routing.in_shares(counts)
    assert [turns.count(route) for route in range(len(counts))] == counts
    given_out = [0] * len(counts)
    for turn, route in enumerate(turns, start=1):
        given_out[route] += 1
        due = [turn * count / len(turns) for count in counts]
        assert all(abs(given - fair) <= len(counts) for given, fair in zip(given_out, due, strict=True))


@pytest.mark.parametrize("counts", [[16, 16, 16, 16], [20, 12, 14, 18], [9, 9, 9, 9, 9, 9, 9, 9, 9]])
def test_experts_have_even_work_in_any_32_microbatches(counts: list[int]) -> None:
    experts = math.isqrt(len(counts))
    turns = routing.in_shares(counts) * 2
    for first in range(len(turns) - 32):
        for stage in range(2):
            visits = Counter(route // experts if stage else route % experts for route in turns[first : first + 32])
            assert max(visits.values()) * experts / 32 <= 1.25


def path(*modules: ModuleId) -> Path:
    return Path(PeerId("data"), tuple(Hop(module, PeerId(str(module))) for module in modules))


def test_the_modules_that_others_stand_for_are_those_of_visited_stages() -> None:
    assert routing.missed_modules((1, 0), path(ModuleId(1, 1), ModuleId(2))) == ()
    assert routing.missed_modules((1, 0), path(ModuleId(1, 0), ModuleId(2))) == (ModuleId(1, 1),)
    assert routing.missed_modules((1, 1), path(ModuleId(2))) == (ModuleId(2, 1),), "a skipped stage is no other's"
    assert routing.missed_modules((), path(ModuleId(1))) == (), "without experts"


def test_microbatches_are_counted_by_their_own_route() -> None:
    tally = routing.RouteTally()
    tally.completed((1,), path(ModuleId(1, 1)), 2.0)
    tally.completed((1,), path(ModuleId(1, 0)), 4.0)
    tally.completed((0,), path(ModuleId(1, 0)), None)
    assert (tally.routes[1,].visits, tally.routes[1,].rerouted, tally.routes[1,].loss.mean) == (2, 1, 3.0)
    assert tally.routes[0,].loss.samples == 0
    assert tally.rerouted == {ModuleId(1, 1): 1}


def test_routes_beyond_those_that_are_counted_are_one() -> None:
    tally = routing.RouteTally()
    routes: list[Route] = [(number,) for number in range(routing.MAX_ROUTES + 5)]
    for route in routes:
        tally.completed(route, path(ModuleId(1, route[0])), 1.0)
    assert len(tally.routes) == routing.MAX_ROUTES + 1
    assert tally.routes[routing.OTHERS].visits == 5


def test_newcomers_take_the_routes_with_the_fewest_workers_one_after_another() -> None:
    others = [announcement("hop", ModuleId(1, 0)), announcement("data", 0)]
    found = list[Route]()
    for number in range(12):
        chosen = routing.neediest_route((1, 2, 3), others, PeerId(f"p{number}"))
        others.append(announcement(f"p{number}", 0, route=chosen.value))
        found.append(chosen.value)
    assert found[0][0] == 1, "module 1.0 has a replica already"
    assert sorted(found[:6]) == sorted(found[6:]) == [(one, two) for one in range(2) for two in range(3)]
    many = routing.neediest_route((1, *[64] * 20), others, PeerId("p"))
    assert len(many.value) == 20
    assert many.reason.startswith("0 other nodes have the path 1.")


def test_a_document_is_read_by_the_workers_of_its_path_else_by_nodes_without_one_else_by_the_closest() -> None:
    a, b, c, d = map(PeerId, "abcd")
    assert routing.readers_of(AFFINITY, {a: OWN, b: (0, 0), c: OWN, d: ()}) == [a, c]
    assert routing.readers_of(AFFINITY, {a: (0, 0), b: (2, 0), d: ()}) == [d]
    assert routing.readers_of(AFFINITY, {a: (0, 0), b: (2, 0), c: (2, 1), d: (9, 9)}) == [b]
    assert routing.readers_of(AFFINITY, {d: (9, 9)}) == [d], "an impossible route"
