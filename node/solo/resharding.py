"""Re-sharding in one process: each drawn document is scored on its alternatives before it is trained on, as in a swarm.

It stands alone because the trainer does the same without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from node.averaging.anchor.anchor import tensors_of
from node.data.packing import Microbatch
from node.experts.block_routers import BlockRouters
from node.experts.route_tables import RouteTables, trained_router
from node.experts.router import DocumentRouter, Router
from node.experts.table_learner import ScoredDocument, TableLearner
from node.solo.solo_checkpoint import SoloReplica
from protocol.manifest.manifest import Manifest
from swarm.experts.resharding import alternatives, regrets


class ScoringModel(Protocol):
    """The model that scores, and the tables beside it."""

    tables: tuple[RouteTables, ...]

    def loss(self, microbatch: Microbatch) -> float:
        """The mean loss on the microbatch's route, nats per token that is predicted."""
        ...


class Resharding:
    """The router of a run as it learns; in a run whose router stays as it is, that one."""

    def __init__(
        self, manifest: Manifest, model: ScoringModel, first: DocumentRouter | None, stage_zero: SoloReplica
    ) -> None:
        self._experts = manifest.stages.experts_of_each[1:]
        self._model, self._first, self._stage_zero = model, first, stage_zero
        self._learner = TableLearner(first) if model.tables and isinstance(first, Router) else None
        self.routers = BlockRouters(first, self._trained)

    def score(self, text: Microbatch) -> None:
        """Scores the documents that were drawn from a microbatch, and learns from them when it is time."""
        if self._learner is None:
            return
        for sample in text.samples:
            routes = alternatives(sample.text.route, self._experts)
            losses = [self._model.loss(replace(sample.text, route=route)) for route in routes]
            told = regrets(sample.text.route, self._experts, losses).value
            if told is not None and self._learner.add(ScoredDocument(sample.opening, told)):
                (tables,) = self._model.tables
                tables.add(*self._learner.learn(*tables.values()))

    def _trained(self) -> Router | None:
        """Of stage 0's anchor; None before its first outer step."""
        anchor = self._stage_zero.store.current
        if self._learner is None or not anchor.version.round:
            return None
        assert isinstance(self._first, Router), "only a router of tables learns"
        return trained_router(self._first, tensors_of(anchor.layout, anchor.parameters))
