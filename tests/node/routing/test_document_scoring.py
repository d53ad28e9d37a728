"""Drawn documents go through the swarm on every route and the router learns from them; what is lost is left out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import torch

from node.concurrency.compute_thread import ComputeThread
from node.data.labels import UNSCORED
from node.data.packing import Microbatch, Sample
from node.experts.route_tables import route_tables
from node.experts.router import Router, StageTable
from node.experts.table_learner import FIRST_AT, TableLearner
from node.routing.document_scoring import WAITING, DocumentScoring
from node.routing.evaluation import Evaluator
from swarm.vocabulary.types import MicrobatchId, ModuleId
from tests.node.experts.routed import manifest_with
from tests.node.experts.test_route_tables import resharding
from tests.node.routing.test_evaluation import Road, evaluator_on

PREFIX = 8
ROUTER = Router((StageTable(np.ones((2, 4096), np.int8), np.array([1, 0], np.int32), (0.5, 0.5)), None), PREFIX)
MANIFEST = resharding(manifest_with(ROUTER), 1.0)


class Drawn:
    """Texts, each of which has one drawn document of one letter; a document of letter `n` is routed to expert 0."""

    def __init__(self, letters: list[int]) -> None:
        self.waiting = deque(letters)

    def ready(self) -> Microbatch | None:
        if not self.waiting:
            return None
        opening = np.full(PREFIX, self.waiting.popleft(), np.int64)
        tokens = torch.full((1, 2 * PREFIX), int(opening[0]))
        labels = torch.full((1, 2 * PREFIX), UNSCORED)
        labels[0, PREFIX:] = 1
        text = Microbatch(tokens, labels, 1.0, documents=(2 * PREFIX,), route=(0,), affinity=((1, 0),))
        return Microbatch(tokens, labels, 1.0, route=(0,), samples=(Sample(opening, text),))


@asynccontextmanager
async def scoring(texts: Drawn, evaluator: Evaluator) -> AsyncIterator[DocumentScoring]:
    (tables,) = route_tables(MANIFEST)
    with ComputeThread() as compute:
        found = DocumentScoring(texts, evaluator, (2,), tables, TableLearner(ROUTER), compute)
        running = asyncio.create_task(found.run())
        yield found
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def until_scored(found: DocumentScoring, count: int) -> None:
    async with asyncio.timeout(20):
        while found.documents + found.left_out < count:
            await asyncio.sleep(0.001)


async def test_each_document_is_scored_on_every_route_and_the_tables_move() -> None:
    road = Road()
    evaluator = evaluator_on(road, [ModuleId(1, 0), ModuleId(1, 1)], experts=2)

    def meets(microbatch: MicrobatchId) -> None:
        """Odd letters are expert 1's. The head's mean is over all tokens, half of which are no labels."""
        expert, letter = int(road.visited[road.numbers[microbatch]][-1]), int(road.texts[microbatch].tokens[0, 0])
        evaluator.loss_known(microbatch, (1.0 if expert == letter % 2 else 1.5) / 2)

    road.meets = meets
    letters = [97 + number % 2 for number in range(FIRST_AT)]
    async with scoring(Drawn(letters), evaluator) as found:
        for number in range(FIRST_AT):
            text = found.ready()
            assert text is not None
            assert text.samples
            await until_scored(found, number + 1)
        assert found.ready() is None
        assert (found.documents, found.left_out) == (FIRST_AT, 0)
        async with asyncio.timeout(20):
            while not found._tables.values()[0].any():
                await asyncio.sleep(0.001)
    assert road.visited.count("1.0") == road.visited.count("1.1") == FIRST_AT
    assert not road.away
    entries, _ = found._tables.values()
    told = {tuple(document.regrets[0]) for document in found._learner._kept}
    assert told == {(0.0, 0.5), (0.0, -0.5)}, "in nats per token that is predicted"
    (even, odd) = ((31 * letter + 1009 * letter + 7) % 4096 for letter in (98, 97))
    assert entries[0, even] > 0 > entries[1, even]
    assert entries[1, odd] > 0 > entries[0, odd]


async def test_where_an_expert_is_not_served_or_dies_the_document_is_left_out() -> None:
    road = Road()
    async with scoring(Drawn([97]), evaluator_on(road, [ModuleId(1, 0)], experts=2)) as found:
        evaluator = found._evaluator
        road.meets = lambda microbatch: evaluator.loss_known(microbatch, 1.0)
        found.ready()
        await until_scored(found, 1)
        assert (found.documents, found.left_out) == (0, 1)
    road = Road()
    async with scoring(Drawn([97]), evaluator_on(road, [ModuleId(1, 0), ModuleId(1, 1)], experts=2)) as found:
        dying = found._evaluator
        road.meets = lambda microbatch: dying.lost(microbatch, "a hop died")
        found.ready()
        await until_scored(found, 1)
        assert (found.documents, found.left_out) == (0, 1)
    assert not road.away


async def test_more_than_there_is_room_for_is_left_out_and_texts_pass() -> None:
    road = Road()
    async with scoring(Drawn([97] * 40), evaluator_on(road, [ModuleId(1, 0), ModuleId(1, 1)], experts=2)) as found:
        for _ in range(40):
            assert found.ready() is not None
        assert found.left_out == 40 - WAITING
        assert len(found._waiting) == WAITING
