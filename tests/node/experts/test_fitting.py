"""Documents of different kinds get different routes, all experts about as many."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.experts.fitting import SLACK, balanced, fit_router
from node.experts.router import Tokens
from swarm.vocabulary.errors import ConfigError

KINDS = (b"abcd ", b"0123,", b"xyz;\n", b"(){}=")


def documents(of_each: int) -> tuple[list[tuple[Tokens, int]], list[int]]:
    """Openings of four kinds, of documents as long as each other, and the kind of each."""
    random = np.random.default_rng(5)
    kinds = [kind for kind in range(len(KINDS)) for _ in range(of_each)]
    openings = [random.choice(np.frombuffer(KINDS[kind], np.uint8), 64).astype(np.int64) for kind in kinds]
    return [(opening, 100) for opening in openings], kinds


def test_each_kind_of_document_has_a_route_of_its_own() -> None:
    openings, kinds = documents(12)
    fitted = fit_router(openings, (1, 2, 2), 64, seed=1, restarts=3)
    routes = {(kind, tuple(route)) for kind, route in zip(kinds, fitted.routes.tolist(), strict=True)}
    assert len(routes) == 4
    assert {route for _, route in routes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for table in fitted.router.tables:
        assert table is not None
        assert table.shares == (0.5, 0.5)


def test_stages_of_one_expert_are_shared() -> None:
    openings, _ = documents(8)
    fitted = fit_router(openings, (1, 1, 4), 64, seed=1, restarts=2)
    assert fitted.router.tables[0] is None
    assert set(fitted.routes[:, 0].tolist()) == {0}
    assert len(set(fitted.routes[:, 1].tolist())) == 4


def test_what_a_router_cannot_tell_apart_is_refused() -> None:
    openings, _ = documents(4)
    with pytest.raises(ConfigError, match=r"16 documents .* too few to tell 4 routes apart"):
        fit_router(openings, (1, 2, 2), 64, seed=1)
    with pytest.raises(ConfigError, match="18 experts on 18 routes"):
        fit_router(openings, (1, 18), 64, seed=1)


def test_experts_have_equal_shares_of_the_tokens_and_not_of_the_documents() -> None:
    random = np.random.default_rng(6)
    sizes = np.rint(random.lognormal(6, 1.5, 400)).astype(int).tolist()
    fitted_to = [(random.integers(97, 123, 64), size) for size in sizes]
    fitted = fit_router(fitted_to, (1, 1, 2), 64, seed=1, restarts=1)
    table = fitted.router.tables[1]
    assert table is not None
    assert max(table.shares) <= 0.52
    of_tokens = [0, 0]
    for size, (_, expert) in zip(sizes, fitted.routes.tolist(), strict=True):
        of_tokens[expert] += size
    assert max(of_tokens) / sum(of_tokens) == pytest.approx(max(table.shares))


SCORES = st.integers(2, 5).flatmap(
    lambda clusters: st.lists(
        st.lists(st.floats(-100, 100), min_size=clusters, max_size=clusters), min_size=1, max_size=60
    )
)


@given(SCORES)
def test_no_cluster_has_more_than_its_share_and_a_twentieth(scores: list[list[float]]) -> None:
    clusters = len(scores[0])
    chosen = balanced(scores, clusters)
    assert len(chosen) == len(scores)
    assert max(Counter(chosen).values()) <= math.ceil(SLACK * len(scores) / clusters)


@given(SCORES)
def test_where_there_is_room_every_document_has_its_best(scores: list[list[float]]) -> None:
    chosen = balanced(scores, len(scores[0]), slack=len(scores[0]))
    assert all(of[cluster] == max(of) for of, cluster in zip(scores, chosen, strict=True))


def test_who_would_lose_the_most_chooses_first() -> None:
    scores = [[1.0, 0.9], [5.0, 0.0], [3.0, 2.0], [4.0, 4.0]]
    assert balanced(scores, 2, slack=1.0) == [1, 0, 0, 1]
