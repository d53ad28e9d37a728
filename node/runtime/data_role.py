"""The role of a data node: builds its objects, serves stage 0, and closes them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from secrets import randbelow

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.outer_step import LocalReplica
from node.averaging.module_rounds import ModuleRounds, module_rounds
from node.checkpoint.state import Post, ReplicaState
from node.concurrency.compute_thread import Priority
from node.concurrency.task_groups import task_scope
from node.context.module_context import ModuleContext
from node.context.options import NodeOptions
from node.data.feed import START, Prefetcher, ReadingPosition, TrainingFeed, open_documents
from node.network.session import NetworkSession
from node.observability.events import Continued, Load, MicrobatchCounts
from node.observability.status import Account, PathStatus, RouteStatus, StagePrice
from node.pipeline.admission import path_rules
from node.pipeline.runner import MicrobatchRunner
from node.pipeline.worker import DataWorker, Launches, host_stage_zero
from node.routing.launcher import DataNode, Evaluator, HeldOut, Training, WindowFinder
from node.runtime import resume
from node.runtime.role import link_codecs, microbatch_runner_for, moments_status, tell_moments
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import QuestionAbout
from protocol.manifest.manifest import Manifest
from swarm.experts.routes import RouteTally
from swarm.pipeline.in_flight import Counts, InFlightRules, InFlightTable
from swarm.routing.attribution import PathTimes
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.planner import Planner
from swarm.vocabulary.announcement import MAX_VISITED_STAGES
from swarm.vocabulary.types import ModuleId, PeerId

UNPROVEN_S = 30.0  # Time in which a data node must prove work to keep its share of the documents
# Limit for a stopping data node to finish its last inner step and tell the hops that their gradients count.
LAST_WORDS_S = 3.0


@dataclass(frozen=True, slots=True)
class DataRole:
    """Role of a node that hosts stage 0 and launches microbatches."""

    _session: NetworkSession
    _worker: DataWorker
    runner: MicrobatchRunner
    _data_node: DataNode
    _planner: Planner
    _times: MeasuredTimes
    _held_out: HeldOut
    rounds: ModuleRounds
    _has_experts: bool

    async def prepare(self) -> None:
        """Fetches the state of stage 0. Announces no speed, because peers never choose among data nodes."""
        await self.rounds.prepare()

    async def run(self) -> None:
        dispatcher, answers = self._session.dispatcher, {QuestionAbout.EVALUATE: self._held_out.answer}
        with dispatcher.registered(answers=answers):
            async with task_scope() as tasks:
                tasks.create_task(self._data_node.run())
                tasks.create_task(self._wake_on_changes())

    async def drain(self, patience_s: float) -> None:
        self._data_node.stop_launching()
        try:
            async with asyncio.timeout(patience_s):
                await self._data_node.all_landed()
        except TimeoutError:
            for entry in self._data_node.in_flight.entries:
                self._data_node.lost(entry.microbatch, "its data node stops")
        await self.runner.nothing_owed(LAST_WORDS_S)  # hops wait for the word that their gradients count

    def capture(self, post: Post) -> ReplicaState:
        return resume.capture_stage_zero(self._worker, self._data_node.training, self.rounds.agreed(), post)

    def load(self) -> Load:
        in_flight = self._data_node.in_flight
        own, rate = self._session.own, self._data_node.rate.per_second()
        return Load(own.peer, str(ModuleId(0)), in_flight.window, len(in_flight.entries), rate)

    def account(self) -> Account:
        in_flight, progress = self._data_node.in_flight, self._data_node.progress
        counts = in_flight.counts
        return Account(
            steps=in_flight.steps_done,
            accumulated=self._worker.accumulated,
            recomputed=self._worker.recomputed,
            tokens=progress.tokens,
            tokens_per_s=self._data_node.rate.mean(),
            codec_s=self._worker.wire.codec_s,
            counts=_reported(counts),
            loss_first=progress.loss_first,
            loss_last=progress.loss_last,
            waiting_for=tuple(str(module) for module in progress.waiting_for),
            visits={str(stage): count for stage, count in sorted(progress.stage_visits.items())},
            module_visits=_by_module(progress.visits) if self._has_experts else None,
            rerouted=_by_module(progress.routes.rerouted) if self._has_experts else None,
            routes=_routes(progress.routes) if self._has_experts else None,
            curve=progress.curve,
            completed=tuple(progress.completed),
            measured=self._data_node.ledger.peers(),
            paths=_paths(self._planner, self._times),
            sizes=self._data_node.sizes.summary() if in_flight.counts.started else None,
            window=self._data_node.window.describe(),
            moments=moments_status(self._worker.stage.optimizer),
        )

    async def _wake_on_changes(self) -> None:
        """Wakes the data node when the membership view changes: a new peer may unblock a microbatch."""
        changed = self._session.membership_sync.changed
        while True:
            await changed.wait()
            changed.clear()
            self._data_node.wake()


@asynccontextmanager
async def data_role(context: ModuleContext, first: Anchor | None) -> AsyncIterator[DataRole]:
    """Builds a data node within the block, with its text open and the first microbatches being packed."""
    manifest, own, clock = context.manifest, context.session.own, SystemClock()
    options, per_step, submit = context.options, manifest.microbatches_per_step, context.compute.submit
    worker = await context.compute.run(
        Priority.UPKEEP, lambda: host_stage_zero(manifest, context.device, options.allowance, context.threads, submit)
    )
    if context.resumed.state is not None:
        await context.compute.run(
            Priority.UPKEEP, partial(resume.restore_stage_zero, worker, context.resumed.state, per_step)
        )
    position = resume.position_of(context.resumed)
    if position is not None:
        context.events.emit(Continued(own.peer, _reported(resume.counts_of(position))))
    tell_moments(context, worker.stage.optimizer)
    own.steps = worker.stage.optimizer.steps  # a restored optimizer already has steps
    assert context.text.value is not None, context.text.reason
    documents = await asyncio.to_thread(open_documents, manifest, context.text.value, context.router)
    membership, times = context.session.membership, MeasuredTimes(own.peer, manifest.microbatch_tokens)
    rules = _in_flight_rules(options, manifest)
    paths = path_rules(manifest)
    planner = Planner(paths, membership, times)
    if paths.skippable <= MAX_VISITED_STAGES:  # a record has room for a bounded number of stages
        own.visits = lambda: tuple(planner.prices.launched)

    first_seen: dict[PeerId, float] = {}

    def live_data_nodes() -> tuple[PeerId, ...]:
        now, proofs = clock.monotonic(), context.proofs
        here = {announcement.peer for announcement in membership.replicas(ModuleId(0), now)}
        for peer in first_seen.keys() - here:
            del first_seen[peer]
        # Names that hand out no work must not take a share of the documents for long.
        is_new = {peer for peer in here if now - first_seen.setdefault(peer, now) < UNPROVEN_S}
        return tuple(sorted({own.peer, *(here & (proofs.proven | is_new) if proofs.tallies else here)}))

    start = START if position is None else position.cursor
    # Training and evaluation draw from separate halves of the numbers, so their microbatches never collide.
    number = resume.first_number(position, randbelow(resume.NUMBERS // 2))
    measured = resume.NUMBERS + randbelow(resume.NUMBERS // 2)
    feed = TrainingFeed(manifest, documents, own.peer, start)
    stage = worker.stage
    replica = LocalReplica(stage.parts, manifest.training.fragments, stage.optimizer, worker.parameters_changed)
    # One more than the window, so that a launch never waits for packing.
    prefetcher = Prefetcher(feed, live_data_nodes, lambda: data_node.wake(), rules.window + 1)
    async with module_rounds(context, replica, first) as rounds, AsyncExitStack() as stack:
        del first  # free the anchor; the rounds hold their own
        runner = microbatch_runner_for(context, worker, planner, link_codecs(context, worker), rounds)
        launches = Launches(worker, runner, context.routes.signed, tells_labels=manifest.tells_labels)
        evaluator = Evaluator(own.peer, planner, launches, clock, measured)
        in_flight = InFlightTable(own.peer, rules, number, resume.counts_of(position), worker.steps)
        ahead = max(rules.window, rules.most_by_staleness)
        reading = ReadingPosition(start, rules.per_step * (rules.staleness + 2) + ahead)
        training = Training(in_flight, resume.progress_of(context.resumed), reading)
        asked, memory = options.window, options.slots_held
        window = WindowFinder(manifest, in_flight, membership, clock, asked=asked, memory=memory)
        path_times = PathTimes(own.peer, times, membership.slots_of)
        data_node = DataNode(context, training, planner, path_times, evaluator, launches, prefetcher.ready, window)
        held_out = HeldOut(manifest, documents, evaluator)
        stack.enter_context(runner.ending_at(data_node))
        stack.enter_context(prefetcher)
        session, has_experts = context.session, paths.has_experts
        yield DataRole(session, worker, runner, data_node, planner, times, held_out, rounds, has_experts)


def _paths(planner: Planner, times: MeasuredTimes) -> PathStatus:
    prices = planner.prices
    figures = zip(prices.launched, prices.shares, prices.excess, planner.stage_prices(), strict=True)
    stages = {
        str(stage): StagePrice(launched, round(share, 4), round(ahead, 1), round(price_s, 4))
        for stage, (launched, share, ahead, price_s) in enumerate(figures, start=1)
    }
    return PathStatus(stages, {str(peer): round(seconds, 4) for peer, seconds in sorted(times.waiting_s().items())})


def _by_module(counts: Mapping[ModuleId, int]) -> dict[str, int]:
    return {str(module): count for module, count in sorted(counts.items())}


def _routes(tally: RouteTally) -> tuple[RouteStatus, ...]:
    completed = max(1, sum(figures.visits for figures in tally.routes.values()))
    return tuple(
        RouteStatus(
            route,
            round(figures.visits / completed, 4),
            figures.visits,
            figures.rerouted,
            round(figures.loss.mean, 4) if figures.loss.samples else None,
        )
        for route, figures in sorted(tally.routes.items())
    )


def _reported(counts: Counts) -> MicrobatchCounts:
    return MicrobatchCounts(counts.started, counts.completed, counts.abandoned, counts.duplicated)


def _in_flight_rules(options: NodeOptions, manifest: Manifest) -> InFlightRules:
    # At first one microbatch per stage keeps each busy, and two more cover the wire. `WindowFinder` adapts it later.
    window = options.window or manifest.stages.visited_per_path + 3
    staleness, tokens = manifest.training.staleness, manifest.microbatch_tokens
    return InFlightRules(manifest.microbatches_per_step, staleness, window, options.steps, tokens)
