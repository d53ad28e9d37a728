"""The two roles of a node, data node and stage peer: each builds its objects, serves a module, and closes them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from secrets import randbelow

import torch

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.outer_step import LocalReplica
from node.averaging.module_rounds import ModuleRounds, module_rounds
from node.checkpoint.state import Post, ReplicaState
from node.concurrency.compute_thread import Priority
from node.concurrency.task_groups import task_scope
from node.context.module_context import ModuleContext
from node.context.options import NodeOptions
from node.data.feed import START, Prefetcher, ReadingPosition, TrainingFeed, open_documents
from node.model.memory_need import need_of, slots_for
from node.model.moments import MomentType
from node.model.optimizer import InnerOptimizer, StepFigures
from node.network.session import NetworkSession
from node.observability.events import Continued, InnerStep, Load, MicrobatchCounts, Note, Retracted, Visit
from node.observability.status import Account, MomentsStatus, PathStatus, RouteStatus, StagePrice, WeightsStatus
from node.observability.throughput import Rate
from node.pipeline import worker as workers
from node.pipeline.admission import Admission, path_rules
from node.pipeline.runner import LinkCodecs, MicrobatchRunner, Worker, WorkerThread
from node.routing.launcher import DataNode, Evaluator, HeldOut, Training, WindowFinder
from node.runtime import resume
from protocol.interfaces.clock import Clock, SystemClock
from protocol.interfaces.transport import QuestionAbout
from protocol.manifest.manifest import Manifest
from swarm.experts.routes import RouteTally
from swarm.membership.membership import Membership
from swarm.pipeline.custody import Custody
from swarm.pipeline.in_flight import Counts, InFlightRules, InFlightTable
from swarm.routing.attribution import PathTimes
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.planner import Planner
from swarm.vocabulary.announcement import MAX_VISITED_STAGES
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Reasoned, Route


class ReplicaHost:
    """Reports a replica's gradients and steps to rounds, events and proofs (`node.pipeline.runner.RunnerHost`)."""

    def __init__(self, context: ModuleContext, rounds: ModuleRounds) -> None:
        self._context, self._rounds = context, rounds
        self._own, self._module = context.session.own, str(context.module)

    def visited(self, microbatch: MicrobatchId) -> None:
        self._context.events.emit(Visit(self._own.peer, self._module, str(microbatch)))

    def retracted(self, microbatch: MicrobatchId) -> None:
        self._context.events.emit(Retracted(self._own.peer, self._module, str(microbatch)))

    def stepped(self, figures: StepFigures) -> None:
        self._own.steps = figures.step
        self._rounds.runner.stepped()
        visits, norm, rate = max(figures.visits), figures.gradient_norm, figures.learning_rate
        self._context.events.emit(InnerStep(self._own.peer, self._module, figures.step, visits, norm, rate))

    def not_reached(self, peer: PeerId, error: PeerError) -> None:
        self._context.session.membership_sync.link_down(peer, error)


@dataclass(frozen=True, slots=True)
class PlannedReplicas:
    """Lookup of replicas that could take over a microbatch (`swarm.pipeline.custody.Replicas`)."""

    _planner: Planner
    _membership: Membership
    _clock: Clock
    is_linked: Callable[[PeerId], bool]

    @property
    def fewest_hops(self) -> int:
        return self._planner.rules.fewest

    def choose(self, module: ModuleId, without: frozenset[PeerId], busy: PeerId | None) -> Reasoned[PeerId | None]:
        return self._planner.replica(module, without, {}, self._clock.monotonic(), busy)

    def link_took(self, peer: PeerId, since: float) -> None:
        self._planner.sent(peer, self._clock.monotonic() - since)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return self._membership.hosts(peer, module)

    def is_given_up(self, peer: PeerId) -> bool:
        return self._membership.is_given_up(peer)

    def goes_round(self, module: ModuleId) -> bool:
        return self._planner.goes_round(module, self._clock.monotonic())

    def has_other_expert(self, module: ModuleId) -> bool:
        return self._planner.has_other_expert(module, self._clock.monotonic())


def microbatch_runner_for(
    context: ModuleContext, worker: Worker, planner: Planner, codecs: LinkCodecs, rounds: ModuleRounds
) -> MicrobatchRunner:
    """Builds the microbatch runner of the node's replica. `planner` chooses substitutes for lost hops."""
    session, clock = context.session, SystemClock()
    own = session.own
    replicas = PlannedReplicas(planner, session.membership, clock, session.transport.is_linked)
    # A data node's own microbatches take no slots, but need as many receive buffers.
    options = context.options
    flying = 0 if context.module.stage else options.window or slots_for(context.manifest, options.slots)
    custody = Custody(own.peer, max(options.slots_held, flying), replicas)
    own.slots, own.used_slots = custody.slots, lambda: custody.used_slots
    admission = Admission(context.manifest, own.peer, context.module, context.routes.fault, context.routes.uninvited)
    allocate = workers.receive_buffers(context.device)
    on_thread = WorkerThread(worker, context.compute, clock, rounds.runner.after_inner_step, allocate)
    host = ReplicaHost(context, rounds)
    return MicrobatchRunner(custody, admission, on_thread, session.transport, codecs, host, clock)


def moments_status(optimizer: InnerOptimizer) -> MomentsStatus:
    return MomentsStatus(optimizer.moments.value.value, optimizer.moments.reason, optimizer.state_bytes)


def tell_moments(context: ModuleContext, optimizer: InnerOptimizer) -> None:
    """Reports to the person the effect of `--moments`, also on moments from a checkpoint."""
    if context.options.moments is MomentType.FLOAT32:
        return
    resumed = context.resumed.state is not None and optimizer.moments.value is not MomentType.FLOAT32
    then = "; float32 moments of the checkpoint are rounded to it" if resumed else ""
    context.events.emit(Note("info", f"moments: {optimizer.moments.reason}{then}"))


def link_codecs(context: ModuleContext, worker: Worker) -> LinkCodecs:
    """Builds the codec choice of links: compares transfer time with the compute time of the link's slower peer."""
    own, membership, transport = context.session.own, context.session.membership, context.session.transport
    tokens = context.manifest.microbatch_tokens

    def visit_s(peer: PeerId) -> float:
        announced = membership.get(peer)
        speeds = (own.speed, 0.0 if announced is None else announced.tokens_per_second)
        known = [speed for speed in speeds if speed > 0]  # a data node announces no speed
        return tokens / min(known) if known else 0.0

    return LinkCodecs(context.manifest, worker.tensor, visit_s, transport.goodput_bytes_per_s)


QUIET_S = 1.0  # Seconds between rate samples, and of silence before a drain ends
LARGEST_DEFAULT_GRAPHS = 2 * 2**30


class StageRole:
    """A peer that hosts stage 1 or above."""

    def __init__(
        self, context: ModuleContext, worker: workers.HopWorker, runner: MicrobatchRunner, rounds: ModuleRounds
    ) -> None:
        self.runner, self.rounds = runner, rounds
        self._context, self._worker = context, worker
        self._rate = Rate(SystemClock())
        self._seen = worker.accumulated_tokens

    async def prepare(self) -> None:
        context = self._context
        measure = partial(workers.measure_speed, self._worker.passes, context.manifest, context.device)
        context.session.own.speed = await context.compute.run(Priority.UPKEEP, measure)
        await self.rounds.prepare()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(QUIET_S)
            self._rate.add(self._worker.accumulated_tokens - self._seen)
            self._seen = self._worker.accumulated_tokens
            if self._worker.speed:  # the speed measured at the start stays until real work replaces it
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
        return resume.capture_hop(self._worker, self.rounds.agreed(), post)

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
    host = partial(workers.host_hop, manifest, context.module, device, budget, allowance, context.threads, submit)
    worker = await context.compute.run(Priority.UPKEEP, host)
    if context.resumed.state is not None:
        await context.compute.run(Priority.UPKEEP, partial(resume.restore_hop, worker, context.resumed.state))
    tell_moments(context, worker.optimizer)
    context.session.own.steps = worker.optimizer.steps
    times = MeasuredTimes(context.session.own.peer, manifest.microbatch_tokens)
    planner = Planner(path_rules(manifest), context.session.membership, times, context.session.own.home)
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


UNPROVEN_S = 30.0  # Time in which a data node must prove work to keep its share of the documents
# Limit for a stopping data node to finish its last inner step and tell the hops that their gradients count.
LAST_WORDS_S = 3.0


@dataclass(frozen=True, slots=True)
class DataRole:
    """Role of a node that hosts stage 0 and launches microbatches."""

    _session: NetworkSession
    _worker: workers.DataWorker
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
    host = partial(workers.host_stage_zero, manifest, context.device, options.allowance, context.threads, submit)
    worker = await context.compute.run(Priority.UPKEEP, host)
    if context.resumed.state is not None:
        await context.compute.run(
            Priority.UPKEEP, partial(resume.restore_stage_zero, worker, context.resumed.state, per_step)
        )
    position = None if context.resumed.state is None else context.resumed.state.data
    if position is not None:
        context.events.emit(Continued(own.peer, _reported(resume.counts_of(position))))
    tell_moments(context, worker.stage.optimizer)
    own.steps = worker.stage.optimizer.steps  # a restored optimizer already has steps
    assert context.text.value is not None, context.text.reason
    documents = await asyncio.to_thread(open_documents, manifest, context.text.value, context.router)
    membership, times = context.session.membership, MeasuredTimes(own.peer, manifest.microbatch_tokens)
    rules = _in_flight_rules(options, manifest)
    paths = path_rules(manifest)
    planner = Planner(paths, membership, times, own.home)
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

    def routes() -> dict[PeerId, Route]:
        return {a.peer: a.route for a in membership.peers() if a.module == ModuleId(0)} | {own.peer: own.route}

    start = START if position is None else position.cursor
    # Training and evaluation draw from separate halves of the numbers, so their microbatches never collide.
    number = resume.first_number(position, randbelow(resume.NUMBERS // 2))
    measured = resume.NUMBERS + randbelow(resume.NUMBERS // 2)
    feed = TrainingFeed(manifest, documents, own.peer, start, routes)
    stage = worker.stage
    replica = LocalReplica(stage.parts, manifest.training.fragments, stage.optimizer, worker.parameters_changed)
    # One more than the window, so that a launch never waits for packing.
    prefetcher = Prefetcher(feed, live_data_nodes, lambda: data_node.wake(), rules.window + 1)
    async with module_rounds(context, replica, first) as rounds, AsyncExitStack() as stack:
        del first  # free the anchor; the rounds hold their own
        runner = microbatch_runner_for(context, worker, planner, link_codecs(context, worker), rounds)
        launches = workers.Launches(worker, runner, context.routes.signed, tells_labels=manifest.tells_labels)
        evaluator = Evaluator(own.peer, planner, launches, clock, measured)
        before = worker.stage.optimizer.steps - worker.steps
        in_flight = InFlightTable(own.peer, rules, number, resume.counts_of(position), worker.steps, before)
        late = rules.per_step * rules.staleness  # microbatches
        reading = ReadingPosition(start, late + 2 * rules.per_step + max(rules.window, late + rules.per_step))
        training = Training(in_flight, resume.progress_of(context.resumed), reading)
        asked, memory = options.window, slots_for(manifest, options.slots)
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
    training, tokens = manifest.training, manifest.microbatch_tokens
    per_step, growth = manifest.microbatches_per_step, training.staleness_steps
    return InFlightRules(per_step, training.staleness, window, options.steps, tokens, growth)
