"""What a node does in its run: the duty of a stage peer, or of a data node. Each puts its parts together and takes them apart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from node.admission import Admission
from node.assignment import Assignment
from node.averaging.replica import LocalReplica
from node.averaging.service import ModuleRounds, module_rounds
from node.carrier import Carrier
from node.checkpoint.state import ReplicaState
from node.clock import SystemClock
from node.compute import Priority
from node.data.feed import START, TrainingFeed, open_documents
from node.data.position import ReadingPosition
from node.data.prefetch import Prefetcher
from node.data_node import DataNode, DataNodeParts
from node.data_worker import DataWorker
from node.evaluation import Evaluator
from node.events import Continued, EventSink, InnerStep, Load, MicrobatchCounts, Retracted, Visit
from node.held_out import HeldOut
from node.hop_worker import HopWorker
from node.hosting import host_hop, host_stage_zero, measure_speed
from node.lane_talk import LaneTalk
from node.optimization import StepFigures
from node.options import NodeOptions
from node.path_rules import path_rules
from node.rate import Rate
from node.resume import (
    capture_hop,
    capture_stage_zero,
    counts_of,
    first_number,
    position_of,
    progress_of,
    restore_hop,
    restore_stage_zero,
)
from node.task_scope import task_scope
from node.work import Worker
from protocol.manifest import Manifest
from protocol.seams import Question, QuestionAbout
from swarm.custody import Custody
from swarm.estimates import Estimates
from swarm.flights import Counts, FlightRules, Flights
from swarm.paths.measurements import Measurements
from swarm.planner import Planner
from swarm.shelf import ChooseReplica
from swarm.timing import PathTimes
from swarm.vocabulary import MicrobatchId, ModuleId, PeerId, Reasoned

DEFAULT_SLOTS = 16
NUMBERS_A_SECOND = 2**14
"""Microbatches are numbered from the time of the start, so that a restarted data node does not use a number twice."""
QUIET_S = 1.0
"""A draining stage peer that has held nothing for this long has nothing more to expect."""
LAST_WORDS_S = 3.0
"""How long a data node that stops may take for its last inner step, and to tell the hops that their gradients count."""
LARGEST_DEFAULT_GRAPHS = 2 * 2**30

NO_COUNTS = MicrobatchCounts()

Answering = Callable[[Question], Awaitable[bytes]]
Hook = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Account:
    """What a duty has done, for summaries and status."""

    steps: int
    accumulated: int
    recomputed: int
    tokens: int
    tokens_per_s: float
    counts: MicrobatchCounts = NO_COUNTS
    loss_first: float | None = None
    loss_last: float | None = None
    waiting_for: tuple[str, ...] = ()
    visits: tuple[tuple[int, int], ...] = ()
    """Of a data node: stage and completed visits."""
    paths: dict[str, Any] | None = None
    """Of a data node: its lanes, and how long its microbatches wait (`node.lane_talk.LaneTalk.describe`)."""


class Duty(Protocol):
    """What the process needs of a duty, whichever it is."""

    carrier: Carrier
    answers: dict[QuestionAbout, Answering]
    rounds: ModuleRounds
    before_leaving: list[Hook]
    """What is still to be done for the others when the module is let go, after `drain`; there is a limit for all together."""

    async def prepare(self) -> None:
        """Gets the replica ready to serve; the node is JOINING meanwhile. Cancelled when the node is asked to stop."""
        ...

    async def run(self) -> None:
        """Works until cancelled."""
        ...

    async def drain(self, patience_s: float) -> None:
        """Takes nothing new and finishes what is under way, or gives up after `patience_s` seconds."""
        ...

    def capture(self) -> ReplicaState:
        """A copy of everything the replica needs to go on. Runs on the compute thread."""
        ...

    def load(self) -> Load: ...

    def account(self) -> Account: ...


class LoggedVisits:
    """`node.work.VisitCounter` that reports each visit."""

    def __init__(self, peer: PeerId, module: str, events: EventSink) -> None:
        self._peer = peer
        self._module = module
        self._events = events

    def visited(self, microbatch: MicrobatchId) -> None:
        self._events.emit(Visit(self._peer, self._module, str(microbatch)))

    def retracted(self, microbatch: MicrobatchId) -> None:
        self._events.emit(Retracted(self._peer, self._module, str(microbatch)))


class HopDuty:
    """A peer of stage 1 or above."""

    def __init__(self, given: Assignment, worker: HopWorker, carrier: Carrier, rounds: ModuleRounds) -> None:
        self.carrier = carrier
        self.rounds = rounds
        self.answers: dict[QuestionAbout, Answering] = dict(rounds.answers)
        self.before_leaving: list[Hook] = [rounds.finish_round]
        self._given = given
        self._presence = given.presence
        self._module = given.module
        self._worker = worker
        self._tokens = given.manifest.microbatch_tokens
        self._rate = Rate(SystemClock())
        self._seen = worker.accumulated

    async def prepare(self) -> None:
        """Its speed, to be announced, and the state on which its module stands."""
        own, part, given = self._presence.own, self._worker.part, self._given
        own.tokens_per_second = await given.compute.run(
            Priority.UPKEEP, lambda: measure_speed(part, given.manifest, given.device)
        )
        await self.rounds.prepare()

    async def run(self) -> None:
        """Keeps the announced speed true."""
        while True:
            await asyncio.sleep(QUIET_S)
            self._rate.add((self._worker.accumulated - self._seen) * self._tokens)
            self._seen = self._worker.accumulated
            if self._worker.tokens_per_s:
                self._presence.own.tokens_per_second = self._worker.tokens_per_s

    async def drain(self, patience_s: float) -> None:
        quiet_since = None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience_s):
                while quiet_since is None or loop.time() - quiet_since < QUIET_S:
                    if not self.carrier.is_empty:
                        quiet_since = None
                    elif quiet_since is None:
                        quiet_since = loop.time()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return

    def capture(self) -> ReplicaState:
        return capture_hop(self._worker, self._tokens, self.rounds.agreed())

    def load(self) -> Load:
        own, custody = self._presence.own, self.carrier.custody
        return Load(own.peer, str(self._module), custody.slots, custody.used_slots, self._rate.per_second())

    def account(self) -> Account:
        worker = self._worker
        tokens = worker.accumulated * self._tokens
        return Account(worker.optimizer.steps, worker.accumulated, worker.recomputed, tokens, self._rate.per_second())


class DataDuty:
    """A data node: stage 0, and the paths that start there."""

    def __init__(
        self,
        given: Assignment,
        worker: DataWorker,
        carrier: Carrier,
        data_node: DataNode,
        text_came: asyncio.Event,
        talk: LaneTalk,
        rounds: ModuleRounds,
    ) -> None:
        self.carrier = carrier
        self.rounds = rounds
        self.answers: dict[QuestionAbout, Answering] = dict(rounds.answers)
        self.before_leaving: list[Hook] = [rounds.finish_round]
        self._given = given
        self._presence = given.presence
        self._worker = worker
        self._data_node = data_node
        self._text_came = text_came
        self._talk = talk

    async def prepare(self) -> None:
        """The state on which its module stands. A data node announces no speed: nobody chooses among them."""
        await self.rounds.prepare()

    async def run(self) -> None:
        reception = self._presence.reception
        reception.lanes = self._talk
        try:
            await self._launch()
        finally:
            reception.lanes = None

    async def _launch(self) -> None:
        async with task_scope() as tasks:
            tasks.create_task(self._data_node.run())
            tasks.create_task(self._talk.run(self._presence.transport))
            tasks.create_task(self._wake_on(self._text_came))
            tasks.create_task(self._wake_on(self._presence.neighbourhood.changed, self._talk.look_around))

    async def drain(self, patience_s: float) -> None:
        self._data_node.stopping = True
        try:
            async with asyncio.timeout(patience_s):
                await self._data_node.all_landed()
        except TimeoutError:
            for flight in self._data_node.flights.in_flight:
                self._data_node.lost(flight.microbatch, "its data node stops")
        await self.carrier.nothing_owed(LAST_WORDS_S)

    def capture(self) -> ReplicaState:
        node = self._data_node
        return capture_stage_zero(self._worker, node.flights, node.progress, node.reading, self.rounds.agreed())

    def load(self) -> Load:
        flights = self._data_node.flights
        own, rate = self._presence.own, self._data_node.rate.per_second()
        return Load(own.peer, str(ModuleId(0)), flights.rules.window, len(flights.in_flight), rate)

    def account(self) -> Account:
        flights, progress = self._data_node.flights, self._data_node.progress
        counts = flights.counts
        return Account(
            steps=flights.steps_done,
            accumulated=self._worker.accumulated,
            recomputed=self._worker.recomputed,
            tokens=progress.tokens,
            tokens_per_s=self._data_node.rate.mean(),
            counts=_reported(counts),
            loss_first=progress.loss_first,
            loss_last=progress.loss_last,
            waiting_for=tuple(str(module) for module in progress.waiting_for),
            visits=tuple(sorted(progress.visits.items())),
            paths=self._talk.describe(),
        )

    async def _wake_on(self, news: asyncio.Event, tell: Callable[[], None] = lambda: None) -> None:
        """A peer that comes may be the one that is waited for, and a text too."""
        while True:
            await news.wait()
            news.clear()
            tell()
            self._data_node.wake()


@asynccontextmanager
async def hop_duty(given: Assignment) -> AsyncIterator[HopDuty]:
    """The duty of a stage peer, built but not prepared."""
    manifest, device = given.manifest, given.device
    budget = default_graph_budget(device).value if given.options.memory is None else given.options.memory
    worker = await given.compute.run(Priority.UPKEEP, lambda: host_hop(manifest, given.module, device, budget))
    if given.resumed.state is not None:
        await given.compute.run(Priority.UPKEEP, partial(restore_hop, worker, given.resumed.state))
    given.presence.own.steps = worker.optimizer.steps
    planner = Planner(path_rules(manifest), given.presence.membership, Estimates(), manifest.microbatch_tokens)
    replica = LocalReplica((worker.part,), manifest.training.fragments, worker.optimizer, worker.parameters_changed)
    async with module_rounds(given, replica) as rounds:
        worker.after_step = rounds.after_inner_step
        yield HopDuty(given, worker, _carrier(given, worker, planner, rounds), rounds)


@asynccontextmanager
async def data_duty(given: Assignment) -> AsyncIterator[DataDuty]:
    """The duty of a data node, its text open and the first microbatches being packed."""
    manifest, own, clock = given.manifest, given.presence.own, SystemClock()
    worker = await given.compute.run(Priority.UPKEEP, lambda: host_stage_zero(manifest, given.device))
    if given.resumed.state is not None:
        await given.compute.run(Priority.UPKEEP, partial(restore_stage_zero, worker, given.resumed.state))
    position, progress = position_of(given.resumed), progress_of(given.resumed)
    if position is not None:
        given.events.emit(Continued(own.peer, _reported(counts_of(position))))
    own.steps = worker.stage.optimizer.steps
    documents = await asyncio.to_thread(open_documents, manifest)
    estimates, tokens = Estimates(), manifest.microbatch_tokens
    membership, measurements = given.presence.membership, Measurements(own.peer, tokens)
    rules = _flight_rules(given.options, manifest)
    talk = LaneTalk(own, membership, measurements, path_rules(manifest), rules.most_in_flight)
    planner = Planner(path_rules(manifest), membership, estimates, tokens, lambda: talk.lanes)
    text_came = asyncio.Event()

    def live_data_nodes() -> tuple[PeerId, ...]:
        replicas = membership.replicas(ModuleId(0), clock.monotonic())
        return tuple(sorted({own.peer, *(announcement.peer for announcement in replicas)}))

    start = START if position is None else position.cursor
    number = first_number(position, int(clock.wall()) * NUMBERS_A_SECOND)
    feed = TrainingFeed(manifest, documents, own.peer, start)
    stage = worker.stage
    replica = LocalReplica(
        (stage.embedding, stage.head), manifest.training.fragments, stage.optimizer, worker.parameters_changed
    )
    prefetcher = Prefetcher(feed, live_data_nodes, text_came.set, rules.window + 1)
    async with module_rounds(given, replica) as rounds, AsyncExitStack() as stack:
        worker.after_step = rounds.after_inner_step
        carrier = _carrier(given, worker, planner, rounds)
        texts = stack.enter_context(prefetcher)
        parts = DataNodeParts(
            flights=Flights(own.peer, rules, first_number=number, counts=counts_of(position)),
            planner=planner,
            times=PathTimes(own.peer, estimates, measurements, tokens, membership.slots_of),
            evaluator=Evaluator(own.peer, planner, worker, carrier, clock),
            worker=worker,
            carrier=carrier,
            texts=texts,
            progress=progress,
            reading=ReadingPosition(start, rules.per_step * (rules.staleness + 2) + rules.window),
        )
        data_node = DataNode(parts, clock, given.events, given.finished)
        carrier.ends = data_node
        duty = DataDuty(given, worker, carrier, data_node, text_came, talk, rounds)
        duty.answers[QuestionAbout.EVALUATE] = HeldOut(manifest, documents, parts.evaluator).answer
        yield duty


def default_graph_budget(device: torch.device) -> Reasoned[int]:
    """Bytes that kept graphs may take when nobody says: two fifths of a GPU's free memory, an eighth of the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Reasoned(free * 2 // 5, "two fifths of the GPU's free memory")
    if not hasattr(os, "sysconf"):
        return Reasoned(LARGEST_DEFAULT_GRAPHS // 2, "this system does not say how much memory it has")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Reasoned(min(LARGEST_DEFAULT_GRAPHS, memory // 8), "an eighth of this machine's memory, 2 GiB at most")


def _reported(counts: Counts) -> MicrobatchCounts:
    return MicrobatchCounts(counts.started, counts.completed, counts.abandoned, counts.duplicated)


def _flight_rules(options: NodeOptions, manifest: Manifest) -> FlightRules:
    """A window of one microbatch for each stage keeps every stage busy; two more cover what is on the wire."""
    window = options.window or manifest.stages.visited_per_path + 3
    return FlightRules(manifest.microbatches_per_step, manifest.training.staleness, window, options.steps)


def _carrier(given: Assignment, worker: Worker, planner: Planner, rounds: ModuleRounds) -> Carrier:
    own, clock, module = given.presence.own, SystemClock(), str(given.module)
    slots = given.options.slots or DEFAULT_SLOTS
    custody = Custody(own.peer, slots, _stand_in(planner, clock), given.presence.membership.hosts)
    own.slots, own.used_slots = custody.slots, lambda: custody.used_slots

    def stepped(figures: StepFigures) -> None:
        own.steps = figures.step
        rounds.stepped()
        visits, norm, rate = max(figures.visits), figures.gradient_norm, figures.learning_rate
        given.events.emit(InnerStep(own.peer, module, figures.step, visits, norm, rate))

    admission = Admission(given.manifest, own.peer, given.module)
    on_failure = given.presence.neighbourhood.link_down
    visits = LoggedVisits(own.peer, module, given.events)
    return Carrier(custody, admission, worker, given.compute, clock, on_failure, stepped, visits=visits)


def _stand_in(planner: Planner, clock: SystemClock) -> ChooseReplica:
    def choose(module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        return planner.replica(module, without, {}, clock.monotonic())

    return choose
