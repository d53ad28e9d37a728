"""Answers `evaluate`: the loss on held-out text, through the swarm as it is now."""

from __future__ import annotations

import asyncio
import json
import math

from node.data.documents import Documents
from node.data.feed import held_out_microbatches
from node.evaluation import Evaluator
from protocol.manifest import Manifest
from protocol.seams import Question
from swarm.errors import ConfigError, Rejected
from swarm.subsets import all_stages

MAX_MICROBATCHES = 256


class HeldOut:
    """The held-out text of one run at one data node. One evaluation at a time; a second one waits."""

    def __init__(self, manifest: Manifest, documents: Documents, evaluator: Evaluator) -> None:
        self._manifest = manifest
        self._documents = documents
        self._evaluator = evaluator
        self._turn = asyncio.Lock()

    async def answer(self, question: Question) -> bytes:
        """JSON: loss in nats per token, tokens, microbatches and the stages that were visited after stage 0.

        Raises:
            Rejected: the question asks for too much, or there is no held-out text.
            Unreachable: the text found no way through the swarm.
        """
        count = question.microbatches
        if not 1 <= count <= MAX_MICROBATCHES:
            raise Rejected(f"{count} microbatches were asked for; 1 to {MAX_MICROBATCHES} are allowed")
        every = all_stages(self._manifest.stages.count)
        stages = question.stages or every
        if not set(stages) <= set(every):
            raise Rejected(f"stage {max(stages)} was asked for; this run's last is {len(every)}")
        async with self._turn:
            try:
                texts = await asyncio.to_thread(
                    lambda: list(held_out_microbatches(self._manifest, count, self._documents))
                )
            except ConfigError as error:
                raise Rejected(str(error)) from None
            losses = await self._evaluator.evaluate(texts, stages)
        tokens = sum(text.size for text in texts)
        report = {
            "loss": math.fsum(losses) / len(losses),
            "tokens": tokens,
            "microbatches": len(losses),
            "stages": stages,
        }
        return json.dumps(report).encode()
