"""Sizes of a data node's latest microbatches, and the cost of visits by their size.

The cost grows with the tokens and, for attention, with each document's squared tokens (WLB-LLM, arXiv:2503.17924,
section 4.1).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.statistics import Ewma

LATEST: Final = 64


@dataclass(frozen=True, slots=True)
class Size:
    tokens: int
    documents: tuple[int, ...]  # Tokens of each document; empty for rows of one stream
    cost: float = 0.0  # In tokens, including attention; 0 if unused

    def cost_with(self, quadratic_share: float) -> float:
        """Returns the cost in tokens if attention over n tokens costs `quadratic_share` * n^2 more."""
        return self.tokens + quadratic_share * sum(tokens * tokens for tokens in self.documents)


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
    def cost(self) -> float:
        """Mean cost in tokens; before the first microbatch, the tokens of a largest one."""
        return self._mean(lambda size: size.cost or size.tokens) if self._latest else self._most_tokens

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


MOST_TIMES: Final = 2.0  # Longer visits, over the mean, are clipped: something else delayed them
TRUSTED: Final = 8  # Visits after which the mean clips


class VisitCost:
    """Mean time of one peer's visits, both passes together, per token of cost."""

    def __init__(self) -> None:
        self._seconds = Ewma()

    def add(self, cost: float, seconds: float) -> None:
        sample = seconds / max(1.0, cost)
        known = self._seconds.samples >= TRUSTED
        self._seconds.add(min(sample, MOST_TIMES * self._seconds.mean) if known else sample)

    def speed(self) -> float:
        """Returns the speed to announce, in tokens of cost per second; 0 before the first visit."""
        return 1 / max(1e-12, self._seconds.mean) if self._seconds.samples else 0.0
