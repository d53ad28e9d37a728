"""A data node: takes packed microbatches, launches them along paths, and measures the held-out loss."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from node.concurrency.task_groups import set_or_after, task_scope
from node.context.module_context import ModuleContext
from node.data.documents import Documents
from node.data.feed import ReadingPosition, held_out_microbatches
from node.data.packing import Microbatch
from node.network.loss_report import answer_of, held_out_loss
from node.observability.events import Abandoned, Completed, Note, Resumed, Step, Visit, Waiting
from node.observability.failpoints import crash_point
from node.observability.status import MOST_COMPLETED, NO_CURVE, CompletedPath, Curve, WindowStatus
from node.observability.throughput import Rate
from node.pipeline.runner import PathEnds
from node.pipeline.worker import Launches
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import MAX_EVALUATION_MICROBATCHES, Question
from protocol.manifest.manifest import Manifest
from swarm.experts.routes import MAX_ROUTES, RouteTally
from swarm.membership.membership import Membership
from swarm.pipeline.custody import LONGEST_LIFETIME_S, SHORTEST_LIFETIME_S
from swarm.pipeline.in_flight import InFlight, InFlightTable, Stragglers, Window, room_at_hops
from swarm.routing.attribution import LossOutliers, PathTimes
from swarm.routing.launch_queue import LaunchQueue, current_route
from swarm.routing.planner import NoReplica, Planner, in_flight_by_peer
from swarm.vocabulary.errors import ConfigError, Rejected, Unreachable
from swarm.vocabulary.pipeline_messages import Forward, Purpose, Receipt
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId, Reasoned, Route, short
from swarm.workload.microbatch_sizes import summary_of

PAUSE_S = 1.0
LIFETIMES_S = (15.0, 30.0, 60.0)  # Timeouts per attempt. A dead hop loses evaluated microbatches: no other keeps them.
# In flight, below a hop's slots. Each queues behind training at every hop: one at a time would be slow.
EVALUATED_AT_ONCE = 8


class UndeliverableError(Exception):
    """An evaluated microbatch could not be delivered; a retry may find another path."""


class Evaluator:
    """Sender of held-out microbatches through the swarm, a few at a time, and receiver of their losses."""

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
        room = asyncio.Semaphore(EVALUATED_AT_ONCE)

        async def measured(text: Microbatch) -> float:
            async with room:
                return await self._evaluate(text, stages)

        async with task_scope() as tasks:
            losses = [tasks.create_task(measured(text)) for text in texts]
        return [loss.result() for loss in losses]

    async def _evaluate(self, text: Microbatch, stages: Sequence[int]) -> float:
        reason = ""
        for attempt, lifetime_s in enumerate(LIFETIMES_S):  # each attempt plans a new path
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
            self._launches.abandon(microbatch, "evaluated")  # hops release it; a loss that arrives later is ignored


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Answers of a data node to requests for the held-out loss. Evaluations run one at a time."""

    _manifest: Manifest
    _documents: Documents
    _evaluator: Evaluator
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, asker: PeerId, question: Question) -> bytes:
        """Returns JSON: loss in nats per token, also by route, and sizes of the text. Raises Rejected, Unreachable."""
        count = question.microbatches
        if not 1 <= count <= MAX_EVALUATION_MICROBATCHES:
            raise Rejected(f"cannot evaluate {count} microbatches; 1 to {MAX_EVALUATION_MICROBATCHES} are allowed")
        every = tuple(range(1, self._manifest.stages.count))
        stages = question.stages or every
        if not set(stages) <= set(every):
            raise Rejected(f"stage {max(stages)} does not exist; the last stage is {len(every)}")
        async with self._turn:
            try:
                texts = await asyncio.to_thread(list, held_out_microbatches(self._manifest, count, self._documents))
            except ConfigError as error:
                raise Rejected(str(error)) from None
            found = await self._evaluator.evaluate(texts, stages)
        # The head averages over all tokens, but some held-out tokens are not labels.
        losses = [(text.per_label(loss), text.scored) for loss, text in zip(found, texts, strict=True)]
        sizes = summary_of([text.workload for text in texts], self._manifest.microbatch_tokens)
        report = answer_of(held_out_loss([text.route for text in texts], losses, sizes)) | {"stages": stages}
        return json.dumps(report).encode()


@dataclass(eq=False)
class WindowFinder:
    """Limit of a data node's microbatches in flight: `asked` (--window), or adapted to round trips if None."""

    _manifest: Manifest
    _in_flight: InFlightTable
    _membership: Membership
    _clock: Clock
    asked: int | None
    memory: int  # Microbatches for which memory was reserved at the start (`node.model.memory_need`)

    def __post_init__(self) -> None:
        start = self._in_flight.rules.window
        # Never below the start value, which keeps every stage busy when links cost nothing. Compute times vary, and a
        # window that covers only their mean left hops idle 2 % longer.
        self._window = None if self.asked is not None else Window(start, start, self._least_bound())
        self._follow()

    @property
    def value(self) -> Reasoned[int]:
        """Largest number of microbatches in flight, with the reason."""
        if self._window is None:
            return Reasoned(self._in_flight.window, "set by --window")
        return self._window.value

    def describe(self) -> WindowStatus:
        value = self.value
        return WindowStatus(value.value, len(self._in_flight.entries), value.reason)

    def completed(self, entry: InFlight, now: float) -> None:
        """Adapts the limit after the microbatch of `entry` completed. Call it before `InFlightTable.complete`."""
        if self._window is not None:
            self._window.bound(self._least_bound())
            self._window.completed(entry.started, now, len(self._in_flight.entries))
            self._follow()

    def _follow(self) -> None:
        self._in_flight.window = self.value.value

    def _least_bound(self) -> Reasoned[int]:
        rules, stages = self._in_flight.rules, self._manifest.stages
        served = self._membership.all_replicas(self._clock.monotonic())
        slots: list[list[int]] = [[] for _ in range(1, stages.count)]
        for module in self._manifest.modules()[1:]:
            slots[module.stage - 1] += [announced.slots for announced in served.get(module, ())]
        others = len(served.get(ModuleId(0), ()))
        room = room_at_hops(slots, stages.visited_per_path / max(1, stages.count - 1), 1 + others)
        late = self._in_flight.staleness
        bounds = (
            Reasoned(rules.per_step * (1 + late), f"limited by a staleness of {late}"),
            Reasoned(self.memory, "limited by the memory reserved for --slots"),
            *(() if room is None else (room,)),
        )
        return min(bounds, key=lambda bound: bound.value)


log = logging.getLogger(__name__)

LIFETIME_IN_PATHS = 20  # A microbatch without a sign of life for this many times its path's usual duration is abandoned
STRAGGLER = "all others are much faster"


@dataclass(slots=True)
class TrainingProgress:
    """Loss, tokens and completed visits of one data node's microbatches, and the modules that no peer serves."""

    loss_first: float | None = None
    loss_last: float | None = None
    tokens: int = 0
    waiting_for: tuple[ModuleId, ...] = ()
    visits: dict[ModuleId, int] = field(default_factory=dict)  # Completed visits of each module after stage 0
    routes: RouteTally = field(default_factory=RouteTally)
    curve: Curve = NO_CURVE
    completed: deque[CompletedPath] = field(default_factory=lambda: deque(maxlen=MOST_COMPLETED))

    @property
    def stage_visits(self) -> dict[int, int]:
        """Number of completed microbatches that visited each stage after stage 0."""
        stages: dict[int, int] = {}
        for module, count in self.visits.items():
            stages[module.stage] = stages.get(module.stage, 0) + count
        return stages


@dataclass(frozen=True, slots=True)
class Training:
    """A data node's state for checkpoints: microbatches in flight, progress, and reading position in the text."""

    in_flight: InFlightTable
    progress: TrainingProgress
    reading: ReadingPosition


class DataNode(PathEnds):
    """A peer that hosts stage 0: launches microbatches, whose paths start and end here."""

    def __init__(
        self,
        context: ModuleContext,
        training: Training,
        planner: Planner,
        times: PathTimes,
        evaluator: Evaluator,
        launches: Launches,
        ready: Callable[[], Microbatch | None],  # Next text; None if none is packed yet: `wake` follows once one is
        window: WindowFinder,
    ) -> None:
        self.training = training
        self.in_flight, self.progress = training.in_flight, training.progress
        self._clock, self._membership = context.session.own.clock, context.session.membership
        self.rate = Rate(self._clock)
        self.ledger = context.proofs.ledger
        self._is_stopping = False
        self.sizes = times.sizes
        self._planner, self._times, self._evaluator = planner, times, evaluator
        self._launches, self._reading = launches, training.reading
        self.window = window
        manifest = context.manifest
        self._round_microbatches = manifest.training.inner_steps * self.in_flight.rules.per_step
        self._outliers: dict[Route, LossOutliers] = {}
        self._events = context.events
        self._packs_documents = manifest.packs_documents
        self._on_finished = context.finished
        self._queue = LaunchQueue(planner, ready, training.reading.drawn, self.in_flight.next_number)
        self._stragglers = Stragglers()
        self._missing: dict[ModuleId, str] = {}  # Unserved modules, with the consequence that was reported
        self._wake = asyncio.Event()
        self._landed = asyncio.Event()

    async def all_landed(self) -> None:
        while self.in_flight.entries:
            self._landed.clear()
            await self._landed.wait()

    def wake(self) -> None:
        """Wakes `run`, because a change may allow another launch."""
        self._wake.set()

    def stop_launching(self) -> None:
        self._is_stopping = True

    async def run(self) -> None:
        if self.in_flight.finished:  # resumed after its last step
            self._on_finished()
        while True:
            self._tell_who_is_missing()
            now = self._clock.monotonic()
            straggler = self._stragglers.find(self.in_flight.entries, now)
            # On the same path it would take as long again, and a text whose loss is known would not be learnt.
            if straggler is not None and self._planner.passes_by(self._times.holders(straggler.microbatch), now):
                self.lost(straggler.microbatch, STRAGGLER)
            while not self._is_stopping and self.in_flight.may_start().value and self._launch():
                pass
            await set_or_after(self._wake, 0.5)

    def _launch(self) -> bool:
        """Launches the next microbatch; False if none is packed, or if it has no path now."""
        now = self._clock.monotonic()
        queue = in_flight_by_peer([entry.path for entry in self.in_flight.entries])
        launch = self._queue.next(self.in_flight.next_number, queue, now)
        if launch is None:
            return False
        text, path = launch.text, launch.path
        entry = self.in_flight.start(path, now, text.size, text.scored)
        self._reading.sent(text, entry.microbatch)
        in_usual_ones = self.sizes.add(text.workload)
        self._times.launched(entry.microbatch, path, queue, now, in_usual_ones)
        log.debug("%s: %s", entry.microbatch, launch.reason)
        usual_s = self._planner.usual_s(path) * max(1.0, in_usual_ones)
        lifetime_s = min(LONGEST_LIFETIME_S, max(SHORTEST_LIFETIME_S, LIFETIME_IN_PATHS * usual_s))
        self._launches.launch(entry.microbatch, text, path, Purpose.TRAIN, lifetime_s)
        return True

    def _tell_who_is_missing(self) -> None:
        """Reports each module without a serving peer once, and once more when a peer serves it again."""
        before, moment = self._missing, self._clock.monotonic()
        unserved = self._planner.unserved(moment)
        self.progress.waiting_for = unserved
        self._missing = now = {module: self._planner.without(module, moment) for module in unserved}
        for module, what in now.items():
            if before.get(module) != what:
                self._events.emit(Waiting(str(module), what))
        for module in before:
            if module not in now:
                self._events.emit(Resumed(str(module)))

    def expects(self, message: Forward) -> bool:
        if message.purpose is Purpose.EVALUATE:
            return self._evaluator.awaits(message.microbatch)
        return self.in_flight.get(message.microbatch) is not None

    def loss_known(self, microbatch: MicrobatchId, path: Path, purpose: Purpose, loss: float) -> None:
        if purpose is Purpose.EVALUATE:
            self._evaluator.loss_known(microbatch, loss)
        else:
            self._times.loss_known(microbatch, self._clock.monotonic())
            text = self._launches.text_of(microbatch)
            loss = loss if text is None else text.per_label(loss)
            self.in_flight.returned(microbatch, path, loss)
            # Routes differ in loss, as their documents do. Beyond the bound all routes share one detector.
            route = () if text is None or len(self._outliers) > MAX_ROUTES else text.route
            detector = self._outliers.setdefault(route, LossOutliers(self._round_microbatches))
            outlier = detector.returned(path, loss)
            if outlier is not None:
                pause_s = self._membership.leave_out(outlier.peer, self._clock.monotonic())
                name = f"replica {short(outlier.peer)} of module {outlier.module}"
                self._events.emit(Note("warning", f"{name} is excluded from paths for {pause_s:.0f} s: {outlier.why}"))

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        self._times.completed(microbatch, self._clock.monotonic())
        text = self._launches.end(microbatch)
        if text is not None:
            self._reading.came_back(text)
        entry = self.in_flight.get(microbatch)
        if entry is not None:
            self.window.completed(entry, self._clock.monotonic())
            self._stragglers.completed(entry, self._clock.monotonic())
        step = self.in_flight.complete(microbatch)
        if entry is not None:
            hops = tuple(f"{hop.module}@{hop.peer}" for hop in path.hops)
            crash_point("before completed")
            # Log the completion before the visit: a crash in between loses a visit instead of adding one.
            route = None if text is None else text.route or None
            self._events.emit(Completed(self.in_flight.own, str(microbatch), hops, entry.tokens, route))
            crash_point("after completed")
            self._events.emit(Visit(self.in_flight.own, str(ModuleId(0)), str(microbatch)))
            now = self._clock.monotonic()
            self.progress.completed.append(CompletedPath(str(microbatch), hops, round(now - entry.started, 3)))
            self.ledger.settled(microbatch, path.hops, entry.tokens, now)
            for hop in path.hops:
                self.progress.visits[hop.module] = self.progress.visits.get(hop.module, 0) + 1
            if text is not None:
                self.progress.routes.completed(text.route, path, entry.loss)
            self.progress.tokens += entry.tokens
            self.rate.add(entry.tokens)
        if step is not None:
            if self.progress.loss_first is None:
                self.progress.loss_first = step.loss
            self.progress.loss_last = step.loss
            tokens, rate = self.progress.tokens, self.rate.per_second()
            self.progress.curve = self.progress.curve.with_point(step.step, tokens, step.loss, self._clock.wall())
            packed = self.sizes.summary() if self._packs_documents else None
            self._events.emit(Step(step.step, step.loss, tokens, rate, self.in_flight.own, packed))
        if self.in_flight.finished:
            self._on_finished()
        self._landed.set()  # a completed microbatch makes room for the next launch
        self.wake()

    def lost(self, microbatch: MicrobatchId, detail: str) -> None:
        if self._evaluator.awaits(microbatch):  # an evaluated microbatch has no gradients to settle
            self._evaluator.lost(microbatch, detail)
            return
        self._times.lost(microbatch, self._clock.monotonic())
        entry = self.in_flight.abandon(microbatch)
        text = self._launches.abandon(microbatch, detail)
        if entry is not None:
            self._events.emit(Abandoned(str(microbatch), detail))
            if text is not None and entry.loss is None:  # no stage has learnt from the text, so launch it again
                self._queue.retry(text)
            elif text is not None:
                self._reading.dropped(text)
        self._landed.set()
        if not detail.startswith("refused"):  # the next one would be refused at once
            self.wake()

    def may_hold(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        entry = self.in_flight.get(microbatch)
        return self._evaluator.awaits(microbatch) if entry is None else self._planner.hosts_one_of(peer, entry.path)

    def may_have_held(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        path = self._times.path_of(microbatch)
        return self.may_hold(peer, microbatch) if path is None else self._planner.hosts_one_of(peer, path)

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        self._membership.moved(sender)
        self._times.passed(sender, receipt, self._clock.monotonic())
