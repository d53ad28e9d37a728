"""Measurement of the held-out loss in the running swarm, by microbatches with a forward pass only."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

from node.concurrency.task_groups import task_scope
from node.data.documents import Documents
from node.data.feed import held_out_microbatches
from node.data.packing import Microbatch
from node.network.loss_report import answer_of, held_out_loss
from node.pipeline.worker import Launches
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import Question
from protocol.manifest.manifest import Manifest
from swarm.routing.launch_queue import current_route
from swarm.routing.planner import NoReplica, Planner
from swarm.vocabulary.errors import ConfigError, Rejected, Unreachable
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import MicrobatchId, PeerId, Route
from swarm.workload.microbatch_sizes import summary_of

log = logging.getLogger(__name__)

PAUSE_S = 1.0
LIFETIMES_S = (15.0, 30.0, 60.0)  # Timeouts per attempt. A dead hop loses evaluated microbatches: no other keeps them.
WINDOW = 8  # In flight, below a hop's slots. Each queues behind training at every hop: one at a time would be slow.
MAX_MICROBATCHES = 256


class UndeliverableError(Exception):
    """An evaluated microbatch could not be delivered; a retry may find another path."""


class Evaluator:
    """Sender of held-out microbatches through the swarm, at most WINDOW at a time, and receiver of their losses."""

    def __init__(self, own: PeerId, planner: Planner, launches: Launches, clock: Clock, first_number: int) -> None:
        self._own = own
        self._planner = planner
        self._launches = launches
        self._clock = clock
        self._next = first_number
        self._awaited: dict[MicrobatchId, asyncio.Future[float]] = {}

    def awaits(self, microbatch: MicrobatchId) -> bool:
        return microbatch in self._awaited

    def loss_known(self, microbatch: MicrobatchId, loss: float) -> None:
        arrival = self._awaited.get(microbatch)
        if arrival is not None and not arrival.done():
            arrival.set_result(loss)

    def lost(self, microbatch: MicrobatchId, detail: str) -> None:
        arrival = self._awaited.get(microbatch)
        if arrival is not None and not arrival.done():
            arrival.set_exception(UndeliverableError(detail))

    async def evaluate(self, texts: Sequence[Microbatch], stages: Sequence[int]) -> list[float]:
        """Returns each microbatch's loss on a path through `stages`, in nats per token. Raises Unreachable."""
        room = asyncio.Semaphore(WINDOW)

        async def measured(text: Microbatch) -> float:
            async with room:
                return await self._evaluate(text, stages)

        async with task_scope() as tasks:
            losses = [tasks.create_task(measured(text)) for text in texts]
        return [loss.result() for loss in losses]

    async def _evaluate(self, text: Microbatch, stages: Sequence[int]) -> float:
        reason = ""
        # Each attempt plans a new path.
        for attempt, lifetime_s in enumerate(LIFETIMES_S):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            try:
                route = current_route(text, self._planner, self._planner.open_modules(self._clock.monotonic())).value
                return await self._send(text, route, stages, lifetime_s)
            except (UndeliverableError, TimeoutError) as error:
                reason = str(error) or f"no loss returned within {lifetime_s:.0f} s"
        raise Unreachable(f"no path through the swarm could evaluate the held-out text: {reason}")

    async def _send(self, text: Microbatch, route: Route, stages: Sequence[int], lifetime_s: float) -> float:
        microbatch = MicrobatchId(self._own, self._next)
        self._next += 1
        plan = self._planner.plan_through(stages, route, {}, self._clock.monotonic())
        if isinstance(plan.value, NoReplica):
            raise UndeliverableError(plan.reason)
        arrival: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._awaited[microbatch] = arrival
        try:
            self._launches.launch(microbatch, text, plan.value, Purpose.EVALUATE, lifetime_s)
            async with asyncio.timeout(lifetime_s):
                return await arrival
        finally:
            del self._awaited[microbatch]
            # Hops release the microbatch; a loss that arrives later is ignored.
            self._launches.abandon(microbatch, "evaluated")


class HeldOut:
    """Answers of a data node to requests for the held-out loss. Evaluations run one at a time."""

    def __init__(self, manifest: Manifest, documents: Documents, evaluator: Evaluator) -> None:
        self._manifest = manifest
        self._documents = documents
        self._evaluator = evaluator
        self._turn = asyncio.Lock()

    async def answer(self, asker: PeerId, question: Question) -> bytes:
        """Returns JSON: loss in nats per token, tokens, microbatches, stages, and with experts the loss by route.

        Raises Rejected if the question asks for too much or there is no held-out text, Unreachable if no path works.
        """
        count = question.microbatches
        if not 1 <= count <= MAX_MICROBATCHES:
            raise Rejected(f"cannot evaluate {count} microbatches; 1 to {MAX_MICROBATCHES} are allowed")
        every = tuple(range(1, self._manifest.stages.count))
        stages = question.stages or every
        if not set(stages) <= set(every):
            raise Rejected(f"stage {max(stages)} does not exist; the last stage is {len(every)}")
        async with self._turn:
            try:
                texts = await asyncio.to_thread(self._texts, count)
            except ConfigError as error:
                raise Rejected(str(error)) from None
            found = await self._evaluator.evaluate(texts, stages)
        # The head averages over all tokens, but some held-out tokens are not labels.
        losses = [(text.per_label(loss), text.scored) for loss, text in zip(found, texts, strict=True)]
        sizes = summary_of([text.workload for text in texts], self._manifest.microbatch_tokens)
        report = answer_of(held_out_loss([text.route for text in texts], losses, sizes)) | {"stages": stages}
        return json.dumps(report).encode()

    def _texts(self, count: int) -> list[Microbatch]:
        """Packs `count` held-out microbatches. Reads files, so call it in a thread."""
        return list(held_out_microbatches(self._manifest, count, self._documents))
