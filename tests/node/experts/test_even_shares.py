"""Experts get equal shares of the tokens, and the documents that go elsewhere are those that lose the least by it."""

from __future__ import annotations

import numpy as np
import pytest

from node.experts.even_shares import even_bias, shares_of_tokens


@pytest.mark.parametrize("experts", [2, 3, 8])
def test_no_expert_has_much_more_than_its_share(experts: int) -> None:
    random = np.random.default_rng(experts)
    scores = random.integers(-1000, 1000, (600, experts)) + np.arange(experts) * 500
    sizes = np.rint(random.lognormal(6, 1, 600)).astype(np.int64)
    assert shares_of_tokens(scores, sizes).max() * experts > 1.3
    assert shares_of_tokens(scores + even_bias(scores, sizes, 1.1), sizes).max() * experts <= 1.1


def test_shares_that_are_even_enough_stay() -> None:
    scores = np.array([[5, 1], [5, 1], [1, 5]])
    assert even_bias(scores, np.array([4, 1, 5]), 1.0).tolist() == [0, 0]
    assert even_bias(scores, np.array([4, 5, 5]), 1.3).tolist() == [0, 0]


def test_those_go_elsewhere_that_lose_the_least() -> None:
    random = np.random.default_rng(1)
    scores = np.stack([random.integers(-50, 100, 300), np.zeros(300, dtype=np.int64)], axis=1)
    sizes = np.full(300, 10)
    evened = scores + even_bias(scores, sizes, 1.05)
    moved = (evened.argmax(axis=1) == 1) & (scores.argmax(axis=1) == 0)
    stayed = evened.argmax(axis=1) == 0
    assert moved.any()
    assert scores[moved, 0].max() <= scores[stayed, 0].min()


def test_one_large_document_cannot_be_evened() -> None:
    scores = np.array([[9, 1], [1, 9], [1, 9]])
    bias = even_bias(scores, np.array([100, 3, 3]), 1.1)
    assert (scores + bias).argmax(axis=1).tolist() == [0, 1, 1], "the best there is"


def test_one_expert_has_all() -> None:
    assert even_bias(np.array([[3], [4]]), np.array([1, 2]), 1.1).tolist() == [0]
