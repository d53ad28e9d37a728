"""What a data node's router learns from documents that were scored on several experts.

The latest of them are kept. For each stage a softmax over its experts' scores is moved towards the experts that
`swarm.experts.resharding` gives the documents to, by some steps of gradient descent on the tables; then the biases even
out the shares. The descent begins where the tables are and is drawn back to the manifest's, which were fitted to many
more documents. (The scores that were taken with older parameters stay: experts change little within so few documents.)

Source: DiPaCo (arXiv:2403.10616) section 2.4, logistic regression of the best path on a document's features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from node.experts.route_tables import UNIT, Values, bias_unit
from node.experts.router import BUCKETS, Router, Tokens, buckets
from swarm.experts.resharding import even_prices, wanted_experts

KEPT: Final = 256
"""Documents."""
FIRST_AT: Final = 32
"""Documents: from fewer nothing is learnt."""
EVERY: Final = 16
"""Documents from one time to the next."""
DESCENT: Final = 40
"""Steps."""
RATE: Final = 1.0
MOMENTUM: Final = 0.9
SHRINK: Final = 1e-3
"""As in the fit: the weight of the square of what is added to the manifest's tables."""
MARGIN: Final = 2.0
"""Logits between the best and the second best expert of a document in the middle of the kept ones, by the manifest's
table: how sure it is, its integers do not say."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredDocument:
    """A document that was scored on the alternatives to its route."""

    opening: Tokens
    """By which it is routed."""
    regrets: tuple[tuple[float, ...], ...]
    """Of each stage after stage 0 and each of its experts."""


class TableLearner:
    """One data node's. Not a part of what is saved: after a start it waits for new documents.

    Args:
        first: the router that the manifest names.
    """

    def __init__(self, first: Router) -> None:
        self.documents = 0
        """Scored since the start."""
        self._first = first
        self._kept: deque[ScoredDocument] = deque(maxlen=KEPT)
        self._since = 0

    def add(self, document: ScoredDocument) -> bool:
        """Keeps a document; returns whether it is time to learn."""
        self._kept.append(document)
        self.documents += 1
        self._since += 1
        return len(self._kept) >= FIRST_AT and self._since >= EVERY

    def learn(self, entries: Values, bias: Values) -> tuple[Values, Values]:
        """What is to be added to the tables now.

        Args:
            entries, bias: of `RouteTables`, as they are.
        """
        self._since = 0
        kept = tuple(self._kept)
        counts = np.zeros((len(kept), BUCKETS), np.float32)
        for row, document in zip(counts, kept, strict=True):
            np.add.at(row, buckets(document.opening), 1)
        more_entries, more_bias = np.zeros_like(entries), np.zeros_like(bias)
        at = 0
        for stage, table in enumerate(self._first.tables):
            if table is None:
                continue
            part = slice(at, at + len(table.bias))
            at = part.stop
            told = [document.regrets[stage] for document in kept]
            scores = counts @ table.entries.T.astype(np.float32) + table.bias.astype(np.float32)
            shift = bias[part] * bias_unit(self._first.prefix)
            moved = _descended(counts, scores, shift, entries[part], told)
            prices = _prices(scores + shift + counts @ moved.T * UNIT)
            more_entries[part] = moved - entries[part]
            more_bias[part] = -prices / bias_unit(self._first.prefix)
        return more_entries, more_bias


def _prices(scores: Values) -> Values:
    """What is taken from each expert's scores so that the documents, [documents, experts], are shared out evenly."""
    return np.array(even_prices((-scores).tolist(), float(np.ptp(scores)) or 1.0), np.float32)


def _descended(counts: Values, first: Values, shift: Values, added: Values, told: Sequence[Sequence[float]]) -> Values:
    """What is to be added to the entries of one stage in the place of what is: [experts, BUCKETS].

    Args:
        counts: [documents, BUCKETS].
        first: scores by the manifest's table, [documents, experts].
        shift: by which the biases differ from those, [experts].
        added: to the entries by now, in UNITs.
        told: regrets, of each document on each expert.
    """
    wanted = wanted_experts(told)
    aims = np.eye(first.shape[1], dtype=np.float32)[[of.expert for of in wanted]]
    weights = np.array([of.weight for of in wanted], np.float32)[:, None] / np.float32(len(wanted))
    ordered = np.sort(first, axis=1)
    margin = float(np.median(ordered[:, -1] - ordered[:, -2])) or 1.0
    length = np.float32(max(float(np.sqrt((counts**2).sum(axis=1).mean())), 1e-9))
    scale = np.float32(MARGIN / margin)
    # In these units a step is as large as in the fit: features of length 1, and logits that are their product.
    inner = np.float32(UNIT * scale * length)
    features, logits_before = counts / length, (first + shift) * scale
    table, speed = added * inner, np.zeros_like(added)
    for _ in range(DESCENT):
        logits = logits_before + features @ table.T
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        gradient = (weights * (odds - aims)).T @ features + np.float32(SHRINK) * table
        speed = np.float32(MOMENTUM) * speed - np.float32(RATE) * gradient
        table = table + speed
    return np.asarray(table / inner, np.float32)
