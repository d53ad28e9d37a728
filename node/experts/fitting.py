"""Fits a router: clusters documents into routes by their first tokens, then fits each stage's tables to the clusters.

Clusters come from balanced hard expectation maximisation of a multinomial over hashed token pairs, best of several
restarts. Similar clusters share experts. For each stage, a softmax predicts the experts of its clusters. Runs once, on
the author's machine.

Sources: DiPaCo (arXiv:2403.10616) section 2.4, generative and discriminative routing of documents, product k-means;
balanced assignment, Gururangan et al. 2023 (arXiv:2303.14177) and Filippova et al. 2024 (arXiv:2410.03529).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from node.experts.router import (
    BUCKETS,
    MAX_BIAS,
    MAX_ENTRY,
    MAX_ROUTER_BYTES,
    Router,
    StageTable,
    Tokens,
    buckets,
    even_bias,
    shares_of_tokens,
)
from swarm.vocabulary.errors import ConfigError

Matrix = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

RESTARTS: Final = 8
ITERATIONS: Final = 15
PER_ROUTE: Final = 8
MAX_ROUTES: Final = 256
PRIOR: Final = 256.0  # Smoothing: pairs of the mean document added to each cluster
DESCENT: Final = 150  # Gradient descent steps per stage
SHRINK: Final = 1e-3  # Weight decay of the tables
EVEN: Final = 1.02  # Largest share of the tokens per expert, relative to an equal share, if possible


def counts_of(openings: Sequence[Tokens], prefix: int) -> Matrix:
    """Counts the token pairs in each document's first `prefix` tokens by hash bucket, [documents, BUCKETS]."""
    counted = np.zeros((len(openings), BUCKETS), dtype=np.float32)
    for row, opening in zip(counted, openings, strict=True):
        np.add.at(row, buckets(opening[:prefix]), 1)
    return counted


def fit_router(
    documents: Sequence[tuple[Tokens, int]], experts: Sequence[int], prefix: int, seed: int, restarts: int = RESTARTS
) -> Router:
    """Fits a router to documents (first tokens, length). Raises ConfigError if there are too few documents."""
    stages = tuple(experts[1:])
    routes = math.prod(stages)
    _check(stages, routes, len(documents))
    openings, sizes = [opening for opening, _ in documents], np.array([size for _, size in documents], dtype=np.int64)
    counts = counts_of(openings, prefix)
    random = np.random.default_rng(seed)
    found = [_clustered(counts, routes, random) for _ in range(restarts)]
    _, labels, centres = max(found, key=lambda each: each[0])
    layout = _laid_out(centres, stages)
    of_stage = layout[labels]
    tables = tuple(
        None if count == 1 else _stage_table(counts, sizes, of_stage[:, stage], count)
        for stage, count in enumerate(stages)
    )
    return Router(tables, prefix)


def _check(stages: tuple[int, ...], routes: int, documents: int) -> None:
    several = sum(count for count in stages if count > 1)
    if routes > MAX_ROUTES or several * (BUCKETS + 8) + 1024 > MAX_ROUTER_BYTES:
        raise ConfigError(
            f"{several} experts on {routes} routes are too many for a router, which allows at most"
            f" {(MAX_ROUTER_BYTES - 1024) // (BUCKETS + 8)} experts (in stages with several) and {MAX_ROUTES} routes",
            hint="Use experts in fewer stages, or omit --route-from to assign documents at random.",
        )
    if documents < PER_ROUTE * routes:
        raise ConfigError(
            f"{documents} non-empty documents are too few to fit {routes} routes, which need {PER_ROUTE * routes}",
            hint="Use a source with more documents, or fewer experts.",
        )


def _clustered(counts: Matrix, clusters: int, random: np.random.Generator) -> tuple[float, Labels, Matrix]:
    """Clusters documents by balanced hard EM. Returns log likelihood, document clusters, token log probabilities."""
    labels = random.permutation(len(counts)) % clusters
    # Start from single, distant documents. Mixtures of all documents would be too similar.
    chosen = [int(random.integers(len(counts)))]
    mean = counts.sum(axis=0) / counts.sum()
    for _ in range(1, clusters):
        chosen.append(int(_far_from(counts, chosen, random)))
    centres = _log_probabilities(counts[chosen], mean)
    likelihood = -math.inf
    for _ in range(ITERATIONS):
        scores = counts @ centres.T
        before, labels = labels, np.array(balanced(scores.tolist(), clusters), dtype=np.int64)
        likelihood = float(scores[np.arange(len(counts)), labels].sum())
        sums = np.stack([counts[labels == cluster].sum(axis=0) for cluster in range(clusters)])
        centres = _log_probabilities(sums, mean)
        if np.array_equal(before, labels):
            break
    return likelihood, labels, centres


def _far_from(counts: Matrix, chosen: list[int], random: np.random.Generator) -> int:
    """Draws a document by its distance from the nearest chosen one (k-means++, Arthur and Vassilvitskii 2007)."""
    units = np.sqrt(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    distances = np.maximum(1 - (units @ units[chosen].T).max(axis=1), 1e-9)
    return int(random.choice(len(counts), p=distances / distances.sum()))


def _log_probabilities(sums: Matrix, mean: Matrix) -> Matrix:
    smoothed = sums + PRIOR * mean + 1e-4
    found: Matrix = np.log(smoothed / smoothed.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def _laid_out(centres: Matrix, stages: tuple[int, ...]) -> Labels:
    """Assigns a route to each cluster, [clusters, stages], such that clusters that share experts are similar."""
    routes = np.array(list(product(*(range(count) for count in stages))), dtype=np.int64)
    # Number of stages with a choice that two routes share.
    shared = (routes[:, None, :] == routes[None, :, :])[:, :, np.array(stages) > 1].sum(axis=2)
    squares = (centres**2).sum(axis=1)
    apart = (squares[:, None] + squares[None, :] - 2 * centres @ centres.T) / centres.shape[1]
    place = np.arange(len(centres))
    better = True
    while better:
        better = False
        for one in range(len(place)):
            for other in range(one):
                swapped = place.copy()
                swapped[[one, other]] = place[[other, one]]
                if _cost(shared, apart, place) - _cost(shared, apart, swapped) > 1e-6:
                    place, better = swapped, True
    return routes[place]


def _cost(shared: npt.NDArray[np.int64], apart: Matrix, place: Labels) -> float:
    return float((shared[np.ix_(place, place)] * apart).sum())


def _stage_table(counts: Matrix, sizes: Labels, labels: Labels, experts: int) -> StageTable:
    """Fits a softmax over a stage's experts, rounds its weights to integers, and balances tokens by a bias."""
    weights = softmax_weights(counts, labels, experts)
    scale = MAX_ENTRY / max(float(np.abs(weights).max()), 1e-9)
    # Integer scores are equal on every machine.
    entries = np.rint(weights * scale).astype(np.int8)
    scores = counts.astype(np.int64) @ entries.T.astype(np.int64)
    bias = np.clip(even_bias(scores, sizes, EVEN), -MAX_BIAS, MAX_BIAS).astype(np.int32)
    return StageTable(entries, bias, tuple(shares_of_tokens(scores + bias, sizes).tolist()))


def softmax_weights(counts: Matrix, labels: Labels, experts: int) -> Matrix:
    """Fits a multinomial logistic regression of `labels` on `counts`. Returns unscaled weights [experts, BUCKETS]."""
    scaled = counts / np.float32(max(float(np.sqrt((counts**2).sum(axis=1).mean())), 1e-9))
    wanted = np.eye(experts, dtype=np.float32)[labels]
    weights, speed = np.zeros((experts, BUCKETS), np.float32), np.zeros((experts, BUCKETS), np.float32)
    for _ in range(DESCENT):
        logits = scaled @ weights.T
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        gradient = (odds - wanted).T @ scaled / len(scaled) + SHRINK * weights
        speed = 0.9 * speed - 1.0 * gradient
        weights = weights + speed
    return weights


# ---- balanced assignment ---------------------------------------------------------------------------------------------


SLACK: Final = 1.05  # Largest size of a cluster, relative to an equal share


def balanced(scores: Sequence[Sequence[float]], clusters: int, slack: float = SLACK) -> list[int]:
    """Assigns documents to clusters by scores [documents, clusters], at most `slack` times an equal share each."""
    capacity = math.ceil(slack * len(scores) / clusters)
    room = [capacity] * clusters
    waiting = [(*_loss(of, room), index) for index, of in enumerate(scores)]  # Negative loss, cluster, document
    heapify(waiting)
    chosen = [0] * len(scores)
    while waiting:
        # A lazy heap: entries are updated when they reach the top.
        _, best, index = waiting[0]
        current = _loss(scores[index], room)
        if current != waiting[0][:2]:  # a cluster filled up meanwhile
            heapreplace(waiting, (*current, index))
            continue
        heappop(waiting)
        chosen[index] = best
        room[best] -= 1
    return chosen


def _loss(scores: Sequence[float], room: Sequence[int]) -> tuple[float, int]:
    """Returns the second best score minus the best one, among clusters with room, and the best cluster."""
    best, second, found = -math.inf, -math.inf, -1
    for cluster, score in enumerate(scores):
        if not room[cluster]:
            continue
        if score > best:
            best, second, found = score, best, cluster
        elif score > second:
            second = score
    return second - best, found
