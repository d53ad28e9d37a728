"""What idle time is worth: weight gradients that are put off against those computed at once, and the cost of filling.

In virtual time what decides is the node's own: custody, planner (`swarm.simulation.pipeline_world`) and compute queue.
A data node and four stages of one peer each, which are 0.8 to 1.2 times as fast as others; forward, the input's
gradient and the weights' gradients take 30 ms each, the head 10 ms; links so many ms one way, and 2 ms more for a
tensor's body, both with a log-normal jitter of 0.3. `put_off`: steps of 8 microbatches wait for each other (staleness
0); `ratio` is the pace with weight gradients put off over that with all computed at once, `held` the same of the most
bytes of graphs and of what is kept for weight gradients. `filling`: staleness 2, a window that leaves the devices idle
half of the time, and endless idle work in chunks of `chunk_ms`, for tensors whose body takes `body_ms` on its link
after its header; `foreground` is the pace with idle work over that without, `busy` the share of the time that devices
compute, `wait_ms` by how much the 99th percentile of a job's waiting grows; `deaf` without expecting a tensor when its
header is there; of the settings' median and the worst.

`stage`: a real stage of two blocks of 256 on one core, in processor seconds: `kept`, bytes kept for the weights'
gradients over those of the graph; `time`, of both halves over a whole backward, and `first`, of the first half;
`chunk_ms`, the 99th percentile of a chunk. `live`: the two arms of `put_off` side by side in real swarms of nodes with
emulated devices (`tests/e2e/emulated.py`), as tokens per second.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import run_of, tell
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import NodeSummary, Step
from node.pipeline.tensor_store import place_of
from swarm.pipeline.arrival_forecast import ArrivalForecast
from swarm.pipeline.compute_queue import ComputeQueue, IdleWork, Priority
from swarm.pipeline.custody_states import Work
from swarm.pipeline.in_flight import FlightRules
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.path_rules import PathRules
from swarm.simulation.pipeline_peer import Peer
from swarm.simulation.pipeline_world import Ledger, World
from swarm.vocabulary.pipeline_messages import MicrobatchTensor, Receipt
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Reasoned
from tests.e2e.emulated import Network, Spec
from tests.e2e.small_run import small_run, write_text

# ---- a pipeline in virtual time --------------------------------------------------------------------------------------


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
        self.talk = TalkRules(microbatches=None)
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


# ---- arms in virtual time --------------------------------------------------------------------------------------------


CHUNKS_S: Final = (0.002, 0.005)


BODIES_S: Final = (0.002, 0.020, 0.170)


KEPT: Final = 0.8
"""Bytes kept for weight gradients over those of a graph, as `stage` finds them."""
WARM_S: Final = 5.0


BARS: Final = {"0": 1.15, "20": 1.15, "50": 1.15, "100": 1.10}


@dataclass(frozen=True, slots=True)
class Seen:
    """What an arm did while it was measured."""

    pace: float
    """Microbatches a second."""
    busy: float
    """Share of the time of the stages' devices."""
    idle_work: float
    wait_s: float
    """99th percentile."""
    held: float
    """The most graphs at a stage."""


def run(setting: Setting, seconds: float, kept: float) -> Seen:
    """Runs one arm for so many virtual seconds after a warm-up."""
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


def put_off(latencies: Sequence[int], seeds: Sequence[int], seconds: float, kept: float) -> dict[str, Any]:
    """Both arms at staleness 0; medians over the seeds."""
    found = {}
    for one_way_ms in latencies:
        pairs = [
            [run(Setting(one_way_ms / 1e3, seed, puts_off=arm), seconds, kept) for arm in (False, True)]
            for seed in seeds
        ]
        found[str(one_way_ms)] = {
            "ratio": statistics.median(later.pace / at_once.pace for at_once, later in pairs),
            "bar": BARS.get(str(one_way_ms)),
            "ratios": [later.pace / at_once.pace for at_once, later in pairs],
            "held": statistics.median(later.held / at_once.held for at_once, later in pairs),
            "busy": [statistics.median(arm.busy + arm.idle_work for arm in arms) for arms in zip(*pairs, strict=True)],
        }
        tell(f"put off, {one_way_ms} ms: {found[str(one_way_ms)]}")
    return found


def filling(latencies: Sequence[int], seeds: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Arms with and without work for idle time, which heed headers or do not; the median of all settings, and the
    worst."""
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for one_way_ms, window, body_s in product(latencies, (2, 3, 4, 6), BODIES_S):
        plain = [Setting(one_way_ms / 1e3, seed, 2, window, body_s=body_s) for seed in seeds]
        bare = [run(setting, seconds, 1.0) for setting in plain]
        if not 0.35 <= statistics.median(each.busy for each in bare) <= 0.65:
            continue
        for chunk_s, hears in product(CHUNKS_S, (True, False)):
            filled = [run(replace(one, fills=True, hears=hears, chunk_s=chunk_s), seconds, 1.0) for one in plain]
            kind = "headers" if hears else "deaf", round(1e3 * chunk_s), round(1e3 * body_s)
            found.setdefault(kind, []).append(compared(filled, bare))
            tell(f"filling, {one_way_ms} ms, window {window}, {kind}: {found[kind][-1]}")
    return [
        dict(zip(("arm", "chunk_ms", "body_ms"), kind, strict=True))
        | {"settings": len(rows)}
        | {
            name: [statistics.median(row[name] for row in rows), worst(row[name] for row in rows)]
            for name, worst in (("foreground", min), ("busy", min), ("wait_ms", max))
        }
        for kind, rows in found.items()
    ]


def compared(filled: Sequence[Seen], bare: Sequence[Seen]) -> dict[str, float]:
    """An arm with idle work against the one without, on the same grounds."""
    pairs = list(zip(filled, bare, strict=True))
    return {
        "foreground": statistics.median(each.pace / without.pace for each, without in pairs),
        "busy": statistics.median(each.busy + each.idle_work for each in filled),
        "wait_ms": 1e3 * statistics.median(each.wait_s - without.wait_s for each, without in pairs),
    }


# ---- a real stage ----------------------------------------------------------------------------------------------------


def stage() -> dict[str, float]:
    """A real stage: what is kept, what the split costs, how long chunks are."""
    import torch

    from node.model.optimizer import Accumulator
    from node.model.parts import build_block_stack
    from node.pipeline.deferred_weights import DeferredWeights, SplitDevice
    from node.pipeline.graph_budget import GraphBudget

    torch.set_num_threads(1)
    manifest = run_of("stage", [0, 2], hidden=256, feed_forward=704, sequence=256, rows=4, microbatches=8)
    part = build_block_stack(manifest, ModuleId(1))
    split, sums, queue = SplitDevice(part), Accumulator(part), ComputeQueue(limit=1)
    later = DeferredWeights(Reasoned(True, "measured"), split, sums, queue.submit)
    tokens, source, graphs = manifest.microbatch_tokens, torch.randn(manifest.hidden_shape), GraphBudget(2**40)
    graphs.forward(split, source, ())
    assert graphs._of_one is not None
    whole, halves, firsts, chunks = [], [], [], []
    for number in range(15):
        visit = split.forward(source, ())
        begun = time.thread_time()
        sums.add(MicrobatchId(stage_peer(0), 2 * number), tokens, split.backward(visit, source).parameters)
        whole.append(time.thread_time() - begun)
        visit = split.forward(source, ())
        begun = time.thread_time()
        half = later.first_half(visit, source)
        assert half.is_bounded()
        later.put_off(MicrobatchId(stage_peer(0), 2 * number + 1), tokens, half, lambda seconds: None)
        firsts.append(time.thread_time() - begun)
        del half
        while isinstance(turn := queue.take(0.0), IdleWork):
            at = time.thread_time()
            turn.compute_chunk()
            chunks.append(time.thread_time() - at)
        halves.append(time.thread_time() - begun)
    return {
        "kept": later.peak_bytes / (graphs._of_one * tokens),
        "time": statistics.median(halves) / statistics.median(whole),
        "first": statistics.median(firsts) / statistics.median(whole),
        "chunk_ms": 1e3 * sorted(chunks)[int(0.99 * (len(chunks) - 1))],
        "longest_chunk_ms": 1e3 * max(chunks),
    }


# ---- real swarms -----------------------------------------------------------------------------------------------------


BLOCKS: Final = (0, 1, 1, 1, 1)


WARM_STEPS: Final = 4


DATA_FORWARD_S: Final = 0.003


PATIENCE_S: Final = 400.0


async def live_arm(
    folder: Path, text: Path, one_way_s: float, part_s: float, *, puts_off: bool, steps: int
) -> tuple[float, float]:
    """Runs one swarm to its end; its tokens per second, and the share of the stages' time in work that was put off."""
    step = small_run(text).microbatch_tokens * PER_STEP
    manifest = small_run(text, blocks=BLOCKS, inner_tokens=step, inner_steps=1_000_000, round_seconds=1e6)
    network = folder / f"network {puts_off}.json"

    def place(index: int) -> Place:
        own = {"window": PER_STEP} if index == 0 else {}
        forward_s = part_s if index else DATA_FORWARD_S
        spec = Spec(forward_s, str(network), weights_factor=1.0, puts_off=puts_off, **own)
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    times, summaries = list[tuple[float, int]](), list[NodeSummary]()
    options = LocalSwarmOptions(peers=len(BLOCKS), steps=steps, threads=1)
    async with asyncio.timeout(PATIENCE_S), LocalSwarm(manifest, options, places=place) as swarm:
        regions = {str(peer.peer): f"region {peer.index}" for peer in swarm.peers}
        Network(regions, {one: dict.fromkeys(regions.values(), one_way_s) for one in regions.values()}).write(network)
        async for event in swarm.events():
            if isinstance(event, Step):
                times.append((time.perf_counter(), event.tokens))
            elif isinstance(event, NodeSummary) and event.module != "0.0":
                summaries.append(event)
            if swarm.progress.is_over:
                swarm.request_stop()
    (begun, before), (ended, after) = times[WARM_STEPS], times[-1]
    spent = [each.busy_s for each in summaries]
    shares = [one.idle_work / max(1e-9, one.compute + one.idle_work + one.wait) for one in spent]
    return (after - before) / (ended - begun), statistics.mean(shares)


async def live(one_way_ms: int, part_s: float, steps: int) -> dict[str, Any]:
    """Both arms side by side, so that other load is the same for both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "text")
        runs = (
            live_arm(folder, text, one_way_ms / 1e3, part_s, puts_off=puts_off, steps=steps)
            for puts_off in (False, True)
        )
        at_once, later = await asyncio.gather(*runs)
    tell(f"live, {one_way_ms} ms: {at_once}, {later}")
    return {"ratio": later[0] / at_once[0], "tokens_per_s": [at_once[0], later[0]], "idle_work": [at_once[1], later[1]]}


# ---- all -------------------------------------------------------------------------------------------------------------


def measure(options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"stage": stage()} if "stage" in options.parts else {}
    given = options.latencies, options.seeds, options.seconds
    if "put_off" in options.parts:
        found["put_off"] = put_off(*given, found["stage"]["kept"] if "stage" in found else KEPT)
    if "filling" in options.parts:
        found["filling"] = filling(*given)
    if "live" in options.parts:
        arms = {ms: live(ms, options.part_ms / 1e3, options.steps) for ms in options.latencies}
        found["live"] = {str(one_way_ms): asyncio.run(arm) for one_way_ms, arm in arms.items()}
    return found


def main() -> None:
    usual = {"latencies": [0, 20, 50, 100], "seeds": [1, 2, 3], "seconds": 60.0, "steps": 24, "part_ms": 30.0}
    quick = {"latencies": [50], "seeds": [1], "seconds": 15.0, "steps": 8, "parts": ["stage", "put_off", "filling"]}
    kit.run(__doc__, measure, quick, parts=("stage", "put_off", "filling", "live"), **usual)


if __name__ == "__main__":
    main()
