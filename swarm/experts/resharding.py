"""What documents that were scored on several experts tell about who is to have them (discriminative re-sharding).

A document is scored on all routes where there are few: whoever is on a wrong route may be better off on none that
differs from it in one stage. Among many it is scored on its own and on each that differs in one stage, so that a
stage's experts are compared with the rest of the route as it is.

If each went to who fits it best, some experts would starve, as without a limit in the router's fit: each expert has a
price, the same for all documents, by which they get about equal shares of them, and a document's place is where its
loss and the price together are the least. What it weighs in the router's learning is how much it would lose elsewhere,
and never more than one document: so experts that are still alike teach nothing, and one false score no more than one
true one.

Sources: DiPaCo (arXiv:2403.10616) section 2.4, discriminative routing; prices as the biases of Wang et al. 2024
(arXiv:2408.15664), which even out the load of experts without a loss of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from swarm.vocabulary.types import Reasoned, Route

MOST_ROUTES: Final = 16
"""A document is scored on all routes of a run that has no more."""
MOST_REGRET: Final = 1.0
"""Nats per token: a larger difference between two experts counts as this one."""
FULL_WEIGHT: Final = 0.05
"""Nats per token: a document that would lose so much by going elsewhere counts in full."""
EVEN: Final = 1.05
"""The largest share may be so many times the mean one, and DEVIATIONS of what it is by chance among so few documents
more: else some would have to leave the experts that fit them because of who happened to be drawn."""
DEVIATIONS: Final = 2.0
ITERATIONS: Final = 40
"""Of the search for prices."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The expert of a stage that a document is to go to."""

    expert: int
    weight: float
    """0 to 1."""


def alternatives(route: Route, experts: Sequence[int]) -> tuple[Route, ...]:
    """The routes on which a document is scored, its own first: all, or those that differ from it in one stage at most.

    Args:
        experts: of each stage after stage 0.
    """
    if math.prod(experts) <= MOST_ROUTES:
        every = product(*(range(count) for count in experts))
        return (route, *(other for other in every if other != route))
    others = [
        (*route[:stage], expert, *route[stage + 1 :])
        for stage, count in enumerate(experts)
        for expert in range(count)
        if expert != route[stage]
    ]
    return (route, *others)


def regrets(
    route: Route, experts: Sequence[int], losses: Sequence[float]
) -> Reasoned[tuple[tuple[float, ...], ...] | None]:
    """What a document loses on each expert of each stage, by the best route that was tried through it, against its own
    route: nats per token within MOST_REGRET.

    Args:
        losses: of each of `alternatives(route, experts)`.

    Returns:
        None when a loss is none that a model can have.
    """
    if not all(math.isfinite(loss) and loss >= 0 for loss in losses):
        return Reasoned(None, "a loss is not finite or negative")
    tried = list(zip(alternatives(route, experts), losses, strict=True))
    told = tuple(
        tuple(
            min(MOST_REGRET, max(-MOST_REGRET, min(loss for by, loss in tried if by[stage] == expert) - losses[0]))
            for expert in range(count)
        )
        for stage, count in enumerate(experts)
    )
    return Reasoned(told, f"scored on {len(losses)} routes")


def even_prices(costs: Sequence[Sequence[float]], largest: float) -> list[float]:
    """The price of each expert by which all get about equal shares of the documents, when each goes where its cost and
    the price together are the least.

    Args:
        costs: of each document on each expert.
        largest: price that is asked at most, also negative.
    """
    experts = len(costs[0])
    allowed = (EVEN + DEVIATIONS * math.sqrt((experts - 1) / len(costs))) * len(costs) / experts
    prices, step = [0.0] * experts, largest / 2
    best, evenest = prices, math.inf
    for _ in range(ITERATIONS):
        shares = [0] * experts
        for of in costs:
            shares[_cheapest(of, prices)] += 1
        if max(shares) < evenest:
            best, evenest = prices, max(shares)
        if max(shares) <= allowed:
            break
        excess = [share * experts / len(costs) - 1 for share in shares]
        most = max(map(abs, excess))
        prices = [
            min(largest, max(-largest, price + step * over / most)) for price, over in zip(prices, excess, strict=True)
        ]
        step *= 0.85
    mean = sum(best) / experts
    return [price - mean for price in best]


def wanted_experts(told: Sequence[Sequence[float]]) -> list[Wanted]:
    """The expert of one stage for each document, in equal shares.

    Args:
        told: each document's regrets.
    """
    prices = even_prices(told, MOST_REGRET)
    found = []
    for of in told:
        priced = [regret + price for regret, price in zip(of, prices, strict=True)]
        expert = _cheapest(of, prices)
        second = min(cost for other, cost in enumerate(priced) if other != expert)
        found.append(Wanted(expert, min(1.0, (second - priced[expert]) / FULL_WEIGHT)))
    return found


def _cheapest(costs: Sequence[float], prices: Sequence[float]) -> int:
    """Of two that cost the same the lower number."""
    priced = [cost + price for cost, price in zip(costs, prices, strict=True)]
    return priced.index(min(priced))
