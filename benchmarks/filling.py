"""What idle time is worth: weight gradients put off against those computed at once, and the cost of filling.

The node's own custody, planner and compute queue in virtual time (`lab.world.world`): a data node and four stages of
one peer each, 0.8 to 1.2 times as fast as each other. Forward, the input's gradient and the weights' gradients take 30
ms each; links have `--latencies` in ms one way, with a log-normal jitter of 0.3. `put_off`: steps of 8 microbatches
wait for each other (staleness 0). `ratio`: throughput with weight gradients put off over that without; `held`: the
same ratio of the most bytes held. `filling`: staleness 2, a window that leaves devices idle half of the time, and
endless idle work. `foreground`: throughput over that without it; `wait_ms`: growth of a job's 99th percentile wait.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import tell
from lab.world.world import Ledger, Peer, World
from node.pipeline.runner import slot_of
from swarm.pipeline.compute_queue import ArrivalForecast, ComputeQueue, IdleWork, Priority
from swarm.pipeline.custody import Work
from swarm.pipeline.in_flight import InFlightRules
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.pipeline_messages import MicrobatchTensor, Receipt
from swarm.vocabulary.types import ModuleId, PeerId

PER_STEP: Final = 8
SLOTS: Final = 16


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of a visit's forward pass, input's and weights' gradients, an inner step, the data node's two parts."""

    forward_s: float = 0.030
    source_s: float = 0.030
    weights_s: float = 0.030
    step_s: float = 0.005
    head_s: float = 0.010
    embedding_s: float = 0.001


@dataclass(frozen=True, slots=True)
class Setting:
    """One arm in one environment. Peers' speeds differ by up to `spread`, delays by a log-normal `jitter`."""

    one_way_s: float
    seed: int
    staleness: int = 0
    window: int = PER_STEP
    puts_off: bool = False
    fills: bool = False
    body_s: float = 0.002
    chunk_s: float = 0.002
    stages: int = 4
    per_step: int = PER_STEP
    durations: Durations = field(default_factory=Durations)
    spread: float = 0.2
    jitter: float = 0.3


class EmulatedPipeline:
    """Machines and links; see `lab.world.world.Environment`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.path_rules = PathRules(setting.stages + 1, setting.stages)
        self.overhead_s = 0.0
        drawn, spread = random.Random(setting.seed), setting.spread
        self.slowness = {stage_peer(at): drawn.uniform(1 - spread, 1 + spread) for at in range(setting.stages + 1)}
        self._links = random.Random(setting.seed)

    def flight_rules(self, data_node: PeerId) -> InFlightRules:
        return InFlightRules(self.setting.per_step, self.setting.staleness, self.setting.window)

    def slots_of(self, peer: PeerId) -> int:
        return max(SLOTS, 2 * self.setting.window)

    def service_s(self, peer: PeerId) -> float:
        each = self.setting.durations
        return (each.forward_s + each.source_s + each.weights_s) * self.slowness[peer]

    def weights_s(self, peer: PeerId) -> float:
        return self.setting.durations.weights_s * self.slowness[peer]

    def compute_s(self, peer: PeerId, work: Work) -> float:
        each = self.setting.durations
        if peer == stage_peer(0):
            return each.head_s if work is Work.LOSS else each.embedding_s
        return (each.forward_s if work is Work.FORWARD else each.source_s + each.weights_s) * self.slowness[peer]

    def message_s(self, here: PeerId, there: PeerId) -> float:
        return self.setting.one_way_s * self._links.lognormvariate(0, self.setting.jitter)

    def body_s(self, here: PeerId, there: PeerId) -> float:
        return self.setting.body_s * self._links.lognormvariate(0, self.setting.jitter)

    def silence_s(self) -> float:
        return math.inf

    def lifetime_s(self, path_s: float) -> float:
        return 3600.0


Span = tuple[float, float]  # begin and end in virtual seconds


@dataclass(slots=True)
class Account:
    """What one device did: time in jobs and in idle work, when each job came and how long it waited, graphs held."""

    busy: list[Span] = field(default_factory=list)
    idle_work: list[Span] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    held: float = 0.0
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
            self._forecast.announced(direction_of(message), slot_of(message), 1, self.world.time.now)
            self.queue.expected = self._forecast.expected
        return refusal

    def received(self, message: MicrobatchTensor) -> None:
        self._forecast.arrived(direction_of(message), slot_of(message), self.world.time.now)
        self.queue.expected = self._forecast.expected
        super().received(message)

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
        """Takes in the end of a stage's forward or backward pass."""
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
        """Spends these seconds in chunks; yields whether a chunk is the last."""
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
        """Starts the next job or chunk."""
        if self._computing:
            return
        now = self.world.time.now
        turn = self.queue.take(now)
        if turn is None:
            rest_s = self.queue.rest_s(now)
            if rest_s is not None:
                self.world.time.after(rest_s, self._next)
            return
        is_idle_work = isinstance(turn, IdleWork)
        spans = self.account.idle_work if is_idle_work else self.account.busy
        turn.compute_chunk() if is_idle_work else turn()
        seconds, self._spent_s, self._computing = self._spent_s, 0.0, True
        spans.append((now, now + seconds))
        self.world.time.after(seconds, self._over)

    def _over(self) -> None:
        self._computing, ended = False, self._ended
        self._ended = lambda: None
        ended()
        self._next()


class FillingWorld(World):
    """The world of one arm. `kept`: bytes kept for a visit's weight gradients over those of its graph."""

    def __init__(self, setting: Setting, kept: float) -> None:
        self.setting, self.kept, self.emulated = setting, kept, EmulatedPipeline(setting)
        stages = [[stage_peer(stage)] for stage in range(setting.stages + 1)]
        super().__init__(self.emulated, stages, random.Random(setting.seed), Ledger())

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        return FillingPeer(self, own, module, incarnation)

    @property
    def stage_peers(self) -> list[FillingPeer]:
        """The peers without the data node, by stage."""
        return [peer for peer in self.peers.values() if isinstance(peer, FillingPeer) and peer.module.stage]


def direction_of(message: MicrobatchTensor) -> PeerId:
    """Stands for the sender: each peer has one upstream and one downstream."""
    return PeerId(type(message).__name__)


def stage_peer(stage: int) -> PeerId:
    return PeerId(f"stage{stage}")


def share_of_time(accounts: Sequence[Sequence[Span]], begin: float, end: float) -> float:
    """Share of the time between begin and end that is within spans, the mean over devices."""
    inside = sum(max(0.0, min(to, end) - max(at, begin)) for spans in accounts for at, to in spans)
    return inside / ((end - begin) * len(accounts))


BODIES_S: Final = (0.002, 0.020, 0.170)
KEPT: Final = 0.8  # measured on two blocks of 256
WARM_S: Final = 5.0
BARS: Final = {"0": 1.15, "20": 1.15, "50": 1.15, "100": 1.10}


@dataclass(frozen=True, slots=True)
class Seen:
    """Microbatches a second, shares of the devices' time, a job's 99th percentile wait, most graphs at a stage."""

    pace: float
    busy: float
    idle_work: float
    wait_s: float
    held: float


def run(setting: Setting, seconds: float, kept: float) -> Seen:
    """Runs one arm for some virtual seconds after a warm-up."""
    world = FillingWorld(setting, kept)
    world.run(WARM_S)
    before = len(world.ledger.completed)
    world.run(seconds)
    peers, span = world.stage_peers, (WARM_S, WARM_S + seconds)
    waits = sorted(wait for peer in peers for came, wait in peer.account.waits if came >= WARM_S)
    return Seen(
        (len(world.ledger.completed) - before) / seconds,
        share_of_time([peer.account.busy for peer in peers], *span),
        share_of_time([peer.account.idle_work for peer in peers], *span),
        waits[int(0.99 * (len(waits) - 1))],
        max(peer.account.most_held for peer in peers),
    )


def put_off(options: Any) -> dict[str, Any]:
    """Both arms at staleness 0; medians over the seeds."""
    found = {}
    for one_way_ms in options.latencies:
        plain = [Setting(one_way_ms / 1e3, seed) for seed in options.seeds]
        pairs = [[run(replace(one, puts_off=arm), options.seconds, KEPT) for arm in (False, True)] for one in plain]
        found[str(one_way_ms)] = {
            "ratio": statistics.median(later.pace / at_once.pace for at_once, later in pairs),
            "bar": BARS.get(str(one_way_ms)),
            "ratios": [later.pace / at_once.pace for at_once, later in pairs],
            "held": statistics.median(later.held / at_once.held for at_once, later in pairs),
            "busy": [statistics.median(arm.busy + arm.idle_work for arm in arms) for arms in zip(*pairs, strict=True)],
        }
        tell(f"put off, {one_way_ms} ms: {found[str(one_way_ms)]}")
    return found


def filling(options: Any) -> list[dict[str, Any]]:
    """With work for idle time against without, in the same environments."""
    found = []
    for one_way_ms, window, body_s in product(options.latencies, (2, 3, 4, 6), BODIES_S):
        plain = [Setting(one_way_ms / 1e3, seed, 2, window, body_s=body_s) for seed in options.seeds]
        bare = [run(setting, options.seconds, 1.0) for setting in plain]
        if not 0.35 <= statistics.median(each.busy for each in bare) <= 0.65:
            continue
        filled = [run(replace(setting, fills=True), options.seconds, 1.0) for setting in plain]
        pairs = list(zip(filled, bare, strict=True))
        row = {"one_way_ms": one_way_ms, "window": window, "body_ms": round(1e3 * body_s)}
        row["foreground"] = statistics.median(each.pace / without.pace for each, without in pairs)
        row["busy"] = statistics.median(each.busy + each.idle_work for each in filled)
        row["wait_ms"] = 1e3 * statistics.median(each.wait_s - without.wait_s for each, without in pairs)
        found.append(row)
        tell(f"filling: {row}")
    return found


if __name__ == "__main__":
    usual = {"latencies": [0, 20, 50, 100], "seeds": [1, 2, 3], "seconds": 60.0}
    quick = {"latencies": [50], "seeds": [1], "seconds": 10.0}
    kit.run(__doc__, {"put_off": put_off, "filling": filling}, quick, **usual)
