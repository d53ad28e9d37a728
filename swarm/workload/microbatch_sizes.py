"""Sizes of a data node's latest microbatches, and the cost of visits by their size.

seconds = a * tokens + b * squares + c * documents + e

`squares` is the sum of the documents' squared tokens (WLB-LLM, arXiv:2503.17924, section 4.1). Similar microbatches
cannot separate the coefficients, so the manifest's ratio (`b = quadratic_share * a`) is a weak prior.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from operator import mul
from typing import Final

from swarm.vocabulary.announcement import NO_SPEED, Speed
from swarm.vocabulary.statistics import Ewma

LATEST: Final = 64


@dataclass(frozen=True, slots=True)
class Size:
    tokens: int
    documents: tuple[int, ...]  # Tokens of each document; empty for rows of one stream
    cost: float = 0.0  # In tokens, including attention; 0 if unused

    @property
    def squares(self) -> int:
        """Sum over documents of their squared tokens, which is proportional to the cost of attention."""
        return sum(tokens * tokens for tokens in self.documents)


@dataclass(frozen=True, slots=True)
class SizeSummary:
    """Mean sizes of several microbatches. Spreads are coefficients of variation: standard deviation over mean."""

    microbatches: int = 0
    tokens: float = 0.0
    tokens_spread: float = 0.0
    cost: float = 0.0  # Mean, in tokens, including attention
    cost_spread: float = 0.0
    documents: float = 0.0  # Mean; 0 for rows of one stream
    padding: float = 0.0  # Mean unused share of the largest microbatch; it is neither sent nor computed


class MicrobatchSizes:
    """Sizes of the latest microbatches. `most_tokens`: largest allowed size."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._latest: deque[Size] = deque(maxlen=LATEST)

    @property
    def tokens(self) -> float:
        return self._mean(lambda size: size.tokens) if self._latest else self._most_tokens

    @property
    def squares(self) -> float:
        return self._mean(lambda size: size.squares)

    def add(self, size: Size) -> float:
        """Adds a microbatch's size. Returns its cost relative to the mean cost of the latest microbatches."""
        self._latest.append(size)
        usual = self._mean(lambda known: known.cost)
        return size.cost / usual if usual > 0 else 1.0

    def summary(self) -> SizeSummary:
        return summary_of(self._latest, self._most_tokens)

    def _mean(self, figure: Callable[[Size], float]) -> float:
        return math.fsum(map(figure, self._latest)) / max(1, len(self._latest))


def summary_of(sizes: Sequence[Size], most_tokens: int) -> SizeSummary:
    if not sizes:
        return SizeSummary()
    tokens, tokens_spread = _mean_and_spread([size.tokens for size in sizes])
    cost, cost_spread = _mean_and_spread([size.cost for size in sizes])
    documents, _ = _mean_and_spread([len(size.documents) for size in sizes])
    return SizeSummary(len(sizes), tokens, tokens_spread, cost, cost_spread, documents, 1 - tokens / most_tokens)


def _mean_and_spread(figures: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(figures) / len(figures)
    variance = math.fsum((figure - mean) ** 2 for figure in figures) / len(figures)
    return mean, math.sqrt(variance) / mean if mean else 0.0


@dataclass(frozen=True, slots=True)
class StepRule:
    """Size of an inner step. A step is complete when less than half of a largest microbatch is missing."""

    inner_tokens: int  # A multiple of `microbatch_tokens`
    microbatch_tokens: int = 1  # Of a largest microbatch

    def is_complete(self, tokens: int, steps: int = 1) -> bool:
        """Whether completed microbatches with `tokens` tokens in all complete `steps` inner steps."""
        return 2 * tokens >= 2 * steps * self.inner_tokens - self.microbatch_tokens


KEPT: Final = 0.98  # Decay of the samples' weights, so that about the last 50 count
PRIOR: Final = 1e-3
MOST_TIMES: Final = 2.0  # Longer visits, over the expected time, are clipped: something else delayed them
TRUSTED: Final = 8  # Samples after which the expected time is used
FIT_EVERY: Final = 8  # Samples between fits after FIRST_FITS, because a fit is expensive
FIRST_FITS: Final = 64

_Vector = tuple[float, ...]


class VisitCost:
    """Cost model fitted to one peer's visit times, both passes together. `quadratic_share`: the manifest's b / a."""

    def __init__(self, quadratic_share: float) -> None:
        self._share = quadratic_share
        self._products = [[0.0] * 4 for _ in range(4)]
        self._sums = [0.0] * 4
        self._means = [Ewma(1 - KEPT) for _ in range(4)]  # Mean features
        self._now = Ewma()
        self._samples = 0
        self._fitted: _Vector | None = None

    def add(self, tokens: int, squares: int, documents: int, seconds: float) -> None:
        features = (float(tokens), float(squares), float(documents), 1.0)
        expected = self.seconds(tokens, squares, documents) if self._samples >= TRUSTED else math.inf
        if expected < math.inf:
            self._now.add(min(seconds / max(expected, 1e-9), MOST_TIMES**2))
        seconds = min(seconds, MOST_TIMES * expected)
        for row, one in enumerate(features):
            self._sums[row] = KEPT * self._sums[row] + one * seconds
            for column, other in enumerate(features):
                self._products[row][column] = KEPT * self._products[row][column] + one * other
            self._means[row].add(one)
        self._samples += 1
        if self._samples <= FIRST_FITS or self._samples % FIT_EVERY == 0:
            self._fitted = None

    def seconds(self, tokens: float, squares: float, documents: float) -> float:
        features = (tokens, squares, documents, 1.0)
        return math.fsum(each * one for each, one in zip(self._coefficients(), features, strict=True))

    def speed(self) -> Speed:
        """Returns the speed to announce: of a microbatch of mean cost, corrected by the latest measured visits."""
        if not self._samples:
            return NO_SPEED
        tokens, squares, documents, _ = (mean.mean for mean in self._means)
        _, quadratic, *_ = self._coefficients()
        usual_s = max(1e-9, self.seconds(tokens, squares, documents))
        linear = (usual_s - quadratic * squares) / max(1.0, tokens)
        share = min(1.0, quadratic / linear) if linear > 0 else 0.0
        now = self._now.mean if self._now.samples else 1.0
        return Speed((tokens + share * squares) / (usual_s * max(now, 1e-9)), share)

    def _coefficients(self) -> _Vector:
        if self._fitted is None:
            self._fitted = self._fit() if self._samples else (0.0,) * 4
        return self._fitted

    def _fit(self) -> _Vector:
        """Solves non-negative least squares by trying all subsets of coefficients, scaled to a mean microbatch."""
        scales = [max(mean.mean, 1e-9) for mean in self._means]
        usual = self._sums[3] / max(self._products[3][3], 1e-9)
        matrix = [[self._products[i][j] / (scales[i] * scales[j]) for j in range(4)] for i in range(4)]
        sums = [self._sums[i] / scales[i] for i in range(4)]
        # The prior: no excess attention cost, no cost per document or per microbatch.
        for row in ((self._share * scales[1] / scales[0], -1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)):
            for i, j in product(range(4), repeat=2):
                matrix[i][j] += PRIOR * row[i] * row[j]
        best: tuple[float, _Vector] | None = None
        used = [i for i in range(4) if self._means[i].mean > 0]
        for chosen in (kept for count in range(1, len(used) + 1) for kept in combinations(used, count)):
            found = _solved([[matrix[i][j] for j in chosen] for i in chosen], [sums[i] for i in chosen])
            if found is None or min(found) < 0:
                continue
            whole = [0.0] * 4
            for i, value in zip(chosen, found, strict=True):
                whole[i] = value
            error = math.fsum(whole[i] * (math.fsum(map(mul, matrix[i], whole)) - 2 * sums[i]) for i in range(4))
            if best is None or error < best[0]:
                best = error, tuple(value / scale for value, scale in zip(whole, scales, strict=True))
        return (usual / scales[0], 0.0, 0.0, 0.0) if best is None else best[1]


def _solved(matrix: list[list[float]], sums: list[float]) -> list[float] | None:
    size = len(sums)
    rows = [[*row, value] for row, value in zip(matrix, sums, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[row][size] / rows[row][row] for row in range(size)]
