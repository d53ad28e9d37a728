"""A pipeline in virtual time whose devices are delays behind the node's own queue: the ground of the benchmarks of idle
time.

What decides is the node's own: custody, flights, planner (`swarm.simulation.pipeline_world`) and the queue before the
compute device (`swarm.pipeline.compute_queue`). A data node and some stages of one peer each; links and devices take
the time that the setting says.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from node.pipeline.tensor_store import place_of
from swarm.pipeline.arrival_forecast import ArrivalForecast
from swarm.pipeline.compute_queue import ComputeQueue, IdleWork, Priority
from swarm.pipeline.custody_states import Work
from swarm.pipeline.in_flight import FlightRules
from swarm.routing.path_rules import PathRules
from swarm.simulation.pipeline_peer import Peer
from swarm.simulation.pipeline_world import Ledger, World
from swarm.vocabulary.pipeline_messages import MicrobatchTensor, Receipt
from swarm.vocabulary.types import ModuleId, PeerId

STAGES: Final = 4
"""After stage 0."""
PER_STEP: Final = 8
CHUNK_S: Final = 0.002
BODY_S: Final = 0.002
SLOTS: Final = 16


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of a device: a visit's forward pass, its input's gradient, its weights' gradients; an inner step; and the
    data node's two parts of a microbatch."""

    forward_s: float = 0.030
    source_s: float = 0.030
    weights_s: float = 0.030
    step_s: float = 0.005
    head_s: float = 0.010
    embedding_s: float = 0.001


@dataclass(frozen=True, slots=True)
class Setting:
    """One arm on one ground."""

    one_way_s: float
    seed: int
    staleness: int = 0
    window: int = PER_STEP
    puts_off: bool = False
    fills: bool = False
    hears: bool = True
    """Whether headers are heeded."""
    body_s: float = BODY_S
    chunk_s: float = CHUNK_S
    stages: int = STAGES
    per_step: int = PER_STEP
    durations: Durations = field(default_factory=Durations)
    spread: float = 0.2
    """How much slower or faster than others a peer is at most."""
    jitter: float = 0.3
    """Of delays, log-normal."""


class EmulatedGround:
    """Machines and links; see `swarm.simulation.pipeline_world.Ground`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.path_rules = PathRules(setting.stages + 1, setting.stages)
        self.overhead_s = 0.0
        drawn, spread = random.Random(setting.seed), setting.spread
        self._slowness = {stage_peer(at): drawn.uniform(1 - spread, 1 + spread) for at in range(setting.stages + 1)}
        self._links = random.Random(setting.seed)

    def flight_rules(self, data_node: PeerId) -> FlightRules:
        return FlightRules(self.setting.per_step, self.setting.staleness, self.setting.window)

    def slots_of(self, peer: PeerId) -> int:
        return max(SLOTS, 2 * self.setting.window)

    def service_s(self, peer: PeerId) -> float:
        each = self.setting.durations
        return (each.forward_s + each.source_s + each.weights_s) * self.slowness(peer)

    def slowness(self, peer: PeerId) -> float:
        return self._slowness[peer]

    def weights_s(self, peer: PeerId) -> float:
        """The weights' gradients of a visit."""
        return self.setting.durations.weights_s * self.slowness(peer)

    def compute_s(self, peer: PeerId, work: Work) -> float:
        each = self.setting.durations
        if peer == stage_peer(0):
            return each.head_s if work is Work.LOSS else each.embedding_s
        return (each.forward_s if work is Work.FORWARD else each.source_s + each.weights_s) * self.slowness(peer)

    def message_s(self, here: PeerId, there: PeerId) -> float:
        return self.setting.one_way_s * self._links.lognormvariate(0, self.setting.jitter)

    def body_s(self, here: PeerId, there: PeerId) -> float:
        return self.setting.body_s * self._links.lognormvariate(0, self.setting.jitter)

    def silence_s(self) -> float:
        return math.inf

    def lifetime_s(self, path_s: float) -> float:
        return 3600.0


Span = tuple[float, float]
"""From when to when, in virtual seconds."""


@dataclass(slots=True)
class Account:
    """What one device did."""

    busy: list[Span] = field(default_factory=list)
    """In jobs."""
    idle_work: list[Span] = field(default_factory=list)
    """In chunks of idle work."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When a job came, and how long it waited."""
    held: float = 0.0
    """Graphs, or of what is kept for weight gradients as much as that is of a graph."""
    most_held: float = 0.0

    def hold(self, graphs: float) -> None:
        self.held += graphs
        self.most_held = max(self.most_held, self.held)


class FillingPeer(Peer):
    """A peer whose compute device is emulated behind the node's own queue."""

    def __init__(self, world: FillingWorld, own: PeerId, module: ModuleId, incarnation: int) -> None:
        self.queue = ComputeQueue(limit=1000)
        self.account = Account()
        self.setting, self._kept = world.setting, world.kept
        self._ground = world.emulated
        self._computing = False
        self._spent_s = 0.0
        self._ended: Callable[[], None] = lambda: None
        self._forecast = ArrivalForecast()
        self._pending: list[IdleWork] = []
        self._added = 0
        super().__init__(world, own, module, incarnation)
        if self.setting.fills and module.stage:
            self.queue.submit(self._without_end(), "filling")

    def refusal(self, message: MicrobatchTensor) -> Receipt | None:
        refusal = super().refusal(message)
        if refusal is None:
            self._forecast.announced(way_of(message), place_of(message), 1, self.world.time.now)
            self._expect()
        return refusal

    def received(self, message: MicrobatchTensor) -> None:
        self._forecast.arrived(way_of(message), place_of(message), self.world.time.now)
        self._expect()
        super().received(message)

    def _expect(self) -> None:
        if self.setting.hears:
            self.queue.expected = self._forecast.expected

    def later(self, work: Work, done: Callable[[float], None]) -> None:
        self._put(Priority.TRAIN, partial(self._job, work, done))

    def _put(self, priority: Priority, job: Callable[[], None]) -> None:
        came = self.world.time.now

        def begun() -> None:
            self.account.waits.append((came, self.world.time.now - came))
            job()

        self.queue.put(priority, begun)
        self._next()

    def _job(self, work: Work, done: Callable[[float], None]) -> None:
        seconds = self._ground.compute_s(self.id, work)
        is_stage = self.module.stage > 0
        if is_stage and work is Work.BACKWARD and self.setting.puts_off:
            seconds -= self._ground.weights_s(self.id)
        self._spent_s += seconds

        def ended() -> None:
            if is_stage:
                self._passed(work)
            if is_stage and work is Work.BACKWARD:
                self._added += 1
                if self._added % self.setting.per_step == 0:
                    self._put(Priority.UPKEEP, self._step)
            done(seconds)

        self._ended = ended

    def _passed(self, work: Work) -> None:
        """What follows from the end of a stage's forward or backward pass."""
        if work is Work.FORWARD:
            self.account.hold(1.0)
        if work is Work.BACKWARD:
            self.account.hold(-1.0)
            if self.setting.puts_off:
                self.account.hold(self._kept)
                self._pending.append(self.queue.submit(self._weights(), "weights"))

    def _weights(self) -> Iterator[None]:
        for is_last in self._in_chunks(self._ground.weights_s(self.id)):
            if is_last:
                self.account.hold(-self._kept)
            yield

    def _in_chunks(self, seconds: float) -> Iterator[bool]:
        """Spends so many seconds in chunks; says of each whether it is the last."""
        count = math.ceil(seconds / self.setting.chunk_s)
        for number in range(count):
            self._spent_s += seconds / count
            yield number == count - 1

    def _step(self) -> None:
        for work in self._pending:
            work.finish()
        self._pending.clear()
        self._spent_s += self.setting.durations.step_s

    def _without_end(self) -> Iterator[None]:
        while True:
            self._spent_s += self.setting.chunk_s
            yield

    def _next(self) -> None:
        """What the compute thread does between two jobs."""
        if self._computing:
            return
        now = self.world.time.now
        turn = self.queue.take(now)
        if turn is None:
            rest_s = self.queue.rest_s(now)
            if rest_s is not None:
                self.world.time.after(rest_s, self._next)
            return
        spans = self.account.busy
        if isinstance(turn, IdleWork):
            spans = self.account.idle_work
            turn.compute_chunk()
        else:
            turn()
        seconds, self._spent_s, self._computing = self._spent_s, 0.0, True
        spans.append((now, now + seconds))
        self.world.time.after(seconds, self._over)

    def _over(self) -> None:
        self._computing, ended = False, self._ended
        self._ended = lambda: None
        ended()
        self._next()


class FillingWorld(World):
    """The world of one arm.

    Args:
        kept: bytes that are kept for the weight gradients of a visit over those of its graph.
    """

    def __init__(self, setting: Setting, kept: float) -> None:
        self.setting, self.kept, self.emulated = setting, kept, EmulatedGround(setting)
        stages = [[stage_peer(stage)] for stage in range(setting.stages + 1)]
        super().__init__(self.emulated, stages, random.Random(setting.seed), Ledger())

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        return FillingPeer(self, own, module, incarnation)

    @property
    def stage_peers(self) -> list[FillingPeer]:
        """In order of stage, without the data node."""
        return [peer for peer in self.peers.values() if isinstance(peer, FillingPeer) and peer.module.stage]


def way_of(message: MicrobatchTensor) -> PeerId:
    """Of whom it comes: each peer has one before it and one after it."""
    return PeerId(type(message).__name__)


def stage_peer(stage: int) -> PeerId:
    return PeerId(f"stage{stage}")


def share_of_time(accounts: Sequence[Sequence[Span]], begin: float, end: float) -> float:
    """How much of the time between two moments is within spans, the mean over devices."""
    inside = sum(max(0.0, min(to, end) - max(at, begin)) for spans in accounts for at, to in spans)
    return inside / ((end - begin) * len(accounts))
