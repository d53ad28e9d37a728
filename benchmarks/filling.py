"""What idle time is worth: weight gradients that are put off against those computed at once, and the cost of filling.

    python benchmarks/filling.py [--seeds 1 2 3] [--seconds 60] [--latencies 0 20 50 100] [--output FILE]

Devices and links are emulated in virtual time, so that other work on this machine changes nothing; what decides is the
node's own: custody, flights, planner (`swarm.simulation.pipeline_world`) and the queue before the compute device
(`swarm.pipeline.compute_queue`). A data node and four stages of one peer each, which are 0.8 to 1.2 times as fast as
others; forward, the input's gradient and the weights' gradients take 30 ms each, the head 10 ms; links so many ms one
way, and 2 ms more for a tensor's body, both with a log-normal jitter of 0.3.

`put_off`: steps of 8 microbatches wait for each other (staleness 0). `ratio` is the pace with weight gradients put off
over that with all computed at once, of the same ground; `held` the most bytes of graphs and of what is kept for weight
gradients at the stage with the most, as a ratio of the two.

`running_freely`: staleness 2, windows of 4 and 6 at once and put off: which of them idle time is better used for.

`filling`: staleness 2 and a window that leaves the devices idle half of the time, and work without end for idle time in
chunks of `chunk_ms`, for tensors that take `body_ms` on their link after their header. `foreground` is the pace with
idle work over that without; `busy` the share of the time that devices compute, idle work included, and `base` without;
`wait_ms` by how much the 99th percentile of a job's waiting grows. `headers`: as the node does it, which expects a
tensor when it has its header; `deaf`: without that. `summary` has the medians, and the worst, over all such settings.

`stage`: a real stage of two blocks of 256 on one core of this machine, in processor seconds: `kept`, the bytes that are
kept for the weights' gradients over those of the graph; `time`, of both halves over a whole backward, and `first`, of
the first half over it, all with adding the gradients to their sums; `chunk_ms`, the 99th percentile of a chunk, and
`longest_chunk_ms`.

Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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

STAGES: Final = 4
"""After stage 0."""
PER_STEP: Final = 8
PART_S: Final = 0.030
"""Of a visit: forward, the input's gradient, the weights' gradients."""
HEAD_S: Final = 0.010
EMBEDDING_S: Final = 0.001
STEP_S: Final = 0.005
CHUNKS_S: Final = (0.002, 0.005)
BODIES_S: Final = (0.002, 0.020, 0.170)
BODY_S: Final = 0.002
JITTER: Final = 0.3
WARM_S: Final = 5.0
BARS: Final = {"0": 1.15, "20": 1.15, "50": 1.15, "100": 1.10}
SLOTS: Final = 16


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
    chunk_s: float = CHUNKS_S[0]


class EmulatedGround:
    """Machines and links; see `swarm.simulation.pipeline_world.Ground`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.path_rules, self.talk = PathRules(STAGES + 1, STAGES), TalkRules(microbatches=None)
        self.overhead_s = 0.0
        drawn = random.Random(setting.seed)
        self._slowness = {stage_peer(stage): drawn.uniform(0.8, 1.2) for stage in range(STAGES + 1)}
        self._links = random.Random(setting.seed)

    def flight_rules(self, data_node: PeerId) -> FlightRules:
        return FlightRules(PER_STEP, self.setting.staleness, self.setting.window)

    def slots_of(self, peer: PeerId) -> int:
        return SLOTS

    def service_s(self, peer: PeerId) -> float:
        return 3 * self.part_s(peer)

    def part_s(self, peer: PeerId) -> float:
        """One of the three parts of a visit."""
        return PART_S * self._slowness[peer]

    def compute_s(self, peer: PeerId, work: Work) -> float:
        if peer == stage_peer(0):
            return HEAD_S if work is Work.LOSS else EMBEDDING_S
        return (1 if work is Work.FORWARD else 2) * self.part_s(peer)

    def message_s(self, here: PeerId, there: PeerId) -> float:
        return self.setting.one_way_s * self._links.lognormvariate(0, JITTER)

    def body_s(self, here: PeerId, there: PeerId) -> float:
        return self.setting.body_s * self._links.lognormvariate(0, JITTER)

    def silence_s(self) -> float:
        return math.inf

    def lifetime_s(self, path_s: float) -> float:
        return 3600.0


@dataclass(slots=True)
class Account:
    """What one device did."""

    busy: list[tuple[float, float]] = field(default_factory=list)
    """From when to when, in jobs; and in idle work."""
    idle_work: list[tuple[float, float]] = field(default_factory=list)
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
        puts_off = is_stage and work is Work.BACKWARD and self.setting.puts_off
        if puts_off:
            seconds -= self._ground.part_s(self.id)
        self._spent_s += seconds

        def ended() -> None:
            if is_stage and work is Work.FORWARD:
                self.account.hold(1.0)
            if is_stage and work is Work.BACKWARD:
                self.account.hold(-1.0)
                if puts_off:
                    self.account.hold(self._kept)
                    self._pending.append(self.queue.submit(self._weights(), "weights"))
                self._added += 1
                if self._added % PER_STEP == 0:
                    self._put(Priority.UPKEEP, self._step)
            done(seconds)

        self._ended = ended

    def _weights(self) -> Iterator[None]:
        whole = self._ground.part_s(self.id)
        count = math.ceil(whole / self.setting.chunk_s)
        for number in range(count):
            self._spent_s += whole / count
            if number == count - 1:
                self.account.hold(-self._kept)
            yield

    def _step(self) -> None:
        for work in self._pending:
            work.finish()
        self._pending.clear()
        self._spent_s += STEP_S

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
        stages = [[stage_peer(stage)] for stage in range(STAGES + 1)]
        super().__init__(self.emulated, stages, random.Random(setting.seed), Ledger())

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        return FillingPeer(self, own, module, incarnation)


def way_of(message: MicrobatchTensor) -> PeerId:
    """Of whom it comes: each peer has one before it and one after it."""
    return PeerId(type(message).__name__)


def stage_peer(stage: int) -> PeerId:
    return PeerId(f"stage{stage}")


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
    peers = [peer for peer in world.peers.values() if isinstance(peer, FillingPeer) and peer.module.stage]
    ended = WARM_S + seconds

    def share(spans: Sequence[tuple[float, float]]) -> float:
        return sum(max(0.0, min(end, ended) - max(begin, WARM_S)) for begin, end in spans) / (seconds * len(peers))

    waits = sorted(wait for peer in peers for came, wait in peer.account.waits if came >= WARM_S)
    return Seen(
        (len(world.ledger.completed) - before) / seconds,
        share([span for peer in peers for span in peer.account.busy]),
        share([span for peer in peers for span in peer.account.idle_work]),
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


def running_freely(latencies: Sequence[int], seeds: Sequence[int], seconds: float, kept: float) -> dict[str, Any]:
    """Microbatches a second and the most graphs of arms that do not wait for steps."""
    arms = {"window 4": (4, False), "window 6": (6, False), "window 4, put off": (4, True)}
    found: dict[str, Any] = {}
    for one_way_ms in latencies:
        found[str(one_way_ms)] = {}
        for name, (window, puts_off) in arms.items():
            seen = [run(Setting(one_way_ms / 1e3, seed, 2, window, puts_off), seconds, kept) for seed in seeds]
            found[str(one_way_ms)][name] = {
                "pace": statistics.median(each.pace for each in seen),
                "held": statistics.median(each.held for each in seen),
            }
        tell(f"running freely, {one_way_ms} ms: {found[str(one_way_ms)]}")
    return found


def filling(latencies: Sequence[int], seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Arms with and without work for idle time, which heed headers or do not."""
    found: list[dict[str, Any]] = []
    for one_way_ms in latencies:
        for window in (2, 3, 4, 6):
            for body_s in BODIES_S:
                plain = [Setting(one_way_ms / 1e3, seed, 2, window, body_s=body_s) for seed in seeds]
                bare = [run(setting, seconds, 1.0) for setting in plain]
                base = statistics.median(each.busy for each in bare)
                if not 0.35 <= base <= 0.65:
                    continue
                row = {"one_way_ms": one_way_ms, "window": window, "body_ms": round(1e3 * body_s), "base": base}
                for chunk_s in CHUNKS_S:
                    for name, hears in (("headers", True), ("deaf", False)):
                        arm = {"fills": True, "hears": hears, "chunk_s": chunk_s}
                        filled = [run(replace(setting, **arm), seconds, 1.0) for setting in plain]
                        given = {"arm": name, "chunk_ms": round(1e3 * chunk_s)}
                        found.append(row | given | compared(filled, bare))
                        tell(f"filling: {found[-1]}")
    return {"runs": found, "summary": summary(found)}


def compared(filled: Sequence[Seen], bare: Sequence[Seen]) -> dict[str, float]:
    """An arm with idle work against the one without, on the same grounds."""
    pairs = list(zip(filled, bare, strict=True))
    return {
        "foreground": statistics.median(each.pace / without.pace for each, without in pairs),
        "busy": statistics.median(each.busy + each.idle_work for each in filled),
        "wait_ms": 1e3 * statistics.median(each.wait_s - without.wait_s for each, without in pairs),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each arm, chunk and body: the median of all settings, and the worst."""
    keys = ("arm", "chunk_ms", "body_ms")
    found = []
    for kind in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        own = [row for row in rows if tuple(row[key] for key in keys) == kind]
        figures = {
            name: [statistics.median(row[name] for row in own), worst(row[name] for row in own)]
            for name, worst in (("foreground", min), ("busy", min), ("wait_ms", max))
        }
        found.append(dict(zip(keys, kind, strict=True)) | {"settings": len(own)} | figures)
    return found


def stage() -> dict[str, float]:
    """A real stage: what is kept, what the split costs, how long chunks are."""
    import torch

    from node.model.optimizer import Accumulator
    from node.model.parts import build_block_stack
    from node.pipeline.deferred_weights import DeferredWeights, SplitDevice
    from node.pipeline.graph_budget import GraphBudget
    from protocol.manifest.manifest import manifest_from_table

    torch.set_num_threads(1)
    model = {
        "vocabulary": 257, "hidden": 256, "heads": 4, "kv_heads": 4, "feed_forward": 704, "sequence": 256,
    }  # fmt: skip
    table = {"protocol": 2, "name": "stage", "seed": 1, "model": model, "stages": {"blocks": [0, 2]}}
    manifest = manifest_from_table(table | {"training": {"rows": 4, "inner_tokens": 8192}})
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


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 20, 50, 100])
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    real = stage()
    tell(f"stage: {real}")
    given = chosen.latencies, chosen.seeds, chosen.seconds
    report = {
        "stage": real,
        "put_off": put_off(*given, real["kept"]),
        "running_freely": running_freely(*given, real["kept"]),
        "filling": filling(*given),
        "seeds": chosen.seeds,
        "seconds": chosen.seconds,
    }
    text = json.dumps(report)
    if chosen.output is not None:
        chosen.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
