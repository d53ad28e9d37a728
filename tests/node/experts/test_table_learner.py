"""A router that mixes two kinds of documents up learns from their losses which expert each kind belongs to."""

from __future__ import annotations

import numpy as np
import torch

from node.experts.route_tables import BIAS, ENTRIES, Values, trained_router
from node.experts.router import BUCKETS, Router, StageTable, Tokens
from node.experts.table_learner import EVERY, FIRST_AT, KEPT, ScoredDocument, TableLearner
from swarm.experts.routes import best_route

PREFIX = 32
KINDS = (b"abcdefgh", b"stuvwxyz")


def opening(kind: int, random: np.random.Generator) -> Tokens:
    return random.choice(np.frombuffer(KINDS[kind], np.uint8), PREFIX).astype(np.int64)


def by_a_few_pairs(random: np.random.Generator) -> Router:
    """Of a stage with one expert and one with two, told apart by pairs that say nothing of the kinds."""
    entries = random.integers(-20, 21, (2, BUCKETS)).astype(np.int8)
    return Router((None, StageTable(entries, np.zeros(2, np.int32), (0.5, 0.5))), PREFIX)


def learnt(learner: TableLearner, times: int = 1) -> tuple[Values, Values]:
    entries, bias = np.zeros((2, BUCKETS), np.float32), np.zeros(2, np.float32)
    for _ in range(times):
        more_entries, more_bias = learner.learn(entries, bias)
        entries, bias = entries + more_entries, bias + more_bias
    return entries, bias


def tables(values: tuple[Values, Values]) -> dict[str, torch.Tensor]:
    return {ENTRIES: torch.from_numpy(values[0]), BIAS: torch.from_numpy(values[1])}


def right(router: Router, random: np.random.Generator) -> float:
    """Of new documents."""
    return float(
        np.mean(
            [best_route(router.affinity("", opening(number % 2, random)))[1] == number % 2 for number in range(400)]
        )
    )


def scored(first: Router, count: int, loss: float, random: np.random.Generator) -> TableLearner:
    """Documents of both kinds, each of which loses so much with the other's expert."""
    learner = TableLearner(first)
    for number in range(count):
        of, kind = opening(number % 2, random), number % 2
        taken = best_route(first.affinity("", of))[1]
        there = [0.0 if expert == kind else loss for expert in range(2)]
        learner.add(ScoredDocument(of, ((0.0,), tuple(cost - there[taken] for cost in there))))
    return learner


def test_documents_find_the_expert_that_predicts_them_best() -> None:
    random = np.random.default_rng(1)
    first = by_a_few_pairs(random)
    assert right(first, random) < 0.7
    learner = scored(first, 200, 0.4, random)
    once = learnt(learner)
    assert right(trained_router(first, tables(once)), random) > 0.95
    often = learnt(learner, 8)
    assert right(trained_router(first, tables(often)), random) > 0.95
    assert np.linalg.norm(often[0]) < 2 * np.linalg.norm(once[0]), "it comes to rest"


def test_experts_that_are_alike_leave_the_router_as_it_is() -> None:
    random = np.random.default_rng(2)
    first = by_a_few_pairs(random)
    entries, _ = learnt(scored(first, 200, 0.0, random))
    assert not entries.any()


def test_a_few_false_scores_do_not_turn_it() -> None:
    """One in eight says the contrary, as loudly as it can."""
    random = np.random.default_rng(3)
    first = by_a_few_pairs(random)
    learner = scored(first, 210, 0.4, random)
    for number in range(30):
        learner.add(ScoredDocument(opening(number % 2, random), ((0.0,), ((-1.0, 1.0), (1.0, -1.0))[1 - number % 2])))
    assert right(trained_router(first, tables(learnt(learner))), random) > 0.8


def test_it_learns_when_there_is_enough_that_is_new_and_keeps_so_many() -> None:
    random = np.random.default_rng(4)
    learner = TableLearner(by_a_few_pairs(random))
    document = ScoredDocument(opening(0, random), ((0.0,), (0.0, 0.1)))
    due = [learner.add(document) for _ in range(FIRST_AT)]
    assert due == [False] * (FIRST_AT - 1) + [True]
    learnt(learner)
    assert [learner.add(document) for _ in range(EVERY)] == [False] * (EVERY - 1) + [True]
    for _ in range(KEPT):
        learner.add(document)
    assert learner.documents == FIRST_AT + EVERY + KEPT
    assert len(learner._kept) == KEPT
