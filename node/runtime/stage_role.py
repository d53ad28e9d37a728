"""The role of a stage peer: builds its objects, serves a module after stage 0, and closes them."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import torch

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.outer_step import LocalReplica
from node.averaging.module_rounds import ModuleRounds, module_rounds
from node.checkpoint.state import Post, ReplicaState
from node.concurrency.compute_thread import Priority
from node.context.module_context import ModuleContext
from node.model.memory_need import need_of
from node.observability.events import Load
from node.observability.status import Account, WeightsStatus
from node.observability.throughput import Rate
from node.pipeline.admission import path_rules
from node.pipeline.runner import MicrobatchRunner
from node.pipeline.worker import HopWorker, host_hop, measure_speed
from node.runtime.resume import capture_hop, restore_hop
from node.runtime.role import link_codecs, microbatch_runner_for, moments_status, tell_moments
from protocol.interfaces.clock import SystemClock
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.planner import Planner

QUIET_S = 1.0  # Seconds between rate samples, and of silence before a drain ends
LARGEST_DEFAULT_GRAPHS = 2 * 2**30


class StageRole:
    """A peer that hosts stage 1 or above."""

    def __init__(
        self, context: ModuleContext, worker: HopWorker, runner: MicrobatchRunner, rounds: ModuleRounds
    ) -> None:
        self.runner, self.rounds = runner, rounds
        self._context, self._worker = context, worker
        self._rate = Rate(SystemClock())
        self._seen = worker.accumulated_tokens

    async def prepare(self) -> None:
        context = self._context
        measure = partial(measure_speed, self._worker.passes, context.manifest, context.device)
        context.session.own.speed = await context.compute.run(Priority.UPKEEP, measure)
        await self.rounds.prepare()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(QUIET_S)
            self._rate.add(self._worker.accumulated_tokens - self._seen)
            self._seen = self._worker.accumulated_tokens
            if self._worker.speed.tokens_per_s:  # the speed measured at the start stays until real work replaces it
                self._context.session.own.speed = self._worker.speed

    async def drain(self, patience_s: float) -> None:
        quiet_since = None
        loop = asyncio.get_running_loop()
        try:
            # Upstream peers may still send work until they hear of the drain, so wait for a quiet second.
            async with asyncio.timeout(patience_s):
                while quiet_since is None or loop.time() - quiet_since < QUIET_S:
                    if not self.runner.is_empty:
                        quiet_since = None
                    elif quiet_since is None:
                        quiet_since = loop.time()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return

    def capture(self, post: Post) -> ReplicaState:
        return capture_hop(self._worker, self.rounds.agreed(), post)

    def load(self) -> Load:
        own, custody = self._context.session.own, self.runner.custody
        return Load(own.peer, str(self._context.module), custody.slots, custody.used_slots, self._rate.per_second())

    def account(self) -> Account:
        worker, put_off, chosen = self._worker, self._worker.deferred, self._worker.deferred.chosen
        figures = put_off.visits, put_off.waiting, put_off.held_bytes, put_off.peak_bytes
        return Account(
            steps=worker.optimizer.steps,
            accumulated=worker.accumulated,
            recomputed=worker.recomputed,
            tokens=worker.accumulated_tokens,
            tokens_per_s=self._rate.per_second(),
            codec_s=worker.wire.codec_s,
            weights=WeightsStatus(chosen.value, chosen.reason, *figures),
            moments=moments_status(worker.optimizer),
            data_nodes=worker.shares,
        )


@asynccontextmanager
async def stage_role(context: ModuleContext, first: Anchor | None) -> AsyncIterator[StageRole]:
    """Builds a stage peer within the block, without `prepare`. `first`: initial anchor; None keeps the weights."""
    manifest, device = context.manifest, context.device
    budget = _graph_budget(context)
    allowance, submit = context.options.allowance, context.compute.submit
    worker = await context.compute.run(
        Priority.UPKEEP, lambda: host_hop(manifest, context.module, device, budget, allowance, context.threads, submit)
    )
    if context.resumed.state is not None:
        await context.compute.run(Priority.UPKEEP, partial(restore_hop, worker, context.resumed.state))
    tell_moments(context, worker.optimizer)
    context.session.own.steps = worker.optimizer.steps
    times = MeasuredTimes(context.session.own.peer, manifest.microbatch_tokens)
    planner = Planner(path_rules(manifest), context.session.membership, times)
    replica = LocalReplica((worker.part,), manifest.training.fragments, worker.optimizer, worker.parameters_changed)
    async with module_rounds(context, replica, first) as rounds:
        del first
        runner = microbatch_runner_for(context, worker, planner, link_codecs(context, worker), rounds)
        yield StageRole(context, worker, runner, rounds)


def _graph_budget(context: ModuleContext) -> int:
    options = context.options
    budget = _default_graph_budget(context.device) if options.graph_bytes is None else options.graph_bytes
    limit = options.memory_limit_bytes
    if limit is None:
        return budget
    # The limit covers stage and kept graphs together.
    need = need_of(context.manifest, (context.module,), options.slots_held, options.moments)
    return min(budget, max(0, limit.value - (need.all if context.device.type == "cpu" else need.device)))


def _default_graph_budget(device: torch.device) -> int:
    """Returns the default memory for graphs: 2/5 of a GPU's free memory, else 1/8 of main memory, at most 2 GiB."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free * 2 // 5
    if not hasattr(os, "sysconf"):
        return LARGEST_DEFAULT_GRAPHS // 2
    return min(LARGEST_DEFAULT_GRAPHS, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
