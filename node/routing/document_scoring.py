"""Scoring of documents on other experts than their own, while the run trains: in the time that hops have left, as all
that is only evaluated, and the router learns from it.

Each drawn document is scored when the microbatch in which it begins is about to set out, so that no expert has seen it
in this epoch. What is lost on the way, or finds no room, is left out: there are more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import task_scope
from node.data.packing import Microbatch, Sample
from node.experts.route_tables import RouteTables
from node.experts.table_learner import ScoredDocument, TableLearner
from node.observability.status import ScoringStatus
from node.routing.evaluation import WINDOW, Evaluator
from node.routing.launcher import Texts
from swarm.experts.resharding import alternatives, regrets

WAITING: Final = 16
"""Documents."""
UNDER_WAY: Final = WINDOW // 2
"""Microbatches at once: an evaluation that somebody waits for has as much room besides."""


class DocumentScoring:
    """One data node's; the texts that are to set out pass through it.

    Args:
        experts: of each stage after stage 0.
        tables: of stage 0's replica, on the compute thread.
    """

    def __init__(
        self,
        texts: Texts,
        evaluator: Evaluator,
        experts: Sequence[int],
        tables: RouteTables,
        learner: TableLearner,
        compute: ComputeThread,
    ) -> None:
        self.left_out = 0
        """Documents that were drawn and not scored."""
        self._texts, self._evaluator, self._experts = texts, evaluator, tuple(experts)
        self._tables, self._learner, self._compute = tables, learner, compute
        self._waiting: deque[Sample] = deque()
        self._offered = asyncio.Event()

    @property
    def documents(self) -> int:
        """Scored since the start."""
        return self._learner.documents

    def status(self) -> ScoringStatus:
        return ScoringStatus(self.documents, self.left_out)

    def ready(self) -> Microbatch | None:
        """The next text, as `node.routing.launcher.Texts`."""
        text = self._texts.ready()
        if text is not None and text.samples:
            room = WAITING - len(self._waiting)
            self._waiting.extend(text.samples[:room])
            self.left_out += len(text.samples[room:])
            self._offered.set()
        return text

    async def run(self) -> None:
        """Scores what was drawn, until cancelled."""
        while True:
            while self._waiting:
                await self._score(self._waiting.popleft())
            self._offered.clear()
            await self._offered.wait()

    async def _score(self, sample: Sample) -> None:
        routes = alternatives(sample.text.route, self._experts)
        room, stages = asyncio.Semaphore(UNDER_WAY), range(1, len(self._experts) + 1)

        async def measured(text: Microbatch) -> float | None:
            async with room:
                return await self._evaluator.score(text, stages)

        async with task_scope() as tasks:
            scores = [tasks.create_task(measured(replace(sample.text, route=route))) for route in routes]
        losses = [loss for loss in (score.result() for score in scores) if loss is not None]
        told = regrets(sample.text.route, self._experts, losses).value if len(losses) == len(routes) else None
        if told is None:
            self.left_out += 1
        elif self._learner.add(ScoredDocument(sample.opening, told)):
            await self._learn()

    async def _learn(self) -> None:
        """The arithmetic takes a tenth of a second, so it is done elsewhere; what it says is added to the tables as
        they are by then."""
        values = await self._compute.run(Priority.UPKEEP, self._tables.values)
        change = await asyncio.to_thread(self._learner.learn, *values)
        await self._compute.run(Priority.UPKEEP, partial(self._tables.add, *change))
