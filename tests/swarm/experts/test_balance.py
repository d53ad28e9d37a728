from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.experts.balance import SLACK, balanced

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
