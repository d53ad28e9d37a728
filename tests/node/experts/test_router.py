"""A router is the same on every machine, or it is refused."""

import math
from collections import Counter
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.experts import router as routing
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.experts.routes import best_route
from swarm.vocabulary.errors import ConfigError, StateError
from swarm.vocabulary.types import Route
from tests.node.small_manifest import small_manifest

PREFIX = 8


def some_router(experts: tuple[int, ...] = (1, 2, 3), prefix: int = PREFIX, seed: int = 0) -> routing.Router:
    random = np.random.default_rng(seed)

    def table(count: int) -> routing.StageTable:
        return routing.StageTable(
            random.integers(-127, 128, (count, routing.BUCKETS)).astype(np.int8),
            random.integers(-200, 201, count).astype(np.int32),
            tuple([1 / count] * count),
        )

    return routing.Router(tuple(table(count) if count > 1 else None for count in experts[1:]), prefix)


def manifest_with(router: routing.Router, **changes: Any) -> Manifest:
    return small_manifest(
        model__attention="documents",
        stages__experts=router.experts,
        routing={"router": routing.router_digest(router.to_bytes()), "prefix": router.prefix},
        **changes,
    )


ROUTER = some_router()


def tokens(text: bytes) -> routing.Tokens:
    return np.frombuffer(text, np.uint8).astype(np.int64)


def test_a_score_is_the_sum_of_the_pairs_entries_and_the_bias() -> None:
    opening = tokens(b"a document that is longer than the prefix")
    found = ROUTER.affinity("", opening)
    for table, scores in zip(ROUTER.tables, found, strict=True):
        for expert, score in enumerate(scores):
            pairs = zip(opening[: PREFIX - 1].tolist(), opening[1:PREFIX].tolist(), strict=True)
            entries = [
                int(table.entries[expert, (31 * after + 1009 * before + 7) % routing.BUCKETS])
                for before, after in pairs
            ]
            assert score == sum(entries) + int(table.bias[expert])
    assert len(best_route(found)) == 2


@given(st.binary(max_size=40))
def test_what_follows_the_prefix_has_no_say(text: bytes) -> None:
    assert ROUTER.affinity("", tokens(b"8 bytes." + text)) == ROUTER.affinity("", tokens(b"8 bytes."))


def test_buckets_are_in_range_for_any_vocabulary() -> None:
    found = routing.buckets(np.array([999_999, 0, 256, 999_999], dtype=np.int64))
    assert found.min() >= 0
    assert found.max() < routing.BUCKETS


@pytest.mark.parametrize("experts", [(1, 2, 3), (1, 1, 4), (1, 2, 1), (1, 32, 32)])
def test_its_bytes_give_it_back(experts: tuple[int, ...]) -> None:
    router = some_router(experts)
    data = router.to_bytes()
    assert len(data) == routing.router_bytes(experts)
    back = routing.read_router(data, manifest_with(router))
    assert back.to_bytes() == data
    scores = back.affinity("", tokens(b"some text"))
    assert scores == router.affinity("", tokens(b"some text"))
    assert tuple(map(len, scores)) == experts[1:], "a stage of one expert has one score"
    assert [t.shares for t in back.tables if t] == [pytest.approx(t.shares) for t in router.tables if t]


def test_another_router_than_the_manifest_names_is_refused() -> None:
    with pytest.raises(StateError, match="this is not the router"):
        routing.read_router(some_router(seed=1).to_bytes(), manifest_with(ROUTER))
    with pytest.raises(StateError, match="this is not the router"):
        routing.read_router(bytes(10**6), manifest_with(ROUTER))


DATA = ROUTER.to_bytes()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is truncated"),
        (DATA + b"\0", "length"),
        (b"S" + DATA[1:], "not a router"),
        (DATA[:16] + b"\2" + DATA[17:], "another version"),
        (DATA[:20] + b"\xff\xff" + DATA[22:], "another version"),
        (DATA[:22] + b"\2\0" + DATA[24:], "length"),
        (DATA[:26] + b"\0\0" + DATA[28:], "length"),
        (DATA[:32] + b"\xff\xff\xff\x7f" + DATA[36:], "a bias is out of range"),
        (DATA[:18] + b"\x10\0" + DATA[20:], "the manifest"),
        (some_router((1, 3, 2)).to_bytes(), "the manifest"),
    ],
)
def test_bytes_that_make_no_router_are_refused_though_the_manifest_names_them(data: bytes, why: str) -> None:
    table = manifest_with(ROUTER).model_dump()
    table["routing"]["router"] = routing.router_digest(data)
    with pytest.raises(StateError, match=why):
        routing.read_router(data, manifest_from_table(table))


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_router_or_a_state_error(data: bytes) -> None:
    table = manifest_with(ROUTER).model_dump()
    table["routing"]["router"] = routing.router_digest(data)
    with pytest.raises(StateError):
        routing.read_router(data, manifest_from_table(table))


def test_chance_deals_evenly_and_by_name_and_seed() -> None:
    router = routing.ChanceRouter(3, (1, 2, 3))
    routes = [best_route(router.affinity(str(number), tokens(b""))) for number in range(3000)]
    assert routes == [best_route(router.affinity(str(number), tokens(b"other"))) for number in range(3000)]
    assert routes != [best_route(routing.ChanceRouter(4, (1, 2, 3)).affinity(str(n), tokens(b""))) for n in range(3000)]
    for route in {(first, second) for first in range(2) for second in range(3)}:
        assert routes.count(route) == pytest.approx(500, abs=100)


def test_a_run_has_the_router_that_its_manifest_names() -> None:
    assert routing.document_router(small_manifest(), None) is None
    assert routing.document_router(manifest_with(ROUTER), ROUTER) is ROUTER
    assert isinstance(
        routing.document_router(small_manifest(stages__experts=2, model__attention="documents"), None),
        routing.ChanceRouter,
    )
    with pytest.raises(ConfigError, match=r"the router of run .* is missing"):
        routing.document_router(manifest_with(ROUTER), None)


@pytest.mark.parametrize("experts", [2, 3, 8])
def test_no_expert_has_much_more_than_its_share(experts: int) -> None:
    random = np.random.default_rng(experts)
    scores = random.integers(-1000, 1000, (600, experts)) + np.arange(experts) * 500
    sizes = np.rint(random.lognormal(6, 1, 600)).astype(np.int64)
    assert routing.shares_of_tokens(scores, sizes).max() * experts > 1.3
    assert routing.shares_of_tokens(scores + routing.even_bias(scores, sizes, 1.1), sizes).max() * experts <= 1.1


def test_shares_that_are_even_enough_stay() -> None:
    scores = np.array([[5, 1], [5, 1], [1, 5]])
    assert routing.even_bias(scores, np.array([4, 1, 5]), 1.0).tolist() == [0, 0]
    assert routing.even_bias(scores, np.array([4, 5, 5]), 1.3).tolist() == [0, 0]
    scores = np.array([[9, 1], [1, 9], [1, 9]])
    bias = routing.even_bias(scores, np.array([100, 3, 3]), 1.1)
    assert (scores + bias).argmax(axis=1).tolist() == [0, 1, 1], "one large document cannot be evened"


KINDS = (b"abcd ", b"0123,", b"xyz;\n", b"(){}=")


def documents(of_each: int) -> tuple[list[tuple[routing.Tokens, int]], list[int]]:
    """Openings of four kinds, of documents as long as each other, and the kind of each."""
    random = np.random.default_rng(5)
    kinds = [kind for kind in range(len(KINDS)) for _ in range(of_each)]
    openings = [random.choice(np.frombuffer(KINDS[kind], np.uint8), 64).astype(np.int64) for kind in kinds]
    return [(opening, 100) for opening in openings], kinds


def routes_of(router: routing.Router, documents: list[tuple[routing.Tokens, int]]) -> list[Route]:
    return [best_route(router.affinity("", opening)) for opening, _ in documents]


def test_each_kind_of_document_has_a_route_of_its_own() -> None:
    openings, kinds = documents(12)
    fitted = routing.fit_router(openings, (1, 2, 2), 64, seed=1, restarts=3)
    routes = {(kind, route) for kind, route in zip(kinds, routes_of(fitted, openings), strict=True)}
    assert len(routes) == 4
    assert {route for _, route in routes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for table in fitted.tables:
        assert table.shares == (0.5, 0.5)


def test_stages_of_one_expert_are_shared() -> None:
    openings, _ = documents(8)
    fitted = routing.fit_router(openings, (1, 1, 4), 64, seed=1, restarts=2)
    assert fitted.tables[0] is None
    assert set(routes_of(fitted, openings)) == {(0, expert) for expert in range(4)}


def test_what_a_router_cannot_tell_apart_is_refused() -> None:
    openings, _ = documents(4)
    with pytest.raises(ConfigError, match=r"16 non-empty documents are too few to fit 4 routes"):
        routing.fit_router(openings, (1, 2, 2), 64, seed=1)
    for experts, why in {(1, 65): "65 experts on 65 routes", (1, 10, 11, 10): "31 experts on 1100 routes"}.items():
        with pytest.raises(ConfigError, match=why):
            routing.documents_to_fit(experts)
    assert routing.documents_to_fit((1, 16, 16)) == 4096
    assert routing.documents_to_fit((1, 32, 32)) == 16_384


def test_no_two_clusters_would_better_swap_their_routes() -> None:
    stages = (3, 1, 4)
    centres = np.random.default_rng(2).normal(size=(12, 8)).astype(np.float32)
    routes = routing._laid_out(centres, stages)
    assert {tuple(route) for route in routes.tolist()} == set(product(*map(range, stages)))
    apart = ((centres[:, None] - centres[None, :]).astype(np.float64) ** 2).sum(axis=2)

    def cost(places: np.ndarray[Any, Any]) -> float:
        shared = ((places[:, None] == places[None, :]) & (np.array(stages) > 1)).sum(axis=2)
        return float((shared * apart).sum())

    for one, other in combinations(range(12), 2):
        swapped = routes.copy()
        swapped[[one, other]] = routes[[other, one]]
        assert cost(routes) <= cost(swapped) + 1e-3


def test_many_kinds_have_routes_of_their_own() -> None:
    """16 kinds of documents on 16 routes of 4 x 4 experts; the fit depends on the seed only."""
    random, letters = np.random.default_rng(7), np.arange(64).reshape(16, 4)
    openings = [(random.choice(letters[kind], 64), 100) for kind in range(16) for _ in range(8)]
    fitted = routing.fit_router(openings, (1, 4, 4), 64, seed=1, restarts=2)
    found = routes_of(fitted, openings)
    assert len(set(found)) >= 14
    purity = [Counter(found[first : first + 8]).most_common(1)[0][1] for first in range(0, 128, 8)]
    assert sum(purity) >= 120
    assert routing.fit_router(openings, (1, 4, 4), 64, seed=1, restarts=2).to_bytes() == fitted.to_bytes()


def test_experts_have_equal_shares_of_the_tokens_and_not_of_the_documents() -> None:
    random = np.random.default_rng(6)
    sizes = np.rint(random.lognormal(6, 1.5, 400)).astype(int).tolist()
    fitted_to = [(random.integers(97, 123, 64), size) for size in sizes]
    fitted = routing.fit_router(fitted_to, (1, 1, 2), 64, seed=1, restarts=1)
    table = fitted.tables[1]
    assert max(table.shares) <= 0.52
    of_tokens = [0, 0]
    for size, (_, expert) in zip(sizes, routes_of(fitted, fitted_to), strict=True):
        of_tokens[expert] += size
    assert max(of_tokens) / sum(of_tokens) == pytest.approx(max(table.shares))


SCORES = st.integers(2, 5).flatmap(
    lambda clusters: st.lists(
        st.lists(st.floats(-100, 100), min_size=clusters, max_size=clusters), min_size=1, max_size=60
    )
)


@given(SCORES)
def test_no_cluster_has_more_than_its_share_and_a_twentieth_unless_there_is_room(scores: list[list[float]]) -> None:
    clusters = len(scores[0])
    chosen = routing.balanced(scores, clusters)
    assert len(chosen) == len(scores)
    assert max(Counter(chosen).values()) <= math.ceil(routing.SLACK * len(scores) / clusters)
    best = routing.balanced(scores, clusters, slack=clusters)
    assert all(of[cluster] == max(of) for of, cluster in zip(scores, best, strict=True))


def test_who_would_lose_the_most_chooses_first() -> None:
    assert routing.balanced([[1.0, 0.9], [5.0, 0.0], [3.0, 2.0], [4.0, 4.0]], 2, slack=1.0) == [1, 0, 0, 1]
