"""Router for runs with experts: integer tables score each stage's experts by a document's first tokens.

A score is a bias plus the expert's entries for the buckets of all neighbouring token pairs.
Format, little-endian: `skipstone-router`, version (u16), prefix (u16), number of stages (u16), experts per stage (u16
each); then, for each expert of each stage with several: the share of documents it got in the fit (u32, in 2^-32), bias
(i32) and 4096 entries (i8).

A fit clusters documents into routes by balanced hard expectation maximisation of a multinomial over hashed token pairs.
Similar clusters share experts. For each stage, a softmax predicts the experts of its clusters. Sources: DiPaCo
(arXiv:2403.10616) section 2.4; balanced assignment, arXiv:2303.14177 and arXiv:2410.03529.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, StateError
from swarm.vocabulary.types import MAX_STAGES, Affinity, Route

Tokens = npt.NDArray[np.int64]

BUCKETS: Final = 4096
MAX_ROUTED_EXPERTS: Final = 64  # Of all stages with several; their tables take 257 KiB
MAX_ENTRY: Final = 127
MAX_BIAS: Final = 2**24  # Limit that keeps scores of the longest prefix within 32 bits
_MAGIC: Final = b"skipstone-router"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(f"<{len(_MAGIC)}sHHH")
_EXPERT: Final = struct.Struct("<Ii")
_SUFFIX: Final = ".router"


@dataclass(frozen=True, slots=True, eq=False)
class StageTable:
    entries: npt.NDArray[np.int8]
    bias: npt.NDArray[np.int32]
    shares: tuple[float, ...]  # Shares of the documents in the fit, with sum 1


class Router:
    """Router by score tables of the stages after 0 (None: one expert), for a document's first `prefix` tokens."""

    def __init__(self, tables: tuple[StageTable | None, ...], prefix: int) -> None:
        self.tables, self.prefix = tables, prefix
        with_several = [table for table in tables if table is not None]
        self._entries = np.concatenate([table.entries for table in with_several])
        self._bias = np.concatenate([table.bias for table in with_several])
        ends = np.cumsum([1 if table is None else len(table.bias) for table in tables])
        self._parts = [
            (int(end) - (1 if t is None else len(t.bias)), int(end)) for t, end in zip(tables, ends, strict=True)
        ]
        self._several = np.concatenate(
            [np.arange(first, end) for (first, end), t in zip(self._parts, tables, strict=True) if t is not None]
        )
        self._count = int(ends[-1])

    @property
    def experts(self) -> tuple[int, ...]:
        return (1, *(1 if table is None else len(table.bias) for table in self.tables))

    def affinity(self, name: str, opening: Tokens) -> Affinity:
        """Scores each expert of each stage after stage 0 by the document's first tokens."""
        scores = np.zeros(self._count, dtype=np.int64)
        found = self._entries.take(buckets(opening[: self.prefix]), axis=1).sum(axis=1, dtype=np.int32)
        scores[self._several] = found + self._bias
        listed = scores.tolist()
        return tuple(tuple(listed[first:end]) for first, end in self._parts)

    def to_bytes(self) -> bytes:
        experts = self.experts
        parts = [_HEADER.pack(_MAGIC, _VERSION, self.prefix, len(experts)), struct.pack(f"<{len(experts)}H", *experts)]
        for table in self.tables:
            if table is None:
                continue
            for entries, bias, share in zip(table.entries, table.bias, table.shares, strict=True):
                parts += [_EXPERT.pack(min(2**32 - 1, round(share * 2**32)), int(bias)), entries.tobytes()]
        return b"".join(parts)


class ChanceRouter:
    """Router that assigns documents at random, depending only on the seed and the document's name."""

    def __init__(self, seed: int, experts: tuple[int, ...]) -> None:
        self._seed, self._experts = seed, experts[1:]

    def affinity(self, name: str, opening: Tokens) -> Affinity:
        key = f"route:{self._seed}:{name}".encode(errors="surrogateescape")
        raw = hashlib.shake_256(key).digest(2 * sum(self._experts))
        numbers = iter(struct.unpack(f"<{len(raw) // 2}H", raw))
        return tuple(tuple(next(numbers) for _ in range(experts)) for experts in self._experts)


@dataclass(frozen=True, slots=True)
class OwnRoute:
    """Router of a data node with a whole path, which all of its documents take."""

    router: "DocumentRouter"
    route: Route

    def affinity(self, name: str, opening: Tokens) -> Affinity:
        found = zip(self.router.affinity(name, opening), self.route, strict=True)
        return tuple((*scores[:own], max(scores) + 1, *scores[own + 1 :]) for scores, own in found)


DocumentRouter = Router | ChanceRouter | OwnRoute


def buckets(tokens: Tokens) -> Tokens:
    return (31 * tokens[1:] + 1009 * tokens[:-1] + 7) & (BUCKETS - 1)


def router_bytes(experts: Sequence[int]) -> int:
    """Returns the length of a router's file for `experts` at each stage. Raises StateError if there are too many."""
    several = sum(count for count in experts if count > 1)
    if several > MAX_ROUTED_EXPERTS:
        raise StateError(
            f"the router is for {several} experts, and this version reads routers for at most {MAX_ROUTED_EXPERTS}",
            hint="Update Skipstone: the author may use a newer version.",
        )
    return _HEADER.size + 2 * len(experts) + several * (_EXPERT.size + BUCKETS)


def router_digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def read_router(data: bytes, manifest: Manifest) -> Router:
    """Parses a router from a peer or a file. Raises StateError if it is not the router that the manifest names."""
    assert manifest.routing is not None, "the caller checked that the run has a router"
    if router_digest(data) != manifest.routing.router:  # before parsing
        raise StateError(
            f"this is not the router of run {manifest.name}, whose BLAKE3 is {manifest.routing.router}",
            hint="Use the file that `skipstone new` wrote next to the manifest, or join by a link.",
        )
    router = parse_router(data)
    if router.experts != manifest.stages.experts_of_each or router.prefix != manifest.routing.prefix:
        raise StateError(
            f"the router has {router.experts} experts and a prefix of {router.prefix} tokens, but the manifest"
            f" has {manifest.stages.experts_of_each} and {manifest.routing.prefix}",
            hint="Ask the author to create a new run with `skipstone new --experts`.",
        )
    return router


def document_router(manifest: Manifest, router: Router | None) -> DocumentRouter | None:
    """Returns the router of a run with experts, else None. Raises ConfigError if the required `router` is missing."""
    if not manifest.stages.has_experts:
        return None
    if manifest.routing is None:
        return ChanceRouter(manifest.seed, manifest.stages.experts_of_each)
    if router is None:
        raise ConfigError(
            f"the router of run {manifest.name} is missing",
            hint="Restore the file that `skipstone new` wrote next to the manifest, or join by a link.",
        )
    return router


def parse_router(data: bytes) -> Router:
    """Parses the bytes of a router, which may be hostile. Raises StateError if they are invalid."""
    try:
        magic, version, prefix, stages = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or not 1 <= stages <= MAX_STAGES:
            raise _unreadable("not a router, or another version")
        experts = struct.unpack_from(f"<{stages}H", data, _HEADER.size)
    except struct.error:
        raise _unreadable("it is truncated") from None
    # Check the length before allocating tables.
    if max(experts) == 1 or 0 in experts or experts[0] != 1 or len(data) != router_bytes(experts):
        raise _unreadable("its length does not match its tables")
    at = _HEADER.size + 2 * stages
    tables: list[StageTable | None] = []
    for count in experts[1:]:
        if count == 1:
            tables.append(None)
            continue
        heads, entries = [], np.empty((count, BUCKETS), dtype=np.int8)
        for expert in range(count):
            heads.append(_EXPERT.unpack_from(data, at))
            entries[expert] = np.frombuffer(data, np.int8, BUCKETS, at + _EXPERT.size)
            at += _EXPERT.size + BUCKETS
        bias = np.array([bias for _, bias in heads], dtype=np.int32)
        if np.abs(bias.astype(np.int64)).max() > MAX_BIAS:
            raise _unreadable("a bias is out of range")
        tables.append(StageTable(entries, bias, tuple(share / 2**32 for share, _ in heads)))
    return Router(tuple(tables), prefix)


def _unreadable(why: str) -> StateError:
    return StateError(f"cannot read the router: {why}", hint="Update Skipstone: the author may use a newer version.")


def router_file(manifest_file: Path) -> Path:
    return manifest_file.with_suffix(_SUFFIX)


def load_router(manifest_file: Path, manifest: Manifest) -> Router | None:
    """Reads the router next to a manifest, or None if the manifest names none. Raises ConfigError or StateError."""
    if manifest.routing is None:
        return None
    path = router_file(manifest_file)
    try:
        with path.open("rb") as file:
            # If the file is too long, `read_router` rejects it.
            return read_router(file.read(router_bytes(manifest.stages.experts_of_each) + 1), manifest)
    except OSError as error:
        raise ConfigError(
            f"cannot read the run's router {path}: {error.strerror}",
            hint="Copy it from next to the manifest that `skipstone new` wrote, or join by a link.",
        ) from None


Integers = npt.NDArray[np.int64]

TRIES: Final = 60


def even_bias(scores: Integers, sizes: Integers, most: float) -> Integers:
    """Finds a bias per expert, so that none gets over about `most` times an equal token share (arXiv:2408.15664)."""
    experts = scores.shape[1]
    bias = best = np.zeros(experts, dtype=np.int64)
    step, least = max(1, int(np.abs(scores).mean())), math.inf
    for _ in range(TRIES):
        shares = shares_of_tokens(scores + bias, sizes)
        if shares.max() < least:
            best, least = bias, float(shares.max())
        if least * experts <= most:
            break
        # Raise the bias of experts below their share, with decreasing steps.
        bias = bias + np.rint(step * (1 / experts - shares) * experts).astype(np.int64)
        step = max(1, int(step * 0.9))
    return best - int(best.mean())


def shares_of_tokens(scores: Integers, sizes: Integers) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = np.bincount(scores.argmax(axis=1), sizes, scores.shape[1]) / sizes.sum()
    return found


Matrix = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

RESTARTS: Final = 8
MOST_CLUSTERS: Final = 512  # Of all restarts together, because each takes time
ITERATIONS: Final = 15
PER_ROUTE: Final = 8
MAX_ROUTES: Final = 1024
FITTED_TO: Final = 4096  # Documents, or twice as many as the routes need
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


def documents_to_fit(experts: Sequence[int]) -> int:
    """Returns how many documents a fit takes at most. Raises ConfigError if no router can have these experts."""
    several, routes = sum(count for count in experts if count > 1), math.prod(experts)
    if several > MAX_ROUTED_EXPERTS or routes > MAX_ROUTES:
        raise ConfigError(
            f"{several} experts on {routes} routes are too many for a router, which allows at most {MAX_ROUTED_EXPERTS}"
            f" experts (in stages with several) and {MAX_ROUTES} routes",
            hint="Use experts in fewer stages, or omit --route-from to assign documents at random.",
        )
    return max(FITTED_TO, 2 * PER_ROUTE * routes)


def fit_router(
    documents: Sequence[tuple[Tokens, int]], experts: Sequence[int], prefix: int, seed: int, restarts: int = RESTARTS
) -> Router:
    """Fits a router to documents (first tokens, length). Raises ConfigError if there are too few documents."""
    stages, routes, most = tuple(experts[1:]), math.prod(experts), documents_to_fit(experts)
    if len(documents) < PER_ROUTE * routes:
        raise ConfigError(
            f"{len(documents)} non-empty documents are too few to fit {routes} routes, which need {PER_ROUTE * routes}",
            hint="Use a source with more documents, or fewer experts.",
        )
    openings, lengths = zip(*documents[:most], strict=True)
    counts, sizes = counts_of(openings, prefix), np.array(lengths, dtype=np.int64)
    random = np.random.default_rng(seed)
    found = [_clustered(counts, routes, random) for _ in range(max(1, min(restarts, MOST_CLUSTERS // routes)))]
    _, labels, centres = max(found, key=lambda each: each[0])
    layout = _laid_out(centres, stages)
    of_stage = layout[labels]
    tables = tuple(
        None if count == 1 else _stage_table(counts, sizes, of_stage[:, stage], count)
        for stage, count in enumerate(stages)
    )
    return Router(tables, prefix)


def _clustered(counts: Matrix, clusters: int, random: np.random.Generator) -> tuple[float, Labels, Matrix]:
    """Clusters documents by balanced hard EM. Returns log likelihood, document clusters, token log probabilities."""
    labels = random.permutation(len(counts)) % clusters
    mean = counts.sum(axis=0) / counts.sum()
    # Start from single, distant documents. Mixtures of all documents would be too similar.
    centres = _log_probabilities(counts[_distant(counts, clusters, random)], mean)
    likelihood = -math.inf
    for _ in range(ITERATIONS):
        scores = counts @ centres.T
        before, labels = labels, np.array(balanced(scores, clusters), dtype=np.int64)
        likelihood = float(scores[np.arange(len(counts)), labels].sum())
        sums = np.stack([counts[labels == cluster].sum(axis=0) for cluster in range(clusters)])
        centres = _log_probabilities(sums, mean)
        if np.array_equal(before, labels):
            break
    return likelihood, labels, centres


def _distant(counts: Matrix, wanted: int, random: np.random.Generator) -> list[int]:
    """Draws documents, each by its distance from the nearest one before (k-means++, Arthur and Vassilvitskii 2007)."""
    units = np.sqrt(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    chosen = [int(random.integers(len(counts)))]
    nearest = np.full(len(counts), np.inf, np.float32)
    while len(chosen) < wanted:
        nearest = np.minimum(nearest, np.maximum(1 - units @ units[chosen[-1]], 1e-9))
        chosen.append(int(random.choice(len(counts), p=nearest / nearest.sum())))
    return chosen


def _log_probabilities(sums: Matrix, mean: Matrix) -> Matrix:
    smoothed = sums + PRIOR * mean + 1e-4
    found: Matrix = np.log(smoothed / smoothed.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def _laid_out(centres: Matrix, stages: tuple[int, ...]) -> Labels:
    """Assigns a route to each cluster, [clusters, stages], such that clusters that share experts are similar."""
    routes = np.array(list(product(*(range(count) for count in stages))), dtype=np.int64)
    # Number of stages with a choice that two routes share.
    shared = (routes[:, None, :] == routes[None, :, :])[:, :, np.array(stages) > 1].sum(axis=2)
    squares = (centres**2).sum(axis=1, dtype=np.float64)
    apart = (squares[:, None] + squares[None, :] - 2.0 * (centres @ centres.T)) / centres.shape[1]
    apart = (apart + apart.T) / 2
    np.fill_diagonal(apart, 0)
    place, near, most = np.arange(len(centres)), shared.astype(np.float64), shared[0, 0]
    better = True
    while better:
        better = False
        for one in range(len(place)):
            # Half of the change of (near * apart).sum() if `one` swaps places with each other cluster.
            own = (near * apart).sum(axis=1)
            change = near @ apart[one] + apart @ near[one] - own - own[one] - 2 * (most - near[one]) * apart[one]
            other = int(change.argmin())
            if change[other] < -1e-6:
                pair, swapped = [one, other], [other, one]
                place[pair], near[pair] = place[swapped], near[swapped]
                near[:, pair] = near[:, swapped]
                better = True
    return routes[place]


def _stage_table(counts: Matrix, sizes: Labels, labels: Labels, experts: int) -> StageTable:
    """Fits a softmax over a stage's experts, rounds its weights to integers, and balances tokens by a bias."""
    weights = softmax_weights(counts, labels, experts)
    scale = MAX_ENTRY / max(float(np.abs(weights).max()), 1e-9)
    entries = np.rint(weights * scale).astype(np.int8)  # integer scores are equal on every machine
    scores = (counts @ entries.T.astype(np.float32)).astype(np.int64)  # exact: all sums are below 2^24
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


SLACK: Final = 1.05  # Largest size of a cluster, relative to an equal share


def balanced(scores: npt.ArrayLike, clusters: int, slack: float = SLACK) -> list[int]:
    """Assigns documents to clusters by scores [documents, clusters], at most `slack` times an equal share each."""
    values = np.asarray(scores, np.float64)
    capacity = math.ceil(slack * len(values) / clusters)
    room, full = [capacity] * clusters, np.zeros(clusters)
    waiting = [(*_loss(of, full), index) for index, of in enumerate(values)]  # Negative loss, cluster, document
    heapify(waiting)
    chosen = [0] * len(values)
    while waiting:
        _, best, index = waiting[0]  # a lazy heap: entries are updated when they reach the top
        current = _loss(values[index], full)
        if current != waiting[0][:2]:  # a cluster filled up meanwhile
            heapreplace(waiting, (*current, index))
            continue
        heappop(waiting)
        chosen[index] = best
        room[best] -= 1
        if not room[best]:
            full[best] = -np.inf
    return chosen


def _loss(scores: npt.NDArray[np.float64], full: npt.NDArray[np.float64]) -> tuple[float, int]:
    """Returns the second best score minus the best one, among clusters with room, and the best cluster."""
    left = scores + full  # -inf for a full cluster
    best = int(left.argmax())
    most, left[best] = float(left[best]), -np.inf
    return float(left.max()) - most, best
